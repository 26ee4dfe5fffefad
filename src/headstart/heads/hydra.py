"""Hydra: heads that also read the tokens drafted before theirs (Ankner et al., arXiv 2402.05109).

Head k (from 0) reads the final state h_t of the last token the target has read and the embeddings of tokens t + 1 (the
root) to t + k + 1, and predicts token t + k + 2. Training reads the conversation's own tokens, as on an accepted path.
On tokens a b c d e f, from the state after `b` (t = 1):

>>> import torch
>>> text = "abcdef"
>>> for step in range(3):
...     origin_M = supervised_origins(torch.tensor([[False, False, True, True, True, True]]), step)[:1]
...     read = " ".join(text[index] for index in read_positions(origin_M, step)[0])
...     print(f"head {step}: state({text[origin_M]}) {read} -> {text[origin_M + step + 2]}")
head 0: state(b) c -> d
head 1: state(b) c d -> e
head 2: state(b) c d e -> f

In drafting a node keeps its head's input, and its children append their own embedding. Partial sums would save FLOPs,
but each level would then read the maps of all deeper heads, and reading weights dominates.

Shape suffixes: B rows, W nodes of a level, E hidden size, F head inputs, D draft vocabulary, M predictions, L blocks of
a head, X = B * T flat positions, K drafts down to a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.heads.base import HeadBatch, HeadConfig, StepPrediction, origins, register, supervised_origins
from headstart.heads.int8_weights import linear
from headstart.heads.parts.graphed import IntArray, Level
from headstart.heads.parts.residual import (
    FinalMemory,
    FinalSession,
    LinearStart,
    ResidualConfig,
    ResidualHead,
    embed_normalized,
    head_hidden,
)
from headstart.model.frozen import FrozenModel
from headstart.replay.cuda_graphs import WIDTHS, next_power_of_two
from headstart.replay.patch import FINAL
from headstart.support.uploads import upload


class HydraConfig(ResidualConfig):
    family: str = "hydra"
    init: Literal["target", "random"] = Field(
        "target", description="Start from the target's weights and fitted linear maps, or from random numbers."
    )


class HydraMemory(FinalMemory):
    """Adds the token paths, root first, of the last level's nodes and of the level before."""

    def __init__(self, like_BE: Tensor, rows: int, capacity: int, steps: int) -> None:
        super().__init__(like_BE, rows, capacity)
        with torch.inference_mode(False):
            self.paths_BWK = torch.zeros(rows, WIDTHS[-1], steps, dtype=torch.long, device=like_BE.device)
            self.above_BWK = torch.zeros_like(self.paths_BWK)


class HydraStep(nn.Module):
    """Input map, residual blocks and (unless shared) LM head of one draft step."""

    lm_head_DE: nn.Parameter | None

    def __init__(self, config: HydraConfig, step: int) -> None:
        super().__init__()
        size, layers = config.hidden_size, config.num_layers
        self.input_EF = nn.Parameter(torch.zeros(size, (step + 2) * size))
        # Blocks start as the identity: x + SiLU(0) = x.
        self.block_weight_LEE = nn.Parameter(torch.zeros(layers, size, size))
        self.block_bias_LE = nn.Parameter(torch.zeros(layers, size))
        lm_head = None if config.shared_lm_head else nn.Parameter(torch.zeros(config.draft_width, size))
        self.register_parameter("lm_head_DE", lm_head)

    def forward(self, inputs: Tensor) -> Tensor:
        return head_hidden(inputs, self.input_EF, self.block_weight_LEE, self.block_bias_LE)


@register
class HydraHead(ResidualHead):
    """K heads; each reads one drafted token more than its predecessor."""

    Config: ClassVar[type[HeadConfig]] = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        heads = nn.ModuleList(HydraStep(config, step) for step in range(config.num_heads))
        self.heads = cast(list[HydraStep], heads)

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """Start every head as the target's LM head, over the draft vocabulary, on the target's state."""
        self.bind(target)
        size = self.config.hidden_size
        if self.config.init == "random":
            for head in self.heads:
                for weight in (head.input_EF, head.lm_head_DE):
                    if weight is not None:
                        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            return
        for head in self.heads:
            head.input_EF[:, :size] = torch.eye(size)
            if head.lm_head_DE is not None:
                head.lm_head_DE.copy_(self.first_lm_head(target))

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Fit head k's input map by ridge regression to h_{t+k+1}, the target's state for the same token."""
        if self.config.init == "random":
            return
        size = self.config.hidden_size
        widths = [(step + 2) * size for step in range(self.draft_steps)]

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_XE = batch.states[FINAL].flatten(0, 1)
            origin_M = supervised_origins(batch.supervised_BT, self.draft_steps - 1)
            input_MF = _head_input(*self._inputs(batch), origin_M, self.draft_steps - 1)
            return input_MF, [final_XE[origin_M + step + 1] for step in range(self.draft_steps)]

        maps = LinearStart(widths, size, self.target_embeddings.device).solve(batches, read)
        for head, map_EF in zip(self.heads, maps, strict=False):
            head.input_EF.copy_(map_EF)

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        final_XE, embedded_XE = self._inputs(batch)
        for step, head in enumerate(self.heads):
            origin_M = origins(batch, step)
            hidden_ME = self.run_region(head.forward, _head_input(final_XE, embedded_XE, origin_M, step))
            yield self.prediction(hidden_ME, self._lm_head(head), origin_M, step)

    def _inputs(self, batch: HeadBatch) -> tuple[Tensor, Tensor]:
        final_XE = batch.states[FINAL].flatten(0, 1)
        return final_XE, embed_normalized(batch.tokens_BT.flatten(), self.target_embeddings, final_XE)

    def draft_step(self, session: FinalSession, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        above_BWF = session.final_BE[:, None]
        if depth:
            rows_B1 = torch.arange(len(tokens_BW), device=tokens_BW.device)[:, None]
            above_BWF = session.inputs[rows_B1, upload(parents_BW, tokens_BW.device)]
        session.inputs = torch.cat([above_BWF, embed_normalized(tokens_BW, self.target_embeddings, above_BWF)], dim=-1)
        return self._logits(session.inputs, depth)

    def new_memory(self, session: FinalSession, rows: int, capacity: int) -> HydraMemory:
        return HydraMemory(session.final_BE, rows, capacity, self.draft_steps)

    def level(
        self, session: FinalSession, root_B: Tensor, tokens_BW: IntArray, parents_BW: IntArray, depths: range
    ) -> Level:
        memory, (rows, width), padded = session.memory, tokens_BW.shape, next_power_of_two(tokens_BW.shape[1])
        assert isinstance(memory, HydraMemory), "captured levels have memory"
        if depths.start == 0:
            memory.begin(session, root_B)
            return Level(tokens_BW[:, :0], 1, (0, 1))
        memory.above_BWK[:rows] = memory.paths_BWK[:rows]
        nodes = [np.pad(part, ((0, 0), (0, padded - width))) for part in (tokens_BW, parents_BW)]
        return Level(np.concatenate(nodes, axis=1), width, (depths.start, padded))

    def draft_level(self, memory: HydraMemory, inputs_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        (depth, width), rows = sizes, len(inputs_BX)
        paths_BWK = memory.root_B[:rows, None, None]
        if depth:
            tokens_BW, parents_BW = inputs_BX.chunk(2, dim=1)
            rows_B1 = torch.arange(rows, device=inputs_BX.device)[:, None]
            above_BWK = memory.above_BWK[rows_B1, parents_BW, :depth]
            paths_BWK = torch.cat([above_BWK, tokens_BW[:, :, None]], dim=2)
        memory.paths_BWK[:rows, :width, : depth + 1] = paths_BWK
        final_BWE = memory.final_BE[:rows, None].expand(-1, width, -1)
        embedded_BWKE = embed_normalized(paths_BWK, self.target_embeddings, final_BWE)
        return self._logits(torch.cat([final_BWE, embedded_BWKE.flatten(2)], dim=-1), depth)

    def _logits(self, input_BWF: Tensor, depth: int) -> Tensor:
        head = self.heads[depth]
        return self.transform_logits(linear(head(input_BWF), self._lm_head(head), self.lm_bias_D))

    def _lm_head(self, head: HydraStep) -> Tensor:
        return self.lm_head_DE if head.lm_head_DE is None else head.lm_head_DE


def read_positions(origin_M: Tensor, step: int) -> Tensor:
    """Flat positions of the tokens after the origin that a step's head reads, [M, step + 1]."""
    return origin_M[:, None] + torch.arange(1, step + 2, device=origin_M.device)


def _head_input(final_XE: Tensor, embedded_XE: Tensor, origin_M: Tensor, step: int) -> Tensor:
    """Inputs of a step's head, [M, F]: the origin's state, then the tokens' embeddings."""
    return torch.cat([final_XE[origin_M], embedded_XE[read_positions(origin_M, step)].flatten(1)], dim=-1)
