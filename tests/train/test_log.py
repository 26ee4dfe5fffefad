"""The training log: a time-stamped file, and one progress line a minute without a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from headstart.errors import UserError
from headstart.support.terminal import progress_bar
from headstart.train import trainer
from headstart.train.training_log import Display, Log
from tests.spies import raising
from tests.train.conftest import Train

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d (.+)")


def lines(folder: Path) -> list[str]:
    """Read the log file without its time stamps."""
    found = [LINE.fullmatch(line) for line in (folder / "log.txt").read_text(encoding="utf-8").splitlines()]
    assert all(found)
    return [line[1] for line in found if line]


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=500, force_terminal=terminal, color_system=None)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_file_matches_the_console_across_sessions(run: Train, tmp_path: Path) -> None:
    first, second = console(), console()
    run(tmp_path, first, steps=2)
    assert lines(tmp_path) == shown(first).splitlines()
    run(tmp_path, second, steps=4)
    assert lines(tmp_path) == [*shown(first).splitlines(), *shown(second).splitlines()]
    assert "Continuing from step 2" in shown(second)


def test_silent_run_has_a_log_and_a_refused_one_none(run: Train, tmp_path: Path) -> None:
    run(tmp_path / "silent", steps=1)
    assert lines(tmp_path / "silent")[0].startswith("Training on 1 process")
    with pytest.raises(UserError):
        run(tmp_path / "refused", feature_weight=1.0)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(UserError, match="was trained with"):
        run(tmp_path / "silent", steps=1, lr=1.0)
    assert not any("was trained with" in line for line in lines(tmp_path / "silent"))


def test_fatal_error_is_logged(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer._Trainer, "_step", raising(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        run(tmp_path)
    assert lines(tmp_path)[-1] == "Error: [Errno 28] full"


def test_step_after_the_time_budget_shows_no_time_left(tmp_path: Path) -> None:
    with Log(console(), tmp_path) as log, progress_bar(log.console, "training", 100, lines=False) as bar:
        Display(log, bar, 0.0).step(1.04, 187.5, "step 9")
    assert lines(tmp_path) == ["100% · step 9 · 0.0 s left"]


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_one_line_per_minute(tmp_path: Path, terminal: bool) -> None:
    to = console(terminal)
    with Log(to, tmp_path) as log, progress_bar(to, "training", 100, lines=False) as bar:
        display = Display(log, bar, 0.0)
        for second in range(0, 200, 10):
            display.step(second / 200, float(second), f"step {second} · loss 2.0")
    steps = ["30% · step 60 ", "60% · step 120 ", "90% · step 180 "]
    assert [line[: len(start)] for line, start in zip(lines(tmp_path), steps, strict=True)] == steps
    assert lines(tmp_path)[0] == "30% · step 60 · loss 2.0 · 2 min 20 s left"
    plain = [line for line in shown(to).splitlines() if line.startswith(tuple(steps))]
    assert plain == ([] if terminal else lines(tmp_path))
