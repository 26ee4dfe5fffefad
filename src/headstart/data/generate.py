"""On-policy conversations: prompts, answered by the target itself.

Work goes in numbered parts of one batch each, written atomically and seeded by their number, so that an interrupted
run goes on with the next part and gives what an uninterrupted one would have given. Parts are only ever added: whoever
asks for more conversations gets more parts, whoever asks for fewer uses the first ones. A prompt belongs to the first
part that holds it, so it is in one split only.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from headstart.data.answers import answer_prompts
from headstart.data.conversations import (
    Conversation,
    has_template,
    prompt_tokens,
    with_template_kwargs,
    write_conversations,
)
from headstart.data.generator import Generator, InProcess
from headstart.data.mixture import configuration, mixture_identity
from headstart.data.overlap import Excluded, normalise
from headstart.data.parts import CLOCKS, Part, TimeBudget
from headstart.data.prompts import LeftOut, Prompt, deduplicate, prompts_for
from headstart.data.sampling import Room
from headstart.data.selfprompt import write_prompts
from headstart.data.server import Servers
from headstart.data.sources import find_origin
from headstart.data.store import Capture
from headstart.data.workers import Workers
from headstart.errors import UserError
from headstart.recipe import DataSection
from headstart.target import Target
from headstart.terminal import progress_bar

_COUNTS = {"heldout": "heldout", "calibration": "validation", "train": "conversations"}
SPLITS = tuple(_COUNTS)
AMOUNTS = {
    "conversations",
    "heldout",
    "validation",
    "minutes",
    "batch_size",
    "cache_gigabytes",
    "states",
    "states_dtype",
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

    Raises:
        UserError: no usable prompt, unreadable prompt file, or no chat template.
    """
    writing = _Writing(target, settings, parts or folder / "parts", console, capture)
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
    """

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        folder: Path,
        console: Console | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._folder, self._settings = folder, settings
        self._seen: set[str] = set()
        self._parts: list[Part] = []
        self.time_is_up = False
        for file in sorted(folder.glob("[0-9]*-*.jsonl")):
            self._add(Part.read(file))
        wanted = sum(int(getattr(settings, name)) for name in _COUNTS.values())
        self._source = _PromptSource(target, settings, self._stop + wanted + settings.batch_size, console, capture)

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
        """Further parts; while one is waited for, the next ones are being written."""
        source = self._source
        number, start = 1 + max((part.number for part in self._parts), default=-1), self._stop
        first = not any(part.split == split for part in self._parts)
        own = 0  # written now: what earlier ones gave says nothing about further ones
        running: deque[tuple[int, tuple[int, int], int, Callable[[], list[Conversation]]]] = deque()
        with Workers(source.device, -(-count // source.batch_size) if source.shareable else 1) as workers:
            mark = time.perf_counter()
            while True:
                room = missing() - sum(size for _, _, size, _ in running)
                # The clock never stops the first part: there is nothing to learn from without it.
                in_time = first or not clock.over(workers.count, time.perf_counter() - mark)
                more = room > 0 and len(running) < workers.count and in_time
                if more and not source.exhausted(split, own, start):
                    size = source.size(room, count)
                    prompts = source.range(start, size)
                    job = workers.submit(partial(source.write, split, number, prompts, size, workers.check))
                    running.append((number, prompts, size, job))
                    number, own, start, first = number + 1, own + 1, prompts[1], False
                    continue
                if not running:
                    return
                index, prompts, _, job = running.popleft()
                conversations = job()
                now = time.perf_counter()
                part = Part(index, split, prompts, round(now - mark, 3), conversations)
                mark = now
                part.write(self._folder)
                self._add(part)
                clock.note(part.seconds)
                yield part


class _PromptSource:
    """Prompts by part: written by the target, or read once from a file or a dataset.

    Args:
        target: the model.
        settings: of the data.
        limit: given prompts to read at first.
        console: told when memory is short.
        capture: of hidden states.

    Attributes:
        left_out: prompts that could not be used.
        used_up: sources among several that have no more.
    """

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        limit: int,
        console: Console | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._capture = capture
        self.left_out = LeftOut()
        self._limit = limit
        self._generator: Generator = (
            Servers(settings.server, target, settings.server_requests)
            if settings.server
            else InProcess(target, Room(None if console is None else console.print))
        )
        self._target = target.with_tokenizer(with_template_kwargs(target.tokenizer, settings.chat_template_kwargs))
        self._settings = settings
        self._excluded = Excluded(settings.exclude)
        self.used_up: list[str] = []
        self._given: list[Prompt] | None = None
        if settings.prompts != "self":
            self._ask_for(limit)

    def _ask_for(self, limit: int) -> None:
        """Read the first `limit` of the given prompts; their order stays as it is when more are asked for."""
        # Files are often sorted by kind: what is kept apart should be of the same kinds as what is trained on.
        found = prompts_for(self._settings, self._target.tokenizer, limit, seed=self._settings.seed)
        self._given, self._limit, self.left_out = found.prompts, limit, found.left_out
        self.used_up = found.used_up

    def seed(self, split: str, number: int) -> int:
        """A seed of its own for each part."""
        return (self._settings.seed * 1_000_003 + number) * len(SPLITS) + SPLITS.index(split)

    @property
    def device(self) -> torch.device:
        """Where the target answers."""
        return self._target.device

    @property
    def shareable(self) -> bool:
        """Whether several parts may be written at once."""
        return self._generator.shareable

    @property
    def batch_size(self) -> int:
        """Conversations of a part at most."""
        return self._settings.batch_size

    def size(self, room: int, count: int) -> int:
        """Conversations of the next part, of a split of `count` that has room for `room`.

        Of self-prompts a few more than wanted: some may be in another split, and a part for one more takes long.
        """
        return min(self.batch_size, room if self._given is not None else count + -(-count // 8))

    def range(self, start: int, size: int) -> tuple[int, int]:
        """The given prompts from `start` on that a part of this size answers; nothing of the kind for self-prompts."""
        return (0, 0) if self._given is None else (start, min(start + size, len(self._given)))

    def write(
        self, split: str, number: int, prompts: tuple[int, int], size: int, check: Callable[[], None]
    ) -> list[Conversation]:
        """Part `number`, answered unless held out, of at most `size` conversations; `check` is called now and then."""
        seed = self.seed(split, number)
        asked = self._written(split, number, check)[:size] if self._given is None else self._given[slice(*prompts)]
        # Calibration answers stay at the data's temperature: they stand for decoding as it is judged.
        share = self._settings.sampled_fraction if split == "train" else 0.0
        settings = self._settings.model_copy(update={"sampled_fraction": share})
        answered = split != "heldout"
        return answer_prompts(
            self._target, asked, settings, seed, answered, check, self.left_out, self._generator, self._capture
        )

    def _written(self, split: str, number: int, check: Callable[[], None]) -> list[Prompt]:
        """Self-prompts: the same for the same settings, whatever was written before."""
        target, seed = self._target, self.seed(split, number)
        drafts = write_prompts(
            target, self.batch_size, self._settings.seed_prompts, target.end_tokens, seed, check, self._generator
        )
        prompts = [
            Prompt([{"role": "user", "content": draft.text}], draft.category, f"{split}-{number}-{i}")
            for i, draft in enumerate(drafts)
        ]
        limit = self._settings.max_prompt_tokens
        return deduplicate(
            [
                prompt
                for prompt in prompts
                if len(prompt_tokens(prompt.messages, target.tokenizer)) <= limit and not self._gives_away(prompt)
            ]
        )

    def _gives_away(self, prompt: Prompt) -> bool:
        reason = self._excluded.reason(prompt.turns)
        if reason:
            self.left_out.add(reason, prompt.id)
        return reason is not None

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
