"""Validation: how often each draft step names the token that the target itself would choose.

Shape suffixes: B rows (of a batch, or of a block of logits), T tokens, X = B * T flat positions, M predictions of one
step, D draft vocabulary, R ranks, V target vocabulary, E hidden size, K draft steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.data.states.store import States
from headstart.errors import UserError
from headstart.heads.base import HeadBatch, StepPrediction, supervised_origins
from headstart.target.few_rows import argmax
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel
from headstart.train.summing import logits_by_block, positions_before_answers

TOPS = (1, 4, 8)
"""Ranks counted: the target's choice is among the head's best 1, 4, 8."""

_ROWS = 512
"""Positions whose logits over the whole vocabulary exist at once."""


@dataclass(frozen=True)
class Validation:
    """What validation measures.

    `accuracy` is {"top1": [one share for each step], "top4": ..., "top8": ...}: the share of predictions whose best 1,
    4 or 8 drafts hold the target's own most likely token (of its whole vocabulary: a token that the heads cannot draft
    is a miss). Step k is judged on its own, whatever the steps before it said.

    `tau` is the predicted tokens per round of a greedy chain of all steps, 1 + sum over k of P(steps 0..k all right),
    counted jointly along each draft; 1 is plain decoding. Each P, in `chain`, is over drafts that reach that deep
    before the answer ends. `predictions` counts those of each step.
    """

    accuracy: dict[str, list[float]]
    chain: list[float]
    predictions: list[int]

    @property
    def tau(self) -> float:
        return 1 + sum(self.chain)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, rounded to what is worth reading."""
        return {
            "tau": round(self.tau, 4),
            **{
                name: [round(share, 4) for share in shares]
                for name, shares in {**self.accuracy, "chain": self.chain}.items()
            },
            "predictions": self.predictions,
        }


@torch.no_grad()
def chosen_tokens(target: FrozenModel, batch: HeadBatch) -> Tensor:
    """The token that the target chooses greedily after each flat position, int64 [X]; -1 where nothing is judged."""
    positions_S = positions_before_answers(batch)
    final_XE = batch.states[FINAL].flatten(0, 1)
    chosen_X = torch.full((final_XE.shape[0],), -1, device=final_XE.device)
    for part_S in torch.split(positions_S, _ROWS):
        chosen_X[part_S] = argmax(target.lm_head(final_XE[part_S].to(target.dtype)))
    return chosen_X


class Tally:
    """Counts over the batches of one validation, kept as one tensor so that processes can add theirs up.

    Attributes:
        counts_KC: float64 [K, 2 + len(TOPS)]: predictions, drafts right up to and with this step, hits by `TOPS`.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.counts_KC = torch.zeros(steps, 2 + len(TOPS), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, predictions: Iterable[StepPrediction], draft_to_target_D: Tensor, chosen_X: Tensor) -> None:
        """Judge one batch's predictions; `chosen_X` is from `chosen_tokens`."""
        alive_X = torch.ones_like(chosen_X, dtype=torch.bool)
        for step, prediction in enumerate(predictions):
            ranks = min(max(TOPS), len(draft_to_target_D))
            best = [logits_BD.topk(ranks, dim=-1).indices for _, logits_BD in logits_by_block(prediction)]
            drafts_MR = draft_to_target_D[torch.cat([draft_to_target_D.new_zeros(0, ranks), *best])]
            hits_MR = drafts_MR == chosen_X[prediction.teacher_M][:, None]
            right_M = hits_MR[:, 0] & alive_X[prediction.origin_M]
            alive_X = torch.zeros_like(alive_X).index_put_((prediction.origin_M,), right_M)
            self.counts_KC[step, 0] += len(right_M)
            self.counts_KC[step, 1] += right_M.sum()
            for column, top in enumerate(TOPS):
                self.counts_KC[step, 2 + column] += hits_MR[:, :top].any(-1).sum()

    def result(self) -> Validation:
        counts = self.counts_KC.cpu()
        shares_KC = (counts[:, 1:] / counts[:, :1].clamp_min(1)).tolist()
        return Validation(
            accuracy={f"top{top}": [row[1 + i] for row in shares_KC] for i, top in enumerate(TOPS)},
            chain=[row[0] for row in shares_KC],
            predictions=[int(count) for count in counts[:, 0].tolist()],
        )


def pick_vocabulary(counts_V: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The draft vocabulary, int64 [size], sorted: the most frequent tokens, ties by id, with `always` among them (those
    that end a turn). `counts_V` says how often each token is supervised in the training data.

    >>> pick_vocabulary(torch.tensor([5, 0, 9, 5, 0, 7]), 3, always=[1]).tolist()
    [1, 2, 5]
    >>> pick_vocabulary(torch.tensor([5, 0, 9, 5, 0, 7]), 3, always=[]).tolist()
    [0, 2, 5]
    """
    assert len(always) <= size <= len(counts_V), "the draft vocabulary has room for what must be in it"
    weights = counts_V.clone()
    weights[list(always)] = torch.iinfo(torch.int64).max
    return weights.sort(descending=True, stable=True).indices[:size].sort().values


def draftable_share(store: States, vocab_size: int, draft_to_target_D: Tensor) -> float:
    """Share of the validation data's supervised tokens, if there are any, that the heads can draft at all."""
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
