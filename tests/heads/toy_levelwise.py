"""A minimal family that drafts level by level, for the contract's suite.

The draft after a node reads the final state and the node's token, nothing in between.

Shape suffixes: B rows, W nodes of a level, E hidden size, K steps, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import DraftHead, HeadBatch, HeadConfig, StepPrediction, origins, register
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.tree.tree import Committed


class ToyConfig(HeadConfig):
    family: str = "toy-levelwise"
    num_steps: int = Field(2, ge=1, description="How many tokens ahead it looks.")


@dataclass
class ToySession:
    """State of each row's last committed token."""

    final_BE: Tensor


@register
class ToyHead(DraftHead):
    """The final state through a matrix of the step, plus the token's embedding."""

    Config: ClassVar[type[HeadConfig]] = ToyConfig
    config: ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.map_KEE = nn.Parameter(torch.zeros(config.num_steps, config.hidden_size, config.hidden_size))
        self.lm_head_DE = nn.Parameter(torch.zeros(config.draft_width, config.hidden_size))

    @property
    def draft_steps(self) -> int:
        return self.config.num_steps

    def warm_start(self, target: Target) -> None:
        self.bind(target)
        self.map_KEE.data.copy_(torch.eye(self.config.hidden_size).expand_as(self.map_KEE))
        self.lm_head_DE.data.copy_(self.first_lm_head(target))

    def mix(self, final: Tensor, tokens: Tensor, step: int) -> Tensor:
        """Return the LM head's input, [..., E]."""
        return final @ self.map_KEE[step].T + F.embedding(tokens, self.target_embeddings).to(final)

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        final_XE, tokens_X = batch.states[FINAL].flatten(0, 1), batch.tokens_BT.flatten()
        for step in range(self.draft_steps):
            origin_M = origins(batch, step)
            hidden_ME = self.mix(final_XE[origin_M], tokens_X[origin_M + step + 1], step)
            yield StepPrediction(hidden_ME, self.lm_head_DE, origin_M + step + 1, origin_M)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> ToySession:
        return ToySession(torch.stack([states[FINAL][row, len(prompt) - 1] for row, prompt in enumerate(prompts)]))

    def draft_step(self, session: ToySession, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        return self.mix(session.final_BE[:, None], tokens_BW, depth) @ self.lm_head_DE.T

    def commit(self, session: ToySession, committed: Committed) -> None:
        rows_B = torch.arange(len(committed.counts_B), device=committed.counts_B.device)
        session.final_BE = committed.states[FINAL][rows_B, committed.counts_B - 1]

    def reorder(self, session: ToySession, rows: Sequence[int]) -> None:
        session.final_BE = session.final_BE[list(rows)]

    def join(self, session: ToySession, other: ToySession) -> None:
        session.final_BE = torch.cat([session.final_BE, other.final_BE])
