"""What a training says, on the console and in a file: progress, validations, losses that diverge or are not finite."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median
from types import TracebackType

from accelerate.utils import gather_object
from rich.console import Console

from headstart.errors import UserError
from headstart.heads.base import HeadBatch
from headstart.support.terminal import Bar, format_seconds, progress_bar
from headstart.train.batches import Batch, states_by_conversation
from headstart.train.validation import Validation

FILE = "log.txt"
_EVERY = 60.0
"""Seconds between lines of progress, without a terminal and in the log file."""
FACTOR = 2.0
"""A loss above this many times its running median is far above it."""
WINDOW = 100
"""Steps that the running median is taken over, at most."""
FEWEST = 20
"""Steps without which there is no median to speak of."""


class Log:
    """The voice of the main process.

    The file is begun when the context is entered: a training that is refused before leaves no trace. What was said
    until then is written with the time at which it was said. Later sessions add to the file.

    Args:
        console: where sentences go; None shows nothing.
        folder: for the file `log.txt`; None writes none (every process but the main one).
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            self.note(f"Error: {error}")

    def say(self, text: str) -> None:
        """One line on the console and in the file."""
        if self.console is not None:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)
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
    """One live line on a terminal, else a line a minute; and a line for each validation.

    Args:
        log: takes every line; its console shows the live one.
        fraction: how much of the run was done before this session, in [0, 1].
    """

    def __init__(self, log: Log, fraction: float) -> None:
        self._log, self._first = log, fraction
        self._noted = 0.0
        self._heads = ""
        self._open = ExitStack()
        self._bar: Bar | None = None

    def __enter__(self) -> Display:
        line = progress_bar(self._log.console, "training", total=100, unit="%", times=False, lines=False)
        self._bar = self._open.enter_context(line)
        self._bar.update(100 * self._first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def step(self, fraction: float, seconds: float, figures: str) -> None:
        """Update the live line; once a minute, a line for the log and for whoever has no terminal.

        Args:
            fraction: of the run that is done, in [0, 1].
            seconds: since this session began.
            figures: of the step.
        """
        if self._bar is None:
            return
        gained = fraction - self._first
        remaining = format_seconds(seconds * (1 - fraction) / gained) if gained > 0 else "?"
        text = f"{figures}{self._heads} · {remaining} left"
        self._bar.update(100 * min(1.0, fraction), note=text)
        if seconds >= self._noted + _EVERY:
            self._noted = seconds
            console = self._log.console
            tell = self._log.note if console is None or console.is_terminal else self._log.say
            tell(f"{min(1.0, fraction):.0%} · {text}")

    def validated(self, step: int, elapsed: float, loss: float | None, validation: Validation) -> None:
        """Print a validation, and show it in the live line from now on."""
        top1 = "/".join(f"{share:.2f}" for share in validation.accuracy["top1"])
        self._heads = f" · top-1 {top1} · tau {validation.tau:.2f}"
        learnt = f" · loss {loss:.3f}" if loss is not None else ""
        self._log.say(f"step {step} · {format_seconds(elapsed)}{learnt}{self._heads}")


class LossWatch:
    """Says once that the loss diverges: at the first step whose loss is more than 2 times the median of the up to
    100 steps before it, once there are 20 of them.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._told = False

    def ratio(self, loss: float) -> float | None:
        """The loss of a step as a multiple of the running median, the first time that it is far above it, else None.

        >>> watch = LossWatch()
        >>> [watch.ratio(loss) for loss in (*[2.0] * 20, 3.9, 4.1, 9.0)][-3:]
        [None, 2.05, None]
        """
        usual = median(self._losses) if len(self._losses) >= FEWEST else 0.0
        self._losses.append(loss)
        if self._told or usual <= 0 or loss <= FACTOR * usual:
            return None
        self._told = True
        return loss / usual


def divergence(loss: float, ratio: float, step: int) -> str:
    """What to say of a loss that is `ratio` times its running median."""
    return (
        f"Warning: the loss of step {step} is {loss:.3f}, {ratio:.1f} times the median of the steps before. "
        "If it stays up, lower train.lr or raise train.warmup. (Said once.)"
    )


def not_finite(
    step: int, loss: float, group: list[Batch], indices: list[Batch], batches: Sequence[HeadBatch]
) -> UserError:
    """What to say of a step whose loss or gradient is not finite: whose data it came from, and what to do.

    Every process calls it.

    Args:
        step: its number.
        loss: of the step.
        group: the batches of the step, over all processes.
        indices: the batches of this process.
        batches: the same, as they were read.
    """
    broken = [
        index
        for members, batch in zip(indices, batches, strict=True)
        for index, states in zip(members, states_by_conversation(batch), strict=True)
        if not all(state_TE.isfinite().all() for state_TE in states)
    ]
    broken = sorted(gather_object(broken))
    if broken:
        where = f"the stored states of training conversations {_some(broken)} are not finite"
        remedy = "Build the data again; if it stays, use target.dtype=float32."
    else:
        where = f"its batches held training conversations {_some(sorted(i for batch in group for i in batch))}"
        remedy = "Lower train.lr or raise train.warmup; the checkpoints before this step are kept."
    return UserError(f"The loss or its gradient is not finite at step {step} (loss {loss:g}): {where}.", remedy)


def _some(numbers: list[int]) -> str:
    """At most eight of them.

    >>> _some([3, 5]), _some(list(range(10)))
    ('3, 5', '0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
