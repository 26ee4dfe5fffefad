"""How headstart speaks on a terminal: errors as sentences, bars that move, durations as people say them."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer.core import TyperGroup

from headstart.errors import UserError, out_of_memory

T = TypeVar("T")

RESUMABLE = {"run", "train", "data", "tune", "adapt"}
"""Commands that go on where they were when they are given again."""

ACCEPTED = "bold cyan"
"""The style of drafts that were accepted."""

LINE_SECONDS = 60.0
"""Between lines of progress, where there is no terminal."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_RIGHT = {errno.EACCES, errno.EPERM, errno.EROFS}
_ERRNO = re.compile(r"\[Errno (\d+)\]")


class Group(TyperGroup):
    """Commands whose first sentences are all listed whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Commands(Group):
    """Commands whose errors are sentences: bad input ends with exit code 2, Ctrl-C with 130, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            complain(error.problem, error.remedy)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            again = (
                f" Continue with: {shlex.join(['headstart', *sys.argv[1:]])}"
                if ctx.invoked_subcommand in RESUMABLE
                else ""
            )
            tell(Console(stderr=True), f"\nStopped.{again}")
            raise SystemExit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read what is printed has gone: nobody is there to be told
                raise
            complain(*explained(error))
            raise SystemExit(2) from None
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            complain(
                f"Memory ran out: {(str(error).splitlines() or [''])[0]}",
                "Lower --max-new-tokens or shorten what is read; a smaller --dtype or --quantization leaves more room.",
            )
            raise SystemExit(2) from None


class DataCommands(Group):
    """`headstart data RECIPE` is short for `headstart data build RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["build", *args]
        return super().parse_args(ctx, args)


def explained(error: OSError) -> tuple[str, str]:
    """What the system refused, as a problem and its remedy.

    >>> explained(FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x"))
    ('Cannot read or write /proc/x (No such file or directory).', 'Check the path, then run the command again.')
    """
    code, reason, where = error.errno, error.strerror or str(error), error.filename
    if isinstance(error, shutil.Error) and (inner := _ERRNO.search(str(error))):  # one of a whole folder, as text
        code, where = int(inner[1]), None
        reason = os.strerror(code)
    if code in _DISK_FULL:
        problem, remedy = "The disk is full" + (f" at {where}" if where else ""), "Free some space"
    elif code in _NO_RIGHT:
        problem, remedy = "No right to read or write" + (f" at {where}" if where else ""), "Choose another folder"
    elif where:
        problem, remedy = f"Cannot read or write {where}", "Check the path"
    else:
        problem, remedy = "The system refused to read or write", "Check the disk and the network"
    return f"{problem} ({reason}).", f"{remedy}, then run the command again."


def complain(problem: str, remedy: str) -> None:
    """One line on stderr: what is wrong, and what to do about it."""
    console = Console(stderr=True)
    console.print("Error:", style="bold red", end=" ")
    tell(console, " ".join(f"{problem} {remedy}".split()))


def program() -> str:
    """How to call headstart again: by its name where the shell finds it, else as it was called."""
    if shutil.which("headstart") is not None or not sys.argv[0].endswith("headstart"):
        return "headstart"
    return os.path.relpath(sys.argv[0])


def tell(console: Console, text: str, style: str | None = None) -> None:
    """A sentence as it is: nothing in it is markup, and a terminal wraps it."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def say(console: Console, *pairs: tuple[str, object]) -> None:
    """Lines of a label and a value, such as where something lies."""
    for label, value in pairs:
        tell(console, f"{label + ':':<14} {value}")


def ask(console: Console) -> str:
    """A line from the user; empty at the end of the input."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def format_seconds(seconds: float) -> str:
    """A duration as people say it.

    >>> format_seconds(0.42), format_seconds(42), format_seconds(75), format_seconds(3700)
    ('0.4 s', '42 s', '1 min 15 s', '1 h 1 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_moment(stamp: str) -> str:
    """A time as people write it, from ISO 8601; what is none stays as it is.

    >>> format_moment("2026-11-04T09:07:31+00:00"), format_moment("2026-11-04"), format_moment("today")
    ('4 November 2026, 09:07 UTC', '4 November 2026', 'today')
    """
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    clock = f", {moment:%H:%M} {moment:%Z}".rstrip() if "T" in stamp else ""
    return f"{moment.day} {moment:%B %Y}{clock}"


class Bar:
    """A line that moves while some work lasts, see `progress_bar`. `say` takes a line of progress once a minute."""

    def __init__(self, progress: Progress, task: TaskID, say: Callable[[str], None] | None, unit: str) -> None:
        self._progress, self._task, self._say, self._unit = progress, task, say, unit
        self._began = self._said = monotonic()

    def advance(self, by: float = 1, note: str | None = None, title: str | None = None) -> None:
        """So much more is done; see `update`."""
        self.update(self._progress.tasks[self._task].completed + by, note=note, title=title)

    def update(
        self, done: float | None = None, total: float | None = None, note: str | None = None, title: str | None = None
    ) -> None:
        """Move the bar; what is None stays as it is. The note stands after the bar, the title before it."""
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._progress.update(self._task, completed=done, total=total, description=title, **fields)
        self._progress.update(self._task, visible=self._progress.tasks[self._task].total is not None)
        if self._say is not None and monotonic() >= self._said + LINE_SECONDS:
            self._said = monotonic()
            self._say(f"    {self._line(self._said - self._began)}")

    def _line(self, seconds: float) -> str:
        task = self._progress.tasks[self._task]
        parts = [f"{task.description} {task.completed:.0f}" + (f"/{task.total:.0f}" if task.total else "")]
        parts[0] = f"{parts[0]} {self._unit}".rstrip()
        parts += [str(task.fields["note"]).strip(" ·"), format_seconds(seconds)]
        if task.total and task.completed:
            parts.append(f"{format_seconds(max(0.0, seconds * (task.total / task.completed - 1)))} left")
        return " · ".join(part for part in parts if part)


@contextmanager
def progress_bar(
    console: Console | None,
    title: str,
    total: float | None = None,
    unit: str = "",
    lines: bool = True,
) -> Iterator[Bar]:
    """A bar with what is done, what there is to do, the time spent and the time left. A terminal shows it, as
    long as the work lasts: what came of the work is somebody else's to say. Elsewhere it is a line a minute.
    Without `lines` somebody else prints those, and times. Nothing is shown before the total is known, nor without a
    console."""
    columns: list[ProgressColumn] = [
        TextColumn("    {task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}".rstrip()),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    if lines:
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    silent = console is None or not console.is_terminal
    say = None
    if lines and console is not None and not console.is_terminal and not console.quiet:
        say = partial(tell, console)

    with Progress(*columns, console=console, transient=True, disable=silent) as progress:
        task = progress.add_task(title, total=total, visible=total is not None, note="")
        yield Bar(progress, task, say, unit)


def tracked(items: Iterable[T], title: str, total: int, console: Console | None) -> Iterator[T]:
    """The items, with a bar that moves from each to the next."""
    with progress_bar(console, title, total) as bar:
        for item in items:
            yield item
            bar.advance()
