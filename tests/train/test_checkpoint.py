"""Complete checkpoints are found and truncated ones skipped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from headstart.errors import UserError
from headstart.support.artifacts import link_into_run
from headstart.support.files import write_text
from headstart.train import checkpoint
from headstart.train.checkpoint import TrainerState
from tests.spies import raising

SETTINGS = {"train.lr": 1e-3}


@pytest.fixture
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A placeholder for the folder of the best heads."""
    folder = tmp_path_factory.mktemp("train") / "best"
    folder.mkdir()
    (folder / "heads.safetensors").write_text("the best")
    return folder


@pytest.fixture
def saved(tmp_path: Path, best: Path) -> Path:
    """A folder after checkpoints at steps 10, 20 and 30 with keep=2."""
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 3)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in (10, 20, 30):
        checkpoint.save(accelerator, tmp_path, TrainerState(step=step, epoch=1, elapsed=2.5), SETTINGS, best, keep=2)
    return tmp_path


def test_two_newest_are_kept_and_the_newest_is_found(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000020", "step-00000030"]
    found = checkpoint.find(saved, SETTINGS, pytest.fail)
    assert found == (saved / "step-00000030", TrainerState(step=30, epoch=1, elapsed=2.5))


@pytest.mark.parametrize("keep", [1, 3])
def test_recipe_sets_how_many_are_kept(saved: Path, best: Path, keep: int) -> None:
    for step in (40, 50):
        checkpoint.save(Accelerator(cpu=True), saved, TrainerState(step=step), SETTINGS, best, keep=keep)
    expected = ["step-00000030", "step-00000040", "step-00000050"][-keep:]
    assert sorted(path.name for path in saved.iterdir()) == expected


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "no manifest"])
def test_cut_short_checkpoint_is_skipped_with_a_warning(saved: Path, damage: str) -> None:
    path = saved / "step-00000030"
    largest = max((file for file in path.iterdir() if file.name != "checkpoint.json"), key=lambda f: f.stat().st_size)
    match damage:
        case "truncate":
            largest.write_bytes(largest.read_bytes()[:-1])
        case "remove":
            largest.unlink()
        case "manifest":
            (path / "checkpoint.json").write_text('{"trainer_state": {"st')
        case _:
            (path / "checkpoint.json").unlink()
    warnings: list[str] = []
    found = checkpoint.find(saved, SETTINGS, warnings.append)
    assert found is not None and found[1].step == 20
    assert len(warnings) == 1 and "step-00000030 is cut short" in warnings[0]


def test_failing_load_leaves_no_hook(saved: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ValueError, match="nowhere"):
        checkpoint.load(accelerator, saved / "nowhere")
    assert not accelerator._load_model_state_pre_hook


def test_unfinished_checkpoint_is_not_seen(saved: Path) -> None:
    (saved / "step-00000030").rename(saved / "step-00000040.partial")
    found = checkpoint.find(saved, SETTINGS, pytest.fail)
    assert found is not None and found[1].step == 20


def test_next_checkpoint_removes_an_unfinished_one(saved: Path, best: Path) -> None:
    (saved / "step-00000035.partial").mkdir()
    accelerator = Accelerator(cpu=True)
    checkpoint.save(accelerator, saved, TrainerState(step=40), SETTINGS, best, keep=2)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000030", "step-00000040"]


@pytest.mark.parametrize("links", [True, False])
def test_best_heads_are_restored(tmp_path: Path, best: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(os, "link", raising(PermissionError))
    checkpoint.save(Accelerator(cpu=True), tmp_path, TrainerState(step=10), SETTINGS, best, keep=2)
    folder, file = tmp_path / "step-00000010", best / "heads.safetensors"
    assert (file.stat().st_nlink == 2) is links, "hard link, or else a copy"
    write_text(file, "of a lost future")
    (best / "more").touch()
    link_into_run(folder / checkpoint.BEST, best)
    assert [path.name for path in best.iterdir()] == [file.name] and file.read_text() == "the best"
    shutil.rmtree(best)
    link_into_run(folder / checkpoint.BEST, best)
    assert file.read_text() == "the best"
    assert [path.name for path in best.parent.iterdir()] == ["best"]


def test_new_folder_has_none(tmp_path: Path) -> None:
    assert checkpoint.find(tmp_path / "none", SETTINGS, pytest.fail) is None


def test_other_settings_are_refused_by_name(saved: Path) -> None:
    with pytest.raises(UserError, match=r"train\.lr = 0\.001, and now it is 0\.002") as caught:
        checkpoint.find(saved, {"train.lr": 2e-3}, pytest.fail)
    assert "--run-dir" in caught.value.remedy
