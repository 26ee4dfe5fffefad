"""How much each prediction of a draft counts in the loss: position weights, constant in what is differentiated.

A draft starts at an origin and takes up to K steps; a step is of use only when every step before it was accepted.
Each rule takes the origins of the steps' predictions in turn and gives one weight for each prediction. On a draft of
three steps, whose second step names another token than the target:

>>> origins = [torch.tensor([7])] * 3
>>> right = [torch.tensor([True]), torch.tensor([False]), torch.tensor([True])]
>>> alphas = [torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])]
>>> def show(weights):
...     return [round(weight_M.item(), 3) for weight_M in weights]
>>> show(exponential(origins, 0.8))
[1.0, 0.8, 0.64]
>>> show(accept_until_failure(origins, right, 0.8))
[1.0, 0.8, 0.0]
>>> show(dpace(origins, alphas))
[2.0, 1.0, 0.5]

Decoding starts each draft where the round before ended, so the positions inside an accepted run are never started
from. `round_starts` finds the others: hard positions, mostly, and those are what a round is about.

>>> right = [torch.tensor([True, True, False, False]), torch.tensor([False, True, True, True])]
>>> [part.tolist() for part in round_starts([torch.tensor([4, 5, 6, 7])] * 2, right)]
[[True, False, True, True], [True, False, True, True]]

Shape suffixes: M predictions of one step, K draft steps, O distinct origins up to the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SMOOTHING = 0.5


def exponential(origins: Sequence[Tensor], step_weight: float) -> list[Tensor]:
    """`step_weight ** k` for every prediction of step k (Medusa, arXiv 2401.10774; EAGLE-3, arXiv 2503.01840).

    Args:
        origins: for each step int64 [M], where its drafts started.
        step_weight: at most 1.

    Returns:
        For each step float32 [M].
    """
    return [
        torch.full(origin_M.shape, step_weight**step, device=origin_M.device) for step, origin_M in enumerate(origins)
    ]


def dpace(origins: Sequence[Tensor], alphas: Sequence[Tensor]) -> list[Tensor]:
    """D-PACE (arXiv 2605.18810, equations 7 and 8): w_k = sum over j >= k of prod over i <= j of (0.5 alpha_i + 0.5).

    The product is the probability that a draft reaches step j, smoothed so that a weak step still teaches those after
    it; w_k is how much the expected length of the draft gains with the logarithm of step k's factor. The paper takes
    for alpha_i the draft's probability of the one token that the target chose; here it is the mass that the two
    distributions share, which is the same where the target is certain. A draft that ends early has no terms after
    its end.

    Args:
        origins: for each step int64 [M], where its drafts started.
        alphas: for each step [M], in [0, 1].

    Returns:
        For each step float32 [M]; up to K at the first step.
    """
    size = 1 + max((int(origin_M.max()) for origin_M in origins if len(origin_M)), default=0)
    reached_KO = torch.zeros(len(origins), size, device=origins[0].device)
    for step, (origin_M, alpha_M) in enumerate(zip(origins, alphas, strict=True)):
        reached_KO[step, origin_M] = (1 - _SMOOTHING) * alpha_M.float() + _SMOOTHING
    reached_KO = reached_KO.cumprod(0)
    weights_KO = reached_KO.flip(0).cumsum(0).flip(0)
    return [weights_KO[step, origin_M] for step, origin_M in enumerate(origins)]


def accept_until_failure(origins: Sequence[Tensor], right: Sequence[Tensor], step_weight: float) -> list[Tensor]:
    """AUF, accept until fail (arXiv 2607.01893): a draft teaches up to and with its first wrong step, then no more.

    Verification throws away what follows a rejected token. The paper found its exponential decay without effect once
    the loss is cut like this; `step_weight=1` leaves it out.

    Args:
        origins: for each step int64 [M], where its drafts started.
        right: for each step bool [M], whether its most likely token is the target's.
        step_weight: as in `exponential`.

    Returns:
        For each step float32 [M], 0 after the first failure.
    """
    size = 1 + max((int(origin_M.max()) for origin_M in origins if len(origin_M)), default=0)
    alive_O = torch.ones(size, dtype=torch.bool, device=origins[0].device)
    weights = []
    for plain_M, origin_M, right_M in zip(exponential(origins, step_weight), origins, right, strict=True):
        weights.append(plain_M * alive_O[origin_M])
        alive_O[origin_M] &= right_M
    return weights


def round_starts(origins: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """The origins at which a greedy chain of these heads would really start while it writes the same text.

    Args:
        origins: for each step int64 [M] ascending, where its drafts started.
        right: for each step bool [M], whether its most likely token is the target's.

    Returns:
        For each step bool [M].
    """
    size = 1 + max((int(origin_M.max()) for origin_M in origins if len(origin_M)), default=0)
    device = origins[0].device
    alive_O, accepted_O = torch.ones(size, dtype=torch.bool, device=device), torch.zeros(size, device=device)
    for origin_M, right_M in zip(origins, right, strict=True):
        reached_O = torch.zeros_like(alive_O).index_put_((origin_M,), right_M)
        alive_O &= reached_O
        accepted_O += alive_O
    starts, following = [], 0
    for origin, accepted in zip(origins[0].tolist(), accepted_O[origins[0]].tolist(), strict=True):
        if origin >= following:
            starts.append(origin)
            following = origin + int(accepted) + 1
    started_O = torch.zeros(size, dtype=torch.bool, device=device)
    started_O[torch.tensor(starts, dtype=torch.long, device=device)] = True
    return [started_O[origin_M] for origin_M in origins]
