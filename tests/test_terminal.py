"""What a terminal sees while something lasts, and what a file does not."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from headstart.terminal import progress_bar, tracked


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
def test_a_file_and_nobody_see_nothing(where: Console | None) -> None:
    assert list(tracked("abc", "reading", 3, where)) == ["a", "b", "c"]
    assert where is None or not written(where).strip()
