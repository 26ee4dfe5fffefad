"""Validation: how often each draft step predicts the target's greedy token.

Shape suffixes: B rows (of a batch, or of a block of logits), T tokens, X = B * T flat positions, S positions that
precede a supervised token, M predictions of one step, D draft vocabulary, R best drafts, V target vocabulary, E hidden
size, K draft steps, C counts of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.data.states.store import States
from headstart.errors import UserError
from headstart.heads.base import HeadBatch, StepPrediction, supervised_origins
from headstart.kernels.draft_kernels import argmax
from headstart.model.frozen import FrozenModel
from headstart.replay.patch import FINAL
from headstart.train.fused_loss import logits_by_block, positions_before_answers

TOPS = (1, 4, 8)  # top-k accuracies counted

_ROWS = 512  # positions per chunk of full-vocabulary logits


@dataclass(frozen=True)
class Validation:
    """Validation metrics.

    `accuracy` is {"top1": [one per step], "top4": ..., "top8": ...}: the fraction of predictions with the target's most
    likely token (of its whole vocabulary: undraftable tokens are misses) among the best 1, 4 or 8 drafts, for each step
    regardless of earlier steps.

    `tau` is the predicted tokens per round of a greedy chain, 1 + sum over k of P(steps 0..k all correct); 1 is plain
    decoding. `chain` holds each P; its denominator is the drafts long enough to have a step k. `predictions` counts
    each step's predictions.
    """

    accuracy: dict[str, list[float]]
    chain: list[float]
    predictions: list[int]

    @property
    def tau(self) -> float:
        return 1 + sum(self.chain)

    def to_json(self) -> dict[str, Any]:
        fractions = {**self.accuracy, "chain": self.chain}
        rounded = {name: [round(fraction, 4) for fraction in steps] for name, steps in fractions.items()}
        return {"tau": round(self.tau, 4), **rounded, "predictions": self.predictions}


@torch.no_grad()
def greedy_tokens(target: FrozenModel, batch: HeadBatch) -> Tensor:
    """The target's greedy token after each flat position, int64 [X]; -1 where no supervised token follows."""
    positions_S = positions_before_answers(batch)
    final_XE = batch.states[FINAL].flatten(0, 1)
    greedy_X = torch.full((final_XE.shape[0],), -1, device=final_XE.device)
    for part_S in torch.split(positions_S, _ROWS):
        greedy_X[part_S] = argmax(target.lm_head(final_XE[part_S].to(target.dtype)))
    return greedy_X


class Tally:
    """Counts of one validation in one tensor, for reduction over ranks."""

    def __init__(self, steps: int, device: torch.device) -> None:
        # By column: predictions, drafts correct up to this step, hits by `TOPS`.
        self.counts_KC = torch.zeros(steps, 2 + len(TOPS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, predictions: Iterable[StepPrediction], draft_to_target_D: Tensor, greedy_X: Tensor) -> None:
        """Count one batch's predictions; `greedy_X` is from `greedy_tokens`."""
        correct_X = torch.ones_like(greedy_X, dtype=torch.bool)  # drafts correct up to the previous step, by origin
        best_count = min(max(TOPS), len(draft_to_target_D))
        for step, prediction in enumerate(predictions):
            greedy_M = greedy_X[prediction.teacher_M]
            hits_MR = torch.zeros(len(greedy_M), best_count, dtype=torch.bool, device=greedy_M.device)
            for block, logits_BD in logits_by_block(prediction):
                best, index_BR = logits_BD.topk(best_count, dim=-1)
                hits_MR[block] = (draft_to_target_D[index_BR] == greedy_M[block][:, None]) & ~best.isneginf()
            correct_M = hits_MR[:, 0] & correct_X[prediction.origin_M]
            correct_X = torch.zeros_like(correct_X).index_put_((prediction.origin_M,), correct_M)
            self.counts_KC[step, 0] += len(correct_M)
            self.counts_KC[step, 1] += correct_M.sum()
            for column, top in enumerate(TOPS):
                self.counts_KC[step, 2 + column] += hits_MR[:, :top].any(-1).sum()

    def result(self) -> Validation:
        counts = self.counts_KC.cpu()
        chain, *accuracy = (counts[:, 1:] / counts[:, :1].clamp_min(1)).T.tolist()
        tops = (f"top{top}" for top in TOPS)
        return Validation(dict(zip(tops, accuracy, strict=True)), chain, counts[:, 0].long().tolist())


def draft_coverage(store: States, vocab_size: int, draft_to_target_D: Tensor) -> float:
    """Fraction of the validation data's supervised tokens in the draft vocabulary; a UserError without predictions."""
    counts_V = store.supervised_counts(vocab_size)
    if int(counts_V.sum()) == 0:
        raise UserError(
            "Nothing is supervised in the validation data.",
            "Raise data.validation, or look at the data with `headstart data show`.",
        )
    if not any(len(supervised_origins(mask_T[None], 0)) for mask_T in store.supervised()):
        raise UserError(
            "The validation data have nothing to predict: no answer has two tokens in a row.",
            "Raise data.validation or data.max_new_tokens, or look at the data with `headstart data show`.",
        )
    return float(counts_V[draft_to_target_D.cpu()].sum() / counts_V.sum())
