"""Which parts of conversations are written next, and the prompts that they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.data.conversations.part_writer import PartJob, PartWriter
from headstart.data.conversations.parts import TimeBudget
from headstart.data.prompts.reading import LeftOut, Prompts, prompts_for
from headstart.data.prompts.shapes import Prompt


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


class GivenPrompts:
    """The prompts that a recipe names, in one order, read as far as they are needed; none for self-prompts.

    Args:
        writer: of the parts.
        limit: prompts to read at first.

    Attributes:
        answering: counts prompts that could not be used once they were answered.
    """

    def __init__(self, writer: PartWriter, limit: int) -> None:
        self._writer, self._limit = writer, limit
        self._read: Prompts | None = None
        self.answering = LeftOut()
        if writer.settings.prompts != "self":
            self._read_again(limit)

    def _read_again(self, limit: int) -> None:
        # Files are often sorted by kind: what is kept apart should be of the same kinds as what is trained on.
        settings, tokenizer = self._writer.settings, self._writer.target.tokenizer
        self._read, self._limit = prompts_for(settings, tokenizer, limit, seed=settings.seed), limit

    def some(self, start: int, count: int) -> list[Prompt] | None:
        """So many prompts from this one on, fewer at the end; None for prompts that the target writes."""
        if self._read is None:
            return None
        if start + self._writer.settings.batch_size > len(self._read.prompts) == self._limit:
            self._read_again(2 * self._limit)
        return self._read.prompts[start : start + count]

    @property
    def used_up(self) -> list[str]:
        """Sources among several that have no more."""
        return [] if self._read is None else self._read.used_up

    @property
    def left_out(self) -> LeftOut:
        """Prompts that could not be used."""
        both = LeftOut() if self._read is None else LeftOut(self._read.left_out.counts, self._read.left_out.examples)
        both.add_all(self.answering)
        return both


class PartPlan:
    """Plans parts of a split one after the other; see `headstart.data.conversations.jobs.Plan`.

    Args:
        writer: of the parts.
        prompts: those given.
        wanted: of the split.
        number: of the first part.
        start: where its prompts begin.
        begun: whether the split has a part. The clock never stops the first: without it there is nothing to learn from.
    """

    def __init__(
        self, writer: PartWriter, prompts: GivenPrompts, wanted: Wanted, *, number: int, start: int, begun: bool
    ) -> None:
        self._writer, self._prompts, self._wanted = writer, prompts, wanted
        self._number, self._start, self._begun = number, start, begun
        self._planned = 0  # by this plan: what earlier ones gave says nothing about further ones
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the part before this one."""
        before, self._mark = self._mark, time.perf_counter()
        return round(self._mark - before, 3)

    def next(self, waiting: Sequence[PartJob], writers: int) -> PartJob | None:
        """The next part. How large parts are does not depend on how many are written at once."""
        wanted, batch_size = self._wanted, self._writer.settings.batch_size
        room = wanted.missing() - sum(job.size for job in waiting)
        if room <= 0 or (self._begun and not self._in_time(writers)):
            return None
        given = self._prompts.some(self._start, min(batch_size, room))
        if given is None:
            # Some may be in another split, and a part for one more takes long: a few more than wanted are asked for.
            # Only parts that gave nothing new can come to so many.
            size, exhausted = (
                min(batch_size, wanted.count + -(-wanted.count // 8)),
                20 + 10 * wanted.count // batch_size,
            )
            if self._planned > exhausted:
                return None
        else:
            size = min(batch_size, room)
            if not given or (waiting and room < batch_size):
                return None
        job = PartJob(
            f"{self._number:05d}-{wanted.split}",
            self._writer.job(wanted.split, self._number, given, size),
            number=self._number,
            split=wanted.split,
            prompts=(0, 0) if given is None else (self._start, self._start + len(given)),
            size=size,
            first=not self._begun,
        )
        self._number, self._start = self._number + 1, job.prompts[1]
        self._planned, self._begun = self._planned + 1, True
        return job

    def still(self, job: PartJob, writers: int) -> bool:
        """Whether there is still time for a part that nobody has begun."""
        return job.first or self._in_time(writers)

    def _in_time(self, writers: int) -> bool:
        return not self._wanted.clock.over(writers, time.perf_counter() - self._mark)
