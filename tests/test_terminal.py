"""Progress on a terminal, in a file, and without a console."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headstart.support import terminal
from headstart.support.terminal import progress_bar, tracked


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)


def written(where: Console) -> str:
    assert isinstance(where.file, io.StringIO)
    return where.file.getvalue()


def test_a_terminal_sees_how_far_the_work_is() -> None:
    where = console(terminal=True)
    with progress_bar(where, "reading", total=4, unit="pages") as bar:
        bar.advance(3, note="[9 a second]")
    assert "reading" in written(where) and "3/4 pages" in written(where) and "[9 a second]" in written(where)


def test_nothing_is_shown_before_the_total_is_known() -> None:
    where = console(terminal=True)
    with progress_bar(where, "reading") as bar:
        bar.update(note="soon")
        assert "reading" not in written(where)
        bar.update(1, total=2, title="reading on")
    assert "reading on" in written(where) and "1/2" in written(where)


@pytest.mark.parametrize("where", [console(terminal=False), None])
def test_files_and_no_console_see_nothing(where: Console | None) -> None:
    assert list(tracked("abc", "reading", 3, where)) == ["a", "b", "c"]
    assert where is None or not written(where).strip()


def test_a_file_sees_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal, "monotonic", lambda: now[0])
    where = console(terminal=False)
    with progress_bar(where, "writing", total=40, unit="answers") as bar:
        for done, seconds in ((10, 30.0), (20, 60.0), (21, 30.0), (30, 60.0), (41, 60.0)):
            now[0] += seconds
            bar.update(done, note=" · 8 a minute")
    lines = [line.strip() for line in written(where).splitlines() if line.strip()]
    assert lines == [
        "writing 20/40 answers · 8 a minute · 1 min 30 s · 1 min 30 s left",
        "writing 30/40 answers · 8 a minute · 3 min 0 s · 1 min 0 s left",
        "writing 41/40 answers · 8 a minute · 4 min 0 s · 0.0 s left",
    ]
    with progress_bar(silent := console(terminal=False), "training", total=4, lines=False) as bar:
        now[0] += 100
        bar.update(1)
    assert not written(silent).strip()
