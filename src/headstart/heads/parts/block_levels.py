"""Base of block drafters with parent-dependent drafts: one forward over the block, then a small product per tree node.

One table has a row per parent token, the other a row per draft token. In training the parent is the preceding token.

Shape suffixes: B rows, W nodes of a level, M origins, S slots, X flat tokens, E hidden size, D draft vocabulary, V
vocabulary, R rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, StepPrediction
from headstart.heads.exchange.published import Published
from headstart.heads.int8_weights import linear
from headstart.heads.parts.block import BlockMemory, BlockSession
from headstart.heads.parts.block_layer import BlockConfig
from headstart.heads.parts.block_start import SolvedBlockHead
from headstart.heads.parts.graphed import IntArray, Level
from headstart.heads.parts.residual import embed_normalized
from headstart.replay.cuda_graphs import next_power_of_two

_BLOCK = 8192
"""Embedding rows per chunk."""


class LevelwiseBlockHead(SolvedBlockHead):
    """Block drafter with logits that depend on the slot and on the token before it.

    Attributes:
        tables: published names of the tables of parents and drafts.
    """

    tables: ClassVar[tuple[str, str]]

    def __init__(self, config: BlockConfig, rank: int) -> None:
        super().__init__(config)
        self.rank = rank
        # Like LoRA, one factor starts at zero.
        self.parents_VR = nn.Parameter(0.01 * torch.randn(config.vocab_size, rank), rank > 0)
        self.drafts_DR = nn.Parameter(torch.zeros(config.draft_width, rank), rank > 0)

    @abstractmethod
    def logits_after(self, product_BD: Tensor, hidden_BE: Tensor, parents_BWR: Tensor) -> Tensor:
        """Return the logits [B, W, D] of a slot after each parent, given the LM head's product and input."""

    def start_markov(self, axes_ER: Tensor, map_RI: Tensor, stream_ME: Tensor) -> None:
        embedding_VE, rank, rms = self.target_embeddings, len(map_RI), stream_ME.square().mean(-1).sqrt().mean()
        head_DR = (self.lm_head_DE * self.norm.weight) @ axes_ER
        for ids_P in torch.split(torch.arange(len(embedding_VE)), _BLOCK):
            rows_PR = embed_normalized(ids_P, embedding_VE, map_RI) @ map_RI.T / rms
            self.parents_VR.data[ids_P, :rank] = rows_PR.to(self.parents_VR)
        # Balance the factors, which share a learning rate.
        ratio = (head_DR.square().mean() / self.parents_VR.data[:, :rank].square().mean()).sqrt().sqrt()
        self.parents_VR.data[:, :rank] *= ratio
        self.drafts_DR.data[:, :rank] = head_DR / ratio

    def by_published_name(self) -> dict[str, Tensor]:
        return super().by_published_name() | dict(zip(self.tables, (self.parents_VR, self.drafts_DR), strict=True))

    def publish(self) -> Published:
        published, name = super().publish(), self.tables[1]
        if not self.config.draft_vocab_size:
            return published
        every_VR = torch.zeros_like(published.tensors[self.tables[0]])  # no correction outside the draft vocabulary
        every_VR[self.draft_to_target_D.cpu()] = published.tensors[name]
        return published.with_tensors({**published.tensors, name: every_VR})

    def embed_parents(self, tokens: Tensor, like: Tensor) -> Tensor:
        return F.embedding(tokens, self.parents_VR).to(like)

    def slots_and_parents(self, batch: HeadBatch) -> Iterator[tuple[StepPrediction, Tensor]]:
        """Yield each step's slots, with the parent rows [M, R] of the tokens before them."""
        parents_XR = None
        for slots in super().unroll(batch):
            if parents_XR is None:  # one lookup: the gradient of each lookup is as large as the table
                parents_XR = self.embed_parents(batch.tokens_BT.flatten(), slots.hidden_MH)
            yield slots, parents_XR[slots.teacher_M]

    def draft_step(self, session: BlockSession, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        if depth == 0:
            self.run_block(session, tokens_BW[:, 0])
            session.logits_BSD = linear(session.hidden_BSE, self.lm_head_DE, self.lm_bias_D)
        assert session.logits_BSD is not None, "levels in order"
        return self._draft(session.logits_BSD, session.hidden_BSE, tokens_BW, depth)

    def _draft(self, logits_BSD: Tensor, hidden_BSE: Tensor, tokens_BW: Tensor, depth: int) -> Tensor:
        parents_BWR = self.embed_parents(tokens_BW, logits_BSD)
        return self.logits_after(logits_BSD[:, depth], hidden_BSE[:, depth], parents_BWR)

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
        return self._draft(memory.logits_BSD[:rows], memory.hidden_BSE[:rows], tokens_BW, depth)
