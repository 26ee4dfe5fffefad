"""EAGLE-3: one decoder layer over fused states of several target layers (Li et al., arXiv 2503.01840).

Three tapped states are fused by a linear map; attention reads the normed embedding of the next token beside the
normed fused state, the stream is the fused state itself, and the layer's output is fed back. The heads have a final
norm and an LM head of their own over the draft vocabulary. EAGLE-3.1 normalises every tapped state before the map and
feeds back the normed output. See `recurrent` for what each step reads and drafts.

With `join` the stream is not the fed state but a linear map of it and the embedding, as in EAGLE-1. Reading and feeding
back final states, every step then makes the same transition, from one final state to the next. Its linear part is
solved for before training, and so is an attention that copies (see `induction`). Serving engines know no such map.

Shape suffixes: E hidden size, D draft vocabulary, M positions, X = taps * E (of final states: flat positions), J what
is solved for reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, positions, register
from headstart.heads.induction import FAR, slow_pairs, solve
from headstart.heads.layer import DraftLayer, LayerConfig, by_token, causal_attention, norm_scale, normed
from headstart.heads.packed import Linear
from headstart.heads.recurrent import RecurrentHead
from headstart.heads.residual import LinearStart
from headstart.recipe import FromTarget
from headstart.target import FINAL, Target

_FEW_ROWS, _ROWS, _MANY = 2, 6, 20_000
"""Tokens for each number that is tapped, from which the code of a token is learnt: `_ROWS`, but beyond `_MANY` in all
no more than `_FEW_ROWS`."""


class Eagle3Config(LayerConfig):
    """Settings of EAGLE-3 heads."""

    family: str = "eagle3"
    steps: int = Field(5, ge=1, le=16, description="Drafts in a row, in training and in drafting.")
    num_layers: int = Field(1, ge=1, le=8, description="Decoder layers; engines expect one.")
    tap_layers: Annotated[tuple[int, ...], FromTarget()] = Field(
        (),
        description="Target layers whose outputs are read, as transformers' hidden_states; (2, L // 2, L - 3), or with "
        "join (2, L // 2, -1).",
    )
    tap_norms: bool = Field(False, description="Normalise each tapped state before the fusion (EAGLE-3.1).")
    feedback: Literal["pre_norm", "post_norm"] = Field(
        "pre_norm", description="Feed back the layer's output as it is, or normed (EAGLE-3.1)."
    )
    join: bool = Field(
        False,
        description="Let the stream be a linear map of embedding and state, solved for at the start; needs "
        "feedback=post_norm and -1, the final state, as the last of tap_layers. Engines do not load it.",
    )
    start: Literal["target", "cold"] = Field(
        "target", description="Start from the target's last layer, norm and LM head, or from random numbers."
    )

    @classmethod
    def of_target(cls, target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
        taps = (2, target.num_layers // 2, FINAL if settings.get("join") else target.num_layers - 3)
        return {**super().of_target(target, settings), "tap_layers": taps}

    def check(self) -> None:
        taps = self.tap_layers
        if len(set(taps)) < len(taps) or any(tap < 1 and tap != FINAL for tap in taps):
            raise self.refused_taps()
        if self.join and (self.feedback != "post_norm" or taps[-1:] not in ((), (FINAL,))):
            raise UserError(
                "heads.join goes from final state to final state.",
                f"Set heads.feedback=post_norm and end heads.tap_layers with {FINAL}, for example [2,15,{FINAL}].",
            )

    def refused_taps(self) -> UserError:
        """Why these layers cannot be read."""
        return UserError(
            f"The heads would read layers {list(self.tap_layers)} of the target, which must be different ones, from 1 "
            "on.",
            "Name them, for example heads.tap_layers=[1,2,3]; a target of few layers needs it.",
        )


@register
class Eagle3Head(RecurrentHead):
    """Fusion, decoder layers, norm and LM head."""

    family: ClassVar[str] = "eagle3"
    Config: ClassVar[type[LayerConfig]] = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        config.check()
        taps = config.tap_layers
        if not taps:
            raise config.refused_taps()
        size = config.hidden_size
        first = DraftLayer(config, 2 * size, input_norm=False)
        super().__init__(
            config, config.steps, [first, *(DraftLayer(config, size) for _ in range(config.num_layers - 1))]
        )
        norms = len(taps) if config.tap_norms else 0
        self.tap_norms = nn.ModuleList(nn.RMSNorm(size, config.rms_norm_eps) for _ in range(norms))
        self.fc = Linear(len(taps) * size, size, bias=False)
        self.joined = Linear(2 * size, size, bias=False) if config.join else None
        self.embedding_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.lm_head = Linear(size, config.draft_width, bias=False)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.tap_layers

    @property
    def lm_head_DE(self) -> Tensor:
        return self.lm_head.weight

    @torch.no_grad()
    def warm_start(self, target: Target) -> None:
        """The target's last layer on the deepest tapped state, then its final norm and LM head."""
        if self.config.num_layers > target.num_layers:
            raise UserError(
                f"heads.num_layers is {self.config.num_layers} and the target has {target.num_layers} layers to start "
                "from.",
                "Lower heads.num_layers.",
            )
        self.bind(target)
        if self.config.start == "cold":
            return
        self.fc.weight.zero_()
        self.fc.weight[:, -self.config.hidden_size :] = torch.eye(self.config.hidden_size)
        for number, layer in enumerate(self.stack):
            behind = self.config.hidden_size if number == 0 else 0
            layer.warm_start(target, number - len(self.layers), behind)
        last = target.layers[-len(self.layers)]
        self.hidden_norm.weight.copy_(norm_scale(getattr(last, "input_layernorm", None), self.norm.weight))
        self.norm.weight.copy_(norm_scale(getattr(target.decoder, "norm", None), self.norm.weight))
        if self.joined is not None:
            for layer in self.stack:
                layer.silence()  # the fused state is a final one already
            self.joined.weight.zero_()
            self.joined.weight[:, self.config.hidden_size :] = torch.eye(self.config.hidden_size)
        self.lm_head.weight.copy_(self.first_lm_head(target))

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Guess linearly where the next token's stream will end: from the tapped states, or with `join` from the final
        state, the next token's embedding and what an attention copies.

        Ridge regression on the direction that the target's own LM head reads one token later, undone by its norm; a
        fused state is scaled like the deepest tapped one.
        """
        if self.config.start == "cold":
            return
        if self.joined is not None:
            self._fit_joined(self.joined, iter(batches))
            return
        size, scale = self.config.hidden_size, 0.0

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            nonlocal scale
            final_XE, origin_M = batch.states[FINAL].flatten(0, 1).float(), positions(batch.supervised_BT, 0)
            read_MX = self._tapped(self.see(batch.states).flatten(0, 1)[origin_M].float())
            scale += float(read_MX[:, -size:].square().mean(-1).sqrt().sum())
            return read_MX, [final_XE[origin_M + 1] / self.norm.weight.float()]

        start = LinearStart([self.fc.in_features], self.fc.out_features, self.device_of_target)
        for map_EX in start.learn(batches, read):
            self.fc.weight.copy_(scale / start.rows * map_EX)

    def _fit_joined(self, joined: nn.Linear, batches: Iterator[HeadBatch]) -> None:
        """Make the layer copy, then solve for what embedding, fused state and copies say of the next final state."""
        first: list[HeadBatch] = []
        size, layer, read_of = self.config.hidden_size, self.stack[0], self.fc.in_features
        enough = min(_ROWS * read_of, max(_FEW_ROWS * read_of, _MANY))
        while sum(batch.tokens_BT.numel() for batch in first) < enough and (batch := next(batches, None)) is not None:
            first.append(batch)
        width = 0
        if first and len(self.layers) == 1:
            tapped_MX = torch.cat([self._tapped(self.see(one.states)).flatten(0, 1).float() for one in first])
            own_ME = torch.cat([self._embed(one.tokens_BT.flatten(), tapped_MX) for one in first])
            cos_1Pd, _ = self._rotary.at(torch.arange(FAR + 1)[None], torch.float32, FAR + 1)
            own_ME = normed(self.embedding_norm, own_ME)
            code = solve(layer, slow_pairs(self.config, cos_1Pd[0]), tapped_MX, tapped_MX[:, -size:], own_ME)
            if code is not None:
                width = layer.o.in_features
                self.hidden_norm.weight.fill_(1)
                self.fc.weight.copy_(code.into(self.fc.weight))

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_BTE, origin_M = batch.states[FINAL].float(), positions(batch.supervised_BT, 0)
            embedded_BTE = self._embed(F.pad(batch.tokens_BT[:, 1:], (0, 1)), final_BTE)
            fed_BTE = self.fuse(self.see(batch.states).float())
            parts = [normed(self.embedding_norm, embedded_BTE), fed_BTE]
            if width:
                places = torch.arange(fed_BTE.shape[1], device=fed_BTE.device).expand(fed_BTE.shape[:2])
                turn = self._rotary.at(places, fed_BTE.dtype, fed_BTE.shape[1])
                parts.append(by_token(causal_attention(*layer.read(self.enter(fed_BTE, embedded_BTE)[0], turn))))
            read_MJ = torch.cat(parts, dim=-1).flatten(0, 1)[origin_M]
            return read_MJ, [final_BTE.flatten(0, 1)[origin_M + 1] / self.norm.weight.float()]

        start = LinearStart([2 * size + width], size, self.device_of_target)
        for map_EJ in start.learn(chain(first, batches), read):
            joined.weight.copy_(map_EJ[:, : 2 * size])
            if width:
                layer.o.weight.copy_(map_EJ[:, 2 * size :])

    def see(self, states: dict[int, Tensor]) -> Tensor:
        return torch.cat([states[tap] for tap in self.config.tap_layers], dim=-1)

    def fuse(self, seen: Tensor) -> Tensor:
        fused: Tensor = self.fc(self._tapped(seen))
        return fused

    def enter(self, fed: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        embedded = normed(self.embedding_norm, embedded)
        stream = fed if self.joined is None else self.joined(torch.cat([embedded, fed], dim=-1))
        return torch.cat([embedded, normed(self.hidden_norm, fed)], dim=-1), stream

    def leave(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        hidden = normed(self.norm, stream)
        return hidden, stream if self.config.feedback == "pre_norm" else hidden

    def _tapped(self, seen: Tensor) -> Tensor:
        if not self.config.tap_norms:
            return seen
        parts = seen.chunk(len(self.config.tap_layers), dim=-1)
        return torch.cat([normed(norm, part) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=-1)
