"""Work side by side on a CPU: two jobs with half of the threads each bring more than one after the other with all.

Steps of generation are many small operations, few of which fill several threads: on two cores, two workers wrote 1.3
times as many tokens as one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from headstart.servers.client import Stopped

R = TypeVar("R")

_MAX = 2
"""Each worker has a KV cache and a batch of its own."""


class Workers:
    """A few threads that work on jobs of a CPU, each with its share of torch's threads; on a GPU there is one.

    Use as a context: leaving it stops the jobs under way, as soon as they call `check`. There will be so many `jobs` at
    most; `count` of them run at once, so many as `side_by_side` says where that does not depend on the device.
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
        """For jobs to call now and then: raises `Stopped` once nobody waits for them any more."""
        if self._stop.is_set():
            raise Stopped
