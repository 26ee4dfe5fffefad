"""Losses between what a head drafts and what the target would have said, both over the draft vocabulary.

A loss is a plain function (draft logits [M, D], target probabilities [M, D]) -> one number per prediction [M], in
float32; any family trains with any of them. `alpha`, the mass the two distributions share, is the probability that a
draft sampled from the head is accepted by lossless verification. `train/summing.py` sums them over a batch.

Position weights say how much each prediction counts, constant in what is differentiated. A draft starts at an origin
and takes up to K steps; a step is of use only when every step before it was accepted. Each rule takes the origins of
the steps' predictions in turn and gives one weight for each prediction. On a draft of three steps, whose second step
names another token than the target:

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

Shape suffixes: M predictions of one step, D draft vocabulary, E hidden size, R most likely tokens, K draft steps, O
distinct origins up to the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.errors import UserError, nearest

Loss = Callable[[Tensor, Tensor], Tensor]

_TINY = torch.finfo(torch.float32).tiny
_TOP = 10
_SMOOTHING = 0.5


def soft_ce(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Cross-entropy against the target's distribution: forward KL plus the target's entropy, a constant."""
    return -(target_probs_MD * draft_logits_MD.log_softmax(-1)).sum(-1)


def hard_ce(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Cross-entropy against the target's most likely token of the draft vocabulary."""
    return F.cross_entropy(draft_logits_MD, target_probs_MD.argmax(-1), reduction="none")


def reverse_kl(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """KL(draft || target): punishes drafts that the target would not say, forgives what is left out."""
    log_q_draft = draft_logits_MD.log_softmax(-1)
    return (log_q_draft.exp() * (log_q_draft - target_probs_MD.clamp_min(_TINY).log())).sum(-1)


def js(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Jensen-Shannon divergence: the mean of both distributions' KL to their middle; at most log 2."""
    log_q_draft = draft_logits_MD.log_softmax(-1)
    log_p_target = target_probs_MD.clamp_min(_TINY).log()
    middle_MD = torch.logaddexp(log_q_draft, log_p_target) - math.log(2)
    forward_M = (target_probs_MD * (log_p_target - middle_MD)).sum(-1)
    backward_M = (log_q_draft.exp() * (log_q_draft - middle_MD)).sum(-1)
    divergence_M: Tensor = (forward_M + backward_M) / 2
    return divergence_M


def tv(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Total variation, 1 - alpha: the probability that a sampled draft is rejected."""
    return 1 - shared_mass(draft_logits_MD, target_probs_MD)


def nla(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Negative log of alpha: like total variation, with a gradient that grows where the head is far off."""
    return -shared_mass(draft_logits_MD, target_probs_MD).clamp_min(_TINY).log()


def lk(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Hybrid lambda * KL + (1 - lambda) * TV with lambda = exp(-3 alpha), alpha held fixed (arXiv 2602.23881).

    KL teaches while the head is weak, total variation takes over as alpha grows.
    """
    alpha_M = shared_mass(draft_logits_MD, target_probs_MD)
    entropy_M: Tensor = -torch.special.xlogy(target_probs_MD, target_probs_MD).sum(-1)
    forward_kl_M: Tensor = soft_ce(draft_logits_MD, target_probs_MD) - entropy_M
    weight_M: Tensor = torch.exp(-3 * alpha_M.detach())
    mixed_M: Tensor = weight_M * forward_kl_M + (1 - weight_M) * (1 - alpha_M)
    return mixed_M


def tv_ce(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """A tenth of the cross-entropy and nine tenths of the L1 distance, twice the total variation (DSpark, arXiv
    2607.05147)."""
    return 0.1 * soft_ce(draft_logits_MD, target_probs_MD) + 0.9 * 2 * tv(draft_logits_MD, target_probs_MD)


def topk_ce(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Cross-entropy against the target's ten most likely tokens, renormalised to 1.

    HASS (Zhang et al., arXiv 2408.15766) adds such a sum over ten tokens, not renormalised, to its other losses;
    renormalised it can stand alone.
    """
    top = target_probs_MD.topk(min(_TOP, target_probs_MD.shape[-1]), dim=-1)
    share_MR = top.values / top.values.sum(-1, keepdim=True)
    # Logits less their normaliser rather than a log-softmax: only ten columns are read.
    log_q_MR = draft_logits_MD.gather(-1, top.indices) - draft_logits_MD.logsumexp(-1, keepdim=True)
    return -(share_MR * log_q_MR).sum(-1)


def smooth_l1(feature_ME: Tensor, final_ME: Tensor) -> Tensor:
    """Distance of a drafted feature to the target's final state, [M], the mean over the state's components.

    EAGLE (Li et al., arXiv 2401.15077) trains with this at weight 1 and its cross-entropy at weight 0.1.
    """
    return F.smooth_l1_loss(feature_ME.float(), final_ME.float(), reduction="none").mean(-1)


def shared_mass(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """alpha of each prediction, [M]: what the two distributions share, from 0 to 1."""
    return torch.minimum(draft_logits_MD.softmax(-1), target_probs_MD).sum(-1)


LOSSES: dict[str, Loss] = {
    "soft_ce": soft_ce,
    "hard_ce": hard_ce,
    "reverse_kl": reverse_kl,
    "js": js,
    "tv": tv,
    "nla": nla,
    "lk": lk,
    "tv_ce": tv_ce,
    "topk_ce": topk_ce,
}


def find_loss(name: str) -> Loss:
    """The loss called `name`.

    Raises:
        UserError: when there is none; the message names the nearest.
    """
    if name not in LOSSES:
        raise UserError(f"Unknown loss {name!r}.", nearest(name, LOSSES))
    return LOSSES[name]


# -- position weights ------------------------------------------------------------------------------------------------


def exponential(origins: Sequence[Tensor], step_weight: float) -> list[Tensor]:
    """`step_weight ** k` for every prediction of step k (Medusa, arXiv 2401.10774; EAGLE-3, arXiv 2503.01840).

    `origins` are for each step int64 [M], where its drafts started; the weights are float32 [M].
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

    `alphas` are for each step [M], in [0, 1]; the weights are float32 [M], up to K at the first step.
    """
    size = _size(origins)
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

    `right` is for each step bool [M], whether its most likely token is the target's; the weights are float32 [M], 0
    after the first failure.
    """
    size = _size(origins)
    alive_O = torch.ones(size, dtype=torch.bool, device=origins[0].device)
    weights = []
    for plain_M, origin_M, right_M in zip(exponential(origins, step_weight), origins, right, strict=True):
        weights.append(plain_M * alive_O[origin_M])
        alive_O[origin_M] &= right_M
    return weights


def round_starts(origins: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """The origins (ascending) at which a greedy chain of these heads would really start while it writes the same text.

    Decoding starts each draft where the round before ended, so the positions inside an accepted run are never started
    from. The others are hard positions, mostly, and those are what a round is about.

    >>> right = [torch.tensor([True, True, False, False]), torch.tensor([False, True, True, True])]
    >>> [part.tolist() for part in round_starts([torch.tensor([4, 5, 6, 7])] * 2, right)]
    [[True, False, True, True], [True, False, True, True]]
    """
    size, device = _size(origins), origins[0].device
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


def _size(origins: Sequence[Tensor]) -> int:
    """One more than the largest origin."""
    return 1 + max((int(origin_M.max()) for origin_M in origins if len(origin_M)), default=0)
