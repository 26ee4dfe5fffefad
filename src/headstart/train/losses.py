"""Losses between what a head drafts and what the target would have said, both over the draft vocabulary.

A loss is a plain function (draft logits [M, D], target probabilities [M, D]) -> one number per prediction [M], in
float32; any family trains with any of them. `alpha`, the mass the two distributions share, is the probability that a
draft sampled from the head is accepted by lossless verification. `train/summing.py` sums them over a batch.

Shape suffixes: M predictions of one step, D draft vocabulary, E hidden size, R most likely tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.errors import UserError, nearest

Loss = Callable[[Tensor, Tensor], Tensor]

_TINY = torch.finfo(torch.float32).tiny
_TOP = 10


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
