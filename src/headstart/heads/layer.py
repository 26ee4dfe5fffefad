"""A decoder layer that belongs to the heads: Llama's arrangement, warm-started from a layer of the target.

Training reads whole conversations (`chain_attention`), drafting one tree level after the other behind a KV cache
(`LayerCache`, `cached_attention`). Both give the same numbers.

Shape suffixes: B rows, T tokens, A origins of a row, W nodes, S cache slots in sight, E hidden size, I width of what
queries, keys and values read, G query heads that share a key head, N key heads, H query heads (G * N), d head size,
F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.heads.base import HeadConfig
from headstart.target import Target

_ROTARY = {"default", "linear", "llama3", "yarn"}
"""Rotary kinds whose angles depend on the position alone."""


class LayerConfig(HeadConfig):
    """Settings of families with decoder layers of their own; what a recipe leaves out is taken from the target."""

    intermediate_size: int = Field(0, ge=1, description="Width of a layer's MLP; the target's own by default.")
    num_attention_heads: int = Field(0, ge=1, description="Query heads; as the target by default.")
    num_key_value_heads: int = Field(0, ge=1, description="Key and value heads; as the target by default.")
    head_dim: int = Field(0, ge=1, description="Size of an attention head; as the target by default.")
    hidden_act: str = Field("silu", description="Activation of the MLP; as the target by default.")
    rms_norm_eps: float = Field(1e-5, gt=0, description="Epsilon of the norms; as the target by default.")
    rope_parameters: dict[str, Any] = Field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0},
        description="Rotary positions as transformers writes them; as the target by default.",
    )
    max_position_embeddings: int = Field(2048, ge=1, description="Longest context; as the target by default.")

    @classmethod
    def of_target(cls, target: Target) -> dict[str, Any]:
        config, (heads, size) = target.config, target.kv_shapes[-1][0]
        rope = getattr(config, "rope_parameters", None) or {}
        rope = rope if "rope_theta" in rope else rope.get("full_attention", {})
        found: dict[str, Any] = {
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": heads,
            "head_dim": size,
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
            "max_position_embeddings": target.max_length,
        }
        act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
        if act in ACT2FN:
            found["hidden_act"] = act
        if rope.get("rope_type", "default") in _ROTARY and "rope_theta" in rope:
            found["rope_parameters"] = dict(rope)
        return found


class Rotary:
    """Cosines and sines of the rotary positions, computed once in float32 and kept in the dtype that asks for them."""

    def __init__(self, config: LayerConfig) -> None:
        self._config = config
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def at(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B, T, d] of these positions; those behind the longest context take its last."""
        key = (positions_BT.device, dtype)
        if key not in self._tables:
            self._tables[key] = self._table(*key)
        cos, sin = self._tables[key]
        positions_BT = positions_BT.clamp(max=len(cos) - 1)
        return cos[positions_BT], sin[positions_BT]

    @torch.inference_mode(False)
    @torch.no_grad()
    def _table(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        config = self._config
        llama = LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
        )
        places_1P = torch.arange(config.max_position_embeddings)[None]
        cos, sin = LlamaRotaryEmbedding(llama)(torch.zeros(1), places_1P)
        return cos[0].to(device, dtype), sin[0].to(device, dtype)


class DraftLayer(nn.Module):
    """Attention and MLP around a residual stream; what attention reads may be wider than the stream.

    Args:
        config: sizes.
        inputs: I, width of what queries, keys and values are computed from.
        input_norm: normalise that input here; families that mix several inputs do it themselves.
    """

    def __init__(self, config: LayerConfig, inputs: int, input_norm: bool = True) -> None:
        super().__init__()
        self.config = config
        size, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.input_norm = nn.RMSNorm(inputs, config.rms_norm_eps) if input_norm else None
        self.qkv = nn.Linear(inputs, (heads + 2 * kv_heads) * config.head_dim, bias=False)
        self.o = nn.Linear(heads * config.head_dim, size, bias=False)
        self.mlp_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)
        self._act = ACT2FN[config.hidden_act]

    def read(self, x_BTI: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, N, G, T, d] and keys [B, N, T, d], and values [B, N, T, d]."""
        config = self.config
        kv_heads, size = config.num_key_value_heads, config.head_dim
        if self.input_norm is not None:
            x_BTI = normed(self.input_norm, x_BTI)
        rows, width = x_BTI.shape[:2]
        all_BHTd = self.qkv(x_BTI).view(rows, width, -1, size).transpose(1, 2)
        heads = config.num_attention_heads
        turned_BHTd = _rotate(all_BHTd[:, : heads + kv_heads], *rotary)
        queries = turned_BHTd[:, :heads].reshape(rows, kv_heads, heads // kv_heads, width, size)
        return queries, turned_BHTd[:, heads:], all_BHTd[:, heads + kv_heads :]

    def write(self, residual_BTE: Tensor, mixed_BNGTd: Tensor) -> Tensor:
        """The stream behind this layer, from the stream before it and what attention brought."""
        rows, width = residual_BTE.shape[:2]
        x_BTE = residual_BTE + self.o(mixed_BNGTd.permute(0, 3, 1, 2, 4).reshape(rows, width, -1))
        gate_BTF, up_BTF = self.gate_up(normed(self.mlp_norm, x_BTE)).chunk(2, dim=-1)
        stream_BTE: Tensor = x_BTE + self.down(self._act(gate_BTF) * up_BTF)
        return stream_BTE

    @torch.no_grad()
    def warm_start(self, target: Target, number: int = -1, behind: int = 0) -> None:
        """Take over a layer of the target, as far as it is built alike; the rest starts without any effect.

        Args:
            target: the frozen model.
            number: of its layer.
            behind: columns of the input before those that the target's layer knows; they start at zero.
        """
        layer: Any = target.layers[number]
        attention: Any = getattr(layer, "self_attn", None)
        mlp: Any = getattr(layer, "mlp", None)
        parts: list[Any] = [getattr(attention, f"{name}_proj", None) for name in "qkv"]
        alike = all(isinstance(part, nn.Linear) for part in parts) and not hasattr(attention, "q_norm")
        if alike and sum(part.weight.shape[0] for part in parts) == self.qkv.weight.shape[0]:
            self.qkv.weight[:, :behind] = 0
            self.qkv.weight[:, behind:] = torch.cat([part.weight for part in parts]).to(self.qkv.weight)
            if self.input_norm is not None:
                self.input_norm.weight.copy_(norm_scale(layer.input_layernorm, self.input_norm.weight))
            self.o.weight.copy_(attention.o_proj.weight)
        else:
            self.o.weight.zero_()
        parts = [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
        fits = all(isinstance(part, nn.Linear) for part in parts)
        if fits and parts[2].weight.shape == self.down.weight.shape:
            self.gate_up.weight.copy_(torch.cat([parts[0].weight, parts[1].weight]))
            self.down.weight.copy_(parts[2].weight)
            norm = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm
            self.mlp_norm.weight.copy_(norm_scale(norm, self.mlp_norm.weight))
        else:
            self.down.weight.zero_()


class LayerCache:
    """Keys and values of committed tokens, and behind them those of the tree that is being drafted.

    Attributes:
        lengths: committed slots of each row.
    """

    def __init__(self, config: LayerConfig, layers: int, rows: int, capacity: int, like: Tensor) -> None:
        shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
        self.kv = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers)]
        self.lengths = [0] * rows

    def reserve(self, slots: int) -> None:
        """Make room for this many slots of a row."""
        have = self.kv[0][0].shape[2]
        if slots > have:
            more = max(slots, 2 * have) - have
            self.kv = [(F.pad(keys, (0, 0, 0, more)), F.pad(values, (0, 0, 0, more))) for keys, values in self.kv]

    def put(self, layer: int, starts: Sequence[int], keys_BNTd: Tensor, values_BNTd: Tensor) -> None:
        """Write to each row's slots from `starts` on."""
        width = keys_BNTd.shape[2]
        for cached, new in zip(self.kv[layer], (keys_BNTd, values_BNTd), strict=True):
            if len(set(starts)) == 1:
                cached[:, :, starts[0] : starts[0] + width] = new
            else:
                for row, start in enumerate(starts):
                    cached[row, :, start : start + width] = new[row]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.kv = [(keys[list(rows)], values[list(rows)]) for keys, values in self.kv]
        self.lengths = [self.lengths[row] for row in rows]


def cached_attention(
    queries_BNGWd: Tensor, kv: tuple[Tensor, Tensor], slots: int, allowed_BWS: Tensor | None
) -> Tensor:
    """What each query finds in the first `slots` slots of a cache, [B, N, G, W, d].

    The queries that share a key head are rows of one attention, so that keys and values need no copy.
    """
    shape = queries_BNGWd.shape
    mask = None
    if allowed_BWS is not None:
        mask = torch.zeros(allowed_BWS.shape, dtype=queries_BNGWd.dtype, device=allowed_BWS.device)
        mask = mask.masked_fill_(~allowed_BWS, float("-inf"))[:, None].repeat(1, 1, shape[2], 1)
    keys, values = (cached[:, :, :slots] for cached in kv)
    mixed = F.scaled_dot_product_attention(queries_BNGWd.flatten(2, 3), keys, values, attn_mask=mask)
    return mixed.view(shape)


def chain_attention(
    queries_BNGAd: Tensor,
    keys_BNTd: Tensor,
    values_BNTd: Tensor,
    hidden_BAT: Tensor,
    chain: Sequence[tuple[Tensor, Tensor]] = (),
) -> Tensor:
    """Attention of one draft step of every origin at once: the text up to the origin, then its own draft so far.

    Args:
        queries_BNGAd: one query an origin.
        keys_BNTd: of the text.
        values_BNTd: of the text.
        hidden_BAT: bool, places of the text behind the origin.
        chain: keys and values [B, N, A, d] of the origin's own drafted tokens, first to last, this step's included.

    Returns:
        [B, N, G, A, d].
    """
    rows, kv_heads, groups, origins, size = queries_BNGAd.shape
    queries_BNGAd = queries_BNGAd * size**-0.5
    scores = (queries_BNGAd.flatten(2, 3) @ keys_BNTd.transpose(2, 3)).view(rows, kv_heads, groups, origins, -1)
    scores = scores.masked_fill(hidden_BAT[:, None, None], float("-inf"))
    own = [(queries_BNGAd * keys_BNAd[:, :, None]).sum(-1, keepdim=True) for keys_BNAd, _ in chain]
    text = keys_BNTd.shape[2]
    shares = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=torch.float32).to(values_BNTd.dtype)
    mixed = (shares[..., :text].flatten(2, 3) @ values_BNTd).view(queries_BNGAd.shape)
    for step, (_, values_BNAd) in enumerate(chain):
        mixed = mixed + shares[..., text + step, None] * values_BNAd[:, :, None]
    return mixed


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """An RMS norm in the dtype of what it normalises, whose fused operation wants one dtype."""
    assert isinstance(norm, nn.RMSNorm), "heads have RMS norms"
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps)


def norm_scale(norm: nn.Module, like: Tensor) -> Tensor:
    """What an RMS norm multiplies with, whether it is stored as such or as a difference to 1; ones for other norms."""
    if "RMSNorm" not in type(norm).__name__:
        return torch.ones_like(like)
    weight = cast(Tensor, norm.weight)
    with torch.no_grad():
        scale: Tensor = norm(torch.ones_like(weight, dtype=torch.float32))
    return scale.to(like)


def _rotate(x_BHTd: Tensor, cos_BTd: Tensor, sin_BTd: Tensor) -> Tensor:
    left, right = x_BHTd.chunk(2, dim=-1)
    turned: Tensor = x_BHTd * cos_BTd[:, None] + torch.cat([-right, left], dim=-1) * sin_BTd[:, None]
    return turned
