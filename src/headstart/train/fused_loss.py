"""Weighted sums of a batch's losses, with their gradients.

`sum_losses` computes the loss and its gradients from LM head inputs in one pass over blocks of rows, so the logits of
all predictions never exist at once.

Shape suffixes: B rows of a block, C rows of a chunk, X flat positions of a batch, S positions that precede a supervised
token, U distinct rows of the teacher logits, M predictions of one step (or of several with one LM head), D draft
vocabulary, L loss tokens, R draft tokens other than the likely ones (in a candidate table: rank), W parents of a
candidate (one), K candidates, E hidden size, H LM head inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from headstart.heads.base import HeadBatch, StepPrediction
from headstart.heads.candidates import Candidates
from headstart.model.frozen import FrozenModel
from headstart.recipes.sections import PositionWeight
from headstart.replay.patch import FINAL
from headstart.support.uploads import upload
from headstart.train.losses import Loss, dpace, exponential, shared_mass, smooth_l1

# Maximum elements of a tensor of logits, on a CPU and on other devices; `_BLOCK_ROWS` rows may exceed `_BLOCK`.
_BLOCK = {"cpu": 1 << 24, "other": 1 << 27}  # per LM head product: 32 MB of bfloat16 on a CPU
_CHUNK = {"cpu": 1 << 19, "other": 1 << 26}  # per loss evaluation: 2 MB of float32, which fit a CPU's cache
_TABLE = {"cpu": 1 << 28, "other": 1 << 30}  # a larger teacher-logit table is not materialised but recomputed per block

_BLOCK_ROWS = 512  # any block may have this many rows: each reads the LM head and accumulates its gradient once
_SAMPLED_FRACTION = 0.2  # fraction of the loss tokens sampled from the unlikely ones
_STRIDE, _MIN_POSITIONS = 4, 512
"""Stride of the positions that choose the loss tokens: reduced to keep at least `_MIN_POSITIONS` of them, or raised
until their logits fit `_TABLE`."""


def positions_before_answers(batch: HeadBatch) -> Tensor:
    """Return the flat positions that precede a supervised token, int64 [S], on the device of the batch."""
    before_BT = torch.zeros_like(batch.supervised_BT)
    before_BT[:, :-1] = batch.supervised_BT[:, 1:]
    return upload(before_BT.flatten().nonzero()[:, 0], batch.tokens_BT.device)


class Teacher:
    """The target's LM head over the draft vocabulary `draft_to_target_D`. Losses use `loss_tokens` of these tokens,
    chosen per batch (`choose_loss_tokens`); 0 uses all."""

    def __init__(self, target: FrozenModel, draft_to_target_D: Tensor, loss_tokens: int = 0) -> None:
        drafts = len(draft_to_target_D)
        self._target, self._loss_tokens = target, min(loss_tokens or drafts, drafts)
        weight, bias = target.lm_head_weight.detach(), target.lm_head_bias
        self._ids_D = draft_to_target_D.to(target.device)
        if drafts < target.vocab_size:
            ids_D = draft_to_target_D.to(weight.device)
            weight, bias = weight[ids_D], None if bias is None else bias.detach()[ids_D]
        self._weight_DE = weight.to(target.device)
        self._bias_D = None if bias is None else bias.to(target.device)

    @torch.no_grad()
    def logits(self, batch: HeadBatch, seed: Sequence[int] = ()) -> TeacherLogits:
        """Return the target's logits at all positions before supervised tokens. They are materialised once, because
        steps share positions, or computed on demand above `_TABLE`. A `seed` always samples the same loss tokens."""
        positions_S = positions_before_answers(batch)
        row_X = torch.full((batch.supervised_BT.numel(),), -1, device=positions_S.device)
        row_X[positions_S] = torch.arange(len(positions_S), device=positions_S.device)
        final_SE = batch.states[FINAL].flatten(0, 1)[positions_S].to(self._weight_DE.dtype)
        drafts, limit, loss_tokens = len(self._weight_DE), _limit(_TABLE, final_SE), None
        if self._loss_tokens < drafts:
            stride = max(1, min(_STRIDE, len(final_SE) // _MIN_POSITIONS), -(-len(final_SE) * drafts // limit))
            counts_D = self._counts(batch.tokens_BT.flatten()[positions_S + 1])
            loss_tokens = choose_loss_tokens(self._compute(final_SE[::stride]), counts_D, self._loss_tokens, seed)
        compute = partial(self._compute, loss_tokens=loss_tokens)
        table = None if len(final_SE) * self._loss_tokens > limit else compute(final_SE)
        return TeacherLogits(table, final_SE, row_X, compute, loss_tokens)

    def _counts(self, tokens_S: Tensor) -> Tensor:
        """Count each draft token, [D]."""
        index_S = torch.searchsorted(self._ids_D, tokens_S).clamp_max(len(self._ids_D) - 1)
        # bincount would synchronise with the device.
        return torch.zeros_like(self._ids_D).index_add_(0, index_S, (self._ids_D[index_S] == tokens_S).long())

    @torch.no_grad()
    def _compute(self, final_SE: Tensor, loss_tokens: LossTokens | None = None) -> Tensor:
        weight, bias = self._weight_DE, self._bias_D
        if loss_tokens is not None:
            weight, bias = weight[loss_tokens.ids_L], None if bias is None else bias[loss_tokens.ids_L]
        with torch.autocast(final_SE.device.type, enabled=False):
            logits = self._target.logit_transform(F.linear(final_SE, weight, bias))
        return logits if loss_tokens is None else loss_tokens.shift(logits)


class LossTokens(NamedTuple):
    """Sampled draft tokens, int64 [L], and the shift of their logits, float32 [L]."""

    ids_L: Tensor
    shift_L: Tensor

    def shift(self, logits: Tensor, transform: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Shift logits [..., L], at least in float32: bfloat16 would round the shift."""
        logits = logits if transform is None else transform(logits)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)) + self.shift_L


@dataclass
class TeacherLogits:
    """The target's logits over the draft vocabulary for one batch, in the target's dtype, and its final states.

    With loss tokens the table is [S, L] and at least float32. Without a table, `compute` maps final states to logits.
    `row_X` (int64) maps flat positions to rows, -1 where no supervised token follows.
    """

    logits_SD: Tensor | None
    final_SE: Tensor
    row_X: Tensor
    compute: Callable[[Tensor], Tensor] | None = None
    loss_tokens: LossTokens | None = None

    def restrict(self, steps: list[StepPrediction]) -> list[StepPrediction]:
        """Restrict predictions to the loss tokens; steps that share an LM head still share it."""
        if self.loss_tokens is None:
            return steps
        ids_L, restricted = self.loss_tokens.ids_L, list(steps)
        for members in _by_lm_head(steps):
            lm_head_LH = steps[members[0]].lm_head_DH.index_select(0, ids_L)
            for member in members:
                step = steps[member]
                bias_L = None if step.bias_D is None else step.bias_D[ids_L]
                shift = partial(self.loss_tokens.shift, transform=step.logit_transform)
                restricted[member] = replace(step, lm_head_DH=lm_head_LH, bias_D=bias_L, logit_transform=shift)
                if (pairs := step.candidates) is not None:
                    pairs = replace(pairs, table_DR=pairs.table_DR[ids_L], shift_D=self.loss_tokens.shift_L)
                    restricted[member].candidates = pairs
        return restricted

    def rows(self, teacher_M: Tensor) -> Tensor:
        """Rows of the teacher logits for flat positions before supervised tokens."""
        rows_M = self.row_X[teacher_M]
        torch._assert_async((rows_M >= 0).all(), "a step predicts supervised tokens only")
        return rows_M

    def table(self, rows_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return a table of logits, and the indices of a block's rows in it."""
        if self.logits_SD is not None:
            return self.logits_SD, rows_B
        assert self.compute is not None, "logits come from a table or are computed"
        distinct_U, index_B = torch.unique(rows_B, return_inverse=True)
        return self.compute(self.final_SE[distinct_U]), index_B


def choose_loss_tokens(logits_SD: Tensor, counts_D: Tensor, count: int, seed: Sequence[int]) -> LossTokens:
    """Choose the loss tokens of a batch ("sampled softmax", Jean et al., arXiv 1412.2007).

    They are the most likely tokens, by their counts in the batch's answers and the target's probabilities at some
    positions, and a fraction `_SAMPLED_FRACTION` sampled from the rest by `seed`. Logits of sampled tokens get the log
    inverse sampling probability added, in teacher and draft (sampled-softmax correction). Sums of exp(logit) over
    tokens (the softmax denominator) are then unbiased, and the softmax nearly so if the rest has little mass.

    >>> logits_SD = torch.tensor([[0.0, 5.0, 1.0, 4.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0]])
    >>> counts_D = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    >>> ids_L, shift_L = choose_loss_tokens(logits_SD, counts_D, 5, seed=[0])  # the last is one of six
    >>> ids_L.tolist(), shift_L.exp().round().tolist()
    ([7, 1, 3, 5, 8], [1.0, 1.0, 1.0, 1.0, 6.0])
    """
    mass_D = counts_D.to(logits_SD.device, torch.float32)
    for chunk in _chunks(logits_SD):
        mass_D += logits_SD[chunk].softmax(-1, dtype=torch.float32).sum(0)
    order_D = mass_D.argsort(descending=True, stable=True)
    likely = count - round(_SAMPLED_FRACTION * count)
    rest_R = order_D[likely:]
    random = np.random.default_rng([*seed, count]).choice(len(rest_R), count - likely, replace=False)
    ids_L = torch.cat([order_D[:likely], rest_R[upload(torch.from_numpy(random), rest_R.device)]])
    shift_L = torch.zeros(count, device=logits_SD.device)
    shift_L[likely:] = math.log(len(rest_R) / (count - likely))
    return LossTokens(ids_L, shift_L)


def batch_loss(
    predictions: Iterable[StepPrediction],
    loss: Loss,
    teacher_logits: TeacherLogits,
    step_weight: float,
    position_weight: PositionWeight = "exponential",
    feature_weight: float = 0.0,
) -> Tensor:
    """Sum the weighted losses of all predictions of a batch: a float32 scalar, not yet normalised.

    With `exponential` position weights, step k weighs `step_weight ** k`. `dpace` (`headstart.train.losses`) costs one
    more LM head product, for alphas. `subsampled` weighs all steps equally, for a batch from `batches.subsample`.
    `feature_weight` scales `smooth_l1` between drafted features and final states. Confidences learn alpha by binary
    cross-entropy. Pairwise scores add `loss` over the candidates, with the target's most likely token among them. All
    use the same position weights.
    """
    steps = teacher_logits.restrict(list(predictions))
    weights = _position_weights(steps, teacher_logits, step_weight, position_weight)
    total = torch.zeros((), device=teacher_logits.final_SE.device)
    for members in _by_lm_head(steps):
        prediction, weight_M = _concatenate(
            [steps[step] for step in members],
            [weights[step] for step in members],
            by_position=teacher_logits.logits_SD is None,
        )
        confidence_M = prediction.confidence_M
        alpha_M = None if confidence_M is None else torch.zeros_like(weight_M)
        total = total + sum_losses(loss, prediction, teacher_logits, weight_M, alpha_M)
        if alpha_M is not None and confidence_M is not None:
            error_M = F.binary_cross_entropy_with_logits(confidence_M.float(), alpha_M, reduction="none")
            total = total + (weight_M * error_M).sum()
    if feature_weight:
        for step, weight_M in zip(steps, weights, strict=True):
            assert step.feature_ME is not None, "refused before: these heads draft no features"
            final_ME = teacher_logits.final_SE[teacher_logits.rows(step.teacher_M)]
            total = total + feature_weight * (weight_M * smooth_l1(step.feature_ME, final_ME)).sum()
    return total


def _by_lm_head(steps: Sequence[StepPrediction]) -> list[list[int]]:
    """Group steps by LM head, so that each head is cast once and has one gradient table."""
    members: dict[int, list[int]] = {}
    for step, prediction in enumerate(steps):
        members.setdefault(id(prediction.lm_head_DH), []).append(step)
    return list(members.values())


def _concatenate(
    steps: Sequence[StepPrediction], weights: Sequence[Tensor], by_position: bool
) -> tuple[StepPrediction, Tensor]:
    """Concatenate predictions that share an LM head, without features, and their weights. `by_position` sorts them by
    teacher position, so that steps share computed teacher logits."""
    teacher_M = torch.cat([step.teacher_M for step in steps])
    order_M = teacher_M.argsort(stable=True) if by_position else slice(None)
    confidences = [step.confidence_M for step in steps if step.confidence_M is not None]
    candidates = steps[0].candidates
    if candidates is not None:
        parents = [step.candidates.parents_MWR for step in steps if step.candidates is not None]
        candidates = replace(candidates, parents_MWR=torch.cat(parents)[order_M])
    prediction = replace(
        steps[0],
        hidden_MH=torch.cat([step.hidden_MH for step in steps])[order_M],
        teacher_M=teacher_M[order_M],
        origin_M=torch.cat([step.origin_M for step in steps])[order_M],
        confidence_M=torch.cat(confidences)[order_M] if confidences else None,
        candidates=candidates,
        feature_ME=None,
    )
    return prediction, torch.cat(list(weights))[order_M]


def _position_weights(
    steps: Sequence[StepPrediction], teacher_logits: TeacherLogits, step_weight: float, position_weight: PositionWeight
) -> list[Tensor]:
    origins = [step.origin_M for step in steps]
    if position_weight == "dpace" and steps:
        return dpace(origins, [alphas(step, teacher_logits) for step in steps])
    # Subsampled drafts end early instead of weighing less with each step.
    return exponential(origins, 1.0 if position_weight == "subsampled" else step_weight)


@torch.no_grad()
def alphas(prediction: StepPrediction, teacher_logits: TeacherLogits) -> Tensor:
    """Compute alpha of a step's drafts over the loss tokens, [M]."""
    rows_M = teacher_logits.rows(prediction.teacher_M)
    shift_D = None if prediction.candidates is None else prediction.candidates.shift_D
    parts = [torch.zeros(0, device=rows_M.device)]
    for block, logits_BD in logits_by_block(prediction):
        table_SD, rows_B = teacher_logits.table(rows_M[block])
        for chunk in _chunks(logits_BD):
            target_probs_CD = table_SD[rows_B[chunk]].float().softmax(-1)
            if shift_D is not None:
                target_probs_CD *= (-shift_D).exp()
            parts.append(shared_mass(logits_BD[chunk].float(), target_probs_CD))
    return torch.cat(parts)


def logits_by_block(prediction: StepPrediction) -> Iterator[tuple[slice, Tensor]]:
    """Yield a step's logits [B, D] in blocks of rows."""
    hidden_MH, lm_head_DH = _operands(prediction.hidden_MH, prediction.lm_head_DH)
    for block in _blocks(hidden_MH, lm_head_DH):
        product_BD = F.linear(hidden_MH[block], lm_head_DH, _like(prediction.bias_D, lm_head_DH))
        yield block, prediction.select(product_BD, block)


def sum_losses(
    loss: Loss,
    prediction: StepPrediction,
    teacher_logits: TeacherLogits,
    weight_M: Tensor,
    alpha_M: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of a loss over predictions that share an LM head: a float32 scalar.

    Gradients flow to the LM head's inputs and its trained columns, and to the inputs of pairwise scores; weights are
    constants. `alpha_M`, if given, is filled with each prediction's alpha.
    """
    hidden_MH, lm_head_DH, candidates = prediction.hidden_MH, prediction.lm_head_DH, prediction.candidates
    assert len(hidden_MH) == len(prediction.teacher_M) == len(weight_M), "a teacher position and weight for each"
    apply: Callable[..., Tensor] = _FusedLoss.apply
    pairs = (None, None) if candidates is None else (candidates.parents_MWR, candidates.table_DR)
    return apply(hidden_MH, lm_head_DH, *pairs, loss, prediction, teacher_logits, weight_M, alpha_M)


class _FusedLoss(torch.autograd.Function):
    """Loss and gradients in one pass.

    A block's logits are replaced in place by their gradient, which is backpropagated through the LM head at once. Under
    autocast products use its dtype, as a linear layer's would; the LM head's gradient accumulates in float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        lm_head_DH: Tensor,
        parents_MWR: Tensor | None,
        table_DR: Tensor | None,
        loss: Loss,
        prediction: StepPrediction,
        teacher_logits: TeacherLogits,
        weight_M: Tensor,
        alpha_M: Tensor | None,
    ) -> Tensor:
        logit_transform, trained_columns = prediction.logit_transform, slice(prediction.frozen_columns, None)
        read_MH, head_DH = _operands(hidden_MH, lm_head_DH)
        dtype = torch.promote_types(read_MH.dtype, torch.float32)
        # float16 gradients underflow unscaled, and the scale only arrives with the backward pass.
        gradient_dtype = dtype if read_MH.dtype == torch.float16 else read_MH.dtype
        rows_M, bias_D = teacher_logits.rows(prediction.teacher_M), _like(prediction.bias_D, head_DH)
        total = torch.zeros((), dtype=dtype, device=hidden_MH.device)
        hidden_dtype = torch.promote_types(hidden_MH.dtype, gradient_dtype)
        hidden_gradient_MH = torch.empty_like(hidden_MH, dtype=hidden_dtype) if ctx.needs_input_grad[0] else None
        head_gradient_DH = torch.zeros_like(lm_head_DH, dtype=dtype) if ctx.needs_input_grad[1] else None
        pairs = None if prediction.candidates is None else _CandidateLoss(loss, prediction.candidates, dtype)
        differentiable = any(ctx.needs_input_grad)
        with torch.autocast(hidden_MH.device.type, enabled=False):
            for block in _blocks(read_MH, head_DH):
                logits_BD = F.linear(read_MH[block], head_DH, bias_D).to(gradient_dtype)
                table_SD, rows_B = teacher_logits.table(rows_M[block])
                for chunk in _chunks(logits_BD):
                    raw_CD = logits_BD[chunk].detach().to(dtype).requires_grad_(differentiable)
                    target_probs_CD = table_SD[rows_B[chunk]].softmax(-1, dtype=dtype)
                    with torch.set_grad_enabled(differentiable):
                        logits_CD = raw_CD if logit_transform is None else logit_transform(raw_CD)
                        loss_C = loss(logits_CD, target_probs_CD)
                        if pairs is not None:
                            loss_C = loss_C + pairs(logits_CD, target_probs_CD, block, chunk)
                        part = (weight_M[block][chunk] * loss_C).sum()
                    total += part.detach()
                    if alpha_M is not None:
                        alpha_M[block][chunk] = shared_mass(logits_CD.detach(), target_probs_CD)
                    if differentiable:
                        inputs = [raw_CD] if pairs is None else [raw_CD, *pairs.inputs]
                        logits_BD[chunk], *of_pairs = torch.autograd.grad(part, inputs)
                        if pairs is not None:
                            pairs.add(of_pairs, block, chunk)
                if hidden_gradient_MH is not None:
                    hidden_gradient_MH[block] = logits_BD @ head_DH.to(gradient_dtype)
                if head_gradient_DH is not None:
                    read_BH = read_MH[block, trained_columns].to(gradient_dtype)
                    head_gradient_DH[:, trained_columns] += logits_BD.T @ read_BH
        ctx.save_for_backward(
            hidden_gradient_MH, head_gradient_DH, *((None, None) if pairs is None else pairs.gradients)
        )
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Scaling the saved tensors in place is safe: autograd refuses a second backward pass.
        return *(None if saved is None else saved.mul_(upstream) for saved in ctx.saved_tensors), *[None] * 5


class _CandidateLoss:
    """Loss of pairwise scores, chunk by chunk, with the gradients of parents and table."""

    def __init__(self, loss: Loss, candidates: Candidates, dtype: torch.dtype) -> None:
        self._loss, self._candidates = loss, candidates
        self.gradients = [torch.zeros_like(one, dtype=dtype) for one in (candidates.parents_MWR, candidates.table_DR)]

    def __call__(self, logits_CD: Tensor, target_probs_CD: Tensor, block: slice, chunk: slice) -> Tensor:
        candidates = self._candidates.rows(block).rows(chunk)
        if (shift_D := candidates.shift_D) is not None:
            logits_CD, target_probs_CD = logits_CD - shift_D, target_probs_CD * (-shift_D).exp()
        self._top_CK = candidates.top(logits_CD, target_probs_CD.argmax(-1))
        read = candidates.parents_MWR, F.embedding(self._top_CK, candidates.table_DR)
        parents_CWR, rows_CKR = self.inputs = [one.detach().to(logits_CD.dtype).requires_grad_() for one in read]
        scores_CK = logits_CD.gather(1, self._top_CK) + (parents_CWR @ rows_CKR.mT)[:, 0]
        probs_CK = target_probs_CD.gather(1, self._top_CK)
        return self._loss(scores_CK, probs_CK / probs_CK.sum(-1, keepdim=True))

    def add(self, of_inputs: Sequence[Tensor], block: slice, chunk: slice) -> None:
        """Add the gradients of the last chunk's inputs."""
        self.gradients[0][block][chunk], rows_CKR = of_inputs
        self.gradients[1].index_add_(0, self._top_CK.flatten(), rows_CKR.flatten(0, 1))


def _like(bias_D: Tensor | None, lm_head_DH: Tensor) -> Tensor | None:
    return None if bias_D is None else bias_D.to(lm_head_DH.dtype)


def _operands(hidden_MH: Tensor, lm_head_DH: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to autocast's dtype, if enabled."""
    device = hidden_MH.device.type
    if not torch.is_autocast_enabled(device):
        return hidden_MH, lm_head_DH
    dtype = torch.get_autocast_dtype(device)
    return hidden_MH.to(dtype), lm_head_DH.to(dtype)


def _limit(limits: Mapping[str, int], tensor: Tensor) -> int:
    return limits["cpu" if tensor.device.type == "cpu" else "other"]


def _blocks(hidden_MH: Tensor, lm_head_DH: Tensor) -> list[slice]:
    return _slices(len(hidden_MH), max(_BLOCK_ROWS, _limit(_BLOCK, hidden_MH) // len(lm_head_DH)))


def _chunks(logits_BD: Tensor) -> list[slice]:
    return _slices(len(logits_BD), max(1, _limit(_CHUNK, logits_BD) // logits_BD.shape[1]))


def _slices(rows: int, maximum: int) -> list[slice]:
    """Split rows evenly into parts of at most `maximum`.

    >>> _slices(5, 2), _slices(0, 2)
    ([slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)], [])
    """
    height = -(-rows // max(1, -(-rows // maximum)))
    return [slice(start, min(rows, start + height)) for start in range(0, rows, max(1, height))]
