"""What a plan reckons with: seconds of forwards and of training steps, timed here on a few of them or taken from the
table of GPUs.

Shape suffixes: B rows, T tokens, D draft vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headstart.heads.base import DraftHead, HeadBatch
from headstart.pipeline.lengths import Lengths
from headstart.recipes.sections import TrainSection
from headstart.support.gpus import Gpu
from headstart.target.memory import forget_most_resident, most_resident
from headstart.target.model import Target
from headstart.target.outline import Outline
from headstart.train.allocator import keep_freed_memory
from headstart.train.batches import subsampled
from headstart.train.losses import soft_ce
from headstart.train.metrics import Tally, chosen_tokens
from headstart.train.optimizers import make_optimizers
from headstart.train.summing import Teacher, weighted
from headstart.train.watch import draft_passes, training_flops
from headstart.tree.tree import TreeBatch

_MATRICES, _READING = 0.4, 0.6
"""Of a GPU's arithmetic in long forwards and of its bandwidth in short ones, what transformers and engines reach."""
_TRAINING = 0.25
"""Of a GPU's arithmetic, what training heads reaches: their matrices are small."""
_AGAIN = 4 / 3
"""How many times as long a step takes where what lies inside of layers is computed again."""
_LAUNCHES = 2.5e-4
"""Seconds that a layer of a forward takes at least where no graph of its kernels was captured."""
_UPDATE = 16 + 8
"""Bytes that an optimiser reads and writes for a weight: weight, gradient and two moments."""
_SUBSAMPLE_SEED = [0, 0, 0]


@dataclass(frozen=True)
class Speeds:
    """Seconds of the parts that work is made of.

    Attributes:
        step: one new token for a single row; more rows cost `row` each.
        row: see there.
        prefill_token: reading one token in a long forward.
        train_step: forward and backward of the heads on one batch of train.batch_tokens.
        update: of the weights by the optimisers.
        judge_step: validating a batch of train.batch_tokens.
        fit_token: the closed-form start, for each token looked at.
        draft: one draft of the heads to their full depth.
        kept_bytes: what a forward on a batch of train.batch_tokens keeps for its backward.
        working_bytes: by how much training on such batches has this process or GPU grown; 0 where nobody looked.
        measured: whether this was timed, here and now.
    """

    step: float
    row: float
    prefill_token: float
    train_step: float
    kept_bytes: int
    update: float = 0.0
    judge_step: float = 0.0
    fit_token: float = 0.0
    draft: float = 0.0
    working_bytes: int = 0
    measured: bool = True

    def forwards(self, count: float, rows: float) -> float:
        """Seconds of so many forwards that read so many new tokens in all, one for each row that goes on."""
        return count * max(0.0, self.step - self.row) + rows * self.row


# -- timed here --------------------------------------------------------------------------------------------------------


def measure(
    target: Target, heads: DraftHead, needed: list[int], rows: int, section: TrainSection, lengths: Lengths
) -> Speeds:
    """Time a few forwards and steps; some seconds on a small model.

    Args:
        target: loaded.
        heads: as the recipe wants them; their weights change.
        needed: layers whose states are kept.
        rows: of a batch of data.
        section: of the recipe.
        lengths: of its conversations; training batches are made alike.
    """

    def step(batch: int) -> Callable[[], None]:
        cache = target.new_cache(batch, 160)
        target.prefill(cache, [[1] * 128] * batch)
        roots = TreeBatch.roots([1] * batch, target.device)

        def forward() -> None:
            target.forward_tree(cache, roots, needed)
            cache.commit([[]] * batch)

        return forward

    length = max(16, min(256, target.max_length))
    rows_read = [[1 + (7 * i) % (target.vocab_size - 1) for i in range(length)]] * 4

    def read() -> list[dict[int, Tensor]]:
        return target.hidden_states(rows_read, needed)

    single = _seconds(step(1), target)
    several = _seconds(step(rows), target) if rows > 1 else single
    prefill = _seconds(read, target) / (4 * length)
    learning = _Learning(target, heads, needed, section, lengths)
    one, two = (_kept(partial(learning.learn, count), heads) for count in (1, 2))
    fit_token = learning.fit_seconds() / learning.length
    train_step, working_bytes = learning.steps()
    update = learning.update_seconds()
    # A quarter of a training batch: the cost grows with its tokens.
    copies = max(1, round(section.batch_tokens / learning.length / 4))
    judge_share = section.batch_tokens / (copies * learning.length)
    return Speeds(
        step=single,
        row=max(0.0, (several - single) / max(1, rows - 1)),
        prefill_token=prefill,
        train_step=train_step,
        kept_bytes=one + int((two - one) * max(0.0, section.batch_tokens / learning.length - 1)),
        update=update,
        judge_step=_seconds(partial(learning.judge, copies), target, times=1) * judge_share,
        fit_token=fit_token,
        draft=single * heads.draft_steps * heads.flops_per_draft() / max(1, 2 * target.parameters),
        working_bytes=working_bytes,
    )


class _Learning:
    """Steps of training on batches like those to come.

    Attributes:
        length: tokens of a row.
    """

    def __init__(
        self, target: Target, heads: DraftHead, needed: list[int], section: TrainSection, lengths: Lengths
    ) -> None:
        self._target, self._heads, self._section = target, heads, section
        least = heads.draft_steps + 4
        longest = min(target.max_length, max(section.batch_tokens, least + 1))
        self.length = max(least + 1, min(int(lengths.tokens), longest))
        self._least, self._share = least, min(1.0, lengths.answer / max(1.0, lengths.tokens))
        tokens = [1 + (7 * i) % (target.vocab_size - 1) for i in range(min(longest, int(1.25 * self.length)))]
        (self._states,) = target.hidden_states([tokens], needed)
        self._tokens_1T = torch.tensor([tokens], device=target.device)
        self._teacher = Teacher(target, heads.draft_to_target_D)
        self._kind = torch.float32 if target.dtype == torch.float32 else target.dtype

    def _batch(self, copies: int, length: int) -> HeadBatch:
        answer = max(self._least, min(length, round(length * self._share)))
        supervised_BT = torch.zeros(copies, length, dtype=torch.bool, device=self._target.device)
        supervised_BT[:, length - answer :] = True
        return HeadBatch(
            self._tokens_1T[:, :length].expand(copies, -1),
            supervised_BT,
            {layer: state[:length].to(self._kind).expand(copies, -1, -1) for layer, state in self._states.items()},
        )

    def steps(self) -> tuple[float, int]:
        """(seconds of a forward and a backward on a batch of `batch_tokens`, bytes by which that lets memory grow).

        Batches differ in shape, as those of training do: what an allocator keeps of one does not fit the next. Updates
        and validations come between them.
        """
        device, longest = self._target.device, self._tokens_1T.shape[1]
        if device.type == "cpu":
            keep_freed_memory()
        else:
            torch.cuda.reset_peak_memory_stats(device)
        before = forget_most_resident() if device.type == "cpu" else torch.cuda.memory_allocated(device)
        spent, clock = [], _clock(device)
        for part in (1.0, 0.7, 1.25, 1.0):
            length = max(self._least + 1, min(longest, int(part * self.length)))
            copies = max(1, self._section.batch_tokens // length)
            start = clock()
            self.learn(copies, length)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent.append((clock() - start) * self._section.batch_tokens / (copies * length))
            if part != 1.0:
                self.judge(copies)
                self.update_seconds()
        most = most_resident() if device.type == "cpu" else torch.cuda.max_memory_allocated(device)
        return statistics.median(spent[1:]), max(0, most - before)

    def learn(self, copies: int, length: int | None = None) -> None:
        """A forward and a backward on so many conversations."""
        batch, section = self._batch(copies, length or self.length), self._section
        if section.position_weight == "subsampled":
            batch = subsampled(batch, section.step_weight, _SUBSAMPLE_SEED)
        with torch.autocast(self._target.device.type, dtype=self._kind, enabled=self._kind != torch.float32):
            loss = weighted(self._heads.unroll(batch), soft_ce, self._teacher.read(batch), 1.0)
        torch.autograd.backward([loss])
        self._heads.zero_grad(set_to_none=True)

    @torch.no_grad()
    def judge(self, copies: int) -> None:
        """A validation of so many conversations."""
        batch = self._batch(copies, self.length)
        with torch.autocast(self._target.device.type, dtype=self._kind, enabled=self._kind != torch.float32):
            tally = Tally(self._heads.draft_steps, self._target.device)
            tally.add(self._heads.unroll(batch), self._heads.draft_to_target_D, chosen_tokens(self._target, batch))

    def fit_seconds(self) -> float:
        """Of the closed-form start from one conversation, beyond what it takes from none."""
        batch = self._batch(1, self.length)
        batch = replace(batch, states={layer: state.float() for layer, state in batch.states.items()})
        spent, clock = [], _clock(self._target.device)
        for count in (1, 3):
            start = clock()
            self._heads.fit([batch] * count)
            spent.append(clock() - start)
        return max(0.0, spent[1] - spent[0]) / 2

    def update_seconds(self) -> float:
        """Of the optimisers."""
        optimizers = make_optimizers(self._heads, self._section)
        for parameter in self._heads.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 1e-6)

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()

        seconds = _seconds(step, self._target, times=2)
        self._heads.zero_grad(set_to_none=True)
        return seconds


def _kept(learn: Callable[[], object], heads: DraftHead) -> int:
    """Bytes that a forward keeps for its backward, the heads' own weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in heads.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        learn()
    return sum(kept.values())


def _clock(device: torch.device) -> Callable[[], float]:
    """What time is read from: with one thread the processor's own clock, which neighbours do not slow down."""
    return process_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter


def _seconds(work: Callable[[], object], target: Target, times: int = 3) -> float:
    """The median of a few timings, after one that warms up."""
    taken, clock = [], _clock(target.device)
    for _ in range(times + 1):
        start = clock()
        work()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        taken.append(clock() - start)
    return statistics.median(taken[1:])


# -- from the table ----------------------------------------------------------------------------------------------------


def from_table(
    target: Outline,
    heads: DraftHead,
    gpu: Gpu,
    rows: int,
    section: TrainSection,
    lengths: Lengths,
    each: int = 1,
    engine: bool = False,
) -> Speeds:
    """Seconds that follow from what a GPU can do, with the shares of it that are usually reached.

    Args:
        target: by its config.
        heads: on the `meta` device, bound to it.
        gpu: of the table.
        rows: of a batch of data.
        section: of the recipe.
        lengths: of its conversations.
        each: GPUs that hold one copy of the target together.
        engine: whether a serving engine runs the target, whose forwards are captured as graphs.
    """
    item = target.dtype.itemsize
    experts, chosen = target.experts
    always = target.parameters - target.expert_parameters
    flops = 2 * (always + target.expert_parameters * chosen / experts)
    least = 0.0 if engine else _LAUNCHES * target.num_layers

    def step(count: int) -> float:
        touched = 1 - (1 - chosen / experts) ** count
        read = item * (always + target.expert_parameters * touched) + count * target.kv_bytes_per_token * lengths.tokens
        work = max(read / (_READING * gpu.bandwidth), count * flops / (_MATRICES * gpu.flops))
        return max(work / each, least)

    drafted = draft_passes(heads, section)
    per_position = training_flops(heads, section, heads.flops_per_draft())
    supervised = section.batch_tokens * min(1.0, lengths.answer / max(1.0, lengths.tokens))
    single, several = step(1), step(max(2, rows))
    arithmetic = _MATRICES * gpu.flops
    # What a forward keeps: for each step and position a few vectors as wide as the states, and as the MLP.
    checkpointing = section.gradient_checkpointing
    width = 8 * target.hidden_size + 3 * getattr(heads.config, "intermediate_size", 0)
    return Speeds(
        step=single,
        row=max(0.0, (several - single) / (max(2, rows) - 1)),
        prefill_token=flops / arithmetic / each,
        train_step=supervised * per_position * (_AGAIN if checkpointing else 1) / (_TRAINING * gpu.flops),
        kept_bytes=int(item * (supervised * drafted + section.batch_tokens) * width / (4 if checkpointing else 1)),
        update=_UPDATE * heads.trainable_parameters / (_READING * gpu.bandwidth),
        judge_step=supervised * heads.draft_steps * heads.flops_per_draft() / arithmetic,
        draft=heads.draft_steps * heads.flops_per_draft() / 2 * item / (_READING * gpu.bandwidth),
        measured=False,
    )
