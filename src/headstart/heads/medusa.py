"""Medusa-1: K independent heads on the target's last hidden state (Cai et al., arXiv 2401.10774).

Head k (from 0) reads the final state h_t of the last token the target has read and predicts token t + k + 2; the
target's own LM head predicts token t + 1. On tokens a b c d e (positions 0-4), from the state after `b` (t = 1):

    target's LM head -> c (2)      head 0 -> d (3)      head 1 -> e (4)

>>> import torch
>>> supervised = torch.tensor([[False, False, True, True, True]])
>>> [supervised_origins(supervised, step).tolist() for step in range(2)]
[[1, 2], [1]]

Shape suffixes: B rows, T tokens, E hidden size, D draft vocabulary, F what a head reads, M predictions, K heads,
L blocks of a head, R ranks, N tree nodes, X = B * T flat positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import (
    HeadBatch,
    HeadConfig,
    OneForwardHead,
    StepPrediction,
    origins,
    register,
    supervised_origins,
)
from headstart.heads.int8_weights import linear, unstack
from headstart.heads.residual import LinearStart, embed, head_hidden, last_states
from headstart.proposal import Committed
from headstart.target import FINAL, Target


class MedusaConfig(HeadConfig):
    """Settings of Medusa heads."""

    family: str = "medusa"
    num_heads: int = Field(4, ge=1, le=16, description="How many tokens ahead the heads look.")
    num_layers: int = Field(1, ge=1, le=8, description="Residual blocks in each head.")
    shared_lm_head: bool = Field(
        False, description="Read logits through the target's frozen LM head instead of one trained LM head per head."
    )
    see_root: bool = Field(
        False,
        description="Heads also read the embedding of token t + 1, which the target has decided when they draft "
        "(Hydra's first step, Ankner et al., arXiv 2402.05109); false is Medusa-1.",
    )


@dataclass
class MedusaState:
    """What drafting reads.

    Attributes:
        final_BE: the final state of the last token that each row has committed.
        seen_BF: what every head reads in this round.
    """

    final_BE: Tensor
    seen_BF: Tensor


@register
class MedusaHead(OneForwardHead):
    """K stacks of residual blocks, each with its own LM head or the target's."""

    family: ClassVar[str] = "medusa"
    Config: ClassVar[type[HeadConfig]] = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        inputs = 2 * size if config.see_root else size
        self.input_KEF = nn.Parameter(torch.zeros(config.num_heads, size, inputs))
        # Blocks start as the identity: x + SiLU(0) = x.
        self.block_weight_KLEE = nn.Parameter(torch.zeros(config.num_heads, config.num_layers, size, size))
        self.block_bias_KLE = nn.Parameter(torch.zeros(config.num_heads, config.num_layers, size))
        if config.shared_lm_head:
            self.register_buffer("lm_head_DE", torch.zeros(config.draft_width, size), persistent=False)
        else:
            self.lm_head_KDE = nn.Parameter(torch.zeros(config.num_heads, config.draft_width, size))
        self._embedding_VE: Tensor | None = None

    @property
    def draft_steps(self) -> int:
        return self.config.num_heads

    def warm_start(self, target: Target) -> None:
        """Every head starts as the target's own LM head, cut to the draft vocabulary, on the target's own state."""
        self.bind(target)
        self.input_KEF.data[:, :, : self.config.hidden_size] = torch.eye(self.config.hidden_size)
        if not self.config.shared_lm_head:
            self.lm_head_KDE.data.copy_(self.first_lm_head(target).to(self.lm_head_KDE).expand_as(self.lm_head_KDE))

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Start head k from the best linear guess of the state it should have seen.

        Ridge regression gives the input map that takes what the head reads at t closest to h_{t+k+1}, the state from
        which the target itself predicts head k's token. Without it a head starts by predicting the token before its
        own, with confidence.
        """
        size, inputs = self.input_KEF.shape[1:]
        start = LinearStart([inputs] * self.draft_steps, size)
        for batch in batches:
            final_XE = batch.states[FINAL].flatten(0, 1)
            origin_M = supervised_origins(batch.supervised_BT, self.draft_steps - 1)
            seen_MF = self.read(final_XE[origin_M], batch.tokens_BT.flatten()[origin_M + 1])
            start.add(seen_MF, [final_XE[origin_M + step + 1] for step in range(self.draft_steps)])
        for step, map_EF in enumerate(start.maps()):
            self.input_KEF.data[step] = map_EF

    def bind(self, target: Target) -> None:
        """Take what is the target's own: embeddings, and with a shared LM head its rows for the draft vocabulary."""
        self._embedding_VE = target.embedding_weight.detach() if self.config.see_root else None
        if self.config.shared_lm_head:
            self.lm_head_DE = self.frozen_lm_head(target, self.block_weight_KLEE)

    def read(self, final_ME: Tensor, root_M: Tensor) -> Tensor:
        """What every head reads, [M, F]: the final state and, with `see_root`, the decided token's embedding."""
        if self._embedding_VE is None:
            return final_ME
        return torch.cat([final_ME, embed(root_M, self._embedding_VE, final_ME)], dim=-1)

    def parts(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Input map [E, F], block weights [L, E, E], block biases [L, E] and LM head [D, E] of each head.

        Unbound once rather than indexed head by head: the gradient of an index is a whole table of zeros with one
        head filled in, and adding four of those was a fifth of a training step.
        """
        lm_heads = [self.lm_head_DE] * self.draft_steps if self.config.shared_lm_head else unstack(self.lm_head_KDE)
        blocks = self.block_weight_KLEE.unbind(0), self.block_bias_KLE.unbind(0)
        return list(zip(unstack(self.input_KEF), *blocks, lm_heads, strict=True))

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        final_XE, tokens_X = batch.states[FINAL].flatten(0, 1), batch.tokens_BT.flatten()
        for step, part in enumerate(self.parts()):
            origin_M = origins(batch, step)
            *body, lm_head_DE = part
            hidden_ME = head_hidden(self.read(final_XE[origin_M], tokens_X[origin_M + 1]), *body)
            own = (None, self.lm_bias_D, self.finish)
            yield StepPrediction(hidden_ME, lm_head_DE, origin_M + step + 1, origin_M, *own)

    # -- drafting ------------------------------------------------------------------------------------------------

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> MedusaState:
        counts_B = torch.tensor([len(prompt) for prompt in prompts], device=states[FINAL].device)
        final_BE = last_states(states[FINAL], counts_B)
        return MedusaState(final_BE, final_BE)

    def depth_logits(self, state: MedusaState, root_B: Tensor, depths: range) -> Tensor:
        if depths.start == 0:
            state.seen_BF = self.read(state.final_BE, root_B)
        logits = []
        for *body, lm_head_DE in self.parts()[depths.start : depths.stop]:
            logits.append(linear(head_hidden(state.seen_BF, *body), lm_head_DE, self.lm_bias_D))
        return self.finished(torch.stack(logits, dim=1))

    def commit(self, state: MedusaState, committed: Committed) -> None:
        state.final_BE = last_states(committed.states[FINAL], committed.counts_B)

    def reorder(self, state: MedusaState, rows: Sequence[int]) -> None:
        state.final_BE = state.final_BE[list(rows)]
