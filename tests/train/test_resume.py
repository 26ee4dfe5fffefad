"""Exact resumption of a run that was killed, interrupted or extended."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.errors import UserError
from headstart.train import trainer
from tests.spies import raising
from tests.train.conftest import Train, before_step, killed_after
from tests.train.results import Killed, assert_same, metrics


def set_taus(monkeypatch: pytest.MonkeyPatch, taus: Iterator[float]) -> None:
    """Replace the taus of successive validations."""
    own = trainer.Tally.result
    monkeypatch.setattr(trainer.Tally, "result", lambda one: dataclasses.replace(own(one), chain=[next(taus) - 1]))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 2, "epochs": 6},
        {"position_weight": "dpace"},
        {"optimizer": "muon", "save_every": 3},  # in the middle of a turn
        {"position_weight": "subsampled", "step_weight": 0.6, "loss_tokens": 12},
    ],
)
def test_killed_run_resumes_exactly(run: Train, tmp_path: Path, settings: dict[str, Any]) -> None:
    complete = run(tmp_path / "whole", **settings)
    for steps in (5, 6):  # once between checkpoints, once after the next one
        with killed_after(steps):
            run(tmp_path / "cut", **settings)
        torch.manual_seed(99)  # disturb the random state in between
    resumed = run(tmp_path / "cut", **settings)
    assert resumed.steps == complete.steps
    assert_same(complete.last_folder, resumed.last_folder)
    assert_same(complete.heads_folder, resumed.heads_folder)
    kept = [{k: v for k, v in row.items() if k not in ("elapsed_seconds", "loss")} for row in metrics(tmp_path / "cut")]
    expected = [{k: v for k, v in row.items() if k in kept[0]} for row in metrics(tmp_path / "whole")]
    assert kept == expected


def test_random_state_is_restored(run: Train, tmp_path: Path) -> None:
    """Families with dropout draw from it in every step."""
    seen: list[torch.Tensor] = []
    original = trainer.learning_rate_now

    def lr(*args: Any) -> float:
        torch.rand(1)
        seen.append(torch.get_rng_state())
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "learning_rate_now", lr)
        run(tmp_path / "whole")
        complete, seen[:] = list(seen), []
        with killed_after(9):
            run(tmp_path / "cut")
        seen.clear()
        run(tmp_path / "cut")
    assert len(seen) == 4
    assert all(torch.equal(one, other) for one, other in zip(seen, complete[8:], strict=True))


def test_cut_short_checkpoint_falls_back(run: Train, tmp_path: Path) -> None:
    complete = run(tmp_path / "whole")
    with killed_after(9):
        run(tmp_path / "cut")
    file = tmp_path / "cut" / "checkpoints" / "step-00000008" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    resumed = run(tmp_path / "cut")
    text = (tmp_path / "cut" / "log.txt").read_text()
    assert "step-00000008 is cut short" in text and "Continuing from step 4" in text
    assert_same(complete.last_folder, resumed.last_folder)


def test_lost_record_of_the_best_heads_is_refused(run: Train, tmp_path: Path) -> None:
    with killed_after(9):
        run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"metrics\.jsonl lacks the best validation of the checkpoint step-00000008"):
        run(tmp_path)


def test_finished_run_is_not_trained_again(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path)
    monkeypatch.setattr(trainer._Trainer, "_step", raising(Killed))
    assert run(tmp_path) == first


def test_run_that_ends_at_its_best_stays(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of the last step is written before its validation, and once more after it."""
    set_taus(monkeypatch, itertools.count(1.5, 0.1))
    settings: dict[str, Any] = {"steps": 8, "save_every": 4, "eval_every": 6}
    first = run(tmp_path, **settings)
    assert first.metrics["step"] == 8
    assert run(tmp_path, **settings) == first


@pytest.mark.parametrize("gone", [False, True], ids=["best of later", "best gone"])
def test_best_heads_are_never_of_a_lost_future(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Killed after a validation that no checkpoint has, then resumed towards another end."""
    set_taus(monkeypatch, iter([1.5, 1.4, 1.5, 1.9, 1.4]))
    start = run(tmp_path / "start", steps=1).heads_folder
    with killed_after(6):
        run(tmp_path / "cut")
    assert [row["step"] for row in metrics(tmp_path / "cut")] == [0, 6]
    if gone:  # killed between the two renames that replace a folder
        shutil.rmtree(tmp_path / "cut" / "best")
    resumed = run(tmp_path / "cut", steps=5)
    assert [row["step"] for row in metrics(tmp_path / "cut")] == [0, 5]
    assert resumed.metrics["step"] == 0
    assert_same(start, resumed.heads_folder)


def test_ctrl_c_after_the_last_step(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = run(tmp_path / "whole", eval_every=100)
    original = trainer._Trainer._validate

    def validate(self: Any, *args: Any) -> None:
        if self.trainer_state.step == 12:
            signal.raise_signal(signal.SIGINT)
        original(self, *args)

    monkeypatch.setattr(trainer._Trainer, "_validate", validate)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", eval_every=100)
    assert (tmp_path / "cut" / "result.json").is_file()
    assert_same(complete.last_folder, tmp_path / "cut" / "last")


def test_ctrl_c_completes_the_step(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = run(tmp_path / "whole")

    def interrupt(training: Any) -> None:
        if training.trainer_state.step == 5:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        before_step(patch, interrupt)
        run(tmp_path / "cut")
    assert (tmp_path / "cut" / "checkpoints" / "step-00000006").is_dir()
    assert_same(complete.last_folder, run(tmp_path / "cut").last_folder)


def test_time_budget_spans_sessions(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rates = [1000.0], list[float]()
    monkeypatch.setattr(trainer, "monotonic", lambda: clock[0])

    def ten_seconds(training: Any) -> None:
        clock[0] += 10
        rates.append(training.trainer_state.lr)

    before_step(monkeypatch, ten_seconds)
    settings: dict[str, Any] = {"steps": None, "minutes": 2, "epochs": 100_000, "eval_every": 10**6, "warmup": 0.0}
    assert run(tmp_path, **settings).steps == 12
    assert metrics(tmp_path)[-1]["elapsed_seconds"] == 120
    assert rates == sorted(rates, reverse=True) and rates[0] == 3e-3, "the schedule follows the clock"
    clock[0] += 10**6  # between two sessions
    assert run(tmp_path, **settings).steps == 12
    rates.clear()
    assert run(tmp_path, **settings | {"minutes": 3}).steps == 18
    assert len(rates) == 6 and metrics(tmp_path)[-1]["elapsed_seconds"] == 180


def test_resuming_with_other_settings_is_refused(run: Train, tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(UserError, match=r"train\.lr = 0\.003, and now it is 0\.001"):
        run(tmp_path, lr=1e-3)
    assert run(tmp_path, steps=14).steps == 14, "a larger budget is not another setting"
