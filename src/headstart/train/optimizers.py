"""Optimisers of a training run: AdamW for all weights, or Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads import DraftHead
from headstart.recipe import TrainSection

_STEPS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic whose iteration takes singular values to about 1 (Jordan et al., "Muon", 2024)."""
_MOMENTUM = 0.95
_TINY = 1e-7
_APART = ("lm_head", "bias", "norm")
_RMS = 0.2
"""Size of AdamW's updates, which those of Muon are given so that one learning rate serves both (arXiv 2502.16982)."""


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal (Jordan et al., 2024).

    Like `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, and for stacks of matrices too: heads keep those of
    several steps in one tensor. Every matrix of a stack is a matrix of its own here.

    Args:
        params: tensors of at least two dimensions.
        lr: learning rate.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # overloaded there
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state: dict[str, Any] = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(weight.grad, 1 - _MOMENTUM)
                update = orthogonal(weight.grad.lerp(momentum, _MOMENTUM))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * _RMS * max(weight.shape[-2:]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest orthogonal matrix of each [..., rows, columns], in bfloat16, by five Newton-Schulz steps."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16().flatten(0, -3) if matrix.ndim > 2 else matrix.bfloat16()[None]
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)


def make_optimizers(heads: DraftHead, section: TrainSection) -> list[torch.optim.Optimizer]:
    """The optimisers of a recipe, which step together.

    LM heads count as embeddings do elsewhere: `muon` leaves them, norms and biases, told by their names, to AdamW.
    """
    trained = {name: weight for name, weight in heads.named_parameters() if weight.requires_grad}
    chosen = {
        name
        for name, weight in trained.items()
        if section.optimizer == "muon" and weight.ndim > 1 and not any(part in name for part in _APART)
    }
    matrices = [weight for name, weight in trained.items() if name in chosen]
    rest = [weight for name, weight in trained.items() if name not in chosen]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, section.lr, section.weight_decay))
    if rest:
        made.append(
            torch.optim.AdamW(rest, lr=section.lr, betas=section.betas, weight_decay=section.weight_decay, fused=True)
        )
    return made
