"""DSpark: a block drafter with a low-rank Markov head, whose slots predict the token after their position
(arXiv 2607.05147).

The block is [root, mask, mask, ...]. On tokens a b c d e (positions 0-4), from the state after `b` (origin t = 1), with
root `c` and a block of 2:

    context   a b                     states of the target
    block     c mask                  at positions 2 3
    drafts    d  e                    step 0 after c, step 1 after d: token t + k + 2, after token t + k + 1

The logits of a slot after a token are U + W2 W1[token], with U from the target's LM head: the block runs once, and each
tree node adds one small product. Training uses the conversation's own preceding token.

>>> import torch
>>> heads = DSparkHead(DSparkConfig(hidden_size=4, vocab_size=9, num_attention_heads=1, num_key_value_heads=1,
...     head_dim=4, intermediate_size=4, aux_layers=(1,), block_size=2, mask_token_id=8, markov_rank=1))
>>> heads._embedding_VE = torch.arange(9.0)[:, None].expand(9, 4)
>>> heads.block(torch.tensor([2]), torch.zeros(1))[0, :, 0].tolist(), heads.first_slot, heads.draft_steps
([2.0, 8.0], 0, 2)
>>> _ = heads.markov_embedding_VR.data.copy_(torch.arange(9.0)[:, None])
>>> for step in range(2):  # the preceding token (the last LM head input), and the drafted one
...     slots = heads.prediction(torch.zeros(1, 4), heads.lm_head_DE, torch.tensor([1]), step)
...     after = heads.correct(slots, heads.concat_lm_head(), heads.markov_embed(torch.arange(5), torch.zeros(1)))
...     after.hidden_MH[:, -1].tolist(), (after.teacher_M + 1).tolist()
([2.0], [3])
([3.0], [4])

An optional confidence head predicts the acceptance probability of a sampled draft, from the slot and the preceding
token. It is for serving engines; headstart's decoding does not read it.

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
from headstart.heads.parts.graphed import IntArray, Level
from headstart.heads.parts.residual import embed_normalized
from headstart.replay.cuda_graphs import next_power_of_two

_BLOCK = 8192
"""Embedding rows per chunk."""


class DSparkConfig(BlockConfig):
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
        self.confidence_head = nn.Linear(config.hidden_size + rank, 1) if config.confidence else None

    @property
    def first_slot(self) -> int:
        return 0

    def markov_embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """Return Markov embeddings of tokens, [..., R]."""
        return F.embedding(tokens, self.markov_embedding_VR).to(like)

    @property
    def markov_rank(self) -> int:
        return self.config.markov_rank

    def start_markov(self, axes_ER: Tensor, map_RI: Tensor, rms: float) -> None:
        embedding_VE, rank = self.target_embeddings, len(map_RI)
        head_DR = (self.lm_head_DE * self.norm.weight) @ axes_ER
        for ids_P in torch.split(torch.arange(len(embedding_VE)), _BLOCK):
            rows_PR = embed_normalized(ids_P, embedding_VE, map_RI) @ map_RI.T / rms
            self.markov_embedding_VR.data[ids_P, :rank] = rows_PR.to(self.markov_embedding_VR)
        # Balance the factors, which share a learning rate.
        ratio = (head_DR.square().mean() / self.markov_embedding_VR.data[:, :rank].square().mean()).sqrt().sqrt()
        self.markov_embedding_VR.data[:, :rank] *= ratio
        self.markov_lm_head_DR.data[:, :rank] = head_DR / ratio

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        lm_head_DH, markov_XR = self.concat_lm_head(), None
        for slots in super().unroll(batch):
            if markov_XR is None:  # look up once: each lookup has a gradient as large as its table
                markov_XR = self.markov_embed(batch.tokens_BT.flatten(), slots.hidden_MH)
            yield self.correct(slots, lm_head_DH, markov_XR)

    def correct(self, slots: StepPrediction, lm_head_DH: Tensor, markov_XR: Tensor) -> StepPrediction:
        """Correct a step's predictions by the conversation's preceding tokens, given `markov_embed` of all tokens."""
        hidden_MH, confidence_M = torch.cat([slots.hidden_MH, markov_XR[slots.teacher_M]], dim=-1), None
        if self.confidence_head is not None:  # detached: it must not change the drafts
            confidence_M = self.confidence_head(hidden_MH.detach())[..., 0]
        return replace(
            slots,
            hidden_MH=hidden_MH,
            lm_head_DH=lm_head_DH,
            frozen_columns=self.config.hidden_size,
            confidence_M=confidence_M,
        )

    def concat_lm_head(self) -> Tensor:
        return torch.cat([self.lm_head_DE, self.markov_lm_head_DR], dim=-1)

    def draft_step(self, session: BlockSession, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        if depth == 0:
            self.run_block(session, tokens_BW[:, 0])
            session.logits_BSD = linear(session.hidden_BSE, self.lm_head_DE, self.lm_bias_D)
        assert session.logits_BSD is not None, "levels in order"
        return self._correct_logits(session.logits_BSD[:, depth : depth + 1], tokens_BW)

    def _correct_logits(self, logits_B1D: Tensor, tokens_BW: Tensor) -> Tensor:
        markov_BWR = self.markov_embed(tokens_BW, logits_B1D)
        return self.transform_logits(logits_B1D + linear(markov_BWR, self.markov_lm_head_DR))

    def level(
        self, session: BlockSession, root_B: Tensor, tokens_BW: IntArray, parents_BW: IntArray, depths: range
    ) -> Level:
        if depths.start == 0:
            inputs_BX, slots = self.first_level(session, tokens_BW)
            return Level(inputs_BX, 1, (0, slots))
        width = tokens_BW.shape[1]
        inputs_BX = np.pad(tokens_BW, ((0, 0), (0, next_power_of_two(width) - width)))
        return Level(inputs_BX, width, (depths.start, inputs_BX.shape[1]))

    def draft_level(self, memory: BlockMemory, inputs_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        (depth, slots), rows, tokens_BW = sizes, len(inputs_BX), inputs_BX
        if depth == 0:
            tokens_BW = inputs_BX[:, :1]
            memory.hidden_BSE[:rows] = self.graph_block(memory, inputs_BX, slots)
            memory.logits_BSD[:rows] = linear(memory.hidden_BSE[:rows], self.lm_head_DE, self.lm_bias_D)
        return self._correct_logits(memory.logits_BSD[:rows, depth : depth + 1], tokens_BW)

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
