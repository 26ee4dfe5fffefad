"""Parts of conversations: batches that are written once, numbered, and only ever added to; and which come next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.conversations.jobs import Job
from headstart.data.conversations.part_writer import PartWriter
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.loading import LeftOut, load_prompts
from headstart.data.prompts.shapes import Prompt
from headstart.errors import UserError
from headstart.support.files import read_json, read_jsonl, write_json, write_jsonl

CLOCKS = "clocks.json"
"""Beside the parts: where budgets of time ended."""


@dataclass
class Part:
    """One batch of conversations of a split, with a number among the parts of all splits.

    Attributes:
        prompts: of given prompts, the range in their order that the part answers.
        seconds: that its writing took; of parts that were written at once, each has its share.
        fresh: conversations whose prompt is in no earlier part.
    """

    number: int
    split: str
    prompts: tuple[int, int]
    seconds: float
    conversations: list[Conversation]
    fresh: list[Conversation] = field(default_factory=list)

    @classmethod
    def of(cls, job: dict[str, Any], result: dict[str, Any], seconds: float) -> Part:
        """What came of a job of `headstart.data.conversations.part_writer.PartWriter`."""
        prompts = job["start"], job["start"] + len(job["prompts"])
        conversations = [Conversation.from_json(row) for row in result["conversations"]]
        return cls(job["number"], job["split"], prompts, seconds, conversations)

    @property
    def file(self) -> str:
        return f"{self.number:05d}-{self.split}.jsonl"

    def write(self, folder: Path) -> None:
        """Write it whole or not at all; its first line says what it is."""
        assert not (folder / self.file).exists(), "parts are only ever added"
        about = {"part": self.number, "split": self.split, "prompts": list(self.prompts), "seconds": self.seconds}
        write_jsonl(folder / self.file, [about, *(item.to_json() for item in self.conversations)])

    @classmethod
    def read(cls, file: Path) -> Part:
        """Back from `write`; a UserError names a file that is none, or damaged."""
        rows = read_jsonl(file)
        try:
            _, about = next(rows, (0, {}))
            start, stop = about["prompts"]
            conversations = [Conversation.from_json(row) for _, row in rows]
            number, seconds = int(about["part"]), float(about["seconds"])
            return cls(number, str(about["split"]), (int(start), int(stop)), seconds, conversations)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{file} is not a part of conversations ({error}).",
                "Move it away; headstart then writes a new one.",
            ) from None


class TimeBudget:
    """Time spent on the training conversations that a run uses, whoever wrote them; None `minutes` have no end.

    The `file` keeps after how many parts a budget was spent, so that the same budget ends there again.
    """

    def __init__(self, minutes: float | None, file: Path) -> None:
        self._file, self._key = file, str(minutes)
        self._budget = math.inf if minutes is None else 60 * minutes
        self._ends: dict[str, int] = read_json(file) if file.is_file() else {}
        self._taken, self._spent, self._new, self._new_seconds = 0, 0.0, 0, 0.0
        self.ended = False

    def takes(self, seconds: float) -> bool:
        """Whether a part that is there belongs to the budget: its middle does, or it did before."""
        if self._key in self._ends:
            taken = self._taken < self._ends[self._key]
        else:
            taken = not self._taken or self._spent + seconds / 2 < self._budget
        self.ended = not taken
        if taken:
            self._taken, self._spent = self._taken + 1, self._spent + seconds
        return taken

    def note(self, seconds: float) -> None:
        self._taken, self._spent = self._taken + 1, self._spent + seconds
        self._new, self._new_seconds = self._new + 1, self._new_seconds + seconds

    @property
    def share(self) -> float:
        """Of the budget, how much is spent; 0 where it has no end."""
        return self._spent / self._budget

    def over(self, workers: int, since: float) -> bool:
        """Whether another part would end further after the budget than its worker would stop before it without one.

        So many `workers` write parts at once, and the last was written so many seconds `since`.
        """
        if self._key in self._ends:
            self.ended = self._taken >= self._ends[self._key]
        else:
            part = workers * self._new_seconds / self._new if self._new else 0.0
            self.ended = self._spent + since + part / 2 >= self._budget
        return self.ended

    def stop(self) -> None:
        """Nothing more is written; when that is because the budget is spent, it is noted where it was."""
        if self.ended and self._budget < math.inf and self._key not in self._ends:
            write_json(self._file, {**self._ends, self._key: self._taken})


# -- which come next ---------------------------------------------------------------------------------------------------


class GivenPrompts:
    """The prompts of the files and datasets that a recipe names, in one order, read as far as they are needed.

    `answering` counts those that could not be used once they were answered.
    """

    def __init__(self, writer: PartWriter, limit: int) -> None:
        self.writer, self._limit = writer, limit
        self._prompts: list[Prompt] = []
        self._left_out, self.answering = LeftOut(), LeftOut()
        self.used_up: dict[str, int] = {}
        if writer.settings.sources:
            self._read()

    def _read(self) -> None:
        # Files are often sorted by kind: what is kept apart should be of the same kinds as what is trained on.
        settings, tokenizer = self.writer.settings, self.writer.target.tokenizer
        read = load_prompts(settings, tokenizer, limit=self._limit, seed=settings.seed)
        self._prompts, self._left_out, self.used_up = read.prompts, read.left_out, read.used_up

    def some(self, start: int, count: int) -> list[Prompt]:
        """So many prompts from this one on, fewer at the end."""
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
        own_share = self._prompts.writer.settings.self_share
        size = min(batch_size, room)
        if own_share:
            # Some may be in another split, and a part for one more takes long: a few more than wanted are asked for.
            size = min(batch_size, self._count + -(-self._count // 8))
        # Fractions add up from part to part; the number alone says how far, the same after an interruption.
        due = own_share * size
        own = int(due * (self._number + 1)) - int(due * self._number)
        given = self._prompts.some(self._start, size - own) if own_share < 1 else []
        if own_share:  # where files are used up, the target writes the rest
            if self._number > self._most:
                return None
        elif not given or (waiting and room < batch_size):
            return None
        part = {"split": self._split, "number": self._number, "start": self._start, "size": size}
        self._number += 1
        self._start += len(given)
        return Job(f"{part['number']:05d}-{self._split}", self._prompts.writer.job(part, given))

    def still(self, job: Job, writers: int) -> bool:
        return self._in_time(job.what["number"], writers)

    def _in_time(self, number: int, writers: int) -> bool:
        since = time.perf_counter() - self._mark
        return number == self._first or not self.clock.over(writers, since)


def answered_until(parts: Sequence[Part]) -> int:
    """Where the prompts begin that no part has answered."""
    return max((part.prompts[1] for part in parts), default=0)
