"""Which parts of conversations are written next, and the prompts that they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.data.conversations.part_writer import SPLITS, PartJob, PartWriter
from headstart.data.conversations.parts import TimeBudget
from headstart.data.prompts.reading import LeftOut, prompts_for
from headstart.data.prompts.shapes import Prompt
from headstart.recipes.sections import DataSection


@dataclass
class Wanted:
    """What is wanted of a split.

    Attributes:
        split: its name.
        count: conversations.
        missing: how many of them there are not yet.
        clock: of the time that may be spent.
    """

    split: str
    count: int
    missing: Callable[[], int]
    clock: TimeBudget


class PartPlan:
    """Plans parts of a split one after the other; see `headstart.data.conversations.jobs.Plan`.

    Args:
        wanted: of the split.
        source: of prompts.
        number: of the first part.
        start: where its prompts begin.
        begun: whether the split has a part. The clock never stops the first: without it there is nothing to learn from.
    """

    def __init__(self, wanted: Wanted, source: JobSource, number: int, start: int, begun: bool) -> None:
        self._wanted, self._source = wanted, source
        self._number, self._start, self._begun = number, start, begun
        self._planned = 0  # by this plan: what earlier ones gave says nothing about further ones
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the part before this one."""
        before, self._mark = self._mark, time.perf_counter()
        return round(self._mark - before, 3)

    def next(self, waiting: Sequence[PartJob], writers: int) -> PartJob | None:
        """The next part. How large parts are does not depend on how many are written at once."""
        room = self._wanted.missing() - sum(job.size for job in waiting)
        if room <= 0 or (waiting and not self._source.full(room)) or (self._begun and not self._in_time(writers)):
            return None
        if self._source.exhausted(self._wanted.split, self._planned, self._start):
            return None
        size = self._source.size(room, self._wanted.count)
        job = self._source.job(self._wanted.split, self._number, self._start, size, not self._begun)
        self._number, self._start = self._number + 1, job.prompts[1]
        self._planned, self._begun = self._planned + 1, True
        return job

    def still(self, job: PartJob, writers: int) -> bool:
        """Whether there is still time for a part that nobody has begun."""
        return job.first or self._in_time(writers)

    def _in_time(self, writers: int) -> bool:
        return not self._wanted.clock.over(writers, time.perf_counter() - self._mark)


class JobSource:
    """Jobs of prompts: written by the target, or read once from files and datasets.

    Args:
        writer: of the parts.
        settings: of the data.
        limit: given prompts to read at first.

    Attributes:
        answering: counts prompts that could not be used once they were answered.
        used_up: sources among several that have no more.
    """

    def __init__(self, writer: PartWriter, settings: DataSection, limit: int) -> None:
        self.writer, self._settings = writer, settings
        self.answering, self._reading = LeftOut(), LeftOut()
        self.used_up: list[str] = []
        self._given: list[Prompt] | None = None
        if settings.prompts != "self":
            self._read(limit)

    def _read(self, limit: int) -> None:
        """Read the first `limit` of the given prompts; their order stays as it is when more are asked for."""
        # Files are often sorted by kind: what is kept apart should be of the same kinds as what is trained on.
        read = prompts_for(self._settings, self.writer.target.tokenizer, limit, seed=self._settings.seed)
        self._given, self._limit = read.prompts, limit
        self._reading, self.used_up = read.left_out, read.used_up

    @property
    def left_out(self) -> LeftOut:
        """Prompts that could not be used."""
        both = LeftOut()
        both.add_all(self._reading)
        both.add_all(self.answering)
        return both

    def full(self, room: int) -> bool:
        """Whether a part is as large as any other where there is room for so many conversations."""
        return self._given is None or room >= self._settings.batch_size

    def size(self, room: int, count: int) -> int:
        """Conversations of the next part, of a split of `count` that has room for `room`.

        Of self-prompts a few more than wanted: some may be in another split, and a part for one more takes long.
        """
        return min(self._settings.batch_size, room if self._given is not None else count + -(-count // 8))

    def job(self, split: str, number: int, start: int, size: int, first: bool) -> PartJob:
        """The part that answers given prompts from `start` on, or prompts of the target's own."""
        if self._given is None:
            return self.writer.job(split, number, (0, 0), None, size, first)
        span = start, min(start + size, len(self._given))
        return self.writer.job(split, number, span, self._given[slice(*span)], size, first)

    def exhausted(self, split: str, planned: int, start: int) -> bool:
        """Whether there is no further part: no given prompts from `start` on, or, of prompts that the target writes,
        so many parts already as only parts that gave nothing new can come to."""
        batch_size = self._settings.batch_size
        if self._given is not None:
            if start + batch_size > len(self._given) == self._limit:
                self._read(2 * self._limit)
            return start >= len(self._given)
        return planned > 20 + 10 * int(getattr(self._settings, SPLITS[split])) // batch_size
