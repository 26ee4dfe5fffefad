"""Deferred signals, so that a training ends after a complete step."""

from __future__ import annotations

import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any

_SAME_REQUEST = 1.0  # seconds during which repeated signals count as one


class Interrupt:
    """A context that defers SIGINT, SIGTERM and SIGUSR1: the first sets `requested`, a later one raises
    KeyboardInterrupt.

    SIGUSR1 is for schedulers: launchers kill their workers half a minute after SIGTERM, which may be too short for a
    checkpoint. It must reach the workers, and terminates a launcher that does not ignore it (`trap '' USR1`). Launchers
    also forward Ctrl-C, hence the grace period of `_SAME_REQUEST`. A no-op outside the main thread, where Python
    delivers no signals.
    """

    def __init__(self) -> None:
        self.requested = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: installed from C, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._first = True, monotonic()
        elif monotonic() > self._first + _SAME_REQUEST:
            raise KeyboardInterrupt
