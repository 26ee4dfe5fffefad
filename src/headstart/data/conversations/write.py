"""On-policy conversations: prompts, answered by the target itself.

Work goes in numbered parts of one batch each, written atomically and seeded by their number, so that an interrupted
run goes on with the next part and gives what an uninterrupted one would have given. Parts are only ever added: whoever
asks for more conversations gets more parts, whoever asks for fewer uses the first ones. A prompt belongs to the first
part that holds it, so it is in one split only. One process plans the parts and adds them, in their order; others may
write some of them (`headstart.data.conversations.jobs`).
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from headstart.data.conversations.conversations import Conversation, has_template, write_conversations
from headstart.data.conversations.jobs import Board, share
from headstart.data.conversations.part_writer import SPLITS, PartJob, PartWriter
from headstart.data.conversations.parts import CLOCKS, Part, TimeBudget
from headstart.data.conversations.workers import Workers
from headstart.data.prompts.mixture import configuration, mixture_identity
from headstart.data.prompts.overlap import normalise
from headstart.data.prompts.prompts import LeftOut, Prompt, prompts_for
from headstart.data.prompts.sources import find_origin
from headstart.data.states.shards import Capture
from headstart.errors import UserError
from headstart.recipes.sections import DataSection
from headstart.support.terminal import progress_bar
from headstart.target.model import Target

_COUNTS = dict(zip(SPLITS, ("heldout", "validation", "conversations"), strict=True))
AMOUNTS = {
    *("conversations", "heldout", "validation", "minutes", "batch_size"),
    *("cache_gigabytes", "states", "states_dtype"),
}
"""Settings of the data that say how much of it there is, and not what it is."""
OF_SERVERS = {"server", "server_requests"}
"""Settings that say who writes it. What counts is whether a server does: its numbers are not those of this process."""
VERSION = 3
"""Raised when the same settings come to mean other conversations."""
_OF_FILES, _OF_SELF = {"split", "regenerate", "revision"}, {"seed_prompts"}
_OF_SOME = {"prefix_tokens", "chat_template_kwargs", "exclude"}
"""Settings that are part of an identity only where they mean something."""


@dataclass(frozen=True)
class Splits:
    """Conversations for training, for validation and tuning, and prompts kept for reports (without answers)."""

    train: list[Conversation]
    validation: list[Conversation]
    heldout: list[Conversation]


def identity(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What conversations depend on: the target, its template, where prompts come from, how answers are drawn.

    Args:
        target: that writes them.
        settings: the recipe's data section, as JSON values.

    Raises:
        UserError: no such file or dataset of prompts, or a hub that cannot be asked for its commit.
    """
    prompts = settings["prompts"]
    self_prompted, mixed = prompts == "self", not isinstance(prompts, str)
    left_out = AMOUNTS | OF_SERVERS | _OF_SOME | (_OF_FILES if self_prompted else _OF_SELF)
    left_out |= {"split"} if mixed else set()
    origin = None if self_prompted or mixed else find_origin(prompts, settings.get("revision"))
    template = json.dumps(getattr(target.tokenizer, "chat_template", None), sort_keys=True)
    return {
        "version": VERSION,
        "target": target.identity().fingerprint,
        "settings": target.settings,
        "dtype": str(target.dtype).removeprefix("torch."),
        "vocabulary": target.vocabulary,
        "ends": sorted(target.end_tokens),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        **{key: value for key, value in settings.items() if key not in left_out},
        **({"server": True} if settings.get("server") else {}),
        "prompts": mixture_identity(settings) if mixed else "self" if origin is None else origin.identity,
        "configuration": "" if origin is None or origin.content is None else configuration(prompts),
        "revision": None if origin is None else origin.commit,
        **_of_some(target, settings),
    }


def _of_some(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What only some conversations depend on; none of it for the others, whose identity stays as it is."""
    found: dict[str, Any] = {}
    if not has_template(target.tokenizer):
        found["prefix_tokens"] = settings["prefix_tokens"]
    if values := settings.get("chat_template_kwargs"):
        found["chat_template_kwargs"] = values
    if files := settings.get("exclude"):
        found["exclude"] = sorted(str(find_origin(file).content) for file in files)
    return found


def build_conversations(
    target: Target,
    settings: DataSection,
    folder: Path,
    console: Console | None = None,
    parts: Path | None = None,
    max_tokens: float = math.inf,
    capture: Capture | None = None,
    board: Board | None = None,
) -> Splits:
    """Write (or go on writing) the conversations of a run.

    Held-out and validation conversations come first, so that a time budget cuts the training ones only.

    Args:
        target: the model, with its tokenizer.
        settings: the recipe's data section.
        folder: where `train.jsonl`, `calibration.jsonl` and `heldout.jsonl` go.
        console: shows a progress bar with the time left; None is silent.
        parts: folder of the parts, which runs with the same `identity` may share; `folder / "parts"` by default.
        max_tokens: training conversations are written until they and those for calibration have so many tokens.
        capture: keeps the hidden states that writing computes, where memory has room for them.
        board: where other processes find parts to write; None to write all of them here.

    Raises:
        UserError: no usable prompt, unreadable prompt file, or no chat template.
    """
    writing = _Writing(target, settings, parts or folder / "parts", console, capture, board)
    wanted = {split: int(getattr(settings, name)) for split, name in _COUNTS.items()}
    splits: dict[str, list[Conversation]] = {}
    with progress_bar(console, "conversations", total=sum(wanted.values())) as bar:
        written, started = 0, time.perf_counter()
        for split, count in wanted.items():
            kept = splits[split] = list[Conversation]()
            tokens = sum(len(item.tokens) for item in splits.get("calibration", ())) if split == "train" else 0
            for part, new in writing.parts(split, kept, count, max_tokens - tokens if split == "train" else math.inf):
                fresh = part.fresh[: count - len(kept)]
                kept.extend(fresh)
                written += sum(sum(item.supervised) for item in part.conversations) if new else 0
                rate = written / max(1e-9, time.perf_counter() - started)
                bar.advance(len(fresh), note=f"{rate:.0f} answer tokens/s" if rate else "")
    if not splits["train"]:
        raise UserError(
            f"No training conversation could be written. {writing.left_out.notice}".strip(),
            "Give more prompts or minutes, lower data.heldout and data.validation, or raise data.max_prompt_tokens.",
        )
    notices = [writing.left_out.notice]
    if 0 < len(writing.used_up) < len(settings.sources):
        notices.append(f"No more prompts in {', '.join(writing.used_up)}: the other sources stand in for the rest.")
    if writing.time_is_up and len(splits["train"]) < settings.conversations:
        notices.append(
            f"{len(splits['train'])} of the {settings.conversations} conversations asked for: data.minutes="
            f"{settings.minutes:g} is spent. Raise it for more."
        )
    if console is not None:
        for notice in filter(None, notices):
            console.print(f"    {notice}", highlight=False, markup=False, soft_wrap=True)
    if board is not None:
        board.clear()
    for split, conversations in splits.items():
        write_conversations(folder / f"{split}.jsonl", conversations)
    return Splits(splits["train"], splits["calibration"], splits["heldout"])


class _Writing:
    """The parts of a folder: those that are there, and further ones as they are asked for.

    Args:
        target: the model.
        settings: of the data.
        folder: of the parts.
        console: told when memory is short.
        capture: of hidden states.
        board: where other processes find parts to write.
    """

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        folder: Path,
        console: Console | None = None,
        capture: Capture | None = None,
        board: Board | None = None,
    ) -> None:
        self._folder, self._settings = folder, settings
        self._board = None if settings.server else board  # requests are bounded by the one process that sends them
        self._seen: set[str] = set()
        self._parts: list[Part] = []
        self.time_is_up = False
        for file in sorted(folder.glob("[0-9]*-*.jsonl")):
            self._add(Part.read(file))
        wanted = sum(int(getattr(settings, name)) for name in _COUNTS.values())
        writer = PartWriter(target, settings, None if console is None else console.print, capture)
        self._source = _PromptSource(writer, settings, self._stop + wanted + settings.batch_size)

    @property
    def left_out(self) -> LeftOut:
        """Prompts that could not be used."""
        return self._source.left_out

    @property
    def used_up(self) -> list[str]:
        """Sources among several that have no more."""
        return self._source.used_up

    @property
    def _stop(self) -> int:
        """Where the prompts begin that no part has answered."""
        return max((part.prompts[1] for part in self._parts), default=0)

    def _add(self, part: Part) -> None:
        for item in part.conversations:
            asked = normalise(_asked(item))
            if asked not in self._seen:
                self._seen.add(asked)
                part.fresh.append(item)
        self._parts.append(part)

    def parts(
        self, split: str, kept: Sequence[Conversation], count: int, max_tokens: float
    ) -> Iterator[tuple[Part, bool]]:
        """The parts of a split, each with whether it is new, until there is enough.

        Args:
            split: its name.
            kept: what the caller keeps of the parts, which decides how many more there are.
            count: conversations wanted.
            max_tokens: tokens wanted.
        """

        def missing() -> int:
            return 0 if sum(len(item.tokens) for item in kept) >= max_tokens else count - len(kept)

        clock = TimeBudget(self._settings.minutes if split == "train" else None, self._folder / CLOCKS)
        for part in [part for part in self._parts if part.split == split]:
            if missing() <= 0 or not clock.takes(part.seconds):
                break
            yield part, False
        else:
            yield from ((part, True) for part in self._new(split, clock, count, missing))
        clock.stop()
        self.time_is_up = self.time_is_up or clock.ended

    def _new(self, split: str, clock: TimeBudget, count: int, missing: Callable[[], int]) -> Iterator[Part]:
        """Further parts; while one is waited for, the next ones are being written, here and by those who help."""
        source, writer = self._source, self._source.writer
        number = 1 + max((part.number for part in self._parts), default=-1)
        plan = _Plan(source, split, count, missing, clock, number, self._stop)
        plan.begun = any(part.split == split for part in self._parts)
        jobs = -(-count // source.batch_size) if writer.shareable else 1
        with Workers(source.device, jobs, beside=self._board is not None) as workers:
            for job, written in share(plan, lambda what: writer.write(what, workers.check), workers, self._board):
                conversations = [Conversation.from_json(row) for row in written["conversations"]]
                source.answering.add_counts(written["left_out"], written["examples"])
                part = Part(job.number, split, job.prompts, plan.lap(), conversations)
                part.write(self._folder)
                wanted = missing() > 0
                self._add(part)
                clock.note(part.seconds)
                if wanted:  # else it was begun before it was known that there is enough: it stays for later
                    yield part


class _Plan:
    """Which parts of a split are written next.

    Args:
        source: of prompts.
        split: its name.
        count: conversations wanted.
        missing: how many of them there are not yet.
        clock: of the time that may be spent.
        number: of the first part.
        start: where its prompts begin.

    Attributes:
        begun: whether the split has a part; the clock never stops the first: there is nothing to learn from without it.
    """

    def __init__(
        self,
        source: _PromptSource,
        split: str,
        count: int,
        missing: Callable[[], int],
        clock: TimeBudget,
        number: int,
        start: int,
    ) -> None:
        self._source, self._split, self._count = source, split, count
        self._missing, self._clock = missing, clock
        self._number, self._start = number, start
        self._own = 0  # planned now: what earlier ones gave says nothing about further ones
        self._mark = time.perf_counter()
        self.begun = False

    def lap(self) -> float:
        """Seconds since the part before this one."""
        before, self._mark = self._mark, time.perf_counter()
        return round(self._mark - before, 3)

    def next(self, waiting: Sequence[PartJob], writers: int) -> PartJob | None:
        """See `headstart.data.conversations.jobs.Plan`. How large parts are does not depend on how many are written at once."""
        source = self._source
        room = self._missing() - sum(job.size for job in waiting)
        if room <= 0 or (waiting and not source.full(room)) or not (not self.begun or self._in_time(writers)):
            return None
        if source.exhausted(self._split, self._own, self._start):
            return None
        size = source.size(room, self._count)
        job = source.job(self._split, self._number, self._start, size, not self.begun)
        self._number, self._own, self._start, self.begun = self._number + 1, self._own + 1, job.prompts[1], True
        return job

    def still(self, job: PartJob, writers: int) -> bool:
        """See `headstart.data.conversations.jobs.Plan`."""
        return job.first or self._in_time(writers)

    def _in_time(self, writers: int) -> bool:
        return not self._clock.over(writers, time.perf_counter() - self._mark)


class _PromptSource:
    """Prompts by part: written by the target, or read once from a file or a dataset.

    Args:
        writer: of the parts.
        settings: of the data.
        limit: given prompts to read at first.

    Attributes:
        writer: of the parts.
        answering: prompts that could not be used once they were answered.
        used_up: sources among several that have no more.
    """

    def __init__(self, writer: PartWriter, settings: DataSection, limit: int) -> None:
        self.writer, self._settings = writer, settings
        self.answering, self._reading = LeftOut(), LeftOut()
        self.used_up: list[str] = []
        self._limit = limit
        self._given: list[Prompt] | None = None
        if settings.prompts != "self":
            self._ask_for(limit)

    def _ask_for(self, limit: int) -> None:
        """Read the first `limit` of the given prompts; their order stays as it is when more are asked for."""
        # Files are often sorted by kind: what is kept apart should be of the same kinds as what is trained on.
        found = prompts_for(self._settings, self.writer.target.tokenizer, limit, seed=self._settings.seed)
        self._given, self._limit, self._reading = found.prompts, limit, found.left_out
        self.used_up = found.used_up

    @property
    def left_out(self) -> LeftOut:
        """Prompts that could not be used."""
        both = LeftOut()
        both.add_all(self._reading)
        both.add_all(self.answering)
        return both

    @property
    def device(self) -> torch.device:
        """Where the target answers."""
        return self.writer.target.device

    @property
    def batch_size(self) -> int:
        """Conversations of a part at most."""
        return self._settings.batch_size

    def full(self, room: int) -> bool:
        """Whether a part is as large as any other where there is room for so many conversations."""
        return self._given is None or room >= self.batch_size

    def size(self, room: int, count: int) -> int:
        """Conversations of the next part, of a split of `count` that has room for `room`.

        Of self-prompts a few more than wanted: some may be in another split, and a part for one more takes long.
        """
        return min(self.batch_size, room if self._given is not None else count + -(-count // 8))

    def job(self, split: str, number: int, start: int, size: int, first: bool) -> PartJob:
        """The part that answers given prompts from `start` on, or prompts of the target's own."""
        if self._given is None:
            return self.writer.job(split, number, (0, 0), None, size, first)
        prompts = start, min(start + size, len(self._given))
        return self.writer.job(split, number, prompts, self._given[slice(*prompts)], size, first)

    def exhausted(self, split: str, own: int, start: int) -> bool:
        """Whether there is no further part: no prompts from `start` on, or, of those that the target writes, `own`
        parts already, which only many parts that gave nothing new can come to."""
        if self._given is not None:
            if start + self.batch_size > len(self._given) == self._limit:
                self._ask_for(2 * self._limit)
            return start >= len(self._given)
        return own > 20 + 10 * int(getattr(self._settings, _COUNTS[split])) // self.batch_size


def _asked(conversation: Conversation) -> str:
    return next(turn["content"] for turn in conversation.messages if turn["role"] == "user")
