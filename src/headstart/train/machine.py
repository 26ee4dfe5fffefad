"""Process-wide settings of a training: malloc tuning, and deferred signals."""

from __future__ import annotations

import ctypes
import platform
import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30
_SAME_REQUEST = 1.0  # seconds during which repeated signals count as one


def keep_freed_memory() -> bool:
    """Make glibc reuse freed blocks of up to 1 GiB, to save page faults in CPU training; returns whether it was set.

    By default every block above 32 MiB (a table of logits, the gradient of an LM head) is mapped, faulted in and zeroed
    anew each time. Peak memory is the same, but it is not returned to the system. A no-op without glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE - 1))


class Interrupt:
    """A context that defers SIGINT, SIGTERM and SIGUSR1: the first sets `requested`, a later one raises
    KeyboardInterrupt.

    SIGUSR1 is for schedulers: launchers kill their processes half a minute after SIGTERM, but ignore SIGUSR1, which
    leaves time for a checkpoint. Launchers also forward Ctrl-C, hence the grace period of `_SAME_REQUEST`. A no-op
    outside the main thread, where Python delivers no signals.
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
            signal.signal(number, handler)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._first = True, monotonic()
        elif monotonic() > self._first + _SAME_REQUEST:
            raise KeyboardInterrupt
