"""On-policy conversations: prompts answered by the target itself.

Each numbered batch is written atomically and seeded by its number, so a resumed run matches an uninterrupted one.
Batches are append-only: a larger request adds batches, a smaller one uses the first ones. Prompts with the same opening
(system message, tools, first turn) go to the split of the first batch that contains one.

Every process of a run makes the same plan, since a batch's prompts and size do not depend on timing. Each claims the
first unclaimed batch and generates it. The batch of a killed process can be claimed again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from rich.console import Console

from headstart.data.conversations.answers import StateSink
from headstart.data.conversations.batch_generator import SPLITS, BatchGenerator
from headstart.data.conversations.batches import (
    CLOCKS,
    ConversationBatch,
    StoredConversation,
    TimeBudget,
    file_name,
    write_batch,
    write_split,
)
from headstart.data.conversations.records import Conversation, read_conversations
from headstart.data.generation.servers import Servers
from headstart.data.prompts.loading import OTHER_SPLIT, LeftOut, Prompts, load_prompts
from headstart.data.prompts.overlap import prompt_key
from headstart.data.prompts.shapes import Prompt
from headstart.data.workers import POLL_SECONDS, Workers, claim, prune_claims
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
    capture: StateSink | None = None,
    servers: Servers | None = None,
) -> Splits:
    """Generate or resume the conversations of a run.

    Held-out and validation conversations come first, so a time budget cuts training conversations only.

    Args:
        folder: destination of `train.jsonl`, `validation.jsonl` and `heldout.jsonl`.
        shared: folder of batches, shared by runs of the same `identity`; `folder` by default.
        max_tokens: limit on training plus validation tokens.
        capture: sink for the hidden states of generation.
        servers: servers that generate in place of the in-process target.

    Raises:
        UserError: no usable prompt, unreadable prompt file, or no chat template.
    """
    build = ConversationBuild(
        target, settings, shared or folder, max_tokens=max_tokens, capture=capture, servers=servers
    )
    build.run(console)
    if not build.selected["train"]:
        raise UserError(
            f"No training conversation could be written. {build.left_out.notice}".strip(),
            "Give more prompts or minutes, or lower data.heldout and data.validation.",
        )
    if console is not None:
        for notice in build.notices():
            tell(console, f"    {notice}")
    prune_claims(build.folder)
    for split, conversations in build.selected.items():
        write_split(folder / f"{split}.jsonl", build.folder, conversations)
    counts = {split: len(conversations) for split, conversations in build.selected.items()}
    return Splits(folder, counts, sum(item.answer_tokens for item in build.selected["train"]))


class ConversationBuild:
    """Existing and missing batches of conversations in the folder `batches` of `shared`; see the module docstring.

    Attributes:
        selected: conversations of each split; `tokens` counts their tokens.
        batches: existing and new ones, by number; `existing` are the numbers at the start.
        prompts_used: index after the last given prompt that was used.
    """

    def __init__(
        self,
        target: Target,
        settings: DataSection,
        shared: Path,
        *,
        max_tokens: float = math.inf,
        capture: StateSink | None = None,
        servers: Servers | None = None,
    ) -> None:
        self.settings, self.folder, self._max_tokens = settings, shared / "batches", max_tokens
        self.generator = BatchGenerator(target, settings, capture, servers)
        self.counts = {split: int(getattr(settings, name)) for split, name in SPLITS.items()}
        self.selected: dict[str, list[StoredConversation]] = {split: [] for split in SPLITS}
        self.tokens = dict.fromkeys(SPLITS, 0)
        self.split_of: dict[str, str] = {}  # by opening key
        self._seen: set[str] = set()
        read = map(ConversationBatch.read, sorted(self.folder.glob("[0-9]*-*.jsonl")))
        self.batches = {batch.number: batch for batch in read}
        self.existing = frozenset(self.batches)
        for batch in self.batches.values():
            for item in batch.conversations:
                self.split_of.setdefault(item.opening_key, batch.split)
        self.prompts_used, self._time_is_up = 0, False
        self._left_out = LeftOut()
        used = max((batch.prompts[1] for batch in self.batches.values()), default=0)
        self._limit = used + sum(self.counts.values()) + settings.batch_size
        self._prompts = self._load() if settings.sources else Prompts([], LeftOut(), {})

    def _load(self) -> Prompts:
        # Files are often sorted by kind; shuffling gives every split the same kinds.
        return load_prompts(self.settings, self.generator.target.tokenizer, limit=self._limit, seed=self.settings.seed)

    @property
    def left_out(self) -> LeftOut:
        both = LeftOut(self._prompts.left_out.counts, self._prompts.left_out.examples)
        both.add_all(self._left_out)
        return both

    def run(self, console: Console | None = None, records_time: bool = True) -> None:
        """Generate the missing batches of all splits, shared with other processes.

        `records_time` is true in exactly one process, which stores where the budget ended.
        """
        requested, answer_tokens, started = sum(self.counts.values()), 0, time.perf_counter()
        with progress_bar(console, "conversations", total=requested) as bar:
            for split, count in self.counts.items():
                clock = TimeBudget(self.settings.minutes if split == "train" else None, self.folder / CLOCKS)
                for batch in _SplitBuilder(self, split, count, clock).batches():
                    is_new = batch.number not in self.existing
                    answer_tokens += sum(item.answer_tokens for item in batch.conversations) if is_new else 0
                    rate = answer_tokens / max(1e-9, time.perf_counter() - started)
                    done, total = sum(map(len, self.selected.values())), requested
                    if fraction := clock.fraction_spent:  # the time budget may end first
                        total = min(requested, round(done + len(self.selected[split]) * (1 / fraction - 1)))
                    note = f"{rate:.0f} answer tokens/s" if rate else ""
                    if is_new and self.generator.requests:
                        note = f"{note}, {self.generator.requests} requests at a time"
                    bar.update(done, max(done, total), note=note)
                if records_time:
                    clock.stop()
                self._time_is_up |= clock.ended

    def select(self, split: str, batch: ConversationBatch) -> None:
        """Add a batch's conversations to the split, except repeated ones and openings of another split."""
        self.batches[batch.number] = batch
        for item in batch.conversations:
            if self.split_of.setdefault(item.opening_key, split) == split and item.prompts_key not in self._seen:
                self._seen.add(item.prompts_key)
                if len(self.selected[split]) < self.counts[split]:
                    self.selected[split].append(item)
                    self.tokens[split] += item.tokens
        self.prompts_used = max(self.prompts_used, batch.prompts[1])
        self._left_out.add_all(batch.left_out)

    def missing(self, split: str) -> int:
        """Return the number of conversations that a split lacks; 0 once the token limit is reached."""
        if split == "train" and self.tokens["train"] + self.tokens["validation"] >= self._max_tokens:
            return 0
        return self.counts[split] - len(self.selected[split])

    def prompts(self, split: str, start: int, count: int, limit: int | None) -> tuple[list[Prompt], int]:
        """Return up to `count` given prompts from `start` to `limit`, and the index after the last one read.

        Drops prompts with the opening of another split.
        """
        taken = list[Prompt]()
        while len(taken) < count:
            stop = start + count - len(taken)
            if stop + self.settings.batch_size > len(self._prompts.prompts) == self._limit:
                self._limit *= 2
                self._prompts = self._load()
            read = self._prompts.prompts[start : stop if limit is None else min(stop, limit)]
            if not read:
                break
            start += len(read)
            for prompt in read:
                if self.split_of.get(prompt_key(prompt.opening, prompt.tools), split) == split:
                    taken.append(prompt)
                else:
                    self._left_out.add(OTHER_SPLIT, prompt.id)
        return taken, start

    def notices(self) -> list[str]:
        """Return messages on dropped prompts, and on the reason for fewer conversations than requested."""
        settings, notices, count, ended = self.settings, [self.left_out.notice], len(self.selected["train"]), ""
        if self._time_is_up:
            ended = f"data.minutes={settings.minutes:g} is spent. Raise it for more."
        if self.tokens["train"] + self.tokens["validation"] >= self._max_tokens:
            ended = f"data.cache_gigabytes={settings.cache_gigabytes:g} is full. Raise it for more."
        used_up = [source for source, last in self._prompts.used_up.items() if last <= self.prompts_used]
        if used_up and (settings.self_share or len(used_up) < len(settings.sources)):
            notices.append(f"No more prompts in {', '.join(used_up)}: the other sources replace them.")
        elif used_up:
            ended = f"there are no more prompts in {', '.join(used_up)}. Give more of them."
        if ended and count < settings.conversations:
            notices.append(f"{count} of the {settings.conversations} conversations asked for: {ended}")
        return list(filter(None, notices))


@dataclass
class _Planned:
    """A batch to generate or to wait for: its file, its given prompts with their range, and its size.

    `batch` is set if the file existed at the start.
    """

    number: int
    file: Path
    prompts: list[Prompt]
    prompt_range: tuple[int, int]
    size: int
    batch: ConversationBatch | None = None

    @property
    def label(self) -> str:
        """The batch number as zero-padded text; names the claim and prefixes the file."""
        return self.file.name.partition("-")[0]


class _SplitBuilder:
    """Planner and generator of one split's batches, shared with other processes.

    `pending` holds planned batches in order until they are yielded; `running` holds futures of batches generated here.
    """

    def __init__(self, build: ConversationBuild, split: str, count: int, clock: TimeBudget) -> None:
        self._build, self._split, self._count, self._clock = build, split, count, clock
        self._pending, self._running = deque[_Planned](), dict[int, Future[None]]()
        self._number = self._start = 0  # of the next batch: its number, and its first given prompt
        # Highest number of a batch with self-written prompts: reached only if they yield almost nothing new.
        self._max_number = max(build.existing, default=-1) + 21 + 10 * count // build.settings.batch_size
        self._is_ended = False

    def batches(self) -> Iterator[ConversationBatch]:
        """Generate missing batches, and yield all in order until the split is complete."""
        build, pending, running = self._build, self._pending, self._running
        while build.missing(self._split) > 0:  # existing batches first: they need neither worker nor server
            if (new := self._plan()) is None:
                return
            pending.append(new)
            if new.batch is None:
                break
            if (batch := self._next()) is None:
                return
            yield batch
        else:
            return
        with build.generator.workers(self._count) as workers:
            while build.missing(self._split) > 0:
                for number in [number for number, future in running.items() if future.done()]:
                    running.pop(number).result()
                if pending and (pending[0].batch is not None or self._exists(pending[0])):
                    if (batch := self._next()) is None:
                        return
                    yield batch
                elif len(running) < workers.count and self._begin(workers):
                    continue
                elif running:
                    wait(running.values(), POLL_SECONDS, FIRST_COMPLETED)
                elif pending:
                    time.sleep(POLL_SECONDS)
                else:
                    return

    def _next(self) -> ConversationBatch | None:
        """Select the first pending batch, which must exist; None if the time is up."""
        planned = self._pending.popleft()
        batch = planned.batch or ConversationBatch.read(planned.file)
        self._start = max(self._start, batch.prompts[1])  # other processes may use another batch size
        if not self._clock.admit(batch, is_new=planned.batch is None):
            return None
        self._build.select(self._split, batch)
        return batch

    def _begin(self, workers: Workers) -> bool:
        """Begin the first planned batch that is unclaimed, else plan another; return False if none is left."""
        for place, planned in enumerate(self._pending):
            is_missing = planned.batch is None and planned.number not in self._running
            if is_missing and (held := self._claim(planned)) is not None:
                return self._submit(planned, place, held, workers)
        if self._is_ended or (new := self._plan()) is None:
            return False
        self._pending.append(new)
        return True

    def _claim(self, planned: _Planned) -> ExitStack | None:
        return claim(self._build.folder, planned.label, partial(self._exists, planned))

    def _exists(self, planned: _Planned) -> bool:
        """Whether the batch's file exists; a UserError if another split has its number."""
        files = list(self._build.folder.glob(f"{planned.label}-*.jsonl"))
        if files and planned.file not in files:
            raise UserError(
                f"Another process writes these conversations with other settings: {files[0]} is not of {self._split}.",
                "End it, then repeat the command.",
            )
        return bool(files)

    def _submit(self, planned: _Planned, place: int, held: ExitStack, workers: Workers) -> bool:
        """Begin the claimed batch at `place` of the pending ones; return False and drop it if the time is over."""
        earlier = [before.batch for before in islice(self._pending, place) if before.batch is not None]
        if self._clock.is_over(place, sum(batch.attributed_seconds for batch in earlier)):
            self._is_ended = True
            held.close()
            while len(self._pending) > place:
                self._pending.pop()
            return False
        self._running[planned.number] = workers.begin(partial(self._generate, planned, held, workers.check))
        return True

    def _generate(self, planned: _Planned, held: ExitStack, check: Callable[[], None]) -> None:
        build, began = self._build, time.perf_counter()
        with held:
            conversations, left_out = build.generator.generate(
                self._split, planned.number, planned.size, planned.prompts, check
            )
            write_batch(
                planned.file,
                conversations,
                left_out,
                number=planned.number,
                split=self._split,
                prompts=planned.prompt_range,
                seconds=round(time.perf_counter() - began, 3),
                concurrent=max(1, len(prune_claims(build.folder))),
            )

    def _plan(self) -> _Planned | None:
        """Return the next batch, existing or new; None if none is needed yet, or no prompt is left."""
        build, settings, split = self._build, self._build.settings, self._split
        room = build.missing(split) - sum(planned.size for planned in self._pending)
        while room > 0:
            if (batch := build.batches.get(self._number)) is not None:
                self._number, self._start = self._number + 1, max(self._start, batch.prompts[1])
                if batch.split == split:
                    file, size = build.folder / file_name(batch.number, split), len(batch.conversations)
                    return _Planned(batch.number, file, [], batch.prompts, size, batch)
                continue
            own_share, size = settings.self_share, min(settings.batch_size, room)
            if own_share:
                # A margin, since some may fall into another split, and one more batch would take long.
                size = min(settings.batch_size, self._count + -(-self._count // 8))
            if self._number > self._max_number if own_share else self._pending and room < settings.batch_size:
                return None
            # Round the running total, not each batch, so that a batch's share depends on its number alone.
            due = own_share * size
            own = int(due * (self._number + 1)) - int(due * self._number)
            start, prompts, count = self._start, list[Prompt](), size - own
            later = [known.prompts[0] for number, known in build.batches.items() if number > self._number]
            limit = min(later, default=None)
            # A killed process can leave numbers missing between existing batches. The last missing one before an
            # existing batch takes all prompts up to that batch's first, however many.
            if limit is not None and self._number + 1 in build.batches:
                count = limit - start
            if own_share < 1:
                prompts, self._start = build.prompts(split, start, count, limit)
            if not (own_share or prompts or later):
                build.prompts_used = max(build.prompts_used, self._start)
                return None
            number, self._number = self._number, self._number + 1
            if own_share or prompts:  # with an own share, the target writes the rest
                file = build.folder / file_name(number, split)
                return _Planned(number, file, prompts, (start, self._start), max(size, own + len(prompts)))
        return None
