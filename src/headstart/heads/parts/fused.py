"""What EAGLE-3 and transition heads share: fused states of several target layers, a norm and an LM head of their own.

A linear map fuses what is read; attention reads the normed embedding of the next token beside the normed fused
state. See `recurrent` for what each step reads and drafts.

Shape suffixes: E hidden size, D draft vocabulary, M tokens, X = aux layers * E.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import HeadBatch
from headstart.heads.parts.induction import FAR, slow_pairs, solve
from headstart.heads.parts.int8_weights import Linear
from headstart.heads.parts.layer import DraftLayer, LayerConfig, normed, refuse_start, start_from_last_layers
from headstart.heads.parts.recurrent import RecurrentHead
from headstart.recipes.sections import FromTarget
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel

_FEW_ROWS, _ROWS, _MANY = 2, 6, 20_000
"""Tokens for each number that is read, from which the code of a token is learnt: `_ROWS`, but beyond `_MANY` in all
no more than `_FEW_ROWS`."""


class FusedConfig(LayerConfig):
    """Settings of heads that fuse several target layers."""

    draft_steps: int = Field(5, ge=1, le=16, description="Drafts in a row, in training and in drafting.")
    num_layers: int = Field(1, ge=1, le=8, description="Decoder layers; engines expect one.")
    aux_layers: Annotated[tuple[int, ...], FromTarget()] = Field(
        (),
        description="Target layers whose outputs are read, as transformers' hidden_states; (2, L // 2, L - 3) for "
        "eagle3, (2, L // 2, L - 1) if it starts as transition, (2, L // 2, -1) for transition.",
    )
    aux_norms: bool = Field(False, description="Normalise each aux hidden state before the fusion (EAGLE-3.1).")
    init: str = Field("target", description="Families say what heads can start from; random is random numbers.")

    @property
    def start_layers(self) -> int:
        return self.num_layers

    def check(self) -> None:
        aux_layers = self.aux_layers
        if len(set(aux_layers)) < len(aux_layers) or any(
            aux_layer < 1 and aux_layer != FINAL for aux_layer in aux_layers
        ):
            raise self.refused_layers()

    def refused_layers(self) -> UserError:
        """Why these layers cannot be read."""
        return UserError(
            f"The heads would read layers {list(self.aux_layers)} of the target, which must be different ones, from 1 "
            "on.",
            "Name them, for example heads.aux_layers=[1,2,3]; a target of few layers needs it.",
        )


class FusedHead(RecurrentHead):
    """Fusion, decoder layers, norm and LM head; families say what the stream is and what is fed back."""

    config: FusedConfig

    def __init__(self, config: FusedConfig) -> None:
        config.check()
        if not config.aux_layers:
            raise config.refused_layers()
        size = config.hidden_size
        first = DraftLayer(config, 2 * size, input_norm=False)
        super().__init__(
            config, config.draft_steps, [first, *(DraftLayer(config, size) for _ in range(config.num_layers - 1))]
        )
        self._add_inputs(size)
        self.embedding_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.lm_head = Linear(size, config.draft_width, bias=False)

    def _add_inputs(self, size: int) -> None:
        """The modules ahead of the layers; saved optimisers know parameters by the order in which they are added."""
        count = len(self.config.aux_layers)
        norms = count if self.config.aux_norms else 0
        self.aux_norms = nn.ModuleList(nn.RMSNorm(size, self.config.rms_norm_eps) for _ in range(norms))
        self.fc = Linear(count * size, size, bias=False)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    @property
    def lm_head_DE(self) -> Tensor:
        return self.lm_head.weight

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """The target's last layer on the deepest aux hidden state, then its final norm and LM head."""
        refuse_start(self.config.num_layers, target)
        self.bind(target)
        if self.config.init == "random":
            return
        before = self.config.hidden_size  # the embedding comes first
        start_from_last_layers(target, self.stack, self.fc, self.hidden_norm, self.norm, before)
        self.lm_head.weight.copy_(self.first_lm_head(target))

    def select_states(self, states: dict[int, Tensor]) -> Tensor:
        return torch.cat([states[aux_layer] for aux_layer in self.config.aux_layers], dim=-1)

    def project(self, seen: Tensor) -> Tensor:
        fused: Tensor = self.fc(self.normed_states(seen))
        return fused

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        embedded = normed(self.embedding_norm, embedded)
        return torch.cat([embedded, normed(self.hidden_norm, feedback)], dim=-1), self.stream(feedback, embedded)

    def stream(self, feedback: Tensor, embedded: Tensor) -> Tensor:
        """What the first layer adds to, from the fused (or fed back) state and the normed embedding, [..., E]."""
        return feedback

    def normed_states(self, seen: Tensor) -> Tensor:
        """What was read of the target, [..., X], each state normed where the settings say so."""
        if not self.config.aux_norms:
            return seen
        parts = seen.chunk(len(self.config.aux_layers), dim=-1)
        return torch.cat([normed(norm, part) for norm, part in zip(self.aux_norms, parts, strict=True)], dim=-1)

    def first(self, batches: Iterator[HeadBatch]) -> list[HeadBatch]:
        """As many batches as the code of a token is learnt from."""
        read_of = self.fc.in_features
        enough = min(_ROWS * read_of, max(_FEW_ROWS * read_of, _MANY))
        first: list[HeadBatch] = []
        while sum(batch.tokens_BT.numel() for batch in first) < enough and (batch := next(batches, None)) is not None:
            first.append(batch)
        return first

    @torch.no_grad()
    def copy(self, batches: list[HeadBatch], fused_EX: Tensor, spare: int = 0) -> bool:
        """Set the fusion and the layer's attention so that it copies (see `induction`); says whether it does.

        Args:
            batches: from `first`.
            fused_EX: the fusion without it, from normed aux layers.
            spare: key heads, the first ones, that do something else.
        """
        if not batches or len(self.layers) > 1:
            return False
        aux_MX = torch.cat(
            [self.normed_states(self.select_states(one.states)).flatten(0, 1).float() for one in batches]
        )
        own_ME = torch.cat([self._embed(one.tokens_BT.flatten(), aux_MX) for one in batches])
        own_ME = normed(self.embedding_norm, own_ME)
        cos_1Pd, _ = self._rotary.at(torch.arange(FAR + 1)[None], torch.float32, FAR + 1)
        slow = slow_pairs(self.config, cos_1Pd[0])
        code = solve(self.stack[0], slow, aux_MX, aux_MX @ fused_EX.T, own_ME, spare)
        if code is None:
            return False
        self.hidden_norm.weight.fill_(1)
        self.fc.weight.copy_(code.into(fused_EX))
        return True
