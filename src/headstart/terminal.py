"""How the command line speaks: errors as sentences, and text that appears as it is decided."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from typer.core import TyperGroup

from headstart.errors import UserError

if TYPE_CHECKING:
    from headstart.api import Stream

RESUMABLE = {"run", "train", "data", "tune"}
"""Commands that go on where they were when they are given again."""

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_RIGHT = {errno.EACCES, errno.EPERM, errno.EROFS}
_ERRNO = re.compile(r"\[Errno (\d+)\]")


class Commands(TyperGroup):
    """Commands whose errors are sentences: bad input ends with exit code 2, Ctrl-C with 130, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            complain(error.problem, error.remedy)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            again = f" Go on with: {command_line()}" if ctx.invoked_subcommand in RESUMABLE else ""
            Console(stderr=True).print(f"\nStopped.{again}", highlight=False, markup=False, soft_wrap=True)
            raise SystemExit(130) from None
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever read what is printed has gone: nobody is there to be told
                raise
            complain(*explained(error))
            raise SystemExit(2) from None


class DataCommands(TyperGroup):
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
    console.print(" ".join(f"{problem} {remedy}".split()), highlight=False, markup=False, soft_wrap=True)


def command_line() -> str:
    """This command as one could type it again."""
    return shlex.join(["headstart", *sys.argv[1:]])


def program() -> str:
    """How to call headstart again: by its name where the shell finds it, else as it was called."""
    if shutil.which("headstart") is not None or not sys.argv[0].endswith("headstart"):
        return "headstart"
    return os.path.relpath(sys.argv[0])


def say(console: Console, *pairs: tuple[str, object]) -> None:
    """Lines of a label and a value, such as where something lies."""
    for label, value in pairs:
        console.print(f"{label + ':':<14} {value}", highlight=False, markup=False, soft_wrap=True)


def pour(stream: Stream) -> str:
    """Write a stream's text to stdout as it comes, then its figures to stderr; returns the text."""
    try:
        for piece in stream:
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        stream.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
    answer = stream.answer
    assert answer is not None, "a stream that ran to its end has an answer"
    Console(stderr=True).print(
        f"{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} tokens/s, τ {answer.tokens_per_round:.2f}, "
        f"first token after {answer.first_token_ms:.0f} ms",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    return answer.text


def ask(console: Console) -> str:
    """A line from the user; empty at the end of the input."""
    try:
        return console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return ""
