"""Optimisers and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headstart.heads.base import DraftHead
from headstart.model.loading import pick_dtype
from headstart.recipes.sections import TrainSection
from headstart.train.checkpoint import TrainerState
from headstart.train.wrapped import LowRank

_QUINTICS = (
    (8.1360, -23.0214, 16.3849),
    (3.8385, -2.7526, 0.5065),
    (3.1124, -2.2431, 0.4509),
    (2.1465, -1.4768, 0.3694),
)
"""Odd quintics that together map singular values in [0.005, 1] (relative to the norm) to [0.873, 1.083], each optimal
on the previous one's range ("The Polar Express", arXiv 2505.16932), with 2 % slack for bfloat16 rounding. Jordan's five
equal ones (2024) map them to [0.68, 1.15]."""
_UPDATE_INTERVAL = 2
"""Each matrix is updated every second step with twice the learning rate, because the momentum direction changes slowly
and orthogonalisation takes 25 % of a CPU step. The matrices take turns."""
_MOMENTUM = 0.95
_EPSILON = 1e-7
_ADAMW_NAMES = ("lm_head", "embedding", "bias", "norm", "confidence", "parents", "drafts", "base_kernel")
_RMS = 0.2
"""RMS of AdamW's updates; Muon's are scaled to it, so that one learning rate serves both (arXiv 2502.16982)."""


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonalised updates (Jordan et al., 2024).

    Like `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, but orthogonalises each matrix of a stack by
    itself. `rows` gives the row ranges of parameters that hold several matrices; other rows do not change. Momentum
    sees every gradient; a matrix is updated in one of `every` steps, by `every` times as much.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        rows: Mapping[nn.Parameter, Sequence[slice]] | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._rows, self._every = dict(rows or {}), every

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # overloaded there
        assert closure is None, "gradients are computed before the step"
        number = 0  # of the matrix, over all parameters
        for group in self.param_groups:
            lr = self._every * group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state: dict[str, Any] = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                momentum, step = state["momentum_buffer"], state.get("step", 0)
                momentum.lerp_(weight.grad, 1 - _MOMENTUM)
                for rows in self._rows.get(weight, [slice(None)]):
                    if (step + number) % self._every == 0:
                        matrix, nesterov = weight[rows], weight.grad[rows].lerp(momentum[rows], _MOMENTUM)
                        matrix.mul_(1 - lr * group["weight_decay"])
                        matrix.add_(orthogonalise(nesterov), alpha=-lr * _RMS * max(matrix.shape[-2:]) ** 0.5)
                    number += 1
                state["step"] = step + 1


def orthogonalise(matrix: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrix of each [..., rows, columns] by four Newton-Schulz steps, in bfloat16
    only if the device is fast at it: elsewhere it is twenty times slower than float32."""
    x = matrix.to(pick_dtype("auto", matrix.device))
    x = x.flatten(0, -3) if matrix.ndim > 2 else x[None]
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    for a, b, c in _QUINTICS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)


def make_optimizers(heads: DraftHead | LowRank, section: TrainSection) -> list[torch.optim.Optimizer]:
    """Build a recipe's optimisers for heads or their low-rank updates. `muon` leaves vectors to AdamW and, by name, LM
    heads, norms, biases, tables of token pairs, confidence weights and convolution kernels."""
    trained = {name: weight for name, weight in heads.named_parameters() if weight.requires_grad}
    muon = {
        name
        for name, weight in trained.items()
        if section.optimizer == "muon" and weight.ndim > 1 and not any(part in name for part in _ADAMW_NAMES)
    }
    matrices = [weight for name, weight in trained.items() if name in muon]
    rest = [weight for name, weight in trained.items() if name not in muon]
    rows = {trained[name]: parts for name, parts in heads.trainable_rows().items() if name in trained}
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, section.lr, section.weight_decay, rows, _UPDATE_INTERVAL))
    if rest:
        made.append(
            torch.optim.AdamW(
                _parameter_groups(rest, rows),
                lr=section.lr,
                betas=section.betas,
                weight_decay=section.weight_decay,
                fused=True,
            )
        )
    return made


def _parameter_groups(
    weights: Sequence[nn.Parameter], rows: Mapping[nn.Parameter, Sequence[slice]]
) -> list[dict[str, Any]]:
    """Exempt weights with frozen rows from decay, which would change those rows."""
    frozen = {
        id(weight) for weight, parts in rows.items() if sum(part.stop - part.start for part in parts) < len(weight)
    }
    decaying = {"params": [weight for weight in weights if id(weight) not in frozen]}
    exempt = {"params": [weight for weight in weights if id(weight) in frozen], "weight_decay": 0.0}
    return [group for group in (decaying, exempt) if group["params"]]


# -- learning rates --------------------------------------------------------------------------------------------------


def learning_rate(section: TrainSection, fraction: float) -> float:
    """Linear warm-up, then a cosine down to `min_lr_ratio` of the peak, by `fraction` of the run done.

    >>> section = TrainSection(lr=1.0, warmup=0.2, min_lr_ratio=0.1)
    >>> [round(learning_rate(section, f), 3) for f in (0.0, 0.1, 0.2, 0.6, 1.0)]
    [0.1, 0.55, 1.0, 0.55, 0.1]
    """
    if fraction < section.warmup:
        height = fraction / section.warmup
    else:
        height = 0.5 + 0.5 * math.cos(math.pi * (fraction - section.warmup) / (1 - section.warmup))
    return section.lr * (section.min_lr_ratio + (1 - section.min_lr_ratio) * height)


def learning_rate_now(section: TrainSection, fraction: float, state: TrainerState) -> float:
    """Return `learning_rate`. After resuming with another budget, approach it linearly from the last learning rate."""
    rate, span = learning_rate(section, fraction), section.warmup * (1 - state.extended_at)
    if not state.extended_at or fraction >= state.extended_at + span:
        return rate
    return state.lr_at_extension + (rate - state.lr_at_extension) * max(0.0, fraction - state.extended_at) / span
