"""Jobs that one process plans, and that its workers and other processes take, over nothing but a folder that all see.

The process that plans posts one job more than anybody works on: a worker that is free, here or in a process that comes
to help, finds it. A job belongs to whoever holds its lock. The system lets go of the locks of a process that dies
(see `headstart.support.lock`), and its job is free again. Results are written whole and stay until the planner has used
them, so that they outlive whoever made them, and the planner too.

    00007-train-1f0c.../   job.json     what to do
                           lock         held by whoever does it
                           result.json  what came of it

On a CPU two workers with half of the threads each write 1.3 times as many tokens as one with all: steps of generation
are many small operations, few of which fill several threads.
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


JOBS = "jobs"
"""Folder of jobs, beside what they make."""
JOB, RESULT = "job.json", "result.json"
LOOK = 0.2
"""Seconds after which a process looks again what the others have done."""


@dataclass(frozen=True)
class Job:
    """Something to do; `what` is all that is needed, as JSON values. Jobs are taken in the order of `order`."""

    order: str
    what: dict[str, Any]

    @cached_property
    def name(self) -> str:
        """Of its folder; the same for the same job only."""
        digest = hashlib.sha256(json.dumps(self.what, sort_keys=True).encode()).hexdigest()
        return f"{self.order}-{digest[:16]}"


Do = Callable[[dict[str, Any]], dict[str, Any]]
"""Does a job; what comes back survives JSON."""


class Board:
    """A folder of jobs, on a disk that all who help see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, name: str, what: dict[str, Any]) -> None:
        """Let everyone see a job; one that is there is left as it is, with its result."""
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
        """Hold a job until what comes back is closed; None when another does, or when nothing is left to do of it."""
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
        if not (folder / JOB).is_file():  # withdrawn meanwhile: locking has made the folder anew
            shutil.rmtree(folder, ignore_errors=True)
        return None

    def is_free(self, name: str) -> bool:
        claim = self.claim(name)
        if claim is not None:
            claim.close()
        return claim is not None

    def withdraw(self, name: str) -> bool:
        """Take a job back; False when somebody is doing it or has done it."""
        claim = self.claim(name)
        if claim is None:
            return False
        with claim:
            self.remove(name)
        return True

    def remove(self, name: str) -> None:
        """Nobody needs the job or its result any more."""
        (self.folder / name / JOB).unlink(missing_ok=True)  # first: without its result it would be to do again
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def clear(self) -> None:
        """Remove what earlier planners left behind, but for what somebody is doing."""
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
    """Takes jobs for the workers of this process, as far as they can be done here (`mine`)."""

    def __init__(
        self,
        do: Do,
        workers: Workers,
        mine: Callable[[dict[str, Any]], bool] = lambda _: True,
        refused: set[str] | None = None,
    ) -> None:
        self._do, self._workers, self._mine = do, workers, mine
        self._refused = set() if refused is None else refused  # jobs that were looked at and cannot be done here
        self.running: dict[str, Future[None]] = {}

    def take(self, board: Board, names: Iterable[str]) -> int:
        """Begin what is free of these jobs and a worker has time for; how many have ended meanwhile.

        What doing one raised is raised here; the job is free for others then.
        """
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
    """Do jobs one after the other, with whoever helps; yields each with its result, in their order.

    `next_job` gives the next one, None when there is none now: it is told the jobs before it whose results have not
    been used, and how many write now. `still` says whether the last job, which nobody has begun, is still to be done.
    What `do` raises here is raised; what others cannot do is done here.
    """
    taker, posted, ended = Taker(do, workers), deque[Job](), False

    def free_jobs() -> list[Job]:
        return [job for job in posted if job.name not in taker.running and board.is_free(job.name)]

    def writers(free: Sequence[Job]) -> int:
        return max(workers.count, sum(not board.is_done(job.name) for job in posted) - len(free))

    try:
        while True:
            free = free_jobs()
            # Asked before a worker here takes it.
            if free and free[-1] is posted[-1] and not still(free[-1], writers(free)):
                if board.withdraw(free[-1].name):  # else somebody has just taken it
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
    """Take jobs that another process has planned until there is none left to take; how many were done."""
    done = 0
    while True:
        done += sum(taker.take(board, board.names()) for board in boards)
        if not taker.running:
            return done
        taker.wait()
