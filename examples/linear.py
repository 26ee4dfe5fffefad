"""Linear heads: K linear maps on the target's last hidden state.

Head k at position t predicts token t + k + 2, as in Medusa. On tokens a b c d e (positions 0-4), from the state after
`b` (t = 1):

    head 0 -> d (3)      head 1 -> e (4)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, HeadConfig, OneForwardHead, StepPrediction, origins, register
from headstart.model.frozen import FrozenModel
from headstart.replay.patch import FINAL
from headstart.tree.tree import Committed


class LinearConfig(HeadConfig):
    family: str = "linear"
    num_heads: int = Field(2, ge=1, description="How many tokens ahead the heads look.")


@dataclass
class LinearSession:
    final_BE: Tensor


# OneForwardHead drafts all depths at once. Where a draft depends on those before it: DraftHead, with `draft_step`.
@register
class LinearHead(OneForwardHead):
    Config: ClassVar[type[HeadConfig]] = LinearConfig
    config: LinearConfig

    def __init__(self, config: LinearConfig) -> None:
        super().__init__(config)
        self.maps_KDE = nn.Parameter(torch.zeros(config.num_heads, config.draft_width, config.hidden_size))

    @property
    def draft_steps(self) -> int:
        return self.config.num_heads

    def warm_start(self, target: FrozenModel) -> None:
        self.maps_KDE.data.copy_(self.first_lm_head(target).to(self.maps_KDE).expand_as(self.maps_KDE))

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        final_XE = batch.states[FINAL].flatten(0, 1)
        for step in range(self.draft_steps):
            origin_M = origins(batch, step)
            yield StepPrediction(final_XE[origin_M], self.maps_KDE[step], origin_M + step + 1, origin_M)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> LinearSession:
        return LinearSession(torch.stack([states[FINAL][row, len(prompt) - 1] for row, prompt in enumerate(prompts)]))

    def depth_logits(self, session: LinearSession, root_B: Tensor, depths: range) -> Tensor:
        return torch.einsum("be,kde->bkd", session.final_BE, self.maps_KDE[depths.start : depths.stop])

    def commit(self, session: LinearSession, committed: Committed) -> None:
        rows_B = torch.arange(len(committed.counts_B), device=committed.counts_B.device)
        session.final_BE = committed.states[FINAL][rows_B, committed.counts_B - 1]

    def reorder(self, session: LinearSession, rows: Sequence[int]) -> None:
        session.final_BE = session.final_BE[list(rows)]

    def join(self, session: LinearSession, other: LinearSession) -> None:
        session.final_BE = torch.cat([session.final_BE, other.final_BE])
