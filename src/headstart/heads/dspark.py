"""DSpark: a block in one pass, and a small Markov head that corrects each draft (arXiv 2607.05147).

The block is [root, mask, mask, ...]: each slot drafts the token *after* its own position. On tokens a b c d e
(positions 0-4), from the state after `b` (origin t = 1), with root `c` and a block of 2:

    context   a b                     states of the target
    block     c mask                  at positions 2 3
    drafts    d  e                    step 0 after c, step 1 after d: token t + k + 2, after token t + k + 1

The logits of a slot after a token are U + W2 W1[token], with U from the target's LM head: the block runs once, and each
tree node then costs one small product. Training uses the conversation's own preceding token.

>>> import torch
>>> heads = DSparkHead(DSparkConfig(hidden_size=4, vocab_size=9, num_attention_heads=1, num_key_value_heads=1,
...     head_dim=4, intermediate_size=4, aux_layers=(1,), block_size=2, mask_token_id=8, markov_rank=1))
>>> heads._embedding_VE = torch.arange(9.0)[:, None].expand(9, 4)
>>> heads.block(torch.tensor([2]), torch.zeros(1))[0, :, 0].tolist(), heads.first_slot, heads.draft_steps
([2.0, 8.0], 0, 2)
>>> _ = heads.markov_embedding_VR.data.copy_(torch.arange(9.0)[:, None])
>>> for step in range(2):  # the preceding token (the last LM head input), and the drafted one
...     slots = heads.prediction(torch.zeros(1, 4), heads.lm_head_DE, torch.tensor([1]), step)
...     after = heads.corrected(slots, heads.joined_lm_head(), heads.follow(torch.arange(5), torch.zeros(1)))
...     after.hidden_MH[:, -1].tolist(), (after.teacher_M + 1).tolist()
([2.0], [3])
([3.0], [4])

An optional confidence head predicts, from the slot and the preceding token, the acceptance probability of a sampled
draft. It is for serving engines; headstart does not use it in decoding.

Shape suffixes: B rows, W nodes of a level, M origins, S slots, E hidden size, D draft vocabulary, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, HeadConfig, StepPrediction, register
from headstart.heads.exchange.published import MARKOV_EMBEDDING, MARKOV_LM_HEAD, Layout, Published
from headstart.heads.int8_weights import linear
from headstart.heads.parts.block import BlockMemory, BlockSession
from headstart.heads.parts.block_layer import BlockConfig
from headstart.heads.parts.block_start import SolvedBlockHead
from headstart.heads.parts.graphed import Level, Numbers
from headstart.heads.parts.residual import embed
from headstart.replay.cuda_graphs import next_power_of_two

_BLOCK = 8192
"""Embedding rows per chunk."""


class DSparkConfig(BlockConfig):
    """Settings of DSpark heads."""

    family: str = "dspark"
    markov_rank: int = Field(64, ge=1, description="Rank of the Markov head; its two tables have a row for each token.")
    confidence: bool = Field(False, description="Also train a head that predicts how likely each draft is accepted.")


@register
class DSparkHead(SolvedBlockHead):
    """Block drafter with the target's LM head, plus a low-rank correction by the preceding token."""

    Config: ClassVar[type[HeadConfig]] = DSparkConfig
    publishes: ClassVar[Layout | None] = Layout.DSPARK
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        # Like LoRA, one factor starts at zero.
        self.markov_embedding_VR = nn.Parameter(0.01 * torch.randn(config.vocab_size, rank))
        self.markov_lm_head_DR = nn.Parameter(torch.zeros(config.draft_width, rank))
        self._start: tuple[Tensor, Tensor] | None = None
        self.confidence_head = nn.Linear(config.hidden_size + rank, 1) if config.confidence else None

    @property
    def first_slot(self) -> int:
        return 0

    def follow(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Markov embeddings of tokens, [..., R]."""
        return F.embedding(tokens, self.markov_embedding_VR).to(like)

    def beside(self, batch: HeadBatch, origin_M: Tensor, step: int) -> Tensor:
        before_M = batch.tokens_BT.flatten()[origin_M + step + 1]
        return embed(before_M, self.target_embeddings, self.fc.weight)

    def beside_guess(self, beside_MI: Tensor | None) -> Tensor | float:
        if beside_MI is None or self._start is None:
            return 0.0
        axes_ER, read_RI = self._start
        return beside_MI @ read_RI.T @ axes_ER.T

    def take_beside(self, map_EI: Tensor, products_II: Tensor) -> None:
        """Keep the best approximation of `map_EI` that the rank allows."""
        axes_EE = torch.linalg.eigh((map_EI @ products_II @ map_EI.T).double())[1].flip(1).to(map_EI)
        axes_ER = axes_EE[:, : self.config.markov_rank]
        self._start = axes_ER, axes_ER.T @ map_EI

    def settle_beside(self, size: float) -> None:
        if self._start is None:
            return
        embedding_VE = self.target_embeddings
        (axes_ER, read_RI), rank = self._start, self._start[0].shape[1]
        head_DR = (self.lm_head_DE * self.norm.weight) @ axes_ER
        for part in torch.split(torch.arange(len(embedding_VE)), _BLOCK):
            rows_PR = embed(part, embedding_VE, read_RI) @ read_RI.T / size
            self.markov_embedding_VR.data[part, :rank] = rows_PR.to(self.markov_embedding_VR)
        # Balance the factors, which share a learning rate.
        ratio = (head_DR.square().mean() / self.markov_embedding_VR.data[:, :rank].square().mean()).sqrt().sqrt()
        self.markov_embedding_VR.data[:, :rank] *= ratio
        self.markov_lm_head_DR.data[:, :rank] = head_DR / ratio
        self._start = None

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        lm_head_DH, following_XR = self.joined_lm_head(), None
        for slots in super().unroll(batch):
            if following_XR is None:  # looked up once: each lookup has a gradient as large as its table
                following_XR = self.follow(batch.tokens_BT.flatten(), slots.hidden_MH)
            yield self.corrected(slots, lm_head_DH, following_XR)

    def corrected(self, slots: StepPrediction, lm_head_DH: Tensor, following_XR: Tensor) -> StepPrediction:
        """Correct a step's predictions by the conversation's preceding tokens, given `follow` of all tokens."""
        hidden_MH, confidence_M = torch.cat([slots.hidden_MH, following_XR[slots.teacher_M]], dim=-1), None
        if self.confidence_head is not None:  # detached: it must not change the drafts
            confidence_M = self.confidence_head(hidden_MH.detach())[..., 0]
        return replace(
            slots,
            hidden_MH=hidden_MH,
            lm_head_DH=lm_head_DH,
            frozen_columns=self.config.hidden_size,
            confidence_M=confidence_M,
        )

    def joined_lm_head(self) -> Tensor:
        return torch.cat([self.lm_head_DE, self.markov_lm_head_DR], dim=-1)

    def draft_step(self, session: BlockSession, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        if depth == 0:
            self.run_block(session, tokens_BW[:, 0])
            session.logits_BSD = linear(session.hidden_BSE, self.lm_head_DE, self.lm_bias_D)
        assert session.logits_BSD is not None, "levels in order"
        return self._followed(session.logits_BSD[:, depth : depth + 1], tokens_BW)

    def _followed(self, logits_B1D: Tensor, tokens_BW: Tensor) -> Tensor:
        following_BWR = self.follow(tokens_BW, logits_B1D)
        return self.finished(logits_B1D + linear(following_BWR, self.markov_lm_head_DR))

    def level(
        self, session: BlockSession, root_B: Tensor, tokens_BW: Numbers, parents_BW: Numbers, depths: range
    ) -> Level:
        if depths.start == 0:
            numbers_BX, seen = self.first_level(session, tokens_BW)
            return Level(numbers_BX, 1, (0, seen))
        width = tokens_BW.shape[1]
        numbers_BX = np.pad(tokens_BW, ((0, 0), (0, next_power_of_two(width) - width)))
        return Level(numbers_BX, width, (depths.start, numbers_BX.shape[1]))

    def draft_level(self, memory: BlockMemory, numbers_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        (depth, seen), rows, tokens_BW = sizes, len(numbers_BX), numbers_BX
        if depth == 0:
            tokens_BW = numbers_BX[:, :1]
            memory.hidden_BSE[:rows] = self.captured_block(memory, numbers_BX, seen)
            memory.logits_BSD[:rows] = linear(memory.hidden_BSE[:rows], self.lm_head_DE, self.lm_bias_D)
        return self._followed(memory.logits_BSD[:rows, depth : depth + 1], tokens_BW)

    def by_published_name(self) -> dict[str, Tensor]:
        tensors = super().by_published_name()
        tensors |= {MARKOV_EMBEDDING: self.markov_embedding_VR, MARKOV_LM_HEAD: self.markov_lm_head_DR}
        if self.confidence_head is not None:
            weights = self.confidence_head.named_parameters()
            tensors |= {f"confidence_head.proj.{name}": weight for name, weight in weights}
        return tensors

    def publish(self) -> Published:
        published = super().publish()
        tensors = dict(published.tensors)
        if self.config.draft_vocab_size:
            every_VR = torch.zeros_like(tensors[MARKOV_EMBEDDING])  # no correction outside the draft vocabulary
            every_VR[self.draft_to_target_D.cpu()] = tensors[MARKOV_LM_HEAD]
            tensors[MARKOV_LM_HEAD] = every_VR
        return published.with_tensors(tensors)
