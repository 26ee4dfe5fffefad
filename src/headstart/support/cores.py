"""Thread counts that follow the cores other programs leave free.

Between two operators GNU's OpenMP threads spin. A thread that spins on a core another program needs delays both: with
one of two cores busy, decoding with two threads runs at a quarter of its speed, with one thread at two thirds.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import floor
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from headstart.support.compiled import torch_threads

_WINDOW = 0.25
"""Seconds between two readings. Linux counts in hundredths of a second."""
_TAKE, _RETURN = 0.35, 0.2
"""Fractions of a core in other programs' use above which a thread is given up, and below which it comes back."""


class FreeCores:
    """Limits the calling thread's compute threads to the cores that other programs leave free.

    Other programs' share is the time Linux counts on this process's cores minus this process's own. Does nothing
    outside Linux, or without GNU's OpenMP.
    """

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._most = 1
        self._given_up = 0
        self._last = self._read()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Apply the last limit until the block ends, then restore the thread count found at its start.

        `update` inside the block follows other programs from there on.
        """
        own, openmp = torch.get_num_threads(), _openmp()
        if openmp is None or own == 1 or not self._cores:
            yield
            return
        self._most, self._last = min(own, len(self._cores)), self._read()
        try:
            openmp.omp_set_num_threads(max(1, self._most - self._given_up))
            yield
        finally:
            self._most = 1
            openmp.omp_set_num_threads(own)

    def update(self) -> bool:
        """Read the load if the last reading is old enough; return whether the number of threads changed."""
        if self._most == 1 or perf_counter() - self._last[0] < _WINDOW:
            return False
        before, self._last = self._last, self._read()
        elapsed, busy, own = (now - then for now, then in zip(self._last, before, strict=True))
        threads = torch.get_num_threads()
        wanted = threads_beside(max(0.0, busy - own) / elapsed, threads, self._most)
        if wanted != threads:
            self._given_up = self._most - wanted
            _openmp().omp_set_num_threads(wanted)
        return wanted != threads

    def _read(self) -> tuple[float, float, float]:
        """Seconds now, seconds this process's cores were busy, and seconds of them in this process."""
        return perf_counter(), busy_seconds(Path("/proc/stat"), self._cores), process_time()


def threads_beside(others: float, threads: int, most: int) -> int:
    """Compute threads to use beside other programs that occupy `others` cores, given the current number.

    >>> [threads_beside(others, 2, 2) for others in (0.0, 0.3, 0.5, 1.0, 2.0)], threads_beside(0.3, 1, 2)
    ([2, 2, 1, 1, 1], 1)
    """
    fewer, more = (max(1, min(most, floor(most - others + slack))) for slack in (_TAKE, _RETURN))
    return min(threads, fewer) if fewer < threads else max(threads, more)


def busy_seconds(stat: Path, cores: list[int]) -> float:
    """Seconds since boot that these cores were busy, from a file like /proc/stat."""
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


@cache
def _openmp() -> Any:
    path = torch_threads()
    return None if path is None else ctypes.CDLL(str(path))
