"""Medusa-1: K independent heads on the target's last hidden state (Cai et al., arXiv 2401.10774).

Head k (from 0) reads the final state h_t of the last token the target has read and predicts token t + k + 2; the
target's own LM head predicts token t + 1. On tokens a b c d e (positions 0-4), from the state after `b` (t = 1):

    target's LM head -> c (2)      head 0 -> d (3)      head 1 -> e (4)

>>> import torch
>>> supervised = torch.tensor([[False, False, True, True, True]])
>>> [positions(supervised, step).tolist() for step in range(2)]
[[1, 2], [1]]

Shape suffixes: B rows, T tokens, E hidden size, D draft vocabulary, M predictions, K heads, R ranks, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import DraftHead, HeadBatch, HeadConfig, StepPrediction, register
from headstart.target import FINAL, DraftTree, Target, TreeShape


class MedusaConfig(HeadConfig):
    """Settings of Medusa heads."""

    family: str = "medusa"
    num_heads: int = Field(4, ge=1, le=16, description="How many tokens ahead the heads look.")
    num_layers: int = Field(1, ge=1, le=8, description="Residual blocks in each head.")
    shared_lm_head: bool = Field(
        False, description="Read logits through the target's frozen LM head instead of one trained LM head per head."
    )


@dataclass
class MedusaState:
    """The final state of the last token that each row has committed, [B, E]."""

    final_BE: Tensor


@register
class MedusaHead(DraftHead):
    """K stacks of residual blocks, each with its own LM head or the target's."""

    family: ClassVar[str] = "medusa"
    Config: ClassVar[type[HeadConfig]] = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        # Blocks start as the identity: x + SiLU(0) = x.
        self.block_weight_KLEE = nn.Parameter(torch.zeros(config.num_heads, config.num_layers, size, size))
        self.block_bias_KLE = nn.Parameter(torch.zeros(config.num_heads, config.num_layers, size))
        if config.shared_lm_head:
            self.register_buffer("lm_head_DE", torch.zeros(config.draft_width, size), persistent=False)
        else:
            self.lm_head_KDE = nn.Parameter(torch.zeros(config.num_heads, config.draft_width, size))

    @property
    def steps(self) -> int:
        return self.config.num_heads

    def warm_start(self, target: Target) -> None:
        """Copy the target's LM head, cut to the draft vocabulary, into every head."""
        if self.config.shared_lm_head:
            self.bind(target)
        else:
            rows_DE = target.lm_head_weight[self.draft_to_target_D.to(target.device)]
            self.lm_head_KDE.data.copy_(rows_DE.to(self.lm_head_KDE).expand_as(self.lm_head_KDE))

    def bind(self, target: Target) -> None:
        """With a shared LM head, take the target's rows for the draft vocabulary."""
        if self.config.shared_lm_head:
            rows_DE = target.lm_head_weight[self.draft_to_target_D.to(target.device)]
            self.lm_head_DE = rows_DE.detach().to(self.block_weight_KLEE)

    def head_logits(self, final_ME: Tensor, step: int) -> Tensor:
        """Logits [M, D] of head `step` on final states [M, E]."""
        x_ME = final_ME
        for layer in range(self.config.num_layers):
            weight, bias = self.block_weight_KLEE[step, layer], self.block_bias_KLE[step, layer]
            x_ME = x_ME + F.silu(F.linear(x_ME, weight, bias))
        return F.linear(x_ME, self.lm_head_DE if self.config.shared_lm_head else self.lm_head_KDE[step])

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        final_XE = batch.states[FINAL].flatten(0, 1)
        for step in range(self.steps):
            origin_M = positions(batch.supervised_BT, step)
            yield StepPrediction(self.head_logits(final_XE[origin_M], step), origin_M + step + 1, origin_M)

    # -- drafting ------------------------------------------------------------------------------------------------

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> MedusaState:
        last_B = torch.tensor([len(prompt) - 1 for prompt in prompts], device=states[FINAL].device)
        return MedusaState(states[FINAL][torch.arange(len(prompts), device=last_B.device), last_B])

    def propose(self, state: MedusaState, root_B: Tensor, shape: TreeShape) -> DraftTree:
        depth, width = shape.depth, shape.width
        if depth == 0:
            return DraftTree.from_shape(root_B[:, None], shape)
        top_BKR = torch.stack(
            [self.head_logits(state.final_BE, step).topk(width, dim=-1).indices for step in range(depth)], dim=1
        )
        drafts_BN = self.draft_to_target_D[top_BKR].flatten(1)[:, _flat_nodes(shape, width).to(root_B.device)]
        return DraftTree.from_shape(torch.cat([root_B[:, None], drafts_BN], dim=1), shape)

    def observe(self, state: MedusaState, tokens_BP: Tensor, states: dict[int, Tensor], counts: Sequence[int]) -> None:
        last_B = torch.tensor(counts, device=tokens_BP.device) - 1
        state.final_BE = states[FINAL][torch.arange(len(counts), device=last_B.device), last_B]

    def select(self, state: MedusaState, rows: Sequence[int]) -> None:
        state.final_BE = state.final_BE[list(rows)]


def positions(supervised_BT: Tensor, step: int) -> Tensor:
    """Flat indices b * T + t from which head `step` learns: tokens t + 1 .. t + step + 2 are all supervised.

    The drafted tokens then belong to one answer, as they do when decoding.
    """
    reach = step + 2
    if supervised_BT.shape[1] <= reach:
        return torch.zeros(0, dtype=torch.long, device=supervised_BT.device)
    valid_BT = torch.zeros_like(supervised_BT)
    stop = supervised_BT.shape[1] - reach
    valid_BT[:, :stop] = supervised_BT.unfold(1, reach, 1)[:, 1:].all(-1)
    return valid_BT.flatten().nonzero()[:, 0]


@lru_cache(maxsize=64)
def _flat_nodes(shape: TreeShape, width: int) -> Tensor:
    """Where each node's draft lies in the flattened [K, R] table of the best drafts of each head."""
    return torch.tensor(
        [(depth - 1) * width + rank for depth, rank in zip(shape.depths[1:], shape.ranks[1:], strict=True)]
    )
