"""Heads as accelerate wraps them: unrolled within one `forward`, whole or with low-rank updates (`train.lora_rank`).

With low-rank updates each matrix W [.., O, I] of the heads is read as W + B A, with A [.., R, I] drawn at random and
B [.., O, R] zero at the start (Hu et al., arXiv 2106.09685). Only A and B learn; W, norms and biases stay as they are.
Before heads are judged or kept, B A is added to W, so that what comes of it are ordinary heads.

A starts with a variance of 1 / R. With Adam, a step of B then moves W about as far as a step of W itself would at the
same learning rate, whatever the rank.

peft wraps linear layers. Heads also keep the matrices of several steps in one tensor, read some rows of a weight
alone, and hand whole LM heads to the loss, so the sums are put in the place of the weights instead, once for a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from headstart.heads.base import DraftHead, HeadBatch, StepPrediction

R = TypeVar("R")


class Unrolled(nn.Module):
    """Heads whose unrolling runs inside `forward`, where a consumer takes each step's logits."""

    def __init__(self, heads: DraftHead) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, batch: HeadBatch, consume: Callable[[Iterator[StepPrediction]], R]) -> R:
        """What `consume` makes of the batch's predictions.

        A loss reaches every parameter, whatever the batch holds: without a position to learn from it is 0, and so are
        its gradients. The processes of a training all wait for the gradients of all parameters.
        """
        taken = 0

        def counted() -> Iterator[StepPrediction]:
            nonlocal taken
            for prediction in self.heads.unroll(batch):
                taken += 1
                yield prediction

        made = consume(counted())
        if isinstance(made, Tensor) and torch.is_grad_enabled() and taken < self.heads.draft_steps:
            return cast(R, made + sum(p.flatten()[:0].sum() for p in self.heads.parameters() if p.requires_grad))
        return made


def matrices(heads: DraftHead) -> dict[str, nn.Parameter]:
    """The weights of heads that low-rank updates are for, stacks of matrices among them (not of biases), by name."""
    learning = ((name, weight) for name, weight in heads.named_parameters() if weight.requires_grad)
    return {name: weight for name, weight in learning if weight.ndim > 1 and "bias" not in name}


def factors(weight: Tensor, rank: int) -> tuple[list[int], list[int]]:
    """Shapes of A and B for a matrix or a stack of them.

    >>> factors(torch.zeros(3, 64, 10), 16)
    ([3, 10, 10], [3, 64, 10])
    """
    *stack, outputs, inputs = weight.shape
    size = min(rank, outputs, inputs)
    return [*stack, size, inputs], [*stack, outputs, size]


def learning_numbers(heads: DraftHead, rank: int) -> int:
    """How many numbers of heads learn: all that can, or with a rank their low-rank updates."""
    if not rank:
        return heads.trainable_parameters
    return sum(math.prod(shape) for weight in matrices(heads).values() for shape in factors(weight, rank))


class LowRank(nn.Module):
    """Heads of which only low-rank updates learn: `down` has A of each matrix and `up` B, by its name in the heads with
    dashes for dots. Of a matrix that is smaller than `rank`, its smaller side is taken."""

    def __init__(self, unrolled: Unrolled, rank: int) -> None:
        super().__init__()
        self.unrolled = unrolled
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        self._names: dict[str, str] = {}
        self._merged = False
        for name, weight in matrices(unrolled.heads).items():
            down, up = factors(weight.detach(), rank)
            key = self._names[name] = name.replace(".", "-")
            self.down[key] = nn.Parameter(weight.new_empty(down).normal_(std=down[-2] ** -0.5))
            self.up[key] = nn.Parameter(weight.new_zeros(up))
        unrolled.heads.requires_grad_(False)

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def learning_rows(self) -> dict[str, list[slice]]:
        """As of heads: every update is one matrix, or a stack of them."""
        return {}

    def forward(self, batch: HeadBatch, consume: Callable[[Iterator[StepPrediction]], R]) -> R:
        if self._merged:
            return cast(R, self.unrolled(batch, consume))
        weights = {f"heads.{name}": weight + self._update(name) for name, weight in self._matrices()}
        return cast(R, functional_call(self.unrolled, weights, (batch, consume)))

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Inside, the heads' own weights are the sums; the optimiser must not step."""
        unmerged = {name: weight.detach().clone() for name, weight in self._matrices()}
        with torch.no_grad():
            for name, weight in self._matrices():
                weight.add_(self._update(name))
        self._merged = True
        try:
            yield
        finally:
            self._merged = False
            with torch.no_grad():
                for name, weight in self._matrices():
                    weight.copy_(unmerged[name])

    def _matrices(self) -> Iterator[tuple[str, nn.Parameter]]:
        weights = dict(self.unrolled.heads.named_parameters())
        return ((name, weights[name]) for name in self._names)

    def _update(self, name: str) -> Tensor:
        key = self._names[name]
        with torch.autocast(self.up[key].device.type, enabled=False):
            update: Tensor = self.up[key] @ self.down[key]
            return update
