"""What a person sees while training: one live line on a terminal, else a line a minute; a line per validation."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from headstart.support.terminal import Bar, format_seconds, progress_bar
from headstart.train.log import Log
from headstart.train.metrics import Validation

_EVERY = 60.0
"""Seconds between lines of progress, without a terminal and in the log file."""


class Display:
    """The live line.

    Args:
        log: takes every line; its console shows the live one.
        fraction: how much of the run was done before this session, in [0, 1].
    """

    def __init__(self, log: Log, fraction: float) -> None:
        self._log = log
        self._noted = 0.0
        self._first = fraction
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

    def say(self, text: str) -> None:
        """Print one line above the live one."""
        self._log.say(text)

    def step(self, fraction: float, seconds: float, step: int, loss: float, lr: float, speed: float) -> None:
        """Update the live line; once a minute, a line for the log and for whoever has no terminal.

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
        self.say(f"step {step} · {format_seconds(elapsed)}{learnt}{self._heads}")
