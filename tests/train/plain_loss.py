"""The reference of `sum_losses`, on the full table of logits.

Shape suffixes: M predictions of one step, D draft vocabulary, S rows of the teacher logits, K candidates.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headstart.heads.base import StepPrediction
from headstart.train.fused_loss import TeacherLogits
from headstart.train.losses import Loss


def sum_losses_plain(loss: Loss, prediction: StepPrediction, teacher_logits: TeacherLogits, weight_M: Tensor) -> Tensor:
    """Return what `sum_losses` returns."""
    candidates, logits_MD = prediction.candidates, replace(prediction, candidates=None).logits_MD
    logits_MD = logits_MD.to(torch.promote_types(logits_MD.dtype, torch.float32))
    table_SD, rows_M = teacher_logits.table(teacher_logits.rows(prediction.teacher_M))
    target_probs_MD = table_SD[rows_M].softmax(-1, dtype=logits_MD.dtype)
    loss_M = loss(logits_MD, target_probs_MD)
    if candidates is not None:
        top_MK = candidates.top(logits_MD, target_probs_MD.argmax(-1))
        pairs_MD = candidates.parents_MWR[:, 0] @ candidates.table_DR.T
        chosen = ((logits_MD + pairs_MD).gather(1, top_MK), target_probs_MD.gather(1, top_MK))
        loss_M = loss_M + loss(chosen[0], chosen[1] / chosen[1].sum(-1, keepdim=True))
    return (weight_M * loss_M).sum()
