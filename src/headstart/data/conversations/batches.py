"""Files of conversation batches, and the time budget for generating them.

The first line of a batch's file describes its conversations, so a restart parses only that line. Conversation lines are
copied into the splits unchanged.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from headstart.data.conversations.records import Conversation
from headstart.data.prompts.loading import LeftOut
from headstart.data.prompts.overlap import prompt_key
from headstart.data.prompts.shapes import opening
from headstart.errors import UserError
from headstart.support.files import read_json, write_atomic, write_json, write_text

CLOCKS = "clocks.json"
"""File beside the batches: where each time budget ended."""


class StoredConversation(NamedTuple):
    """A conversation in its batch's file: line, sizes, and keys (`prompt_key`) of its opening and of all its prompts,
    or of all its messages if its answers were given."""

    file: str
    line: int
    tokens: int
    answer_tokens: int
    opening_key: str
    prompts_key: str

    @classmethod
    def of(cls, item: Conversation, file: str, line: int) -> StoredConversation:
        is_given = item.sampling.get("source") == "given"
        prompts = [message for message in item.messages if is_given or message["role"] != "assistant"]
        keys = prompt_key(opening(item.messages), item.tools), prompt_key(prompts, item.tools)
        return cls(file, line, len(item.tokens), sum(item.supervised), *keys)


def file_name(number: int, split: str) -> str:
    return f"{number:05d}-{split}.jsonl"


@dataclass
class ConversationBatch:
    """One batch of conversations of a split, with a number among the batches of all splits.

    Attributes:
        prompts: range of given prompts in the batch.
        seconds: duration of its generation, concurrently with `concurrent` - 1 other batches.
        left_out: dropped conversations and turns, and answers cut short.
    """

    number: int
    split: str
    prompts: tuple[int, int]
    seconds: float
    concurrent: int
    conversations: list[StoredConversation]
    left_out: LeftOut

    @property
    def attributed_seconds(self) -> float:
        """Duration divided by the number of concurrent batches."""
        return self.seconds / self.concurrent

    @classmethod
    def read(cls, file: Path) -> ConversationBatch:
        """Read the first line of a batch; raise a UserError for any other file."""
        try:
            with file.open("rb") as handle:
                header = json.loads(next(handle))
            del header["crc32"]
            rows = enumerate(header["conversations"])
            header["conversations"] = [StoredConversation(file.name, line, *row) for line, row in rows]
            header["left_out"] = LeftOut(*header["left_out"])
            return cls(**header)
        except (StopIteration, KeyError, TypeError, ValueError) as error:
            raise _no_batch(file, str(error)) from None


def write_batch(file: Path, conversations: Sequence[Conversation], left_out: LeftOut, **header: Any) -> None:
    """Write the file of a batch; `header` holds the other attributes of `ConversationBatch`."""
    lines = "".join(json.dumps(item.to_json(), ensure_ascii=False) + "\n" for item in conversations)
    described = {
        **header,
        "conversations": [StoredConversation.of(item, file.name, line)[2:] for line, item in enumerate(conversations)],
        "left_out": [left_out.counts, left_out.examples],
        "crc32": zlib.crc32(lines.encode()),
    }
    write_text(file, f"{json.dumps(described)}\n{lines}")


def _no_batch(file: Path, reason: str) -> UserError:
    return UserError(f"{file} is not a batch of conversations ({reason}).", "Move it away; headstart writes a new one.")


def write_split(file: Path, folder: Path, selected: Sequence[StoredConversation]) -> None:
    """Copy conversation lines from the batches of a folder; raise a UserError for a damaged batch."""

    def write(partial: Path) -> None:
        with partial.open("wb") as handle:
            for name, items in groupby(selected, key=lambda item: item.file):
                first, _, rest = (folder / name).read_bytes().partition(b"\n")
                if zlib.crc32(rest) != json.loads(first)["crc32"]:
                    raise _no_batch(folder / name, "it is damaged")
                lines = rest.split(b"\n")
                handle.writelines(lines[item.line] + b"\n" for item in items)

    write_atomic(file, write)


class TimeBudget:
    """Time budget for a run's training conversations; `minutes=None` means no limit.

    `file` records the number of batches at which a budget was spent, so that the same budget ends there again.
    """

    def __init__(self, minutes: float | None, file: Path) -> None:
        self._file, self._key = file, str(minutes)
        self._budget = math.inf if minutes is None else 60 * minutes
        self._ends: dict[str, int] = read_json(file) if file.is_file() else {}
        self._admitted, self._before, self._duration = 0, 0.0, 0.0
        self._began = time.perf_counter()
        self.ended = False

    def admit(self, batch: ConversationBatch, is_new: bool) -> bool:
        """Return whether the batch is within budget, and count it if so.

        A new batch always is. For others, a recorded end of this budget decides; without one, the first batch is within
        budget, and a later one if more than half of it fits.
        """
        if is_new:
            admitted = True
        elif self._key in self._ends:
            admitted = self._admitted < self._ends[self._key]
        else:
            admitted = not self._admitted or self._before + batch.attributed_seconds / 2 < self._budget
        self.ended = self.ended or not admitted
        if admitted:
            self._admitted, self._duration = self._admitted + 1, batch.seconds
            self._before += 0.0 if is_new else batch.attributed_seconds
        return admitted

    @property
    def _spent(self) -> float:
        return self._before + time.perf_counter() - self._began

    @property
    def fraction_spent(self) -> float:
        """Spent fraction of the budget; 0 if unlimited."""
        return self._spent / self._budget

    def is_over(self, pending: int, seconds: float) -> bool:
        """Whether stopping now ends closer to the budget than one more batch would.

        Args:
            pending: number of earlier planned batches that are not admitted yet.
            seconds: generation time of those that existed at the start.
        """
        if self._key in self._ends:
            self.ended = self._admitted + pending >= self._ends[self._key]
        else:
            spent = self._spent + seconds + self._duration / 2
            self.ended = self._admitted + pending > 0 and spent >= self._budget
        return self.ended

    def stop(self) -> None:
        """Record where the budget ended, if it is spent."""
        if self.ended and self._budget < math.inf and self._key not in self._ends:
            write_json(self._file, {**self._ends, self._key: self._admitted})
