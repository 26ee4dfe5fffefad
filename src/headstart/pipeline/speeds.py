"""A few timed forwards of the target and of a training step: what a plan reckons with.

Shape suffixes: B rows, T tokens, D draft vocabulary.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from headstart.heads import DraftHead, HeadBatch
from headstart.target import DraftTree, Target, TreeShape
from headstart.train.losses import Teacher, soft_ce, weighted


@dataclass(frozen=True)
class Speeds:
    """Seconds measured on this machine.

    Attributes:
        step_B: one new token for each row of a data batch.
        prefill_token: reading one token in a long forward.
        single: one new token at batch 1.
        train_step: forward and backward of the heads on one batch of train.batch_tokens.
        kept_bytes: what a forward on such a batch keeps for its backward.
    """

    step_B: float
    prefill_token: float
    single: float
    train_step: float
    kept_bytes: int


def measure(target: Target, heads: DraftHead, needed: list[int], rows: int, batch_tokens: int) -> Speeds:
    """Time a few forwards; a few seconds on a small model."""
    root = TreeShape.chain(0)

    def step(batch: int) -> Callable[[], None]:
        cache = target.new_cache(batch, 160)
        target.prefill(cache, [[1] * 128] * batch)
        tree = DraftTree.from_shape(torch.ones(batch, 1, dtype=torch.long, device=target.device), root)

        def forward() -> None:
            target.forward_tree(cache, tree)
            cache.commit([[]] * batch)

        return forward

    length = min(256, target.max_length)
    rows_read = [[1] * length] * 4

    def read() -> list[dict[int, Tensor]]:
        return target.hidden_states(rows_read, needed)

    states = read()[0]
    kind = torch.float32 if target.dtype == torch.float32 else target.dtype
    teacher = Teacher(target, heads.draft_to_target_D)

    def learn(copies: int) -> None:
        batch = HeadBatch(
            torch.ones(copies, length, dtype=torch.long, device=target.device),
            torch.ones(copies, length, dtype=torch.bool, device=target.device),
            {aux_layer: state.to(kind).expand(copies, -1, -1) for aux_layer, state in states.items()},
        )
        with torch.autocast(target.device.type, dtype=kind, enabled=kind != torch.float32):
            loss = weighted(heads.unroll(batch), soft_ce, teacher.read(batch), 1.0)
        torch.autograd.backward([loss])
        heads.zero_grad(set_to_none=True)

    # A quarter of a training batch: the cost of a step grows with its tokens, and so does what it keeps.
    copies = max(1, batch_tokens // length // 4)
    one, two = (_kept(partial(learn, count), heads) for count in (1, 2))
    return Speeds(
        step_B=_seconds(step(rows), target),
        prefill_token=_seconds(read, target) / (4 * length),
        single=_seconds(step(1), target),
        train_step=_seconds(partial(learn, copies), target) * batch_tokens / (copies * length),
        kept_bytes=one + int((two - one) * max(0.0, batch_tokens / length - 1)),
    )


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


def _seconds(work: Callable[[], object], target: Target, times: int = 3) -> float:
    """The median of a few timings, after one that warms up."""
    taken = []
    for _ in range(times + 1):
        start = perf_counter()
        work()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        taken.append(perf_counter() - start)
    return statistics.median(taken[1:])
