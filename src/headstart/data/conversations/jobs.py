"""A job queue on a shared file system.

The planner keeps one unclaimed job posted for any idle worker, in its own process or another. A worker claims a job by
locking it; the lock of a dead process is released (`headstart.support.lock`). Results are written atomically and stay
until the planner has read them.

    00007-train-1f0c.../   job.json     payload
                           lock         held by the worker
                           result.json  result

On a CPU two workers with half of the threads each write 1.3 times as many tokens as one worker with all threads: most
operations of a generation step are too small for many threads.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from headstart.servers.client import Stopped
from headstart.support.files import read_json, write_json
from headstart.support.lock import Busy, locked

R = TypeVar("R")

_MAX = 2
"""Each worker has a KV cache and a batch of its own."""


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


JOBS = "jobs"
"""Folder of jobs, beside their outputs."""
JOB, RESULT = "job.json", "result.json"
LOOK = 0.2
"""Polling interval in seconds."""


@dataclass(frozen=True)
class Job:
    """A job with its JSON payload `what`; jobs are taken in ascending `order`."""

    order: str
    what: dict[str, Any]

    @cached_property
    def name(self) -> str:
        """Folder name, unique to the payload."""
        digest = hashlib.sha256(json.dumps(self.what, sort_keys=True).encode()).hexdigest()
        return f"{self.order}-{digest[:16]}"


Do = Callable[[dict[str, Any]], dict[str, Any]]
"""Runs a job payload and returns a JSON-serialisable result."""


class Board:
    """A folder of jobs on a shared disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, name: str, what: dict[str, Any]) -> None:
        """Post a job unless it exists already."""
        if not (self.folder / name / JOB).is_file():
            write_json(self.folder / name / JOB, what, indent=None)

    def names(self) -> list[str]:
        return sorted(file.parent.name for file in self.folder.glob(f"*/{JOB}"))

    def job(self, name: str) -> dict[str, Any]:
        return dict(read_json(self.folder / name / JOB))

    def result(self, name: str) -> dict[str, Any] | None:
        return dict(read_json(self.folder / name / RESULT)) if self.is_done(name) else None

    def is_done(self, name: str) -> bool:
        return (self.folder / name / RESULT).is_file()

    def finish(self, name: str, result: dict[str, Any]) -> None:
        write_json(self.folder / name / RESULT, result, indent=None)

    def claim(self, name: str) -> ExitStack | None:
        """Lock a job until the returned stack is closed; None if it is locked, done or withdrawn."""
        folder = self.folder / name
        if not self._open(folder):
            return None
        held = ExitStack()
        try:
            held.enter_context(locked(folder))
        except Busy:
            return None
        if self._open(folder):
            return held
        held.close()
        if not (folder / JOB).is_file():  # withdrawn meanwhile: locking has recreated the folder
            shutil.rmtree(folder, ignore_errors=True)
        return None

    def is_free(self, name: str) -> bool:
        claim = self.claim(name)
        if claim is not None:
            claim.close()
        return claim is not None

    def withdraw(self, name: str) -> bool:
        """Remove a job; False if it is running or done."""
        claim = self.claim(name)
        if claim is None:
            return False
        with claim:
            self.remove(name)
        return True

    def remove(self, name: str) -> None:
        (self.folder / name / JOB).unlink(missing_ok=True)  # first: without its result the job would run again
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def clear(self) -> None:
        """Remove leftover jobs except the running ones."""
        for name in self.names():
            if self.is_done(name):
                self.remove(name)
            else:
                self.withdraw(name)
        with suppress(OSError):
            self.folder.rmdir()

    def _open(self, folder: Path) -> bool:
        return (folder / JOB).is_file() and not (folder / RESULT).is_file()


class Taker:
    """Claims jobs for the workers of this process; `mine` selects the ones it can run."""

    def __init__(
        self,
        do: Do,
        workers: Workers,
        mine: Callable[[dict[str, Any]], bool] = lambda _: True,
        refused: set[str] | None = None,
    ) -> None:
        self._do, self._workers, self._mine = do, workers, mine
        self._refused = set() if refused is None else refused  # jobs this process cannot run
        self.running: dict[str, Future[None]] = {}

    def take(self, board: Board, names: Iterable[str]) -> int:
        """Start free jobs on idle workers; return how many have ended. Re-raises a job's error and frees that job."""
        ended = [name for name, future in self.running.items() if future.done()]
        for name in ended:
            self.running.pop(name).result()
        for name in names:
            if len(self.running) < self._workers.count and name not in self.running and name not in self._refused:
                self._begin(board, name)
        return len(ended)

    def wait(self) -> None:
        if self.running:
            wait(self.running.values(), LOOK, FIRST_COMPLETED)
        else:
            time.sleep(LOOK)

    def _begin(self, board: Board, name: str) -> None:
        claim = board.claim(name)
        if claim is None:
            return
        what = board.job(name)
        if not self._mine(what):
            self._refused.add(name)
            claim.close()
            return

        def work() -> None:
            with claim:
                board.finish(name, self._do(what))

        self.running[name] = self._workers.begin(work)


def share(
    next_job: Callable[[Sequence[Job], int], Job | None],
    do: Do,
    workers: Workers,
    board: Board,
    *,
    still: Callable[[Job, int], bool] = lambda job, writers: True,
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Run jobs here and in other processes; yield each with its result, in order.

    `next_job` takes the pending jobs and the number of writers, and returns the next job or None. `still` tells whether
    the last unclaimed job is still needed. Errors of `do` in this process propagate.
    """
    taker, posted, ended = Taker(do, workers), deque[Job](), False

    def free_jobs() -> list[Job]:
        return [job for job in posted if job.name not in taker.running and board.is_free(job.name)]

    def writers(free: Sequence[Job]) -> int:
        return max(workers.count, sum(not board.is_done(job.name) for job in posted) - len(free))

    try:
        while True:
            free = free_jobs()
            # Before a worker here claims it.
            if free and free[-1] is posted[-1] and not still(free[-1], writers(free)):
                if board.withdraw(free[-1].name):  # else another process has just claimed it
                    posted.pop()
                    ended = True
                continue
            taker.take(board, [job.name for job in posted])
            free = free_jobs()
            if not (free or ended) and (job := next_job(list(posted), writers(free))) is not None:
                board.post(job.name, job.what)
                posted.append(job)
            elif not posted:
                return
            elif (result := board.result(posted[0].name)) is not None:
                job = posted.popleft()
                yield job, result
                board.remove(job.name)
            else:
                taker.wait()
    finally:
        for job in free_jobs():
            board.withdraw(job.name)


def help_others(boards: Sequence[Board], taker: Taker) -> int:
    """Run jobs of other processes until none is free; return how many ended."""
    done = 0
    while True:
        done += sum(taker.take(board, board.names()) for board in boards)
        if not taker.running:
            return done
        taker.wait()
