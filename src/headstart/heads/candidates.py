"""Pairwise scores of the most likely drafts: a draft's logit plus the dot product of its table row with a vector for
the slot and parent. Other drafts get -inf.

Shape suffixes: M predictions (in drafting, slots), W parents of a prediction, K candidates, D draft vocabulary, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Inputs of pairwise scores: a vector per prediction and parent, and a table row per draft.

    Training with sampled loss tokens shifts logits by `shift_D`. Scores do without: their softmax has no other drafts.
    """

    parents_MWR: Tensor
    table_DR: Tensor
    count: int
    shift_D: Tensor | None = None

    def rows(self, rows: slice | list[int]) -> Candidates:
        return replace(self, parents_MWR=self.parents_MWR[rows])

    @torch.no_grad()
    def top(self, logits_MD: Tensor, required_M: Tensor | None = None) -> Tensor:
        """Return the indices of the most likely drafts, [M, K]; `required_M`, if missing, replaces the least likely."""
        top_MK = logits_MD.topk(min(self.count, logits_MD.shape[1])).indices
        if required_M is not None:
            missing_M = (top_MK != required_M[:, None]).all(1)
            top_MK[:, -1] = torch.where(missing_M, required_M, top_MK[:, -1])
        return top_MK

    def select(self, logits_MD: Tensor) -> Tensor:
        """Return the logits after each parent, [M, W, D]: the scores of the most likely drafts, -inf elsewhere.

        >>> table_DR, parents_MWR = torch.tensor([[0.0], [3.0], [9.0]]), torch.tensor([[[0.0], [1.0]]])
        >>> Candidates(parents_MWR, table_DR, 2).select(torch.tensor([[5.0, 4.0, 1.0]])).tolist()
        [[[5.0, 4.0, -inf], [5.0, 7.0, -inf]]]
        """
        logits_MD = logits_MD if self.shift_D is None else logits_MD - self.shift_D
        top_MK = self.top(logits_MD)
        pairs_MWK = self.parents_MWR @ F.embedding(top_MK, self.table_DR).to(self.parents_MWR.dtype).mT
        scores_MWK = (logits_MD.gather(1, top_MK)[:, None] + pairs_MWK).to(logits_MD.dtype)
        excluded = logits_MD.new_full((*scores_MWK.shape[:2], logits_MD.shape[1]), float("-inf"))
        return excluded.scatter(2, top_MK[:, None].expand_as(scores_MWK), scores_MWK)
