"""Faults found in trials: nodes without the target, wording of `gc` and `runs`, formats that were refused too late."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.errors import UserError
from headstart.model.model import Target
from headstart.pipeline.data_stages import check_formats
from headstart.pipeline.inventory import delete, run_states, show_runs, unreferenced
from headstart.pipeline.plan import make_plan
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.recipes.values import recipe_text
from headstart.support.files import format_bytes
from headstart.train import trainer
from tests.test_cli import works
from tests.test_pipeline import logged, quiet, tiny_recipe
from tests.test_stages import said
from tests.train.test_golden import HEADS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> tuple[Recipe, Path]:
    """A recipe, and a folder with its run as `headstart data build` leaves it and the target, which may go away."""
    folder = tmp_path_factory.mktemp("trials")
    shutil.copytree(tiny_target_folder, folder / "target")
    recipe = tiny_recipe(folder, folder / "target")
    execute(quiet(folder / "runs" / "run", recipe), stages_until("states"))
    return recipe, folder


def test_without_the_target_heads_train(data: tuple[Recipe, Path]) -> None:
    recipe, folder = data
    run, file = folder / "runs" / "run", folder / "tiny.yaml"
    file.write_text(recipe_text(recipe))
    (folder / "target").rename(folder / "away")
    try:
        works("train", file, "--run-dir", run)
        assert (run / "train" / "last").is_dir()
    finally:
        (folder / "away").rename(folder / "target")


def test_an_interrupted_training(data: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = data
    runs = tmp_path / "runs"
    shutil.copytree(folder / "runs", runs, symlinks=True)
    take = trainer._Trainer._step

    def dies(self: Any, *arguments: Any) -> float:
        if self.trainer_state.step == 3:
            raise KeyboardInterrupt
        return take(self, *arguments)

    settings = recipe.model_dump(mode="json")
    settings["heads"]["num_heads"] = 1  # whatever else was trained there
    recipe = parse_recipe(settings)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer._Trainer, "_step", dies)
        execute(quiet(runs / "run", recipe), stages_until("train"))
    others = {one.path for one in unreferenced(runs)}
    assert (runs / "run" / "train").resolve() not in others, "its run would go on"
    other = parse_recipe({**settings, "train": {**settings["train"], "lr": 1e-5}})
    execute(quiet(runs / "run", other), stages_until("train"))
    (left,) = [one for one in unreferenced(runs) if one.path not in others]
    assert "a training interrupted at step 2, needed by no run" in left.what
    execute(run := logged(runs / "run", recipe), stages_until("train"))
    assert "Continuing from step 2" in said(run)
    kinds = {one.what for one in unreferenced(runs)}
    assert "heads that no run refers to" in kinds, "the other learning rate's finished heads"
    assert delete(runs, unreferenced(runs)) > 0


def test_predicted_and_measured_tau_are_separate_columns(data: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, folder = data
    shutil.copytree(folder / "runs", tmp_path / "runs", symlinks=True)
    execute(quiet(tmp_path / "runs" / "run", recipe), stages_until("train"))
    (state,) = run_states(tmp_path / "runs")
    assert state.tau is None and state.predicted_tau is not None
    out = io.StringIO()
    show_runs([state], Console(file=out, width=400))
    header, row = out.getvalue().splitlines()[:2]
    assert re.search(r"τ +predicted τ", header)
    assert row.index(f"{state.predicted_tau:.2f}") > header.index("predicted") - 1


def test_the_disk_of_a_plan_adds_up(data: tuple[Recipe, Path]) -> None:
    recipe, folder = data
    plan = make_plan(quiet(folder / "nothing" / "run", recipe), prompt_tokens=20)
    every = sum(plan.disk.values())
    assert plan.left_bytes == every, "nothing is done yet"
    assert plan.peak_bytes > every, "a checkpoint stands beside an older one"
    told = dict(plan.facts)["Disk space"]
    left, peak = format_bytes(every), format_bytes(plan.peak_bytes)
    assert told.startswith(f"{left} at the end, {left} of it still to write, at most {peak} at a time")


REFUSED = {("eagle3", "sglang"): {"norm_before_residual": True}, ("medusa", "gguf"): {}, ("hydra", "vllm"): {}}


@pytest.mark.parametrize(("name", "format"), REFUSED)
def test_unsupported_formats_are_refused(data: tuple[Recipe, Path], tmp_path: Path, name: str, format: str) -> None:
    heads = {**HEADS[name], **REFUSED[name, format]}
    settings = {**data[0].model_dump(mode="json"), "heads": heads, "export": {"formats": [format]}}
    run = quiet(tmp_path / "run", parse_recipe(settings))
    with pytest.raises(UserError) as told:
        execute(run, stages_until("train"))
    assert f"leave {format} out of export.formats" in told.value.remedy
    assert not (run.folder / "data" / "conversations").exists()
    with pytest.raises(UserError):
        make_plan(run)


def test_heads_that_the_engine_of_the_report_cannot_serve_are_refused(
    data: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any conversation, and without loading a target that servers run."""
    values = data[0].model_dump(mode="json")
    changes = {"heads": HEADS["hydra"], "eval": {"engine": "vllm"}, "data": {**values["data"], "server": "vllm"}}
    run = quiet(tmp_path / "run", parse_recipe({**values, **changes}))
    monkeypatch.setattr(Run, "target", property(lambda run: pytest.fail("the target was loaded")))
    with pytest.raises(UserError, match=r"Or leave vllm out of export\.formats and eval\.engine"):
        execute(run, stages_until("train"))
    assert not (run.folder / "data" / "conversations").exists()


def test_heads_that_fit_the_formats_are_accepted(data: tuple[Recipe, Path], tiny_target: Target) -> None:
    settings = data[0].model_dump(mode="json")
    heads = HEADS["eagle3"]
    formats = ["vllm", "speculators"]
    run = quiet(Path("nowhere"), parse_recipe({**settings, "heads": heads, "export": {"formats": formats}}))
    (remark,) = check_formats(run, tiny_target)
    assert remark == "Not for sglang: sglang cannot read layers [1, 2, 3] of a target with 3 layers: 2 is the deepest."
    with pytest.raises(UserError, match=r"export\.formats"):
        parse_recipe({**settings, "export": {"formats": ["tensorrt"]}})
