"""What a person sees while training: one live line on a terminal, one line per validation anywhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from headstart.train.metrics import Validation


class Display:
    """The live line.

    Args:
        console: where to write; None writes nothing (every process but the main one).
        fraction: how much of the run was done before this session, in [0, 1].
    """

    def __init__(self, console: Console | None, fraction: float) -> None:
        self._console = console
        self._first = fraction
        self._heads = ""
        self._bar: Progress | None = None
        if console is not None and console.is_terminal:
            columns = (BarColumn(bar_width=16), TaskProgressColumn(), TextColumn("{task.fields[text]}"))
            self._bar = Progress(TextColumn("training"), *columns, console=console)
            self._task = self._bar.add_task("", total=1.0, text="")
            self._bar.update(self._task, completed=fraction)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print one line above the live one."""
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def step(self, fraction: float, seconds: float, step: int, loss: float, lr: float, speed: float) -> None:
        """Update the live line.

        Args:
            fraction: of the run that is done, in [0, 1].
            seconds: since this session began.
            step: optimiser steps taken.
            loss: of the last step.
            lr: of the last step.
            speed: supervised tokens per second.
        """
        if self._bar is None:
            return
        gained = fraction - self._first
        left = format_seconds(seconds * (1 - fraction) / gained) if gained > 0 else "?"
        text = f"step {step} · loss {loss:.3f} · lr {lr:.1e} · {speed:,.0f} tok/s{self._heads} · {left} left"
        self._bar.update(self._task, completed=min(1.0, fraction), text=text)

    def validated(self, step: int, elapsed: float, loss: float | None, validation: Validation) -> None:
        """Print a validation, and show it in the live line from now on."""
        top1 = "/".join(f"{share:.2f}"[1:] if share < 1 else "1" for share in validation.accuracy["top1"])
        self._heads = f" · top-1 {top1} · tau {validation.tau:.2f}"
        learnt = f" · loss {loss:.3f}" if loss is not None else ""
        self.say(f"step {step} · {format_seconds(elapsed)}{learnt}{self._heads}")


def format_seconds(seconds: float) -> str:
    """A duration as people write it.

    >>> format_seconds(7), format_seconds(425), format_seconds(7300)
    ('7 s', '7 min 05 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
