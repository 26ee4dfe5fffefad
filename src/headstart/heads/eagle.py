"""EAGLE-1: a decoder layer that drafts the target's next final states (Li et al., arXiv 2401.15077).

The state of token t and the embedding of token t + 1 are joined by a linear map; a decoder layer without an input norm
turns them into a guess of the final state of token t + 1, which the target's own frozen LM head reads. The guess is fed
back. With dynamic trees this is EAGLE-2 (arXiv 2406.16858). See `recurrent` for what each step reads and drafts.

Shape suffixes: E hidden size, D draft vocabulary, M predictions, J inputs of the joining map, X = B * T flat positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from headstart.heads.base import HeadBatch, register, supervised_origins
from headstart.heads.int8_weights import Linear
from headstart.heads.layer import DraftLayer, LayerConfig
from headstart.heads.recurrent import RecurrentHead
from headstart.heads.residual import LinearStart
from headstart.target import FINAL, Target


class EagleConfig(LayerConfig):
    """Settings of EAGLE-1 heads."""

    family: str = "eagle"
    draft_steps: int = Field(5, ge=1, le=16, description="Drafts in a row, in training and in drafting.")
    init: Literal["target", "random"] = Field(
        "target", description="Start from the target's last layer and a linear guess, or from random numbers."
    )


@register
class EagleHead(RecurrentHead):
    """Joining map and one decoder layer; the LM head is the target's."""

    family: ClassVar[str] = "eagle"
    Config: ClassVar[type[LayerConfig]] = EagleConfig
    drafts_features: ClassVar[bool] = True
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        size = config.hidden_size
        super().__init__(config, config.draft_steps, [DraftLayer(config, size, input_norm=False)])
        self.fc = Linear(2 * size, size)
        self.register_buffer("_frozen_DE", torch.zeros(config.draft_width, size), persistent=False)

    @property
    def lm_head_DE(self) -> Tensor:
        return self._frozen_DE

    def bind(self, target: Target) -> None:
        """Take the target's embeddings, and its LM head over the draft vocabulary."""
        super().bind(target)
        self._frozen_DE = self.frozen_lm_head(target, self.fc.weight)

    @torch.no_grad()
    def warm_start(self, target: Target) -> None:
        """The target's last layer; the map starts as the state alone."""
        self.bind(target)
        if self.config.init == "random":
            return
        size = self.config.hidden_size
        (layer,) = self.stack
        layer.warm_start(target)
        layer.zero_init()  # the joined state is a final one already
        self.fc.weight.zero_()
        self.fc.weight[:, size:] = torch.eye(size)
        self.fc.bias.zero_()

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Join state and embedding into the best linear guess of the next final state, by ridge regression."""
        if self.config.init == "random":
            return

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_XE, tokens_X = batch.states[FINAL].flatten(0, 1).float(), batch.tokens_BT.flatten()
            origin_M = supervised_origins(batch.supervised_BT, 0)
            joined_MJ = self._join(final_XE[origin_M], self._embed(tokens_X[origin_M + 1], final_XE))
            return joined_MJ, [final_XE[origin_M + 1]]

        start = LinearStart([self.fc.in_features], self.fc.out_features, self.device_of_target)
        for map_EJ in start.solve(batches, read):
            self.fc.weight.copy_(map_EJ)

    def select_states(self, states: dict[int, Tensor]) -> Tensor:
        return states[FINAL]

    def project(self, seen: Tensor) -> Tensor:
        return seen

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        joined: Tensor = self.fc(self._join(feedback, embedded))
        return joined, joined

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        return stream, stream

    def feature(self, feedback_ME: Tensor) -> Tensor:
        return feedback_ME

    def _join(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        """Embedding first; normalised, since embeddings are an order of magnitude smaller than final states."""
        return torch.cat([F.rms_norm(embedded, embedded.shape[-1:]), feedback], dim=-1)
