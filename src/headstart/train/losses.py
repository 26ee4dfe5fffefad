"""Losses between what a head drafts and what the target would have said, both over the draft vocabulary.

A loss is a plain function (draft logits [M, D], target probabilities [M, D]) -> one number per prediction [M], in
float32; any family trains with any of them. `alpha`, the mass the two distributions share, is the chance that a draft
sampled from the head is accepted by lossless verification.

`summed` runs a loss over a few rows at a time and keeps nothing but its gradient, so the float32 copies of a
[M, D] table of logits never exist at once. Its reference is the loss applied to the whole table.

Shape suffixes: B rows, T tokens, X = B * T flat positions, S positions that precede a supervised token, M predictions
of one step, D draft vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.errors import UserError, nearest
from headstart.heads import HeadBatch, StepPrediction
from headstart.target import FINAL, Target

Loss = Callable[[Tensor, Tensor], Tensor]

_TINY = torch.finfo(torch.float32).tiny
_CHUNK = {"cpu": 1 << 19}
"""Numbers of a [rows, D] chunk: on a CPU it fits the cache (2 MB of float32), elsewhere it only bounds memory."""
_CHUNK_ELSEWHERE = 1 << 26


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


def tv(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Total variation, 1 - alpha: the chance that a sampled draft is rejected."""
    return 1 - _alpha(draft_logits_MD, target_probs_MD)


def nla(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Negative log of alpha: like total variation, with a gradient that grows where the head is far off."""
    return -_alpha(draft_logits_MD, target_probs_MD).clamp_min(_TINY).log()


def lk(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    """Hybrid lambda * KL + (1 - lambda) * TV with lambda = exp(-3 alpha), alpha held fixed (arXiv 2602.23881).

    KL teaches while the head is weak, total variation takes over as alpha grows.
    """
    alpha_M = _alpha(draft_logits_MD, target_probs_MD)
    entropy_M: Tensor = -torch.special.xlogy(target_probs_MD, target_probs_MD).sum(-1)
    forward_kl_M: Tensor = soft_ce(draft_logits_MD, target_probs_MD) - entropy_M
    weight_M: Tensor = torch.exp(-3 * alpha_M.detach())
    mixed_M: Tensor = weight_M * forward_kl_M + (1 - weight_M) * (1 - alpha_M)
    return mixed_M


def _alpha(draft_logits_MD: Tensor, target_probs_MD: Tensor) -> Tensor:
    return torch.minimum(draft_logits_MD.softmax(-1), target_probs_MD).sum(-1)


LOSSES: dict[str, Loss] = {
    "soft_ce": soft_ce,
    "hard_ce": hard_ce,
    "reverse_kl": reverse_kl,
    "tv": tv,
    "nla": nla,
    "lk": lk,
}


def find_loss(name: str) -> Loss:
    """The loss called `name`.

    Raises:
        UserError: when there is none; the message names the nearest.
    """
    if name not in LOSSES:
        raise UserError(f"Unknown loss {name!r}.", nearest(name, LOSSES))
    return LOSSES[name]


class Teacher:
    """The target's LM head, cut to the draft vocabulary.

    Args:
        target: the frozen model.
        draft_to_target_D: int64, the target's token id of each draft token.
    """

    def __init__(self, target: Target, draft_to_target_D: Tensor) -> None:
        self._target = target
        head = target.model.get_output_embeddings()
        whole = len(draft_to_target_D) == target.vocab_size
        ids_D = draft_to_target_D.to(target.device)
        bias = getattr(head, "bias", None)
        self._weight_DE: Tensor = head.weight.detach() if whole else head.weight.detach()[ids_D]
        self._bias_D: Tensor | None = bias if bias is None or whole else bias.detach()[ids_D]

    @torch.no_grad()
    def read(self, batch: HeadBatch) -> Lesson:
        """What the target would say at every place of a batch that a draft step can be asked about.

        The logits are computed once here, although most positions are used by several steps.
        """
        before_BT = torch.zeros_like(batch.supervised_BT)
        before_BT[:, :-1] = batch.supervised_BT[:, 1:]
        positions_S = before_BT.flatten().nonzero()[:, 0]
        row_X = torch.full((before_BT.numel(),), -1, device=before_BT.device)
        row_X[positions_S] = torch.arange(len(positions_S), device=before_BT.device)
        final_SE = batch.states[FINAL].flatten(0, 1)[positions_S].to(self._weight_DE.dtype)
        with torch.autocast(final_SE.device.type, enabled=False):
            logits_SD = self._target.scale_logits(F.linear(final_SE, self._weight_DE, self._bias_D))
        return Lesson(logits_SD, row_X)


@dataclass
class Lesson:
    """The target's logits over the draft vocabulary for one batch.

    Attributes:
        logits_SD: in the target's dtype.
        row_X: int64, the row of `logits_SD` that belongs to a flat position, -1 where no supervised token follows.
    """

    logits_SD: Tensor
    row_X: Tensor

    def rows(self, source_M: Tensor) -> Tensor:
        """Rows of `logits_SD` for flat positions, all of which precede a supervised token."""
        rows_M = self.row_X[source_M]
        assert not (rows_M < 0).any(), "a step predicts supervised tokens only"
        return rows_M


def summed(loss: Loss, logits_MD: Tensor, lesson: Lesson, source_M: Tensor) -> Tensor:
    """Sum of a loss over all predictions of a step: a float32 scalar with a gradient on `logits_MD`."""
    assert logits_MD.shape[0] == source_M.shape[0], "one source for each prediction"
    apply: Callable[..., Tensor] = _Summed.apply
    return apply(logits_MD, loss, lesson, source_M)


def weighted(predictions: Iterable[StepPrediction], loss: Loss, lesson: Lesson, step_weight: float) -> Tensor:
    """Sum over steps k of `step_weight ** k` times the step's summed loss: a float32 scalar, not yet normalised."""
    total = torch.zeros((), device=lesson.logits_SD.device)
    for step, prediction in enumerate(predictions):
        total = total + step_weight**step * summed(loss, prediction.logits_MD, lesson, prediction.source_M)
    return total


class _Summed(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows; the gradient is kept in the dtype of the logits."""

    @staticmethod
    def forward(ctx: Any, logits_MD: Tensor, loss: Loss, lesson: Lesson, source_M: Tensor) -> Tensor:
        height = max(1, _CHUNK.get(logits_MD.device.type, _CHUNK_ELSEWHERE) // logits_MD.shape[1])
        kind = torch.promote_types(logits_MD.dtype, torch.float32)
        rows_M = lesson.rows(source_M)
        total = torch.zeros((), dtype=kind, device=logits_MD.device)
        learning = ctx.needs_input_grad[0]
        gradient_MD = torch.empty_like(logits_MD) if learning else None
        with torch.autocast(logits_MD.device.type, enabled=False), torch.set_grad_enabled(learning):
            for start in range(0, logits_MD.shape[0], height):
                part = slice(start, start + height)
                chunk = logits_MD[part].detach().to(kind).requires_grad_(learning)
                target_probs = lesson.logits_SD[rows_M[part]].softmax(-1, dtype=kind)
                part_sum = loss(chunk, target_probs).sum()
                if gradient_MD is not None:
                    gradient_MD[part] = torch.autograd.grad(part_sum, chunk)[0]
                total += part_sum.detach()
        ctx.save_for_backward(gradient_MD)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_MD,) = ctx.saved_tensors
        return gradient_MD.mul_(upstream), None, None, None  # in place: autograd refuses a second use by itself
