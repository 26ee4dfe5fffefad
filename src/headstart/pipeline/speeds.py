"""Seconds of forwards and of training steps, timed on a few of them with the target and the heads of a recipe.

Shape suffixes: B rows, T tokens, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headstart.heads.base import DraftHead, HeadBatch
from headstart.pipeline.lengths import Lengths
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import TrainSection
from headstart.target.memory import forget_most_resident, most_resident
from headstart.target.model import Target
from headstart.train.batches import subsampled
from headstart.train.losses import soft_ce
from headstart.train.machine import keep_freed_memory
from headstart.train.optimizers import make_optimizers
from headstart.train.summing import Teacher, weighted
from headstart.tree.tree import TreeBatch

_SUBSAMPLE_SEED = [0, 0, 0]
_BATCHES = (1.0, 0.7, 1.25, 1.0)
"""Lengths of the rows of the batches that are learnt from, as multiples of the usual one."""


@dataclass(frozen=True)
class Speeds:
    """Seconds of the parts that work is made of; all 0 where nothing was timed.

    Attributes:
        step: one new token for a single row; more rows cost `row` each.
        row: see there.
        prefill_token: reading one token in a long forward.
        train_step: learning from one batch of train.batch_tokens, the update of the weights included.
        draft: one draft of the heads to their full depth.
        training_bytes: memory that training on such batches takes beside weights, gradients, optimisers and batches.
    """

    step: float = 0.0
    row: float = 0.0
    prefill_token: float = 0.0
    train_step: float = 0.0
    draft: float = 0.0
    training_bytes: int = 0

    def forwards(self, count: float, rows: float) -> float:
        """Seconds of so many forwards that read so many new tokens in all, one for each row that goes on."""
        return count * max(0.0, self.step - self.row) + rows * self.row


def measure(target: Target, heads: DraftHead, needed: list[int], recipe: Recipe, lengths: Lengths) -> Speeds:
    """Time a few forwards and steps; some seconds on a small model.

    Args:
        target: loaded.
        heads: as the recipe wants them; their weights change.
        needed: layers whose states are kept.
        recipe: whose batches are timed.
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

    train_step, training_bytes = _train_step(target, heads, needed, recipe.train, lengths)
    length, rows = max(16, min(256, target.max_length)), recipe.data.batch_size
    texts = [_text(length, target)] * 4
    single = _seconds(step(1), target)
    several = _seconds(step(rows), target) if rows > 1 else single
    return Speeds(
        step=single,
        row=max(0.0, (several - single) / max(1, rows - 1)),
        prefill_token=_seconds(lambda: target.hidden_states(texts, needed), target) / (4 * length),
        train_step=train_step,
        draft=single * heads.draft_steps * heads.flops_per_draft() / max(1, 2 * target.parameters),
        training_bytes=training_bytes,
    )


def _train_step(
    target: Target, heads: DraftHead, needed: list[int], section: TrainSection, lengths: Lengths
) -> tuple[float, int]:
    """(seconds of learning from a batch of train.batch_tokens, bytes that this takes).

    Batches differ in shape, as those of training do: what an allocator keeps of one does not fit the next. The bytes
    are those by which memory grew, or what was kept for the backward where that is more: a process may have had memory
    to spare.
    """
    device, wanted, least = target.device, section.batch_tokens, heads.draft_steps + 5
    usual = max(least, min(int(lengths.tokens), wanted, target.max_length))
    answers = min(1.0, lengths.answer / max(1.0, lengths.tokens))
    tokens = _text(min(target.max_length, int(1.25 * usual)), target)
    (states,) = target.hidden_states([tokens], needed)
    teacher, optimizers = Teacher(target, heads.draft_to_target_D), make_optimizers(heads, section)

    def learn(length: int) -> int:
        """One step; how many tokens its batch has."""
        rows = max(1, wanted // length)
        supervised_BT = torch.zeros(rows, length, dtype=torch.bool, device=device)
        supervised_BT[:, length - max(least - 1, round(length * answers)) :] = True
        batch = HeadBatch(
            torch.tensor([tokens[:length]], device=device).expand(rows, -1),
            supervised_BT,
            {layer: state[:length].to(target.dtype).expand(rows, -1, -1) for layer, state in states.items()},
        )
        if section.position_weight == "subsampled":
            batch = subsampled(batch, section.step_weight, _SUBSAMPLE_SEED)
        with torch.autocast(device.type, dtype=target.dtype, enabled=target.dtype != torch.float32):
            loss = weighted(heads.unroll(batch), soft_ce, teacher.read(batch), 1.0)
        torch.autograd.backward([loss])
        for optimizer in optimizers:
            optimizer.step()
        heads.zero_grad(set_to_none=True)
        return rows * length

    if device.type == "cpu":
        keep_freed_memory()
        before = forget_most_resident()
    else:
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    shapes = [max(least, min(len(tokens), int(part * usual))) for part in _BATCHES]
    spent = [_seconds(partial(learn, length), target, times=1, warm_up=False) for length in shapes]
    grown = (most_resident() if device.type == "cpu" else torch.cuda.max_memory_allocated(device)) - before
    moments = [state for optimizer in optimizers for state in optimizer.state.values()]
    grown -= sum(value.nbytes for state in moments for value in state.values() if isinstance(value, Tensor))
    grown -= 4 * heads.trainable_parameters
    kept, count = _kept(partial(learn, usual), heads)
    by_token = [seconds / (length * max(1, wanted // length)) for seconds, length in zip(spent, shapes, strict=True)]
    return wanted * median(by_token[1:]), max(int(kept * wanted / count), grown)


def _text(length: int, target: Target) -> list[int]:
    return [1 + (7 * i) % (target.vocab_size - 1) for i in range(length)]


def _kept(learn: Callable[[], int], heads: DraftHead) -> tuple[int, int]:
    """(bytes that a forward keeps for its backward, the heads' own weights left out; what `learn` returns)."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in heads.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        count = learn()
    return sum(kept.values()), count


def _seconds(work: Callable[[], object], target: Target, times: int = 3, warm_up: bool = True) -> float:
    """The median of a few timings; with one thread by the processor's own clock, which neighbours do not slow down."""
    clock = process_time if target.device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    taken = []
    for _ in range(times + warm_up):
        start = clock()
        work()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        taken.append(clock() - start)
    return median(taken[warm_up:])
