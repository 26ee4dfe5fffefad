"""Parts of conversations: batches that are written once, numbered, and only ever added to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.data.conversations.records import Conversation
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
        prompts = (job["start"], job["start"] + len(job["prompts"])) if job["prompts"] is not None else (0, 0)
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
