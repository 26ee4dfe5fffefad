"""Heads as modules for accelerate: unrolled within one `forward`, optionally with low-rank updates (`train.lora_rank`).

With low-rank updates each matrix W [.., O, I] is used as W + B A, with random A [.., R, I] and B [.., O, R] initially
zero (Hu et al., arXiv 2106.09685). Only A and B learn. For validation and saving, B A is merged into W, which gives
ordinary heads.

A starts with variance 1 / R: with Adam, a step of B then moves W about as far as a step of W itself at the same
learning rate, for any rank.

peft wraps linear layers, but heads also stack matrices in one tensor, read row ranges of a weight, and pass LM heads to
the loss. Here the sums replace the weights instead, once per batch.
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
    """Heads that unroll inside `forward`, for a consumer of the predictions."""

    def __init__(self, heads: DraftHead) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, batch: HeadBatch, consume: Callable[[Iterator[StepPrediction]], R]) -> R:
        """Apply `consume` to the batch's predictions. DDP waits for the gradients of all parameters, so add a zero term
        over all parameters when the batch has fewer steps than the heads."""
        steps = 0

        def counted() -> Iterator[StepPrediction]:
            nonlocal steps
            for prediction in self.heads.unroll(batch):
                steps += 1
                yield prediction

        result = consume(counted())
        if isinstance(result, Tensor) and torch.is_grad_enabled() and steps < self.heads.draft_steps:
            return cast(R, result + sum(p.flatten()[:0].sum() for p in self.heads.parameters() if p.requires_grad))
        return result


def matrices(heads: DraftHead) -> dict[str, nn.Parameter]:
    """The weights that get low-rank updates, by name: matrices and stacks of matrices, but not stacks of biases."""
    trained = ((name, weight) for name, weight in heads.named_parameters() if weight.requires_grad)
    return {name: weight for name, weight in trained if weight.ndim > 1 and "bias" not in name}


def factor_shapes(weight: Tensor, rank: int) -> tuple[list[int], list[int]]:
    """Shapes of A and B for a matrix or a stack of them.

    >>> factor_shapes(torch.zeros(3, 64, 10), 16)
    ([3, 10, 10], [3, 64, 10])
    """
    *stack, outputs, inputs = weight.shape
    size = min(rank, outputs, inputs)
    return [*stack, size, inputs], [*stack, outputs, size]


def count_trained_parameters(heads: DraftHead, rank: int) -> int:
    """Count the trained parameters: of the heads, or of their LoRA factors."""
    if not rank:
        return heads.trainable_parameters
    return sum(math.prod(shape) for weight in matrices(heads).values() for shape in factor_shapes(weight, rank))


class LowRank(nn.Module):
    """Heads with trainable low-rank updates: `down` holds each matrix's A and `up` its B, by its name with dashes for
    dots. The rank is at most the matrix's smaller side."""

    def __init__(self, unrolled: Unrolled, rank: int) -> None:
        super().__init__()
        self.unrolled = unrolled
        self.down, self.up = nn.ParameterDict(), nn.ParameterDict()
        self._merged = False
        for name, weight in matrices(unrolled.heads).items():
            down, up = factor_shapes(weight.detach(), rank)
            key = name.replace(".", "-")
            self.down[key] = nn.Parameter(weight.new_empty(down).normal_(std=down[-2] ** -0.5))
            self.up[key] = nn.Parameter(weight.new_zeros(up))
        unrolled.heads.requires_grad_(False)

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def trainable_rows(self) -> dict[str, list[slice]]:
        """See `DraftHead.trainable_rows`: every update is one matrix, or a stack of them."""
        return {}

    def forward(self, batch: HeadBatch, consume: Callable[[Iterator[StepPrediction]], R]) -> R:
        if self._merged:
            return cast(R, self.unrolled(batch, consume))
        weights = {f"heads.{name}": weight + update for name, weight, update in self._updates()}
        return cast(R, functional_call(self.unrolled, weights, (batch, consume)))

    @contextmanager
    def merged(self) -> Iterator[None]:
        """A context with updates merged into the heads' weights; the optimiser must not step inside."""
        originals: list[tuple[nn.Parameter, Tensor]] = []
        with torch.no_grad():
            for _, weight, update in self._updates():
                originals.append((weight, weight.clone()))
                weight.add_(update)
        self._merged = True
        try:
            yield
        finally:
            self._merged = False
            with torch.no_grad():
                for weight, original in originals:
                    weight.copy_(original)

    def _updates(self) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield each matrix, by name, with its update B A."""
        for name, weight in self.unrolled.heads.named_parameters():
            if (key := name.replace(".", "-")) in self.up:
                with torch.autocast(weight.device.type, enabled=False):
                    update = self.up[key] @ self.down[key]
                yield name, weight, update
