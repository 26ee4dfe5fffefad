"""Ctrl-C and SIGTERM that wait for the end of a step, so that nothing done so far is lost."""

from __future__ import annotations

import signal
import threading
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

_SAME = 1.0
"""Seconds in which further signals belong to the first."""


class Interrupt:
    """A context in which the first SIGINT or SIGTERM only sets `asked`; a later one raises KeyboardInterrupt.

    Ctrl-C in a terminal reaches the launcher of several processes as well, which passes it on: what follows at once is
    the same request. Outside the main thread, where Python delivers no signals, this does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if not self.asked:
            self.asked, self._first = True, monotonic()
        elif monotonic() > self._first + _SAME:
            raise KeyboardInterrupt
