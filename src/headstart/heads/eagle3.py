"""EAGLE-3: one decoder layer over fused states of several target layers (Li et al., arXiv 2503.01840).

Three aux hidden states are fused by a linear map; attention reads the normed embedding of the next token beside the
normed fused state, the stream is the fused state itself, and the layer's output is fed back. The heads have a final
norm and an LM head of their own over the draft vocabulary. EAGLE-3.1 normalises every aux hidden state before the map
and feeds back the normed output. See `fused` and `recurrent` for what each step reads and drafts.

This is the arrangement that serving engines read. With `init: transition` it begins as `transition` heads do, which
are built from the same parts: as a solved step from one final state of the target to the next, with attention that
copies from the text. The linear map of that step, for which the arrangement has no place, is held by attention heads
that look at their own position alone (see `own_position`).

Shape suffixes: E hidden size, M predictions, P distances, R pairs of a head, X = aux layers * E (of final states: flat
positions), I = 2 E, J what is solved for reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, register, supervised_origins
from headstart.heads.exchange.fused import fill_fused, fused_settings, publish_fused
from headstart.heads.exchange.published import Layout, Published
from headstart.heads.parts import own_position
from headstart.heads.parts.fused import FusedConfig, FusedHead
from headstart.heads.parts.layer import LayerConfig, by_token, normed
from headstart.heads.parts.residual import LinearStart
from headstart.heads.parts.text_attention import causal_attention
from headstart.target.fitting import FINAL
from headstart.target.frozen import FrozenModel
from headstart.target.model import Target

_BLOCK = 8192
"""Embeddings that are normed at a time."""
_LONGEST, _ENOUGH = 1024, 8192
"""Tokens of a text, and of all, on which it is looked up whether heads find their own position."""


class Eagle3Config(FusedConfig):
    """Settings of EAGLE-3 heads."""

    family: str = "eagle3"
    init: Literal["target", "transition", "random"] = Field(
        "target",
        description="Start from the target's last layer, norm and LM head; as transition heads do, with attention "
        "heads enough to hold their linear map; or from random numbers.",
    )
    feedback: Literal["pre_norm", "post_norm"] = Field(
        "pre_norm", description="Feed back the layer's output as it is, or normed (EAGLE-3.1)."
    )
    norm_before_residual: bool = Field(
        False, description="Add to the normed fused state instead of the fused state; SGLang does not know it."
    )

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        found = super().of_target(target, settings)
        if settings.get("init") != "transition":
            return {**found, "aux_layers": (2, target.num_layers // 2, target.num_layers - 3)}
        own = -(-target.hidden_size // settings.get("head_dim", found["head_dim"]))
        heads = own + min(found["num_key_value_heads"], max(1, own // 2))
        aux_layers = (2, target.num_layers // 2, target.num_layers - 1)
        return {**found, "aux_layers": aux_layers, "num_attention_heads": heads, "num_key_value_heads": heads}

    @property
    def own_heads(self) -> int:
        """Key heads that look at their own position alone when heads start as transition heads do."""
        return -(-self.hidden_size // self.head_dim)

    def check(self) -> None:
        super().check()
        if self.init != "transition" or not self.hidden_size:
            return
        if self.num_layers > 1:
            raise UserError(
                f"heads.num_layers is {self.num_layers}, and heads.init=transition solves for one layer.",
                "Set heads.num_layers=1, or heads.init=target.",
            )
        if self.num_key_value_heads < self.own_heads:
            raise UserError(
                f"heads.num_key_value_heads is {self.num_key_value_heads}, and {self.own_heads} heads of "
                f"{self.head_dim} are needed to hold a linear map of the hidden size {self.hidden_size}.",
                "Leave out heads.num_key_value_heads and heads.num_attention_heads, or raise them.",
            )


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
            norm_before_residual=self.config.norm_before_residual,
            norm_output=self.config.feedback == "post_norm",
        )

    @classmethod
    def from_published(cls, published: Published, target: Target) -> Self:
        feedback = "post_norm" if published.norm_output else "pre_norm"
        own = {"family": cls.family, "feedback": feedback, "norm_before_residual": published.norm_before_residual}
        return fill_fused(cls(Eagle3Config.model_validate({**fused_settings(published), **own})), published, target)

    def layer_input(self, feedback: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        attended, stream = super().layer_input(feedback, embedded)
        return attended, attended[..., self.config.hidden_size :] if self.config.norm_before_residual else stream

    def layer_output(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        hidden = normed(self.norm, stream)
        return hidden, stream if self.config.feedback == "pre_norm" else hidden

    @torch.no_grad()
    def warm_start(self, target: FrozenModel) -> None:
        """The target's last layer, norm and LM head; or a layer without any effect yet, whose own heads look at
        themselves."""
        super().warm_start(target)
        if self.config.init == "transition":
            self.stack[0].zero_init()
            self.hidden_norm.weight.fill_(1)
            self._look([])

    @torch.no_grad()
    def fit(self, batches: Iterable[HeadBatch]) -> None:
        """Guess linearly, from the aux hidden states, where the next token's stream will end.

        Ridge regression on the direction that the target's own LM head reads one token later, undone by its norm; a
        fused state is scaled like the deepest aux hidden state.
        """
        if self.config.init == "transition":
            self._fit_transition(iter(batches))
        if self.config.init != "target":
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

    @torch.no_grad()
    def before_training(self, batches: Iterable[HeadBatch]) -> None:
        """Let heads that look at their own position stay as they are, where they really do."""
        layer, own = self.stack[0], self.config.own_heads
        layer.own_heads = 0
        if self.config.init != "transition" or own == self.config.num_key_value_heads:
            return
        least, tokens = 1.0, 0
        for batch in batches:
            seen_BTX = self.select_states(batch.states)[:, :_LONGEST]
            following_BT = F.pad(batch.tokens_BT[:, 1:], (0, 1))[:, :_LONGEST]
            attended_BTI, _ = self.layer_input(self.project(seen_BTX), self._embed(following_BT, seen_BTX))
            width = attended_BTI.shape[1]
            index_BT = torch.arange(width, device=attended_BTI.device).expand(attended_BTI.shape[:2])
            queries, keys, _ = layer.read(attended_BTI, self._rotary.at(index_BT, attended_BTI.dtype, width))
            least = min(least, float(own_position.shares(queries[:, :own], keys[:, :own]).mean((0, 2, 3)).min()))
            tokens += width
            if tokens >= _ENOUGH:
                break
        layer.own_heads = own if least >= own_position.ALONE else 0

    # -- the start as transition heads ---------------------------------------------------------------------------

    def _fit_transition(self, rest: Iterator[HeadBatch]) -> None:
        """Fuse to the final state before its norm, make some heads copy, and let the others hold the linear part of
        the step to the next final state, as `TransitionHead.fit` solves for it."""
        first = self.first(rest)
        if not first:
            return
        size, layer, own = self.config.hidden_size, self.stack[0], self.config.own_heads
        self._look(first)
        self.fc.weight.copy_(self._to_final(first))
        copies = self.copy(first, self.fc.weight.clone(), spare=own)

        def read(batch: HeadBatch) -> tuple[Tensor, list[Tensor]]:
            final_BTE, origin_M = batch.states[FINAL].float(), supervised_origins(batch.supervised_BT, 0)
            embedded_BTE = self._embed(F.pad(batch.tokens_BT[:, 1:], (0, 1)), final_BTE)
            attended_BTI, _ = self.layer_input(self.project(self.select_states(batch.states).float()), embedded_BTE)
            parts = [attended_BTI]
            if copies:
                width = attended_BTI.shape[1]
                index_BT = torch.arange(width, device=attended_BTI.device).expand(attended_BTI.shape[:2])
                found = layer.read(attended_BTI, self._rotary.at(index_BT, attended_BTI.dtype, width))
                parts.append(by_token(causal_attention(*(part[:, own:] for part in found))))
            read_MJ = torch.cat(parts, dim=-1).flatten(0, 1)[origin_M]
            return read_MJ, [final_BTE.flatten(0, 1)[origin_M + 1] / self.norm.weight.float()]

        behind = layer.o.in_features // self.config.num_key_value_heads * own
        start = LinearStart([2 * size + (layer.o.in_features - behind if copies else 0)], size, self.device_of_target)
        for map_EJ in start.solve(chain(first, rest), read):
            products_JJ = start.gram_FF / start.rows
            stays = 1.0
            if not self.config.norm_before_residual:
                # What is added to is the fused state as it is: it is given the size of the guesses that are fed back.
                stays = float(((map_EJ @ products_JJ) * map_EJ).sum() / size) ** 0.5
                fused_MX = torch.cat(
                    [self.project(self.select_states(one.states).float()).flatten(0, 1) for one in first]
                )
                self.fc.weight *= stays / float(fused_MX.square().mean(-1).sqrt().median())
            joined_EI = map_EJ[:, : 2 * size].clone()
            joined_EI[:, size:] -= stays * torch.eye(size).to(joined_EI)
            own_position.hold(layer, own, joined_EI, products_JJ[: 2 * size, : 2 * size])
            if copies:
                layer.o.weight[:, behind:] = map_EJ[:, 2 * size :]

    def _look(self, batches: list[HeadBatch]) -> None:
        """Let the first heads look at their own position, whatever token of the vocabulary or of the texts it has."""
        assert self._embedding_VE is not None, "heads are bound to their target"
        like = self.embedding_norm.weight.float()

        def normed_of(tokens: Tensor) -> Iterator[Tensor]:
            return (normed(self.embedding_norm, self._embed(part, like)) for part in torch.split(tokens, _BLOCK))

        kinds = [normed_of(torch.arange(len(self._embedding_VE)))]
        if batches:
            kinds.append(normed_of(torch.cat([one.tokens_BT.flatten() for one in batches])))
        number_E, mean_E = own_position.number_of_all(*kinds)
        index_1P = torch.arange(own_position.FAR + 1)[None]
        cos_Pd = self._rotary.at(index_1P, torch.float32, own_position.FAR + 1)[0][0]
        cos_PR = cos_Pd[1:, : self.config.head_dim // 2] / cos_Pd[0, 0]  # tables of long contexts may carry a factor
        own_position.look_at_itself(self.stack[0], self.config.own_heads, cos_PR, number_E, mean_E)

    def _to_final(self, batches: list[HeadBatch]) -> Tensor:
        """The map from normed aux layers to the final state before its norm, as large as the deepest of them, [E, X].

        Ridge regression of what the last layers add to the deepest aux hidden state: nothing, where that is the last
        one.
        """
        size, scale_E = self.config.hidden_size, self.norm.weight.float()
        aux_MX = torch.cat(
            [self.normed_states(self.select_states(one.states)).flatten(0, 1).float() for one in batches]
        )
        final_ME = torch.cat([one.states[FINAL].flatten(0, 1).float() for one in batches]) / scale_E
        good_M = aux_MX.isfinite().all(-1) & final_ME.isfinite().all(-1) & (aux_MX != 0).any(-1)
        aux_MX, final_ME = aux_MX[good_M], final_ME[good_M]
        deepest_ME = aux_MX[:, -size:]
        added_ME = final_ME * deepest_ME.square().mean(-1, keepdim=True).sqrt() - deepest_ME
        # A few tokens have states a hundred times as large as the rest in some components; directions alone count.
        columns_X = aux_MX.abs().median(0).values.clamp(min=1e-6)
        scaled_MX = aux_MX / columns_X
        sizes_M1 = scaled_MX.square().mean(-1, keepdim=True).sqrt()
        start = LinearStart([aux_MX.shape[1]], size, aux_MX.device)
        start.add(scaled_MX / sizes_M1, [added_ME / sizes_M1])
        map_EX = torch.zeros_like(self.fc.weight)
        for added_EX in start.maps():
            map_EX = added_EX / columns_X
        map_EX[:, -size:] += torch.eye(size).to(map_EX)
        return map_EX
