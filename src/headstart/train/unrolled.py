"""Heads as a module that accelerate can wrap: all draft steps of a batch inside one `forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from headstart.heads.base import DraftHead, HeadBatch, StepPrediction

R = TypeVar("R")


class Unrolled(nn.Module):
    """Heads as accelerate wraps them: their unrolling runs inside `forward`, and a consumer takes each step's logits.

    Args:
        heads: to train.
    """

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
