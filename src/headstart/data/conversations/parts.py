"""Parts of conversations: numbered, append-only batches, and the plan of the next ones.

The first line of a part's file describes its conversations, so a restart parses only that line; conversation lines are
copied into the splits unchanged.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from headstart.data.conversations.jobs import Job
from headstart.data.conversations.part_writer import PartWriter
from headstart.data.prompts.loading import OTHER_SPLIT, LeftOut, load_prompts
from headstart.data.prompts.overlap import prompt_key
from headstart.data.prompts.shapes import Prompt, opening
from headstart.errors import UserError
from headstart.support.files import read_json, write_atomic, write_json, write_text

CLOCKS = "clocks.json"
"""File beside the parts: where each time budget ended."""


class Written(NamedTuple):
    """A conversation in its part's file: line, sizes, and keys (`prompt_key`) of its opening and of all prompts."""

    file: str
    line: int
    tokens: int
    answer_tokens: int
    opening: str
    asked: str

    @classmethod
    def of(cls, row: Mapping[str, Any], file: str, line: int) -> Written:
        messages, tools = row["messages"], row.get("tools", [])
        given = row["sampling"].get("source") == "given"
        asked = [message for message in messages if given or message["role"] != "assistant"]
        answer = sum(stop - start for start, stop in row["supervised"])
        keys = prompt_key(opening(messages), tools), prompt_key(asked, tools)
        return cls(file, line, len(row["tokens"]), answer, *keys)


@dataclass
class Part:
    """One batch of conversations of a split, with a number among the parts of all splits.

    Attributes:
        prompts: range of given prompts in the part.
        seconds: writing time, split among parts written concurrently.
        fresh: conversations that neither repeat an earlier one nor share an opening with another split.
    """

    number: int
    split: str
    prompts: tuple[int, int]
    seconds: float
    conversations: list[Written] = field(default_factory=list)
    fresh: list[Written] = field(default_factory=list)

    @property
    def file(self) -> str:
        return f"{self.number:05d}-{self.split}.jsonl"

    @classmethod
    def write(cls, folder: Path, job: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], seconds: float) -> Part:
        """Write the conversations that a job of `PartWriter` returned."""
        part = cls(job["number"], job["split"], (job["start"], job["stop"]), seconds)
        assert not (folder / part.file).exists(), "parts are only ever added"
        part.conversations = [Written.of(row, part.file, line) for line, row in enumerate(rows)]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        about = {
            "part": part.number,
            "split": part.split,
            "prompts": list(part.prompts),
            "seconds": seconds,
            "conversations": [item[2:] for item in part.conversations],
            "crc32": zlib.crc32(lines.encode()),
        }
        write_text(folder / part.file, f"{json.dumps(about)}\n{lines}")
        return part

    @classmethod
    def read(cls, file: Path) -> Part:
        """Read the first line of a part; raise a UserError for any other file."""
        try:
            with file.open("rb") as handle:
                about = json.loads(next(handle))
            start, stop = about["prompts"]
            part = cls(int(about["part"]), str(about["split"]), (int(start), int(stop)), float(about["seconds"]))
            part.conversations = [Written(file.name, line, *known) for line, known in enumerate(about["conversations"])]
        except (StopIteration, KeyError, TypeError, ValueError) as error:
            raise _no_part(file, str(error)) from None
        return part


def _no_part(file: Path, reason: str) -> UserError:
    return UserError(f"{file} is not a part of conversations ({reason}).", "Move it away; headstart writes a new one.")


def write_split(file: Path, folder: Path, chosen: Sequence[Written]) -> None:
    """Copy conversation lines from the parts of a folder; raise a UserError for a damaged part."""

    def write(partial: Path) -> None:
        with partial.open("wb") as handle:
            for name, items in groupby(chosen, key=lambda item: item.file):
                first, _, rest = (folder / name).read_bytes().partition(b"\n")
                if zlib.crc32(rest) != json.loads(first)["crc32"]:
                    raise _no_part(folder / name, "it is damaged")
                lines = rest.split(b"\n")
                handle.writelines(lines[item.line] + b"\n" for item in items)

    write_atomic(file, write)


class TimeBudget:
    """Time budget for a run's training conversations; None `minutes` is unlimited.

    `file` records the part count at which a budget was spent, so that the same budget ends there again.
    """

    def __init__(self, minutes: float | None, file: Path) -> None:
        self._file, self._key = file, str(minutes)
        self._budget = math.inf if minutes is None else 60 * minutes
        self._ends: dict[str, int] = read_json(file) if file.is_file() else {}
        self._taken, self._spent, self._new, self._new_seconds = 0, 0.0, 0, 0.0
        self.ended = False

    def takes(self, seconds: float) -> bool:
        """Whether an existing part is within the budget: its midpoint is, or it was before."""
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
        """Spent fraction of the budget; 0 if unlimited."""
        return self._spent / self._budget

    def over(self, workers: int, since: float) -> bool:
        """Whether another part would overshoot the budget by more than stopping now undershoots it.

        `workers` write concurrently; `since` is the time since the last part, in seconds.
        """
        if self._key in self._ends:
            self.ended = self._taken >= self._ends[self._key]
        else:
            part = workers * self._new_seconds / self._new if self._new else 0.0
            self.ended = self._spent + since + part / 2 >= self._budget
        return self.ended

    def stop(self) -> None:
        """Record where the budget ended, if it is spent."""
        if self.ended and self._budget < math.inf and self._key not in self._ends:
            write_json(self._file, {**self._ends, self._key: self._taken})


# -- which come next ---------------------------------------------------------------------------------------------------


class GivenPrompts:
    """A recipe's prompts from files and datasets, in a fixed order; `answering` counts the ones dropped later."""

    def __init__(self, writer: PartWriter, limit: int) -> None:
        self.writer, self._limit = writer, limit
        self._prompts: list[Prompt] = []
        self._left_out, self.answering = LeftOut(), LeftOut()
        self.used_up: dict[str, int] = {}
        self.reached = 0  # no prompt before this one is left for any split
        if writer.settings.sources:
            self._read()

    def _read(self) -> None:
        # Files are often sorted by kind; shuffling gives every split the same kinds.
        settings, tokenizer = self.writer.settings, self.writer.target.tokenizer
        read = load_prompts(settings, tokenizer, limit=self._limit, seed=settings.seed)
        self._prompts, self._left_out, self.used_up = read.prompts, read.left_out, read.used_up

    def some(self, start: int, count: int) -> list[Prompt]:
        """Return up to `count` prompts from `start`."""
        if start + self.writer.settings.batch_size > len(self._prompts) == self._limit:
            self._limit *= 2
            self._read()
        return self._prompts[start : start + count]

    @property
    def left_out(self) -> LeftOut:
        both = LeftOut(self._left_out.counts, self._left_out.examples)
        both.add_all(self.answering)
        return both


class PartPlan:
    """Plans further parts of a split for `headstart.data.conversations.jobs.share`.

    Stops once no conversation is `missing` or the clock runs out, but always plans the first part of a split.
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
        split_of: Mapping[str, str],
    ) -> None:
        self._split_of = split_of  # by the key of an opening
        self._prompts, self._batch_size = prompts, prompts.writer.settings.batch_size
        self._split, self._count, self.missing, self.clock = split, count, missing, clock
        self._number = 1 + max((part.number for part in parts), default=-1)
        self._start = answered_until(parts)
        self._first = None if any(part.split == split for part in parts) else self._number
        # Reached only if parts yield nothing new.
        self._most = self._number + 20 + 10 * count // self._batch_size
        self._mark = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the previous part."""
        before, self._mark = self._mark, time.perf_counter()
        return round(self._mark - before, 3)

    def next(self, waiting: Sequence[Job], writers: int) -> Job | None:
        """Return the next part's job; its size does not depend on the number of writers."""
        batch_size = self._batch_size
        room = self.missing() - sum(job.what["size"] for job in waiting)
        if room <= 0 or not self._in_time(self._number, writers):
            return None
        own_share = self._prompts.writer.settings.self_share
        size = min(batch_size, room)
        if own_share:
            # A margin: some may fall into another split, and one more part would take long.
            size = min(batch_size, self._count + -(-self._count // 8))
        # Fractions accumulate over parts as a function of the number alone, so a resumed run agrees.
        due = own_share * size
        own = int(due * (self._number + 1)) - int(due * self._number)
        if self._number > self._most if own_share else waiting and room < batch_size:
            return None
        start, given = self._start, self._take(size - own) if own_share < 1 else []
        if not (own_share or given):  # with an own share, the target writes the rest
            self._prompts.reached = self._start
            return None
        number, self._number = self._number, self._number + 1
        part = {"split": self._split, "number": number, "start": start, "stop": self._start, "size": size}
        return Job(f"{number:05d}-{self._split}", self._prompts.writer.job(part, given))

    def _take(self, count: int) -> list[Prompt]:
        """Return the next prompts, except the ones that open like a prompt of another split."""
        taken: list[Prompt] = []
        while more := self._prompts.some(self._start, count - len(taken)):
            self._start += len(more)
            for prompt in more:
                if self._split_of.get(prompt_key(prompt.opening, prompt.tools), self._split) == self._split:
                    taken.append(prompt)
                else:
                    self._prompts.answering.add(OTHER_SPLIT, prompt.id)
        return taken

    def still(self, job: Job, writers: int) -> bool:
        return self._in_time(job.what["number"], writers)

    def _in_time(self, number: int, writers: int) -> bool:
        since = time.perf_counter() - self._mark
        return number == self._first or not self.clock.over(writers, since)


def answered_until(parts: Sequence[Part]) -> int:
    """Return the index of the first prompt not yet in a part."""
    return max((part.prompts[1] for part in parts), default=0)
