"""Thread counts that adapt to the load of other programs.

GNU's OpenMP threads spin between operators. A thread that spins on a busy core delays both programs: with one of two
cores busy, decoding with two threads runs at a quarter of its speed, with one thread at two thirds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import floor
from pathlib import Path
from time import perf_counter, process_time

import torch

from headstart.support.compiled import torch_threads

_WINDOW = 0.25
"""Seconds between two readings. Linux counts in hundredths of a second."""
_REDUCE_ABOVE, _RESTORE_BELOW = 0.35, 0.2
"""Load by other programs, in cores, above which the thread count goes down by one, and below which it goes up again."""


class FreeCores:
    """Limit of the calling thread's compute threads: the cores that other programs leave free.

    The load by other programs is the busy time of this process's cores minus this process's own time, while a `limited`
    block runs. Does nothing outside Linux, or without GNU's OpenMP.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._free: float = len(self._cores)
        self._seen = (0.0, 0.0, 0.0)
        self._here = threading.local()  # `own` thread count and `last` reading of this thread's block

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Apply the last limit until the block ends, then restore the thread count found at its start.

        `update` inside the block follows other programs from there on.
        """
        own = torch.get_num_threads()
        if torch_threads() is None or own == 1 or not self._cores:
            yield
            return
        self._here.own, self._here.last = own, self._read()
        try:
            torch.set_num_threads(threads_for(self._free, own))
            yield
        finally:
            self._add()
            self._here.own = 1
            torch.set_num_threads(own)

    def update(self) -> bool:
        """Measure the load if enough time has passed; return whether the number of threads changed."""
        own = getattr(self._here, "own", 1)
        if own == 1 or self._seen[0] + perf_counter() - self._here.last[0] < _WINDOW:
            return False
        self._add()
        (elapsed, busy, ours), self._seen = self._seen, (0.0, 0.0, 0.0)
        free = len(self._cores) - max(0.0, busy - ours) / elapsed
        threads = torch.get_num_threads()
        # Between the two bounds nothing changes.
        limit = max(threads_for(free + _RESTORE_BELOW, own), min(threads, threads_for(free + _REDUCE_ABOVE, own)))
        if limit != threads:
            self._free = limit if limit < own else len(self._cores)
            torch.set_num_threads(limit)  # MKL's, too
        return limit != threads

    def _add(self) -> None:
        now = self._read()
        spent = zip(self._seen, now, self._here.last, strict=True)
        elapsed, busy, ours = (seen + after - before for seen, after, before in spent)
        self._seen, self._here.last = (elapsed, busy, ours), now

    def _read(self) -> tuple[float, float, float]:
        """Return wall time, busy time of this process's cores, and CPU time of this process, in seconds."""
        return perf_counter(), busy_seconds(Path("/proc/stat"), self._cores), process_time()


def threads_for(free: float, most: int) -> int:
    """Return the compute threads for this many free cores.

    >>> [threads_for(free, 4) for free in (-1.0, 0.7, 2.3, 12.0)]
    [1, 1, 2, 4]
    """
    return max(1, min(most, floor(free)))


def busy_seconds(stat: Path, cores: list[int]) -> float:
    """Return the busy seconds of these cores since boot, from a file like /proc/stat."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0.0
    names = {f"cpu{core}" for core in cores}
    # user, nice, system, irq, softirq; idle, iowait and steal are not work on this machine.
    return sum(
        int(fields[number]) / os.sysconf("SC_CLK_TCK")
        for fields in map(str.split, lines)
        if fields and fields[0] in names
        for number in (1, 2, 3, 6, 7)
    )
