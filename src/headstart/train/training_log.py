"""What a training says, on the console and in a file: progress, validations, a loss that is not finite."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from rich.console import Console

from headstart.errors import UserError
from headstart.support.terminal import Bar, format_seconds, tell
from headstart.train.batches import Batch
from headstart.train.validation import Validation

FILE = "log.txt"
_EVERY = 60.0
"""Seconds between lines of progress, without a terminal and in the log file."""


class Log:
    """The voice of the main process.

    The file `log.txt` is begun when the context is entered: a training that is refused before leaves no trace. Later
    sessions add to it. Without a folder none is written, as by every process but the main one.
    """

    def __init__(self, console: Console | None, folder: Path | None) -> None:
        self.console = console
        self._path = None if folder is None else folder / FILE
        self._waiting: list[str] | None = []

    def __enter__(self) -> Log:
        waiting, self._waiting = self._waiting or [], None
        for line in waiting:
            self._write(line)
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, Exception):
            self.note(f"Error: {error}")

    def say(self, text: str) -> None:
        """One line on the console and in the file."""
        if self.console is not None:
            tell(self.console, text)
        self.note(text)

    def note(self, text: str) -> None:
        """One line in the file only."""
        line = f"{datetime.now().astimezone().isoformat(' ', 'seconds')} {' '.join(text.split())}\n"
        if self._waiting is not None:
            self._waiting.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as handle:
                handle.write(line)


class Display:
    """One live line on a terminal, the bar, else a line a minute; and a line for each validation. `fraction` of the run
    was done before this session."""

    def __init__(self, log: Log, bar: Bar, fraction: float) -> None:
        self._log, self._bar, self._first = log, bar, fraction
        self._noted = 0.0
        self._heads = ""
        bar.update(100 * fraction)

    def step(self, fraction: float, seconds: float, figures: str) -> None:
        """Update the live line; once a minute, a line for the log and for whoever has no terminal. `seconds` are since
        this session began."""
        fraction = min(1.0, fraction)  # the last step may end after the last minute
        gained = fraction - self._first
        remaining = format_seconds(seconds * (1 - fraction) / gained) if gained > 0 else "?"
        text = f"{figures}{self._heads} · {remaining} left"
        self._bar.update(100 * fraction, note=text)
        if seconds >= self._noted + _EVERY:
            self._noted = seconds
            console = self._log.console
            tell = self._log.note if console is None or console.is_terminal else self._log.say
            tell(f"{fraction:.0%} · {text}")

    def validated(self, step: int, elapsed: float, loss: float | None, validation: Validation) -> None:
        """Print a validation, and show it in the live line from now on."""
        top1 = "/".join(f"{share:.2f}" for share in validation.accuracy["top1"])
        self._heads = f" · top-1 {top1} · tau {validation.tau:.2f}"
        learnt = f" · loss {loss:.3f}" if loss is not None else ""
        self._log.say(f"step {step} · {format_seconds(elapsed)}{learnt}{self._heads}")


def not_finite(step: int, loss: float, group: list[Batch]) -> UserError:
    """What to say of a step whose loss or gradient is not finite; `group` are its batches over all processes."""
    numbers = sorted(index for batch in group for index in batch)
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return UserError(
        f"The loss or its gradient is not finite at step {step} (loss {loss:g}), of training conversations {shown}.",
        "Lower train.lr or raise train.warmup; the checkpoints before this step are kept.",
    )
