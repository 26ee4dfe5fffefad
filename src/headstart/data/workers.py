"""Worker threads of one process, and claims on outputs that several processes write to one file system.

On a CPU two workers with half of the threads each write 1.3 times as many tokens as one worker with all threads: most
operations of a generation step are too small for many threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch

from headstart.servers.client import Stopped
from headstart.support.lock import Busy, locked

R = TypeVar("R")

_MAX = 2
"""Each worker has a KV cache and a batch of its own."""
POLL_SECONDS = 0.2
"""Interval of looking for the results of other processes."""
_CLAIM = ".claim"
"""Suffix of the lock file of an output that a process is writing."""


class Workers:
    """A thread pool that splits torch's CPU threads among workers; one worker on a GPU unless `side_by_side` is set.

    Leaving the context stops running jobs at their next `check`. `jobs` is an upper bound; `count` run at once.
    """

    def __init__(self, device: torch.device, jobs: int, side_by_side: int | None = None) -> None:
        self._threads = torch.get_num_threads()
        by_device = min(_MAX, self._threads) if device.type == "cpu" else 1
        self.count = max(1, min(jobs, side_by_side or by_device))
        self._stop = threading.Event()

    def __enter__(self) -> Workers:
        torch.set_num_threads(max(1, self._threads // self.count))
        self._pool = ThreadPoolExecutor(self.count, "worker")
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def begin(self, job: Callable[[], R]) -> Future[R]:
        return self._pool.submit(job)

    def check(self) -> None:
        """Raise `Stopped` once the pool is closing; jobs poll this."""
        if self._stop.is_set():
            raise Stopped


def claim(folder: Path, name: str, is_done: Callable[[], bool]) -> ExitStack | None:
    """Lock an output until the returned stack is closed; None if it `is_done` or another process has locked it.

    The lock of a killed process is released.
    """
    stack, lock = ExitStack(), folder / (name + _CLAIM)
    try:
        stack.enter_context(locked(folder, name=lock.name))
    except Busy:
        return None
    stack.callback(lock.unlink, missing_ok=True)
    if lock.exists() and not is_done():  # else its last holder has deleted the file
        return stack
    stack.close()
    return None


def claims(folder: Path) -> list[Path]:
    """List the lock files of claimed outputs, including leftovers of killed processes."""
    return list(folder.glob(f"*{_CLAIM}"))


def clear_claims(folder: Path) -> None:
    """Delete leftover lock files once all outputs are done."""
    for lock in claims(folder):
        lock.unlink(missing_ok=True)
