"""Losses between draft and target distributions over the draft vocabulary.

A loss is a plain function (draft logits [M, D], target probabilities [M, D]) -> one number per prediction [M], in
float32; any family trains with any of them. `alpha`, the shared mass of the two distributions, is the acceptance
probability of a sampled draft under lossless verification. `train/fused_loss.py` sums losses over a batch.

Position weights scale each prediction's loss and carry no gradient. A draft starts at an origin and takes up to K
steps; a step matters only if all earlier ones were accepted. Each rule maps the origins of the steps' predictions to
one weight per prediction. Example: a draft of three steps with no shared mass at the second step.

>>> origins = [torch.tensor([7])] * 3
>>> alphas = [torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])]
>>> def show(weights):
...     return [round(weight_M.item(), 3) for weight_M in weights]
>>> show(exponential(origins, 0.8))
[1.0, 0.8, 0.64]
>>> show(dpace(origins, alphas))
[2.0, 1.0, 0.5]

Shape suffixes: M predictions of one step, D draft vocabulary, E hidden size, K draft steps, O origins of the first
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Loss = Callable[[Tensor, Tensor], Tensor]

_SMOOTHING = 0.5


def soft_ce(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Cross-entropy against the target's distribution: forward KL up to the target's entropy, a constant."""
    return _ce_and_l1(draft_logits_MD, target_probs_MD, 0.0)


def hard_ce(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Cross-entropy against the target's most likely token of the draft vocabulary."""
    return F.cross_entropy(draft_logits_MD, target_probs_MD.argmax(-1), reduction="none")


def tv_ce(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """A tenth of the cross-entropy and nine tenths of the L1 distance, twice the total variation (DSpark, arXiv
    2607.05147)."""
    return _ce_and_l1(draft_logits_MD, target_probs_MD, 0.9)


def half_l1(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Half cross-entropy and half L1 distance. The L1 distance alone has a small gradient for very wrong drafts, so
    cross-entropy is mixed in."""
    return _ce_and_l1(draft_logits_MD, target_probs_MD, 0.5)


def _ce_and_l1(draft_logits_MD: Tensor, target_probs_MD: Tensor, distance: float) -> Tensor:
    """L1 distance with weight `distance`, cross-entropy with the rest; target probabilities must sum to one."""
    apply: Callable[..., Tensor] = _CeAndL1.apply
    return apply(draft_logits_MD, target_probs_MD, distance)


class _CeAndL1(torch.autograd.Function):
    """Loss and gradient at once, in fewer passes over the table than autograd.

    The cross-entropy's gradient is draft - target; the distance's is draft * (sign - sum(draft * sign)), with the sign
    of draft - target (1 at ties).
    """

    @staticmethod
    def forward(ctx: Any, draft_logits_MD: Tensor, target_probs_MD: Tensor, distance: float) -> Tensor:
        draft_probs_MD = draft_logits_MD.softmax(-1)
        log_sum_M = draft_logits_MD.amax(-1) - draft_probs_MD.amax(-1).log()
        with torch.autocast(draft_logits_MD.device.type, enabled=False):
            expected_M = torch.bmm(target_probs_MD[:, None], draft_logits_MD[:, :, None])[:, 0, 0]
        loss_M = (1 - distance) * (log_sum_M - expected_M)
        if distance:
            loss_M += distance * 2 * (1 - torch.minimum(draft_probs_MD, target_probs_MD).sum(-1))
        if ctx.needs_input_grad[0]:
            gradient_MD = draft_probs_MD - target_probs_MD
            if distance:
                signed_MD = torch.copysign(draft_probs_MD, gradient_MD)
                gradient_MD.mul_(1 - distance).add_(signed_MD, alpha=distance)
                gradient_MD.addcmul_(draft_probs_MD, signed_MD.sum(-1, keepdim=True), value=-distance)
            ctx.save_for_backward(gradient_MD)
        return loss_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_M: Tensor) -> tuple[Tensor, None, None]:
        (gradient_MD,) = ctx.saved_tensors
        return gradient_MD * upstream_M[:, None], None, None


def smooth_l1(feature_ME: Tensor, final_ME: Tensor) -> Tensor:
    """Smooth L1 distance of drafted features to the target's final states, averaged over components, [M].

    EAGLE (Li et al., arXiv 2401.15077) weighs it 1, and its cross-entropy 0.1.
    """
    return F.smooth_l1_loss(feature_ME.float(), final_ME.float(), reduction="none").mean(-1)


def shared_mass(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """alpha of each prediction, [M]: the shared mass of the two distributions, from 0 to 1."""
    return torch.minimum(draft_logits_MD.softmax(-1), target_probs_MD).sum(-1)


LOSSES: dict[str, Loss] = {"soft_ce": soft_ce, "hard_ce": hard_ce, "tv_ce": tv_ce, "half_l1": half_l1}
"""Losses by recipe name (`LossName`)."""


# -- position weights ------------------------------------------------------------------------------------------------


def exponential(origins: Sequence[Tensor], step_weight: float) -> list[Tensor]:
    """`step_weight ** k` for every prediction of step k (Medusa, arXiv 2401.10774; EAGLE-3, arXiv 2503.01840).

    `origins` are int64 [M] for each step; the weights are float32 [M].
    """
    return [torch.full(part_M.shape, step_weight**step, device=part_M.device) for step, part_M in enumerate(origins)]


def dpace(origins: Sequence[Tensor], alphas: Sequence[Tensor]) -> list[Tensor]:
    """D-PACE (arXiv 2605.18810, equations 7 and 8): w_k = sum over j >= k of prod over i <= j of (0.5 alpha_i + 0.5).

    The product is the probability that a draft reaches step j, smoothed so that a weak step does not silence later
    ones; w_k is the derivative of the expected draft length by the logarithm of step k's factor. The paper's alpha_i is
    the draft's probability of the token that the target chose; here it is the shared mass, the same if the target's
    distribution is one-hot. A draft that ends early has no terms after its end.

    `origins` ascend, and each step's are a subset of the first step's. `alphas` are [M] for each step, in [0, 1]; the
    weights are float32 [M], up to K at the first step.
    """
    drafts = [torch.searchsorted(origins[0], origin_M) for origin_M in origins]
    reached_KO = torch.zeros(len(origins), len(origins[0]), device=origins[0].device)
    for step, (draft_M, alpha_M) in enumerate(zip(drafts, alphas, strict=True)):
        reached_KO[step, draft_M] = (1 - _SMOOTHING) * alpha_M.float() + _SMOOTHING
    reached_KO = reached_KO.cumprod(0)
    weights_KO = reached_KO.flip(0).cumsum(0).flip(0)
    return [weights_KO[step, draft_M] for step, draft_M in enumerate(drafts)]
