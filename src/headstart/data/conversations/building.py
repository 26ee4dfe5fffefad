"""On-policy conversations: prompts answered by the target itself.

Each numbered part is one batch, written atomically and seeded by its number, so a resumed run matches an uninterrupted
one. Parts are append-only: more conversations add parts, fewer use the first ones. Prompts with the same opening
(system message, tools, first turn) go to the split of the first part that contains one. One process plans and appends
parts in order; other processes may write them (`headstart.data.conversations.jobs`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from rich.console import Console

from headstart.data.conversations.answers import KeepsStates
from headstart.data.conversations.jobs import JOBS, Board, share
from headstart.data.conversations.part_writer import SPLITS, PartWriter
from headstart.data.conversations.parts import (
    CLOCKS,
    GivenPrompts,
    Part,
    PartPlan,
    TimeBudget,
    Written,
    answered_until,
    write_split,
)
from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.prompts.loading import LeftOut
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.recipes.sections import DataSection
from headstart.support.terminal import progress_bar, tell


@dataclass(frozen=True)
class Splits:
    """Conversation files, read lazily, and the number of conversations per split."""

    folder: Path
    counts: dict[str, int]
    answer_tokens: int

    @cached_property
    def train(self) -> list[Conversation]:
        return read_conversations(self.folder / "train.jsonl")

    @cached_property
    def validation(self) -> list[Conversation]:
        """For validation and tuning."""
        return read_conversations(self.folder / "validation.jsonl")

    @cached_property
    def heldout(self) -> list[Conversation]:
        """Prompts for reports, without answers."""
        return read_conversations(self.folder / "heldout.jsonl")


def build_conversations(
    target: Target,
    settings: DataSection,
    folder: Path,
    console: Console | None = None,
    *,
    shared: Path | None = None,
    max_tokens: float = math.inf,
    capture: KeepsStates | None = None,
) -> Splits:
    """Write or resume the conversations of a run.

    Held-out and validation conversations come first, so a time budget only cuts training conversations.

    Args:
        folder: destination of `train.jsonl`, `validation.jsonl` and `heldout.jsonl`.
        shared: folder of parts and jobs, shared by runs of the same `identity`; `folder` by default.
        max_tokens: limit on training plus validation tokens.
        capture: sink for hidden states computed while writing, if they fit in memory.

    Raises:
        UserError: no usable prompt, unreadable prompt file, or no chat template.
    """
    board = Board((shared or folder) / JOBS)
    writer = PartWriter(target, settings, capture)
    parts = (shared or folder) / "parts"
    writing = _Writing(writer, parts, board)
    counts = {split: int(getattr(settings, name)) for split, name in SPLITS.items()}
    kept: dict[str, list[Written]] = {split: [] for split in SPLITS}
    wanted = sum(counts.values())
    with progress_bar(console, "conversations", total=wanted) as bar:
        asked, answer_tokens, started = 0, 0, time.perf_counter()
        for split, count in counts.items():
            room = math.inf
            if split == "train":
                room = max_tokens - sum(item.tokens for item in kept["validation"])
            for part, new in writing.parts(split, kept[split], count, room):
                fresh = part.fresh[: count - len(kept[split])]
                kept[split].extend(fresh)
                asked = max(asked, part.prompts[1])
                answer_tokens += sum(item.answer_tokens for item in part.conversations) if new else 0
                rate = answer_tokens / max(1e-9, time.perf_counter() - started)
                done = sum(map(len, kept.values()))
                total = wanted
                if writing.spent:  # the time budget may end before all are written
                    total = min(wanted, round(done + len(kept[split]) * (1 / writing.spent - 1)))
                note = f"{rate:.0f} answer tokens/s" if rate else ""
                if new and writer.requests:
                    note = f"{note}, {writer.requests} requests at a time"
                bar.update(done, max(done, total), note=note)
    asked = max(asked, writing.prompts.reached)
    if not kept["train"]:
        raise UserError(
            f"No training conversation could be written. {writing.prompts.left_out.notice}".strip(),
            "Give more prompts or minutes, or lower data.heldout and data.validation.",
        )
    if console is not None:
        notices, count = [writing.prompts.left_out.notice], len(kept["train"])
        ended = f"data.minutes={settings.minutes:g} is spent. Raise it for more." if writing.time_is_up else ""
        if sum(item.tokens for item in kept["train"] + kept["validation"]) >= max_tokens:
            ended = f"data.cache_gigabytes={settings.cache_gigabytes:g} is full. Raise it for more."
        used_up = [source for source, last in writing.prompts.used_up.items() if last <= asked]
        if used_up and (settings.self_share or len(used_up) < len(settings.sources)):
            notices.append(f"No more prompts in {', '.join(used_up)}: the other sources stand in for the rest.")
        elif used_up:
            ended = f"there are no more prompts in {', '.join(used_up)}. Give more of them."
        if ended and count < settings.conversations:
            notices.append(f"{count} of the {settings.conversations} conversations asked for: {ended}")
        for notice in filter(None, notices):
            tell(console, f"    {notice}")
    board.clear()
    for split, conversations in kept.items():
        write_split(folder / f"{split}.jsonl", parts, conversations)
    counts = {split: len(conversations) for split, conversations in kept.items()}
    return Splits(folder, counts, sum(item.answer_tokens for item in kept["train"]))


class _Writing:
    """Existing parts of a folder, and new ones written on demand."""

    def __init__(self, writer: PartWriter, folder: Path, board: Board) -> None:
        settings = writer.settings
        self._writer, self._folder, self._board = writer, folder, board
        self._seen: set[str] = set()
        self._split_of: dict[str, str] = {}  # by the key of an opening
        self._parts: list[Part] = []
        self.time_is_up, self.spent = False, 0.0  # fraction of the current split's time budget
        for file in sorted(self._folder.glob("[0-9]*-*.jsonl")):
            self._add(Part.read(file))
        wanted = sum(int(getattr(settings, name)) for name in SPLITS.values())
        self.prompts = GivenPrompts(writer, answered_until(self._parts) + wanted + settings.batch_size)

    def _add(self, part: Part) -> None:
        for item in part.conversations:
            if self._split_of.setdefault(item.opening, part.split) == part.split and item.asked not in self._seen:
                self._seen.add(item.asked)
                part.fresh.append(item)
        self._parts.append(part)

    def parts(self, split: str, kept: Sequence[Written], count: int, max_tokens: float) -> Iterator[tuple[Part, bool]]:
        """Yield parts of a split with an is-new flag until `kept` holds enough conversations."""
        counted = tokens = 0

        def missing() -> int:
            nonlocal counted, tokens
            tokens += sum(item.tokens for item in kept[counted:])
            counted = len(kept)
            return 0 if tokens >= max_tokens else count - counted

        clock = TimeBudget(self._writer.settings.minutes if split == "train" else None, self._folder / CLOCKS)
        for part in [part for part in self._parts if part.split == split]:
            if missing() <= 0 or not clock.takes(part.seconds):
                break
            self.spent = clock.share
            yield part, False
        else:
            plan = PartPlan(
                self.prompts,
                self._parts,
                split=split,
                count=count,
                missing=missing,
                clock=clock,
                split_of=self._split_of,
            )
            for part in self._new(plan, count):
                self.spent = clock.share
                yield part, True
        clock.stop()
        self.time_is_up = self.time_is_up or clock.ended

    def _new(self, plan: PartPlan, count: int) -> Iterator[Part]:
        """Yield new parts in order while workers here and in other processes write ahead."""
        writer = self._writer
        with writer.workers(count) as workers:
            write = partial(writer.write, check=workers.check)
            for job, written in share(plan.next, write, workers, self._board, still=plan.still):
                self.prompts.answering.add_all(LeftOut(written["left_out"], written["examples"]))
                part = Part.write(self._folder, job.what, written["conversations"], plan.lap())
                is_wanted = plan.missing() > 0
                self._add(part)
                plan.clock.note(part.seconds)
                if is_wanted:  # else it was started before enough were written; a later run may use it
                    yield part
