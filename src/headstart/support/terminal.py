"""Terminal output: error messages, progress bars, formatted durations."""

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
from rich.markup import escape
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
"""Commands that resume when repeated."""

ACCEPTED = "bold cyan"
"""Style of accepted drafts."""

LINE_SECONDS = 60.0
"""Interval of progress lines without a terminal."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_RIGHT = {errno.EACCES, errno.EPERM, errno.EROFS}
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Print a warning without the line of code that raised it, for `warnings.showwarning`."""
    Console(stderr=True).print(f"[yellow]Warning:[/yellow] {escape(str(message))}", highlight=False, soft_wrap=True)


class Group(TyperGroup):
    """A command group that lists untruncated first sentences."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Commands(Group):
    """The top-level group: prints errors without a traceback; exit code 2 for bad input, 130 for Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            complain(error.problem, error.remedy)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            again = f" Continue with: {shlex.join(['headstart', *sys.argv[1:]])}"
            tell(Console(stderr=True), f"\nStopped.{again if ctx.invoked_subcommand in RESUMABLE else ''}")
            raise SystemExit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # stdout is closed: nowhere to print
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
    """Convert a system error to a problem and its remedy.

    >>> explained(FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/x"))
    ('Cannot read or write /proc/x (No such file or directory).', 'Check the path, then run the command again.')
    """
    code, reason, where = error.errno, error.strerror or str(error), error.filename
    # The error of a folder copy has its number only in the text.
    if isinstance(error, shutil.Error) and (inner := _ERRNO.search(str(error))):
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
    """Print an error and its remedy as one line on stderr."""
    console = Console(stderr=True)
    console.print("Error:", style="bold red", end=" ")
    tell(console, " ".join(f"{problem} {remedy}".split()))


def program() -> str:
    """Return the command to call headstart: its name if in PATH, else the path it was called by."""
    if shutil.which("headstart") is not None or not sys.argv[0].endswith("headstart"):
        return "headstart"
    return os.path.relpath(sys.argv[0])


def tell(console: Console, text: str, style: str | None = None) -> None:
    """Print text literally, without markup or hard wraps."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def say(console: Console, *pairs: tuple[str, object]) -> None:
    """Print lines of a label and a value."""
    for label, value in pairs:
        tell(console, f"{label + ':':<14} {value}")


def ask(console: Console) -> str:
    """Read a line from the user; empty at the end of input."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""


def format_seconds(seconds: float) -> str:
    """Format a duration.

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
    """Format an ISO 8601 time; return other text unchanged.

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
    """A progress bar, see `progress_bar`; `say` prints a line of progress once a minute."""

    def __init__(self, progress: Progress, task: TaskID, say: Callable[[str], None] | None, unit: str) -> None:
        self._progress, self._task, self._say, self._unit = progress, task, say, unit
        self._began = self._said = monotonic()

    def advance(self, by: float = 1, note: str | None = None, title: str | None = None) -> None:
        self.update(self._progress.tasks[self._task].completed + by, note=note, title=title)

    def update(
        self, done: float | None = None, total: float | None = None, note: str | None = None, title: str | None = None
    ) -> None:
        """Update the given values; `title` is shown before the bar, `note` after it."""
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._progress.update(self._task, completed=done, total=total, description=title, **fields)
        self._progress.update(self._task, visible=self._progress.tasks[self._task].total is not None)
        if self._say is not None and monotonic() >= self._said + LINE_SECONDS:
            self._said = monotonic()
            self._say(f"    {self._line(self._said - self._began)}")

    def _line(self, seconds: float) -> str:
        task = self._progress.tasks[self._task]
        total = f"/{task.total:.0f}" if task.total else ""
        done = f"{task.description} {task.completed:.0f}{total} {self._unit}".rstrip()
        parts = [done, str(task.fields["note"]).strip(" ·"), format_seconds(seconds)]
        if task.total and task.completed:
            parts.append(f"{format_seconds(max(0.0, seconds * (task.total / task.completed - 1)))} left")
        return " · ".join(part for part in parts if part)


@contextmanager
def progress_bar(
    console: Console | None, title: str, total: float | None = None, unit: str = "", lines: bool = True
) -> Iterator[Bar]:
    """Show a transient bar with progress, elapsed and remaining time on a terminal, else a line a minute.

    `lines=False` omits the lines and times, for callers that print their own. Hidden until the total is known, and
    without a console.
    """
    columns: list[ProgressColumn] = [
        TextColumn("    {task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}".rstrip()),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    if lines:
        columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    is_terminal = console is not None and console.is_terminal
    say = None
    if lines and console is not None and not is_terminal and not console.quiet:
        say = partial(tell, console)
    with Progress(*columns, console=console, transient=True, disable=not is_terminal) as progress:
        task = progress.add_task(title, total=total, visible=total is not None, note="")
        yield Bar(progress, task, say, unit)


def tracked(items: Iterable[T], title: str, total: int, console: Console | None) -> Iterator[T]:
    """Iterate over items with a progress bar."""
    with progress_bar(console, title, total) as bar:
        for item in items:
            yield item
            bar.advance()
