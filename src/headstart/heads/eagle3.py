"""EAGLE-3: one decoder layer over fused states of several target layers (Li et al., arXiv 2503.01840).

Three aux hidden states are fused by a linear map; attention reads the normed embedding of the next token beside the
normed fused state, the stream is the fused state itself, and the layer's output is fed back. The heads have a final
norm and an LM head of their own over the draft vocabulary. EAGLE-3.1 normalises every aux hidden state before the map
and feeds back the normed output. See `fused` and `recurrent` for what each step reads and drafts.

This is the arrangement that serving engines read. `transition` heads are built from the same parts, for little data.

Shape suffixes: E hidden size, M predictions, X = aux layers * E (final states: flat positions).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from headstart.heads.base import HeadBatch, register, supervised_origins
from headstart.heads.fused import FusedConfig, FusedHead
from headstart.heads.fused_published import fill_fused, fused_settings, publish_fused
from headstart.heads.layer import LayerConfig, normed
from headstart.heads.published import Layout, Published
from headstart.heads.residual import LinearStart
from headstart.target import FINAL, Target


class Eagle3Config(FusedConfig):
    """Settings of EAGLE-3 heads."""

    family: str = "eagle3"
    feedback: Literal["pre_norm", "post_norm"] = Field(
        "pre_norm", description="Feed back the layer's output as it is, or normed (EAGLE-3.1)."
    )

    @classmethod
    def of_target(cls, target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
        layers = (2, target.num_layers // 2, target.num_layers - 3)
        return {**super().of_target(target, settings), "aux_layers": layers}


@register
class Eagle3Head(FusedHead):
    """Fusion, decoder layers, norm and LM head."""

    family: ClassVar[str] = "eagle3"
    Config: ClassVar[type[LayerConfig]] = Eagle3Config
    publishes: ClassVar[Layout | None] = Layout.EAGLE3
    config: Eagle3Config

    def publish(self) -> Published:
        return publish_fused(
            self,
            norm_before_residual=getattr(self.config, "norm_before_residual", False),
            norm_output=self.config.feedback == "post_norm",
        )

    @classmethod
    def from_published(cls, published: Published, target: Target) -> Self:
        feedback = "post_norm" if published.norm_output else "pre_norm"
        added = {"norm_before_residual": True} if published.norm_before_residual else {}
        settings = {**fused_settings(published), "family": cls.family, "feedback": feedback, **added}
        return fill_fused(cls(Eagle3Config.model_validate(settings)), published, target)

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Guess linearly, from the aux hidden states, where the next token's stream will end.

        Ridge regression on the direction that the target's own LM head reads one token later, undone by its norm; a
        fused state is scaled like the deepest aux hidden state.
        """
        if self.config.init == "random":
            return
        size, scale = self.config.hidden_size, 0.0

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            nonlocal scale
            final_XE, origin_M = batch.states[FINAL].flatten(0, 1).float(), supervised_origins(batch.supervised_BT, 0)
            read_MX = self.normed_states(self.select_states(batch.states).flatten(0, 1)[origin_M].float())
            scale += float(read_MX[:, -size:].square().mean(-1).sqrt().sum())
            return read_MX, [final_XE[origin_M + 1] / self.norm.weight.float()]

        start = LinearStart([self.fc.in_features], self.fc.out_features, self.device_of_target)
        for map_EX in start.solve(batches, read):
            self.fc.weight.copy_(scale / start.rows * map_EX)

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        hidden = normed(self.norm, stream)
        return hidden, stream if self.config.feedback == "pre_norm" else hidden
