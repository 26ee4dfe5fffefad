"""A block's decoder layer and its settings; see `block`.

Shape suffixes: B rows, T tokens, H heads, E hidden size, N key heads, X what keys and values are together, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.parts.layer import DraftLayer, LayerConfig, linear_of, norm_scale, normed, rotate
from headstart.recipes.sections import FromTarget
from headstart.target.frozen import FrozenModel

_NEWEST, _ROOT = 2 / 3, 1 / 3
"""Of a state, how much is passed on by the attention heads that look at the newest one, and at the root."""


class BlockConfig(LayerConfig):
    """Settings of heads that draft a block in one pass."""

    num_layers: int = Field(1, ge=1, le=12, description="Decoder layers.")
    block_size: int = Field(8, ge=2, le=64, description="Slots of a block; with dflash the first one drafts nothing.")
    aux_layers: Annotated[tuple[int, ...], FromTarget()] = Field(
        (),
        description="Target layers whose outputs are read, as transformers' hidden_states, ascending and below the "
        "last; (2, L // 2, L - 1). Published configs count one less (target_layer_ids).",
    )
    mask_token_id: Annotated[int, FromTarget()] = Field(
        -1, ge=0, description="Token that stands in a block for what is not drafted yet: one that no text has."
    )
    init: Literal["target", "linear", "random"] = Field(
        "target",
        description="Start from the target's last layers and norm; from these with attention heads added that look at "
        "the newest state and at the root, and with output maps that are solved for; or from random numbers.",
    )

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        found = super().of_target(target, settings)
        last = target.num_layers - 1
        found["aux_layers"] = tuple(sorted({min(2, last), max(1, target.num_layers // 2), last}))
        if settings.get("init") == "linear":
            heads = found["num_key_value_heads"] + sum(looking(target.hidden_size, found["head_dim"]))
            found |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        if "mask_token_id" in settings:
            return found
        if target.spare_token is None:
            raise UserError(
                f"{target.name} has no token that is known to be free, to stand for what is not drafted yet.",
                "Name one that no text has: heads.mask_token_id=<id>.",
            )
        return {**found, "mask_token_id": target.spare_token}

    @property
    def start_layers(self) -> int:
        return self.num_layers

    def check(self) -> None:
        super().check()
        layers = self.aux_layers
        if list(layers) != sorted(set(layers)) or any(layer < 1 for layer in layers):
            raise self.refused_layers()
        if self.vocab_size and self.mask_token_id >= self.vocab_size:
            raise UserError(
                f"heads.mask_token_id is {self.mask_token_id}, and the target has {self.vocab_size} tokens.",
                "Name a token that no text has, or leave it out.",
            )

    def refused_layers(self) -> UserError:
        """Why these layers cannot be read."""
        return UserError(
            f"The heads would read layers {list(self.aux_layers)} of the target, which must be different ones, "
            "ascending, from 1 to the last but one.",
            "Name them, for example heads.aux_layers=[1,2]; a target of few layers needs it.",
        )


def looking(size: int, width: int) -> tuple[int, int]:
    """Key heads that look at the newest state, and those that look at the root."""
    return max(1, round(_NEWEST * size / width)), max(1, round(_ROOT * size / width))


class BlockLayer(DraftLayer):
    """A decoder layer whose queries and keys are normed head by head, and which reads a context beside its stream.

    Args:
        config: sizes.
    """

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def norm_heads(self, read_BHTd: Tensor, heads: int) -> Tensor:
        return torch.cat([normed(self.q_norm, read_BHTd[:, :heads]), normed(self.k_norm, read_BHTd[:, heads:])], dim=1)

    def _heads_as(self, attention: object) -> bool:
        return True  # norms of heads are cheap to learn around: they only change how sharply attention looks

    def by_published_name(self, number: int) -> dict[str, Tensor]:
        norms = {f"layers.{number}.self_attn.{name}_norm.weight": getattr(self, f"{name}_norm").weight for name in "qk"}
        return super().by_published_name(number) | norms

    def context(self, context_BTE: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, N, T, d] of the context."""
        config = self.config
        queries = config.num_attention_heads * config.head_dim
        read_BTX = F.linear(context_BTE, self.qkv.weight[queries:])
        keys, values = read_BTX.view(*context_BTE.shape[:2], -1, config.head_dim).transpose(1, 2).chunk(2, dim=1)
        return rotate(normed(self.k_norm, keys), *rotary), values

    @torch.no_grad()
    def warm_start(self, target: FrozenModel, number: int = -1, offset: int = 0) -> None:
        super().warm_start(target, number, offset)
        attention = getattr(target.layers[number], "self_attn", None)
        self._last_heads(target, number)
        for name in ("q_norm", "k_norm"):
            norm, own = getattr(attention, name, None), getattr(self, name)
            if getattr(norm, "weight", own.weight).shape == own.weight.shape:
                own.weight.copy_(norm_scale(norm, own.weight))

    def _last_heads(self, target: FrozenModel, number: int) -> None:
        """Where this layer has more heads than the target's, give its last ones the target's queries, keys, values."""
        config, layer = self.config, cast(Any, target.layers[number])
        attention = getattr(layer, "self_attn", None)
        given = [linear_of(attention, f"{name}_proj") for name in "qkv"]
        counts = [config.num_attention_heads, *[config.num_key_value_heads] * 2]
        every = torch.split(self.qkv.weight, [count * config.head_dim for count in counts])
        weights = [one.weight for one in given if one is not None]
        if config.head_dim != target.kv_shapes[number][0][1] or len(weights) < 3:
            return
        groups = config.num_attention_heads // config.num_key_value_heads  # of each of the target's, as many as fit
        grouped = weights[0].view(len(weights[1]) // config.head_dim, -1, config.head_dim, weights[0].shape[1])
        weights[0] = grouped[:, :groups].flatten(0, 2)
        if any(len(one) >= len(rows) for one, rows in zip(weights, every, strict=True)):
            return
        for one, rows in zip(weights, every, strict=True):
            rows[-len(one) :] = one
        if self.input_norm is not None:
            self.input_norm.weight.copy_(norm_scale(getattr(layer, "input_layernorm", None), self.input_norm.weight))
