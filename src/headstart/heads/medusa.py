"""Medusa-1: K independent heads on the target's last hidden state (Cai et al., arXiv 2401.10774).

Head k (from 0) reads the final state h_t of the last token the target has read and predicts token t + k + 2; the
target's own LM head predicts token t + 1. On tokens a b c d e (positions 0-4), from the state after `b` (t = 1):

    target's LM head -> c (2)      head 0 -> d (3)      head 1 -> e (4)

>>> import torch
>>> supervised = torch.tensor([[False, False, True, True, True]])
>>> [supervised_origins(supervised, step).tolist() for step in range(2)]
[[1, 2], [1]]

Shape suffixes: B rows, T tokens, E hidden size, D draft vocabulary, F head inputs, M predictions, K heads, L blocks of
a head, X = B * T flat positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import (
    HeadBatch,
    HeadConfig,
    OneForwardHead,
    StepPrediction,
    origins,
    register,
    supervised_origins,
)
from headstart.heads.exchange.published import LM_HEAD, Layout, Published
from headstart.heads.int8_weights import linear, unstack
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
from headstart.model.model import Target
from headstart.replay.patch import FINAL


class MedusaConfig(ResidualConfig):
    family: str = "medusa"
    see_root: bool = Field(
        False,
        description="Heads also read the embedding of the root, token t + 1 (Hydra's first step, Ankner et al., "
        "arXiv 2402.05109); false is Medusa-1.",
    )
    input_map: bool = Field(
        True,
        description="A linear map ahead of each head's blocks; false is Medusa-1 as published, which vLLM up to 0.32 "
        "loads.",
    )

    def check(self) -> None:
        if self.see_root and not self.input_map:
            raise UserError(
                "heads.see_root is on, and heads.input_map off: without the map a head reads the final state alone.",
                "Set heads.input_map=true, or heads.see_root=false.",
            )


@register
class MedusaHead(ResidualHead, OneForwardHead):
    """K stacks of residual blocks, each with its own LM head or the target's."""

    Config: ClassVar[type[HeadConfig]] = MedusaConfig
    publishes: ClassVar[Layout | None] = Layout.MEDUSA
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        inputs = 2 * size if config.see_root else size
        self.input_KEF = nn.Parameter(torch.zeros(config.num_heads, size, inputs)) if config.input_map else None
        # Blocks start as the identity: x + SiLU(0) = x.
        self.block_weight_KLEE = nn.Parameter(torch.zeros(config.num_heads, config.num_layers, size, size))
        self.block_bias_KLE = nn.Parameter(torch.zeros(config.num_heads, config.num_layers, size))
        if not config.shared_lm_head:
            self.lm_head_KDE = nn.Parameter(torch.zeros(config.num_heads, config.draft_width, size))

    def warm_start(self, target: FrozenModel) -> None:
        """Start every head as the target's LM head, over the draft vocabulary, on the target's state."""
        self.bind(target)
        if self.input_KEF is not None:
            self.input_KEF.data[:, :, : self.config.hidden_size] = torch.eye(self.config.hidden_size)
        if not self.config.shared_lm_head:
            self.lm_head_KDE.data.copy_(self.first_lm_head(target).to(self.lm_head_KDE).expand_as(self.lm_head_KDE))

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Fit head k's input map (or else its LM head) by ridge regression to h_{t+k+1}, the state from
        which the target predicts the same token. Unfitted heads confidently predict the target's next token."""
        if self.input_KEF is None and self.config.shared_lm_head:
            return
        size = self.config.hidden_size
        inputs = 2 * size if self.config.see_root else size
        start = LinearStart([inputs] * self.draft_steps, size)
        for batch in batches:
            final_XE = batch.states[FINAL].flatten(0, 1)
            origin_M = supervised_origins(batch.supervised_BT, self.draft_steps - 1)
            input_MF = self.head_input(final_XE[origin_M], batch.tokens_BT.flatten()[origin_M + 1])
            start.add(input_MF, [final_XE[origin_M + step + 1] for step in range(self.draft_steps)])
        for step, map_EF in enumerate(start.maps()):
            if self.input_KEF is not None:
                self.input_KEF.data[step] = map_EF
            else:
                self.lm_head_KDE.data[step] = self.lm_head_KDE.data[step] @ map_EF.to(self.lm_head_KDE)

    def bind(self, target: FrozenModel) -> None:
        super().bind(target)
        if not self.config.see_root:
            self._embedding_VE = None

    def head_input(self, final_ME: Tensor, root_M: Tensor) -> Tensor:
        """Return the input of every head, [M, F]: the final state and, with `see_root`, the root's embedding."""
        if self._embedding_VE is None:
            return final_ME
        return torch.cat([final_ME, embed_normalized(root_M, self._embedding_VE, final_ME)], dim=-1)

    def parts(self) -> list[tuple[Tensor | None, Tensor, Tensor, Tensor]]:
        """Return input map [E, F], block weights [L, E, E], block biases [L, E] and LM head [D, E] of each head.

        Unbinds once: indexing would materialize one stack-sized gradient per head, which takes a fifth of a training
        step.
        """
        lm_heads = [self.lm_head_DE] * self.draft_steps if self.config.shared_lm_head else unstack(self.lm_head_KDE)
        blocks = self.block_weight_KLEE.unbind(0), self.block_bias_KLE.unbind(0)
        maps = [None] * self.draft_steps if self.input_KEF is None else unstack(self.input_KEF)
        return list(zip(maps, *blocks, lm_heads, strict=True))

    def unroll(self, batch: HeadBatch) -> Iterator[StepPrediction]:
        final_XE, tokens_X = batch.states[FINAL].flatten(0, 1), batch.tokens_BT.flatten()
        for step, part in enumerate(self.parts()):
            origin_M = origins(batch, step)
            input_EF, weight_LEE, bias_LE, lm_head_DE = part
            input_MF = self.head_input(final_XE[origin_M], tokens_X[origin_M + 1])
            hidden_ME = self.run_region(head_hidden, input_MF, input_EF, weight_LEE, bias_LE)
            yield self.prediction(hidden_ME, lm_head_DE, origin_M, step)

    @property
    def publishing_reads_target(self) -> bool:
        return self.config.shared_lm_head

    def by_published_name(self) -> dict[str, Tensor]:
        tensors = {
            f"blocks.{head}.layers.{block}.{name}": stacked[head, block]
            for name, stacked in (("weight", self.block_weight_KLEE), ("bias", self.block_bias_KLE))
            for head in range(self.draft_steps)
            for block in range(self.config.num_layers)
        }
        if self.config.shared_lm_head:
            return {**tensors, LM_HEAD: self.lm_head_DE}
        return tensors | {f"lm_heads.{head}.weight": weight_DE for head, weight_DE in enumerate(self.lm_head_KDE)}

    @torch.no_grad()
    def publish(self) -> Published:
        config = self.config
        if self.input_KEF is not None:
            raise UserError(
                "No engine knows Medusa heads with a linear map ahead of their blocks.",
                "Train them with heads.input_map=false, or decode with headstart (--format headstart).",
            )
        if config.shared_lm_head and self.lm_bias_D is not None:
            raise UserError(
                "The target's LM head has a bias, which published Medusa heads leave out.",
                "Train with heads.shared_lm_head=false.",
            )
        ids_D = self.draft_to_target_D.cpu().clone() if config.draft_vocab_size else None
        return replace(super().publish(), draft_ids_D=ids_D)

    @classmethod
    def settings_of(cls, published: Published) -> dict[str, Any]:
        return {**super().settings_of(published), "num_heads": published.steps, "input_map": False}

    @classmethod
    def from_published(cls, published: Published, target: Target) -> Self:
        tensors = dict(published.tensors)
        if LM_HEAD in tensors:  # shared by all heads
            tensors |= {f"lm_heads.{head}.weight": tensors[LM_HEAD] for head in range(published.steps)}
        return super().from_published(published.with_tensors(tensors), target)

    def depth_logits(self, session: FinalSession, root_B: Tensor, depths: range) -> Tensor:
        if depths.start == 0:
            session.inputs = self.head_input(session.final_BE, root_B)
        return self._logits(session.inputs, depths)

    def level(
        self, session: FinalSession, root_B: Tensor, tokens_BW: IntArray, parents_BW: IntArray, depths: range
    ) -> Level:
        assert session.memory is not None, "captured levels have memory"
        session.memory.begin(session, root_B)
        return Level(tokens_BW[:, :0], len(depths), (depths.stop,))

    def draft_level(self, memory: FinalMemory, inputs_BX: Tensor, sizes: tuple[int, ...]) -> Tensor:
        (stop,), rows = sizes, len(inputs_BX)
        return self._logits(self.head_input(memory.final_BE[:rows], memory.root_B[:rows]), range(stop))

    def _logits(self, input_BF: Tensor, depths: range) -> Tensor:
        logits = []
        for input_EF, weight_LEE, bias_LE, lm_head_DE in self.parts()[depths.start : depths.stop]:
            hidden_BE = head_hidden(input_BF, input_EF, weight_LEE, bias_LE)
            logits.append(linear(hidden_BE, lm_head_DE, self.lm_bias_D))
        return self.transform_logits(torch.stack(logits, dim=1))
