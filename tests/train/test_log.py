"""What a training says: in a file with the time, once a minute without a terminal, and once when the loss diverges."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.data.states.store import StateStore
from headstart.decode.loop import Engine
from headstart.errors import UserError
from headstart.heads.io import load_heads
from headstart.recipes.recipe import Recipe
from headstart.target.model import Target
from headstart.train import trainer, validation
from headstart.train.trainer import train
from headstart.train.training_log import Display, Log, LossWatch
from headstart.train.validation import decode, validation_prompts
from tests.train.conftest import Train
from tests.train.results import assert_same, metrics
from tests.train.test_golden import HEADS

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d (.+)")


def lines(folder: Path) -> list[str]:
    """What the log file says, without the times."""
    found = [LINE.fullmatch(line) for line in (folder / "log.txt").read_text(encoding="utf-8").splitlines()]
    assert all(found)
    return [line[1] for line in found if line]


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=500, force_terminal=terminal, color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_file_says_what_the_console_said_and_later_sessions_add_to_it(run: Train, tmp_path: Path) -> None:
    first, second = console(), console()
    run(tmp_path, first, steps=2)
    assert lines(tmp_path) == shown(first).splitlines()
    run(tmp_path, second, steps=4)
    assert lines(tmp_path) == [*shown(first).splitlines(), *shown(second).splitlines()]
    assert "Going on from step 2" in shown(second)


def test_a_silent_training_has_a_log_and_a_refused_one_leaves_none(run: Train, tmp_path: Path) -> None:
    run(tmp_path / "silent", steps=1)
    assert lines(tmp_path / "silent")[0].startswith("Training on 1 process")
    with pytest.raises(UserError):
        run(tmp_path / "refused", loss="foo")
    assert not (tmp_path / "refused").exists()
    with pytest.raises(UserError, match="was trained with"):
        run(tmp_path / "silent", steps=1, lr=1.0)
    assert not any("was trained with" in line for line in lines(tmp_path / "silent"))


def test_what_ends_a_training_is_in_its_log(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> float:
        raise OSError(28, "full")

    monkeypatch.setattr(trainer._Trainer, "_step", full)
    with pytest.raises(OSError, match="full"):
        run(tmp_path)
    assert lines(tmp_path)[-1] == "Error: [Errno 28] full"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_a_line_a_minute(tmp_path: Path, terminal: bool) -> None:
    to = console(terminal)
    with Log(to, tmp_path) as log, Display(log, 0.0) as display:
        for second in range(0, 200, 10):
            display.step(second / 200, float(second), f"step {second} · loss 2.0")
    steps = ["30% · step 60 ", "60% · step 120 ", "90% · step 180 "]
    assert [line[: len(start)] for line, start in zip(lines(tmp_path), steps, strict=True)] == steps
    plain = [line for line in shown(to).splitlines() if line.startswith(tuple(steps))]
    assert plain == ([] if terminal else lines(tmp_path))


def test_a_loss_far_above_its_running_median_is_said_once(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = trainer._Trainer._step

    def diverging(self: Any, *args: Any) -> float:
        return take(self, *args) * (5 if self.trainer_state.step in (25, 26) else 1)

    monkeypatch.setattr(trainer._Trainer, "_step", diverging)
    to = console()
    run(tmp_path, to, steps=28)
    (said,) = (line for line in lines(tmp_path) if "times the median" in line)
    assert said.startswith("Warning: the loss of step 26 is") and shown(to).count("times the median") == 1


def test_a_loss_of_other_positions_has_a_median_of_its_own() -> None:
    watch = LossWatch()
    assert all(watch.ratio(1.0, False) is None for _ in range(30))
    assert all(watch.ratio(3.0, True) is None for _ in range(30))
    assert watch.ratio(6.1, True) == pytest.approx(6.1 / 3)


@pytest.mark.parametrize("name", HEADS)
def test_heads_in_training_decode_as_they_will(
    recipe: Callable[..., Recipe],
    tiny_target: Target,
    train_store: StateStore,
    valid_store: StateStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """And training takes no notice: the same heads, bit by bit."""
    monkeypatch.setattr(validation, "NEW_TOKENS", 12)
    monkeypatch.setattr(validation, "PROMPTS", 2)
    for folder, every in (("without", None), ("with", 2)):
        settings = recipe(heads={"family": name, **HEADS[name]}, steps=4, noise=0.1, decode_every=every)
        train(settings, tiny_target, train_store, valid_store, tmp_path / folder)
    assert_same(tmp_path / "without" / "last", tmp_path / "with" / "last")
    (*_, before), (*_, after) = (metrics(tmp_path / folder) for folder in ("without", "with"))
    assert before.keys() == after.keys()
    said = [line for line in lines(tmp_path / "with") if "decoding" in line]
    assert [line.split(" · ")[0] for line in said] == ["step 2", "step 4"]
    heads = load_heads(tmp_path / "with" / "last", tiny_target)
    found = decode(heads, tiny_target, valid_store)
    assert found.summary == f"decoding 2 prompts: {found.tau:.2f} tokens per round"
    assert said[-1] == f"step 4 · {found.summary}"
    assert 1 <= len(found.acceptance) <= heads.draft_steps and all(0 <= share <= 1 for share in found.acceptance)
    assert not any("decoding" in line for line in lines(tmp_path / "without"))


def test_prompts_end_where_the_first_answer_begins(valid_store: StateStore, tiny_target: Target) -> None:
    for index, prompt in enumerate(validation_prompts(valid_store, tiny_target)):
        sample = valid_store.get(index)
        assert prompt == sample.tokens_T[: len(prompt)].tolist()
        assert not sample.supervised_T[: len(prompt)].any() and sample.supervised_T[len(prompt)]


def test_heads_that_cannot_draft_are_not_taken_for_plain_decoding(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Engine.generate

    def failing(self: Any, *args: Any) -> Any:
        made = generate(self, *args)
        made[-1].drafter_error = "no"
        return made

    monkeypatch.setattr(Engine, "generate", failing)
    assert run(tmp_path, steps=1, decode_every=1).steps == 1
    assert "step 1 · decoding: the heads cannot draft (no)" in lines(tmp_path)
