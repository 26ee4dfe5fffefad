"""On-policy conversations: prompts, answered by the target itself.

Work goes in parts of one batch each, written atomically and seeded by their number, so that an interrupted run goes on
with the next part and gives what an uninterrupted one would have given.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from headstart.data.conversations import (
    Conversation,
    Unfit,
    added_tokens,
    encode,
    prompt_tokens,
    read_conversations,
    render,
    write_conversations,
)
from headstart.data.lanes import Lanes
from headstart.data.prompts import LeftOut, Prompt, deduplicate, load_prompts, normalise
from headstart.data.sampling import Room, sample_rows
from headstart.data.selfprompt import write_prompts
from headstart.errors import UserError
from headstart.files import read_json, write_json
from headstart.target import Target

_COUNTS = {"heldout": "heldout", "calibration": "calibration", "train": "conversations"}
SPLITS = tuple(_COUNTS)


@dataclass(frozen=True)
class Settings:
    """What the data depends on; field meanings are those of the recipe's data section."""

    prompts: str
    split: str
    openers: str
    conversations: int
    heldout: int
    calibration: int
    minutes: float | None
    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    sampled_fraction: float
    batch_size: int
    regenerate: bool
    seed: int


@dataclass(frozen=True)
class Splits:
    """Conversations for training, for validation and tuning, and prompts kept for reports (without answers)."""

    train: list[Conversation]
    calibration: list[Conversation]
    heldout: list[Conversation]


def build_conversations(target: Target, section: Any, folder: Path, console: Console | None = None) -> Splits:
    """Write (or go on writing) the conversations of a run.

    Held-out and calibration conversations come first, so that a time budget cuts the training ones only. A prompt
    appears in one split only.

    Args:
        target: the model, with its tokenizer.
        section: the recipe's data section.
        folder: where `train.jsonl`, `calibration.jsonl`, `heldout.jsonl` and the parts go.
        console: shows a progress bar with the time left; None is silent.

    Raises:
        UserError: no usable prompt, unreadable prompt file, or no chat template.
    """
    settings = Settings(**{name: getattr(section, name) for name in Settings.__dataclass_fields__})
    source = _PromptSource(target, settings, getattr(section, "revision", None), console)
    splits: dict[str, list[Conversation]] = {split: [] for split in SPLITS}
    wanted = {split: int(getattr(settings, name)) for split, name in _COUNTS.items()}
    seen: set[str] = set()
    with _progress(console) as progress:
        bar = progress.add_task("conversations", total=sum(wanted.values()), tokens="")
        written_tokens, started = 0, time.perf_counter()
        for split, count in wanted.items():
            kept = splits[split]
            clock = _Clock(folder / "clock.json", settings.minutes) if split == "train" else None
            for batch, new in _in_order(source, split, kept, count, folder / "parts", clock):
                fresh = [item for item in batch if normalise(_asked(item)) not in seen][: count - len(kept)]
                seen.update(normalise(_asked(item)) for item in fresh)
                kept.extend(fresh)
                written_tokens += sum(sum(item.supervised) for item in batch) if new else 0
                rate = written_tokens / max(1e-9, time.perf_counter() - started)
                progress.update(bar, advance=len(fresh), tokens=f"{rate:.0f} answer tokens/s" if rate else "")
        progress.update(bar, total=progress.tasks[bar].completed)
    if not splits["train"]:
        raise UserError(
            f"No training conversation could be written. {source.left_out.notice}".strip(),
            "Give more prompts or minutes, lower data.heldout and data.calibration, or raise data.max_prompt_tokens.",
        )
    if console is not None and source.left_out.notice:
        console.print(f"    {source.left_out.notice}")
    for split, conversations in splits.items():
        write_conversations(folder / f"{split}.jsonl", conversations)
    return Splits(splits["train"], splits["calibration"], splits["heldout"])


def _in_order(
    source: _PromptSource, split: str, kept: Sequence[Conversation], count: int, parts: Path, clock: _Clock | None
) -> Iterator[tuple[list[Conversation], bool]]:
    """The batches of a split, each with whether it is new; while one is waited for, the next ones are being written.

    Args:
        source: of prompts and answers.
        split: its name.
        kept: what the caller keeps of the batches, which decides how many more there are.
        count: conversations wanted.
        parts: folder where each batch is kept.
        clock: bounds the time; None does not.
    """
    size, number = source.batch_size, 0
    running: deque[tuple[Path, bool, Callable[[], list[Conversation]]]] = deque()
    with Lanes(source.device, -(-count // size) if source.shareable else 1) as lanes:
        while True:
            room = count - len(kept) - len(running) * size  # those under way may bring a whole batch each
            if room > 0 and len(running) < lanes.count and not source.exhausted(split, number):
                part = parts / f"{split}-{number:05d}.jsonl"
                new = not part.is_file()
                if not new or number == 0 or clock is None or not clock.over(lanes.count):
                    # A few more than wanted: some may be in another split, and a batch for one more takes long.
                    write = partial(source.write, split, number, count + -(-count // 8), lanes.check)
                    batch_of = lanes.submit(write) if new else partial(read_conversations, part)
                    running.append((part, new, batch_of))
                    number += 1
                    continue
            if not running:
                return
            part, new, batch_of = running.popleft()
            batch = batch_of()
            if new:
                write_conversations(part, batch)
                if clock is not None:
                    clock.note()
            yield batch, new


class _Clock:
    """Time spent on training conversations, over all sessions.

    Args:
        file: where it is kept.
        minutes: the budget; None has no end.
    """

    def __init__(self, file: Path, minutes: float | None) -> None:
        self._file, self._budget = file, math.inf if minutes is None else 60 * minutes
        self._spent = float(read_json(file)["training_seconds"]) if file.is_file() else 0.0
        self._mark, self._batches, self._before = time.perf_counter(), 0, self._spent

    def note(self) -> None:
        """A batch is written."""
        now = time.perf_counter()
        self._spent += now - self._mark
        self._mark, self._batches = now, self._batches + 1
        write_json(self._file, {"training_seconds": self._spent})

    def over(self, lanes: int) -> bool:
        """Whether another batch would end further behind the budget than its lane would stop before it without one."""
        one = lanes * (self._spent - self._before) / self._batches if self._batches else 0.0
        return self._spent + time.perf_counter() - self._mark + one / 2 >= self._budget


class _PromptSource:
    """Batches of prompts by split and number: written by the target, or read once from a file or a dataset."""

    def __init__(
        self, target: Target, settings: Settings, revision: str | None = None, console: Console | None = None
    ) -> None:
        self.left_out = LeftOut()
        self._room = Room(None if console is None else console.print)
        self._target = target
        self._settings = settings
        self._given: dict[str, list[Prompt]] | None = None
        if settings.prompts != "self":
            first, second = settings.heldout, settings.heldout + settings.calibration
            found = load_prompts(
                settings.prompts,
                settings.split,
                target.tokenizer,
                max_tokens=settings.max_prompt_tokens,
                limit=second + settings.conversations,
                # Files are often sorted by kind: what is kept apart should be of the same kinds as what is trained on.
                seed=settings.seed,
                revision=revision,
            )
            given, self.left_out = found.prompts, found.left_out
            self._given = {"heldout": given[:first], "calibration": given[first:second], "train": given[second:]}

    def seed(self, split: str, number: int) -> int:
        """A seed of its own for each batch."""
        return (self._settings.seed * 1_000_003 + number) * len(SPLITS) + SPLITS.index(split)

    @property
    def device(self) -> torch.device:
        """Where the target answers."""
        return self._target.device

    @property
    def shareable(self) -> bool:
        """Whether several batches may be written at once: some rotary tables change with the text that is read."""
        return not any(
            kind in str(getattr(self._target.config, "rope_parameters", "")) for kind in ("dynamic", "longrope")
        )

    @property
    def batch_size(self) -> int:
        """Conversations of a batch at most."""
        return self._settings.batch_size

    def write(self, split: str, number: int, most: int, check: Callable[[], None]) -> list[Conversation]:
        """Batch `number` of a split, `most` of it, answered unless held out; `check` is called now and then."""
        prompts = self.take(split, number, check)[:most]
        seed = self.seed(split, number)
        # Calibration answers stay at the data's temperature: they stand for decoding as it is judged.
        settings = self._settings if split == "train" else replace(self._settings, sampled_fraction=0.0)
        return _answer(self._target, prompts, settings, seed, split != "heldout", check, self.left_out, self._room)

    def take(self, split: str, number: int, check: Callable[[], None]) -> list[Prompt]:
        """Batch `number` of a split: the same for the same settings, whatever was taken before."""
        size = self._settings.batch_size
        if self._given is not None:
            return self._given[split][number * size : (number + 1) * size]
        target = self._target
        seed = self.seed(split, number)
        drafts = write_prompts(target, size, self._settings.openers, target.end_tokens, seed, check, self._room)
        prompts = [
            Prompt([{"role": "user", "content": draft.text}], draft.category, f"{split}-{number}-{i}")
            for i, draft in enumerate(drafts)
        ]
        limit = self._settings.max_prompt_tokens
        return deduplicate(
            [prompt for prompt in prompts if len(prompt_tokens(prompt.messages, target.tokenizer)) <= limit]
        )

    def exhausted(self, split: str, number: int) -> bool:
        """Whether there is no batch `number`; self-prompts end only after many batches that gave nothing new."""
        size = self._settings.batch_size
        if self._given is not None:
            return number * size >= len(self._given[split])
        return number > 20 + 10 * int(getattr(self._settings, _COUNTS[split])) // size


def _answer(
    target: Target,
    prompts: Sequence[Prompt],
    settings: Settings,
    seed: int,
    answered: bool,
    check: Callable[[], None],
    left_out: LeftOut | None = None,
    room: Room | None = None,
) -> list[Conversation]:
    """Answer every user turn of each prompt with the target, shortest prompts first; a share of them at temperature 1.

    Prompts that come with answers keep them when `regenerate` is off; the others are answered all the same. What the
    chat template makes nothing to learn from of is left out and counted.

    Args:
        target: the model, with its tokenizer.
        prompts: of one batch.
        settings: of the data.
        seed: of the batch.
        answered: whether answers are wanted; the openings alone otherwise.
        check: called now and then; what it raises ends the work.
        left_out: takes the count.
        room: what is known of memory from earlier batches.
    """
    left_out = LeftOut() if left_out is None else left_out
    if not answered:
        return _fitting(prompts, lambda prompt: _unanswered(prompt, target.tokenizer), left_out)
    kept = [] if settings.regenerate else [item for item in prompts if item.messages[-1]["role"] == "assistant"]
    ends = target.end_tokens
    running = [
        _Running(prompt, [turn for turn in prompt.messages if turn["role"] != "assistant"])
        for prompt in prompts
        if prompt not in kept
    ]
    sampled = round(settings.sampled_fraction * len(running))
    for place, row in enumerate(running):
        row.temperature = 1.0 if place < sampled else settings.temperature
    turn = 0
    while any(row.left for row in running):
        asking = [row for row in running if row.left]
        for row in asking:
            row.ask(target.tokenizer, settings.max_prompt_tokens, target.max_length - settings.max_new_tokens)
        asking = sorted((row for row in asking if row.asked), key=lambda row: len(row.tokens))
        if not asking:
            continue
        answers = sample_rows(
            target,
            [row.tokens for row in asking],
            max_new_tokens=settings.max_new_tokens,
            temperatures=[row.temperature for row in asking],
            top_p=1.0,
            ends=ends,
            seed=seed * 31 + turn,
            check=check,
            room=room,
        )
        for row, answer in zip(asking, answers, strict=True):
            row.answer(answer, target.tokenizer, ends)
        turn += 1
    for row in running:
        if not any(row.supervised):
            left_out.add("that the chat template refuses, or too long", row.prompt.id)
    sampling = {"max_new_tokens": settings.max_new_tokens, "top_k": 64, "seed": seed}
    written = [
        Conversation(
            id=row.prompt.id,
            tokens=row.tokens,
            supervised=row.supervised,
            messages=row.messages,
            category=row.prompt.category,
            sampling={**sampling, "temperature": row.temperature},
        )
        for row in running
        if any(row.supervised)
    ]
    return [*_fitting(kept, lambda prompt: _given(prompt, target), left_out), *written]


def _fitting(
    prompts: Sequence[Prompt], read: Callable[[Prompt], Conversation], left_out: LeftOut
) -> list[Conversation]:
    """The conversations of the prompts that the chat template takes as they are; the others are counted."""
    fitting = []
    for prompt in prompts:
        try:
            fitting.append(read(prompt))
        except Unfit as misfit:
            left_out.add(misfit.reason, f"{prompt.id}: {misfit.problem}")
    return fitting


class _Running:
    """A conversation that is being written: the exact tokens that the target read and wrote."""

    def __init__(self, prompt: Prompt, left: list[dict[str, str]]) -> None:
        self.prompt = prompt
        self.left = left
        self.messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self.supervised: list[bool] = []
        self.temperature = 0.0
        self.asked = False

    def ask(self, tokenizer: Any, longest: int, room: int) -> None:
        """Append the next user turn (with a system turn before it) and the generation prompt.

        The conversation ends before a turn that is too long, before one that the template refuses, and before one at
        which it rewrites earlier turns (dropped thinking, say): what the target read and wrote would no longer be what
        the template shows.

        Args:
            tokenizer: with a chat template.
            longest: most tokens of the turn.
            room: most tokens of the conversation with it.
        """
        asked: list[dict[str, str]] = []
        while self.left:
            asked.append(self.left.pop(0))
            if asked[-1]["role"] == "user":
                break
        fresh = self._rendered(asked, tokenizer)
        self.asked = fresh is not None and len(fresh) <= longest and len(self.tokens) + len(fresh) <= room
        if fresh is None or not self.asked:
            self.left = []
            return
        self.messages.extend(asked)
        self.tokens = [*self.tokens, *fresh]
        self.supervised = [*self.supervised, *[False] * len(fresh)]

    def _rendered(self, asked: list[dict[str, str]], tokenizer: Any) -> list[int] | None:
        """Tokens that these messages add; None when the template refuses them or rewrites what came before."""
        try:
            if not self.tokens:
                return prompt_tokens(asked, tokenizer)
            before = render(self.messages, tokenizer, answer=False)
            after = render([*self.messages, *asked], tokenizer, answer=True)
        except Unfit:
            return None
        return added_tokens(before, after, self.tokens[-1], tokenizer) if after.startswith(before) else None

    def answer(self, tokens: list[int], tokenizer: Any, ends: frozenset[int]) -> None:
        """Append the target's answer; one that was cut ends the conversation."""
        self.tokens = [*self.tokens, *tokens]
        self.supervised = [*self.supervised, *[True] * len(tokens)]
        self.messages.append({"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)})
        if tokens[-1] not in ends:
            self.left = []


def _given(prompt: Prompt, target: Target) -> Conversation:
    tokens, supervised = encode(prompt.messages, target.tokenizer, max_tokens=target.max_length)
    return Conversation(prompt.id, tokens, supervised, prompt.messages, prompt.category, {"source": "given"})


def _unanswered(prompt: Prompt, tokenizer: Any) -> Conversation:
    asked = [turn for turn in prompt.messages if turn["role"] != "assistant"]
    tokens = prompt_tokens(prompt.opening, tokenizer)
    return Conversation(prompt.id, tokens, [False] * len(tokens), asked, prompt.category, {})


def _asked(conversation: Conversation) -> str:
    return next(turn["content"] for turn in conversation.messages if turn["role"] == "user")


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
    )
