"""Worker threads of one process, and claims on outputs that several processes write to one file system.

On a CPU, two workers with half of the threads each generate 1.3 times as many tokens as one worker with all threads:
most operations of a decoding step are too small for many threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import torch

from headstart.servers.client import Stopped
from headstart.support.lock import Busy, locked

R = TypeVar("R")

_MAX = 2
"""Maximum workers on a CPU; each has a KV cache and a batch of its own."""
POLL_SECONDS = 0.2
"""Interval of checks for the results of other processes."""
_CLAIM = ".claim"
"""Suffix of the lock file of an output that a process is writing."""


class Workers:
    """A thread pool that splits torch's CPU threads among workers; one worker on a GPU unless `side_by_side` is set.

    Leaving the context stops running jobs at their next `check`. `count` of at most `jobs` jobs run concurrently.
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
    """Claim an output; closing the returned stack releases it. None if it `is_done` or another process holds it.

    The lock of a killed process is released.
    """
    stack, lock = ExitStack(), folder / (name + _CLAIM)
    try:
        handle = stack.enter_context(locked(folder, name=lock.name))
    except Busy:
        return None
    stack.callback(lock.unlink, missing_ok=True)
    with suppress(FileNotFoundError):  # its last holder may have deleted the file after we opened it
        if os.path.samestat(os.fstat(handle.fileno()), lock.stat()) and not is_done():
            return stack
    stack.close()
    return None


def prune_claims(folder: Path) -> list[Path]:
    """Delete the claims of killed processes; return the claims of running ones."""
    held = []
    for lock in folder.glob(f"*{_CLAIM}"):
        try:
            with locked(folder, name=lock.name):
                lock.unlink(missing_ok=True)
        except Busy:
            held.append(lock)
    return held
