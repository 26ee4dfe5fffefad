"""Base of EAGLE-1 and MTP: feature-level autoregression on the target's final hidden states.

A linear map joins a final state and the next token's embedding. A decoder layer predicts the next final state. The
target's frozen LM head reads it, and the next draft step gets it as input.

Shape suffixes: E hidden size, D draft vocabulary, M predictions, J inputs of the joining map, X = B * T flat positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from headstart.heads.base import HeadBatch, supervised_origins
from headstart.heads.int8_weights import Linear
from headstart.heads.parts.layer import DraftLayer
from headstart.heads.parts.recurrent import RecurrentConfig, RecurrentHead
from headstart.heads.parts.residual import LinearStart
from headstart.model.frozen import FrozenModel
from headstart.replay.patch import FINAL


class FinalStateHead(RecurrentHead):
    """Joining map and decoder layer; families define the map's inputs."""

    drafts_features: ClassVar[bool] = True

    def __init__(self, config: RecurrentConfig, layer: DraftLayer) -> None:
        super().__init__(config, [layer])
        self.register_buffer("_frozen_DE", torch.zeros(config.draft_width, config.hidden_size), persistent=False)

    @property
    @abstractmethod
    def joining_map(self) -> Linear:
        """Map from `joining_inputs` to the stream."""

    @abstractmethod
    def joining_inputs(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        """Inputs of the joining map, [..., J], embedding first."""

    @property
    def lm_head_DE(self) -> Tensor:
        return self._frozen_DE

    def bind(self, target: FrozenModel) -> None:
        super().bind(target)
        self._frozen_DE = self.frozen_lm_head(target, self.joining_map.weight)

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """Copy the target's last layer with zeroed outputs; the joining map passes the state through."""
        self.bind(target)
        if self.config.init == "random":
            return
        size, joining_map = self.config.hidden_size, self.joining_map
        self.layers[0].warm_start(target)
        self.layers[0].zero_init()  # the joined state is a final state already
        joining_map.weight.zero_()
        joining_map.weight[:, size:] = torch.eye(size)
        if joining_map.bias is not None:
            joining_map.bias.zero_()

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Fit the joining map to the next final state by ridge regression."""
        if self.config.init != "target":
            return

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_XE, tokens_X = batch.states[FINAL].flatten(0, 1).float(), batch.tokens_BT.flatten()
            origin_M = supervised_origins(batch.supervised_BT, 0)
            joined_MJ = self.joining_inputs(final_XE[origin_M], self.embed_tokens(tokens_X[origin_M + 1], final_XE))
            label_ME, norm = final_XE[origin_M + 1], self.output_norm
            return joined_MJ, [label_ME if norm is None else label_ME / norm.weight.float()]

        joining_map = self.joining_map
        start = LinearStart([joining_map.in_features], joining_map.out_features, self.target_embeddings.device)
        for map_EJ in start.solve(batches, read):
            joining_map.weight.copy_(map_EJ)

    def select_states(self, states: dict[int, Tensor]) -> Tensor:
        return states[self.aux_layers[0]]

    def project(self, states: Tensor) -> Tensor:
        return states

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        stream: Tensor = self.joining_map(self.joining_inputs(feedback, embedded))
        return stream, stream
