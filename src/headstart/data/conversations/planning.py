"""Which parts of conversations are written next, and the prompts that they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from headstart.data.conversations.jobs import Job
from headstart.data.conversations.part_writer import PartWriter
from headstart.data.conversations.parts import Part, TimeBudget
from headstart.data.prompts.loading import LeftOut, load_prompts
from headstart.data.prompts.shapes import Prompt


class GivenPrompts:
    """The prompts that a recipe names, in one order, read as far as they are needed; none for self-prompts.

    `answering` counts those that could not be used once they were answered.
    """

    def __init__(self, writer: PartWriter, limit: int) -> None:
        self.writer, self._limit = writer, limit
        self._prompts: list[Prompt] = []
        self._left_out, self.answering = LeftOut(), LeftOut()
        self.used_up: list[str] = []
        if writer.settings.prompts != "self":
            self._read()

    def _read(self) -> None:
        # Files are often sorted by kind: what is kept apart should be of the same kinds as what is trained on.
        settings, tokenizer = self.writer.settings, self.writer.target.tokenizer
        read = load_prompts(settings, tokenizer, limit=self._limit, seed=settings.seed)
        self._prompts, self._left_out, self.used_up = read.prompts, read.left_out, read.used_up

    def some(self, start: int, count: int) -> list[Prompt] | None:
        """So many prompts from this one on, fewer at the end; None for prompts that the target writes."""
        if self.writer.settings.prompts == "self":
            return None
        if start + self.writer.settings.batch_size > len(self._prompts) == self._limit:
            self._limit *= 2
            self._read()
        return self._prompts[start : start + count]

    @property
    def left_out(self) -> LeftOut:
        both = LeftOut()
        both.add_all(self._left_out)
        both.add_all(self.answering)
        return both


class PartPlan:
    """Plans the parts of a split that come after those that are there, for `headstart.data.conversations.jobs.share`.

    So many conversations (`count`) are wanted, of which some are still `missing`, in the time that the clock leaves. It
    never stops the first part of a split: without it there is nothing to learn from.
    """

    def __init__(
        self,
        prompts: GivenPrompts,
        parts: Sequence[Part],
        *,
        split: str,
        count: int,
        missing: Callable[[], int],
        clock: TimeBudget,
    ) -> None:
        self._prompts, self._batch_size = prompts, prompts.writer.settings.batch_size
        self._split, self._count, self.missing, self.clock = split, count, missing, clock
        self._number = 1 + max((part.number for part in parts), default=-1)
        self._start = answered_until(parts)
        self._first = None if any(part.split == split for part in parts) else self._number
        # Only parts that gave nothing new can come to so many.
        self._most = self._number + 20 + 10 * count // self._batch_size
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the part before this one."""
        before, self._mark = self._mark, time.perf_counter()
        return round(self._mark - before, 3)

    def next(self, waiting: Sequence[Job], writers: int) -> Job | None:
        """The next part. How large parts are does not depend on how many are written at once."""
        batch_size = self._batch_size
        room = self.missing() - sum(job.what["size"] for job in waiting)
        if room <= 0 or not self._in_time(self._number, writers):
            return None
        size = min(batch_size, room)
        given = self._prompts.some(self._start, size)
        if given is None:
            # Some may be in another split, and a part for one more takes long: a few more than wanted are asked for.
            size = min(batch_size, self._count + -(-self._count // 8))
            if self._number > self._most:
                return None
        elif not given or (waiting and room < batch_size):
            return None
        part = {"split": self._split, "number": self._number, "start": self._start, "size": size}
        self._number += 1
        self._start += len(given or ())
        return Job(f"{part['number']:05d}-{self._split}", self._prompts.writer.job(part, given))

    def still(self, job: Job, writers: int) -> bool:
        return self._in_time(job.what["number"], writers)

    def _in_time(self, number: int, writers: int) -> bool:
        since = time.perf_counter() - self._mark
        return number == self._first or not self.clock.over(writers, since)


def answered_until(parts: Sequence[Part]) -> int:
    """Where the prompts begin that no part has answered."""
    return max((part.prompts[1] for part in parts), default=0)
