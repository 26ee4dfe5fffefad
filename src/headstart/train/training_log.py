"""Log of a training, on the console and in a file: progress, validations, errors."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from rich.console import Console

from headstart.errors import UserError
from headstart.support.terminal import Bar, format_seconds, tell
from headstart.train.batches import Batch
from headstart.train.validation import Validation

FILE = "log.txt"
_EVERY = 60.0  # seconds between progress lines, without a terminal and in the log file


class Log:
    """Console and file log of the main rank; other ranks pass no console and no folder.

    `log.txt` is created (or appended to) on entering the context, so that a training refused before leaves no file.
    """

    def __init__(self, console: Console | None, folder: Path | None) -> None:
        self.console = console
        self._path = None if folder is None else folder / FILE
        self._pending: list[str] | None = []

    def __enter__(self) -> Log:
        pending, self._pending = self._pending or [], None
        self._write("".join(pending))
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if isinstance(error, Exception):
            self.note(f"Error: {error}")

    def say(self, text: str) -> None:
        """Log a line on the console and in the file."""
        if self.console is not None:
            tell(self.console, text)
        self.note(text)

    def note(self, text: str) -> None:
        """Log a line in the file only."""
        line = f"{datetime.now().astimezone().isoformat(' ', 'seconds')} {' '.join(text.split())}\n"
        if self._pending is not None:
            self._pending.append(line)
        else:
            self._write(line)

    def _write(self, line: str) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as handle:
                handle.write(line)


class Display:
    """A live progress line on a terminal, else a line a minute; and a line per validation. `fraction` of the run was
    done before this session."""

    def __init__(self, log: Log, bar: Bar, fraction: float) -> None:
        self._log, self._bar, self._first = log, bar, fraction
        self._logged = 0.0
        self._validation = ""
        bar.update(100 * fraction)

    def step(self, fraction: float, seconds: float, figures: str) -> None:
        """Update the live line, and once a minute log one. `seconds` are since the start of this session."""
        fraction = min(1.0, fraction)  # the last step may exceed a budget in minutes
        done = fraction - self._first
        remaining = format_seconds(seconds * (1 - fraction) / done) if done > 0 else "?"
        text = f"{figures}{self._validation} · {remaining} left"
        self._bar.update(100 * fraction, note=text)
        if seconds >= self._logged + _EVERY:
            self._logged = seconds
            console = self._log.console
            log = self._log.note if console is None or console.is_terminal else self._log.say
            log(f"{fraction:.0%} · {text}")

    def show_validation(self, step: int, elapsed: float, loss: float | None, validation: Validation) -> None:
        """Log a validation, and show it in the live line from now on."""
        top1 = "/".join(f"{share:.2f}" for share in validation.accuracy["top1"])
        self._validation = f" · top-1 {top1} · tau {validation.tau:.2f}"
        shown = f" · loss {loss:.3f}" if loss is not None else ""
        self._log.say(f"step {step} · {format_seconds(elapsed)}{shown}{self._validation}")


def not_finite(step: int, loss: float, group: list[Batch]) -> UserError:
    """Error for a step with a non-finite loss or gradient; `group` is its batches over all ranks."""
    conversations = sorted(index for batch in group for index in batch)
    shown = ", ".join(map(str, conversations[:8])) + (", ..." if len(conversations) > 8 else "")
    return UserError(
        f"The loss or its gradient is not finite at step {step} (loss {loss:g}), on training conversations {shown}.",
        "Lower train.lr or raise train.warmup; the checkpoints before this step are kept.",
    )
