"""Jobs that one process plans and others help with, over nothing but a folder that all of them see.

The process that plans posts what is to be done next, does it itself, and posts one job more than anybody works on: who
comes to help finds it. A job belongs to whoever holds its lock. The system lets go of the locks of a process that dies
(see `headstart.support.lock`), and its job is free again. Results are written whole and stay until the planner has used
them, so that they outlive whoever made them, and the planner too.

    00007-train-1f0c.../   job.json     what to do
                           lock         held by whoever does it
                           result.json  what came of it
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from headstart.data.conversations.workers import Workers
from headstart.support.files import read_json, write_json
from headstart.support.lock import Busy, locked
from headstart.target.model import Target

JOBS = "jobs"
"""Folder of jobs, beside what they make."""
JOB, RESULT = "job.json", "result.json"
LOOK = 0.2
"""Seconds after which one looks again what the others have done."""


def owner_of(target: Target) -> str:
    """Whose conversations or hidden states a job asks for."""
    return f"{target.identity().fingerprint} {target.settings} {str(target.dtype).removeprefix('torch.')}"


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


J = TypeVar("J", bound=Job)
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
        """All jobs, in order."""
        return sorted(file.parent.name for file in self.folder.glob(f"*/{JOB}"))

    def job(self, name: str) -> dict[str, Any]:
        return dict(read_json(self.folder / name / JOB))

    def result(self, name: str) -> dict[str, Any] | None:
        """What came of a job; None while it is not done."""
        file = self.folder / name / RESULT
        return dict(read_json(file)) if file.is_file() else None

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

    def held(self, name: str) -> bool:
        """Whether somebody is doing a job."""
        claim = self.claim(name)
        if claim is None:
            return not (self.folder / name / RESULT).is_file()
        claim.close()
        return False

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
            if self.result(name) is not None:
                self.remove(name)
            else:
                self.withdraw(name)
        with suppress(OSError):
            self.folder.rmdir()

    def _open(self, folder: Path) -> bool:
        return (folder / JOB).is_file() and not (folder / RESULT).is_file()


class Plan(Protocol[J]):
    """Says which jobs there are."""

    def next(self, waiting: Sequence[J], writers: int) -> J | None:
        """The next job; None when there is none now.

        `waiting` are the jobs before it whose results have not been used; so many `writers` work now.
        """

    def still(self, job: J, writers: int) -> bool:
        """Whether the last job, which nobody has begun, is still to be done."""


class InOrder(Generic[J]):
    """A plan of these jobs, one after the other."""

    def __init__(self, jobs: Iterable[J]) -> None:
        self._jobs = iter(jobs)

    def next(self, waiting: Sequence[J], writers: int) -> J | None:
        return next(self._jobs, None)

    def still(self, job: J, writers: int) -> bool:
        return True


@dataclass
class _Posted(Generic[J]):
    """A job whose result has not been used; it is done here (`future`), elsewhere, or by nobody yet."""

    job: J
    result: dict[str, Any] | None = None
    future: Future[dict[str, Any]] | None = None
    elsewhere: bool = False

    def look(self, board: Board | None) -> None:
        """See how far it is; raises what was raised by it in this process."""
        if self.result is not None:
            return
        if self.future is not None:
            self.result = self.future.result() if self.future.done() else None
        elif board is not None:
            self.result = board.result(self.job.name)
            self.elsewhere = self.result is None and board.held(self.job.name)

    @property
    def here(self) -> bool:
        return self.result is None and self.future is not None

    @property
    def free(self) -> bool:
        return self.result is None and self.future is None and not self.elsewhere


def share(plan: Plan[J], do: Do, workers: Workers, board: Board | None = None) -> Iterator[tuple[J, dict[str, Any]]]:
    """Do the jobs of a plan, with whoever helps; yields each with its result, in the order of the plan.

    What `do` raises here is raised; what others cannot do is done here. Without a board nobody helps.
    """
    if board is None and not workers.beside:
        while (job := plan.next((), 1)) is not None:
            yield job, do(job.what)
        return
    posted: deque[_Posted[J]] = deque()
    try:
        yield from _share(plan, do, workers, board, posted=posted)
    finally:
        if board is not None:
            for item in posted:
                if item.free:
                    board.withdraw(item.job.name)


def _share(
    plan: Plan[J], do: Do, workers: Workers, board: Board | None, posted: deque[_Posted[J]]
) -> Iterator[tuple[J, dict[str, Any]]]:
    ended = False
    while True:
        for item in posted:
            item.look(board)
        while posted and posted[-1].free and not plan.still(posted[-1].job, _writers(workers, posted)):
            if board is not None and not board.withdraw(posted[-1].job.name):
                break  # somebody has just taken it
            posted.pop()
            ended = True
        running = sum(item.here for item in posted)
        for item in posted:
            running += item.free and running < workers.count and _begin(item, do, workers, board)
        room = workers.count + sum(item.elsewhere for item in posted) + (board is not None)
        if not ended and sum(item.result is None for item in posted) < room:
            job = plan.next([item.job for item in posted], _writers(workers, posted))
            if job is not None:
                posted.append(_Posted(job))
                if board is not None:
                    board.post(job.name, job.what)
                continue
        if not posted:
            return
        if (result := posted[0].result) is not None:
            job = posted.popleft().job
            yield job, result
            if board is not None:
                board.remove(job.name)
        elif futures := [item.future for item in posted if item.future is not None and item.result is None]:
            wait(futures, None if board is None else LOOK, FIRST_COMPLETED)
        else:
            time.sleep(LOOK)


def _writers(workers: Workers, posted: Iterable[_Posted[J]]) -> int:
    """How many jobs are being done, here or elsewhere."""
    return max(workers.count, sum(item.here or item.elsewhere for item in posted))


def _begin(item: _Posted[J], do: Do, workers: Workers, board: Board | None) -> bool:
    """Begin a job here, if nobody has it."""
    claim = ExitStack() if board is None else board.claim(item.job.name)
    if claim is not None:
        item.future = workers.begin(partial(_done, do, item.job.what, item.job.name, board, claim))
    return claim is not None


def _done(do: Do, what: dict[str, Any], name: str, board: Board | None, claim: ExitStack) -> dict[str, Any]:
    """Do a job that is held, post what came of it, and let go."""
    with claim:
        result = do(what)
        if board is not None:
            board.finish(name, result)
        return result


@dataclass
class Helper:
    """Does jobs that another process has planned, as far as they can be done here (`mine`)."""

    do: Do
    mine: Callable[[dict[str, Any]], bool]
    refused: set[str] = field(default_factory=set)

    def help(self, boards: Collection[Board], workers: Workers) -> int:
        """Take jobs until there is none left to take; how many were done. What `do` raises frees the job for others."""
        running: list[Future[dict[str, Any]]] = []
        finished = 0
        while True:
            for future in [future for future in running if future.done()]:
                future.result()
                running.remove(future)
                finished += 1
            for board in boards:
                for name in board.names():
                    if len(running) < workers.count and (begun := self._take(board, name, workers)) is not None:
                        running.append(begun)
            if not running:
                return finished
            wait(running, LOOK, FIRST_COMPLETED)

    def _take(self, board: Board, name: str, workers: Workers) -> Future[dict[str, Any]] | None:
        if name in self.refused or (claim := board.claim(name)) is None:
            return None
        what = board.job(name)
        if not self.mine(what):
            self.refused.add(name)
            claim.close()
            return None
        return workers.begin(partial(_done, self.do, what, name, board, claim))
