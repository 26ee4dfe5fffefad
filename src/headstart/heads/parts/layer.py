"""Decoder layer of draft heads: Llama's architecture, warm-started from a layer of the target.

Attention is the caller's: over complete conversations in training (`text_attention`), with a KV cache in drafting
(`cache`), with equal results.

Shape suffixes: B rows, T tokens, E hidden size, I inputs of queries, keys and values, G query heads per key head, N key
heads, H all heads, d head size, F width of the MLP, R rows of a weight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from math import inf
from typing import Annotated, Any, cast

import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from headstart.errors import UserError
from headstart.heads.base import HeadConfig
from headstart.heads.exchange.published import LayerSizes
from headstart.heads.int8_weights import Int8Weight, Linear, in_panels
from headstart.heads.settings import FromTarget
from headstart.kernels import draft_kernels
from headstart.model.frozen import FrozenModel, used_tokens
from headstart.model.lm_head import is_quantized

Angles = tuple[Tensor, Tensor]
"""(cos, sin) of rotary positions."""
_ROTARY: dict[str, set[str]] = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "llama3": {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"rope_theta", "factor"},
}
"""Rotary types with angles that depend on the position only, and their required settings."""
_MIN_POSITIONS = 256
"""Size of the first rotary table."""


class LayerConfig(HeadConfig):
    """Settings of families with decoder layers."""

    intermediate_size: Annotated[int, FromTarget()] = Field(0, ge=1, le=1 << 24, description="Width of a layer's MLP.")
    num_attention_heads: Annotated[int, FromTarget()] = Field(0, ge=1, le=4096, description="Query heads.")
    num_key_value_heads: Annotated[int, FromTarget()] = Field(0, ge=1, le=4096, description="Key and value heads.")
    head_dim: Annotated[int, FromTarget()] = Field(
        0, ge=2, le=1 << 14, multiple_of=2, description="Size of an attention head."
    )
    hidden_act: Annotated[str, FromTarget()] = Field("silu", description="Activation of the MLP.")
    rms_norm_eps: Annotated[float, FromTarget()] = Field(1e-5, gt=0, description="Epsilon of the norms.")
    rope_parameters: Annotated[dict[str, Any], FromTarget()] = Field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0},
        description="Rotary positions as transformers writes them.",
    )
    max_position_embeddings: Annotated[int, FromTarget()] = Field(2048, ge=1, description="Longest context.")

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        config, (heads, size) = target.config, target.kv_shapes[-1][0]
        rope = _rope(target)
        values: dict[str, Any] = {
            "intermediate_size": getattr(config, "intermediate_size", None) or 4 * target.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": heads,
            "head_dim": size,
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
            "max_position_embeddings": target.max_length,
        }
        act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
        if act in ACT2FN:
            values["hidden_act"] = act
        if rope.get("partial_rotary_factor", 1.0) == 1.0 and "rope_theta" in rope:
            complete = rope.get("rope_type", "default") in _ROTARY
            values["rope_parameters"] = rope if complete else {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return values

    @property
    def published_sizes(self) -> LayerSizes:
        return LayerSizes(**{field.name: getattr(self, field.name) for field in fields(LayerSizes)})

    @field_validator("hidden_act")
    @classmethod
    def _known_activation(cls, name: str) -> str:
        if name not in ACT2FN:
            raise ValueError("transformers has no such activation")
        return name

    @field_validator("rope_parameters")
    @classmethod
    def _known_rotary(cls, rope: dict[str, Any]) -> dict[str, Any]:
        kind = rope.get("rope_type", "default")
        if kind not in _ROTARY:
            raise ValueError(f"rope_type is one of {', '.join(_ROTARY)}")
        for name in sorted(_ROTARY[kind] | rope.keys() - {"rope_type"}):
            value, needed = rope.get(name), name in _ROTARY[kind]
            if not (isinstance(value, int | float) and 0 < value < inf if needed else value == value != inf):
                raise ValueError(f"{kind} positions need a {'positive' if needed else 'finite'} number as {name}")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("the layers of the heads rotate all of a head: partial_rotary_factor can only be 1")
        return {"rope_type": kind, **rope}


class Rotary:
    """Rotary tables that grow on demand, from transformers' rotary module for Llama or the one from `build`."""

    def __init__(self, config: LayerConfig, build: Callable[[], nn.Module] | None = None) -> None:
        self._config, self._build = config, build or partial(_llama_rotary, config)
        self._tables: dict[tuple[torch.device, torch.dtype], Angles] = {}

    def at(self, positions_BT: Tensor, dtype: torch.dtype, stop: int) -> Angles:
        """(cos, sin) [B, T, d] of positions below `stop`, clamped to the longest context."""
        return angles(self.table(stop, positions_BT.device, dtype), positions_BT)

    def table(self, stop: int, device: torch.device, dtype: torch.dtype) -> Angles:
        """(cos, sin) [P, d] of at least the positions below `stop`, up to the longest context."""
        key = (device, dtype)
        needed = min(stop, self._config.max_position_embeddings)
        table = self._tables.get(key)
        if table is None or len(table[0]) < needed:
            table = self._tables[key] = self._table(needed, *key)
        return table  # not re-read: another drafting thread may have stored a shorter one

    @torch.inference_mode(False)
    @torch.no_grad()
    def _table(self, needed: int, device: torch.device, dtype: torch.dtype) -> Angles:
        size = min(self._config.max_position_embeddings, max(_MIN_POSITIONS, 1 << (needed - 1).bit_length()))
        cos, sin = self._build()(torch.zeros(1), torch.arange(size)[None])
        return cos[0].to(device, dtype), sin[0].to(device, dtype)


def _llama_rotary(config: LayerConfig) -> nn.Module:
    llama = LlamaConfig(
        hidden_size=config.num_attention_heads * config.head_dim,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
    )
    rotary: nn.Module = LlamaRotaryEmbedding(llama)
    return rotary


def angles(table: Angles, positions_BT: Tensor) -> Angles:
    """(cos, sin) [B, T, d] of the positions, clamped to the end of the table."""
    cos, sin = table
    positions_BT = positions_BT.clamp(max=len(cos) - 1)
    return cos[positions_BT], sin[positions_BT]


class DraftLayer(nn.Module):
    """Attention and MLP around a residual stream.

    Args:
        inputs: width of attention's input, which may be wider than the stream.
        input_norm: false if the family norms the input.
        qk_norm: norm queries and keys per head before the rotation, as in Qwen3.

    Attributes:
        own_heads: number of leading own-position key heads (`own_position`). Training freezes their queries and keys,
            and their output is their value.
        has_target_norms: whether its query and key norms are copies of the target's.
    """

    def __init__(self, config: LayerConfig, inputs: int, input_norm: bool = True, qk_norm: bool = False) -> None:
        super().__init__()
        self.config = config
        self.own_heads, self.has_target_norms = 0, False
        size, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        if heads % kv_heads:
            raise UserError(
                f"{heads} query heads cannot share {kv_heads} key heads evenly.",
                f"Set heads.num_key_value_heads to a divisor of {heads}, or leave it out for the target's own.",
            )
        self.input_norm = nn.RMSNorm(inputs, config.rms_norm_eps) if input_norm else None
        self.qkv = Linear(inputs, (heads + 2 * kv_heads) * config.head_dim, bias=False)
        self.o = Linear(heads * config.head_dim, size, bias=False)
        self.mlp_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.gate_up = Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = Linear(config.intermediate_size, size, bias=False)
        self._act = ACT2FN[config.hidden_act]
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, config.rms_norm_eps) if qk_norm else None for _ in range(2)
        )

    @property
    def groups(self) -> int:
        """Number of query heads that share a key head."""
        return self.config.num_attention_heads // self.config.num_key_value_heads

    def read(self, x_BTI: Tensor, rotary: Angles, trained_RI: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries [B, N, G, T, d] and keys [B, N, T, d], and values [B, N, T, d]. With the rows from
        `trained_qkv`, queries and keys exclude the `own_heads`."""
        kv_heads = self.config.num_key_value_heads - (0 if trained_RI is None else self.own_heads)
        all_BHTd = self.project_qkv(x_BTI, trained_RI).transpose(1, 2)
        heads = self.groups * kv_heads
        rotated_BHTd = rotate(all_BHTd[:, : heads + kv_heads], *rotary)
        queries_BHTd = rotated_BHTd[:, :heads]
        queries = queries_BHTd.reshape(len(x_BTI), kv_heads, self.groups, *queries_BHTd.shape[2:])
        return queries, rotated_BHTd[:, heads:], all_BHTd[:, heads + kv_heads :]

    def project_qkv(self, x_BTI: Tensor, trained_RI: Tensor | None = None) -> Tensor:
        """Return queries, keys and values of each token before the rotation, [B, T, H, d]."""
        x_BTI = self.attention_input(x_BTI)
        read_BTR: Tensor = self.qkv(x_BTI) if trained_RI is None else F.linear(x_BTI, trained_RI)
        all_BTHd = read_BTR.view(*x_BTI.shape[:2], -1, self.config.head_dim)
        if self.q_norm is None or self.k_norm is None:
            return all_BTHd
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        queries, keys, values = torch.split(all_BTHd, [heads, kv_heads, kv_heads], dim=2)
        return torch.cat([rms_norm(self.q_norm, queries), rms_norm(self.k_norm, keys), values], dim=2)

    def attention_input(self, x_BTI: Tensor) -> Tensor:
        """Return the input of the query, key and value maps."""
        return x_BTI if self.input_norm is None else rms_norm(self.input_norm, x_BTI)

    @torch.no_grad()
    def match_qk_rms(self, x_BTI: Tensor) -> None:
        """Set the scale of the query and key norms so that they preserve the RMS on these inputs."""
        x_BTI = self.attention_input(x_BTI)
        for norm, rows in zip((self.q_norm, self.k_norm), self.head_rows()[:2], strict=True):
            if norm is not None:
                norm.weight.fill_(F.linear(x_BTI, rows).square().mean().sqrt())

    def trained_qkv(self) -> Tensor | None:
        """Return the trained rows of queries, keys and values, [R, I]; None for all, and outside of training."""
        if not self.own_heads or not self.training:
            return None
        slices, where = self.trainable_rows()["qkv.weight"], self.qkv.weight.device
        rows_R = torch.cat([torch.arange(rows.start, rows.stop, device=where) for rows in slices])
        weight_RI = self.qkv.weight.index_select(0, rows_R)  # one gradient table, not one per slice
        device = weight_RI.device.type  # cast once: autocast would cast in every step
        return weight_RI.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else weight_RI

    def trainable_rows(self) -> dict[str, list[slice]]:
        """Return the row ranges of the matrices stacked in each weight. Other rows are frozen."""
        config = self.config
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        own_heads = self.own_heads
        queries = slice(heads // kv_heads * own_heads * size, heads * size)
        keys = slice((heads + own_heads) * size, (heads + kv_heads) * size)
        values = slice((heads + kv_heads) * size, (heads + 2 * kv_heads) * size)
        halves = [slice(0, config.intermediate_size), slice(config.intermediate_size, 2 * config.intermediate_size)]
        matrices = {"qkv.weight": [queries, keys, values], "gate_up.weight": halves}
        return {name: [rows for rows in parts if rows.stop > rows.start] for name, parts in matrices.items()}

    def by_published_name(self, number: int) -> dict[str, Tensor]:
        """Return views of the weights under the published names of layer `number`."""
        queries, keys, values = self.head_rows()
        gate, up = self.gate_up.weight.chunk(2)
        tensors = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": self.o.weight,
            "post_attention_layernorm": self.mlp_norm.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": self.down.weight,
        }
        if self.input_norm is not None:
            tensors["input_layernorm"] = self.input_norm.weight
        for name, norm in (("self_attn.q_norm", self.q_norm), ("self_attn.k_norm", self.k_norm)):
            if norm is not None:
                tensors[name] = norm.weight
        return {f"layers.{number}.{name}.weight": tensor for name, tensor in tensors.items()}

    def head_rows(self) -> tuple[Tensor, ...]:
        """Weights of queries, keys and values."""
        config = self.config
        heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        return torch.split(self.qkv.weight, [count * config.head_dim for count in heads])

    def write(self, residual_BTE: Tensor, attention_output_BNGTd: Tensor) -> Tensor:
        """Return the next stream from the residual and the attention output."""
        return self.write_concat(residual_BTE, concat_heads(attention_output_BNGTd))

    def write_concat(self, residual_BTE: Tensor, attention_output_BTH: Tensor) -> Tensor:
        """`write` for an attention output with concatenated heads."""
        x_BTE = residual_BTE + self.o(attention_output_BTH)
        stream_BTE: Tensor = x_BTE + self.down(self.mlp_inner(x_BTE))
        return stream_BTE

    def kernel_layer(self, like: Tensor, own_heads: int = 0) -> draft_kernels.Layer | None:
        """Return this layer for the C kernels, which skip the attention of `own_heads`; None if its weights are not
        int8 or its activation is unsupported."""
        maps = [in_panels(linear.weight, like) for linear in (self.qkv, self.o, self.gate_up, self.down)]
        if self.config.hidden_act != "silu" or not all(maps):
            return None
        norms = (self.input_norm, self.q_norm, self.k_norm, self.mlp_norm)
        weights = [None if norm is None else norm.weight.to(like.dtype) for norm in norms]
        return draft_kernels.Layer(cast(list[Int8Weight], maps), weights, self.config.rms_norm_eps, own_heads)

    def mlp_input(self, stream_BTE: Tensor) -> Tensor:
        """Return the input of the MLP."""
        return rms_norm(self.mlp_norm, stream_BTE)

    def mlp_inner(self, stream_BTE: Tensor) -> Tensor:
        """Return the input of the MLP's down projection, [B, T, F]."""
        gate_BTF, up_BTF = self.gate_up(self.mlp_input(stream_BTE)).chunk(2, dim=-1)
        inner_BTF: Tensor = self._act(gate_BTF) * up_BTF
        return inner_BTF

    @torch.no_grad()
    def zero_init(self) -> None:
        """Zero the output projections, so that the layer is the identity."""
        self.o.weight.zero_()
        self.down.weight.zero_()

    @torch.no_grad()
    def warm_start(self, target: FrozenModel, number: int = -1, offset: int = 0) -> None:
        """Copy the compatible parts of a target layer. Other parts, and the first `offset` columns of attention's input
        (which the target's layer does not have), start without effect."""
        config, layer = self.config, cast(Any, target.layers[number])
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        # Layers with norms on their output (Gemma 2 and 3, OLMo 2, GLM 4) cannot be copied by weights alone.
        plain = not any(hasattr(layer, f"post_{name}_layernorm") for name in ("feedforward", "self_attn", "mlp"))
        multiplier = float(getattr(layer, "residual_multiplier", 1.0))  # Granite's

        query, key, value, out = (linear_of(attention, f"{name}_proj") for name in "qkvo")
        sizes = [part.out_features for part in (query, key, value) if part is not None]
        heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        norm = getattr(layer, "input_layernorm", None)
        scale = getattr(attention, "scaling", config.head_dim**-0.5) / config.head_dim**-0.5
        self._copy_qk_norms(attention, scale)
        self.o.weight.zero_()
        if query and key and value and sizes == [count * config.head_dim for count in heads]:
            self.qkv.weight[:, :offset] = 0
            self.qkv.weight[:, offset:] = torch.cat([scale * query.weight, key.weight, value.weight])
            if self.input_norm is not None:
                self.input_norm.weight.copy_(norm_scale(norm, self.input_norm.weight))
            # Query and key norms that only this layer has are harmless: they change the sharpness of attention.
            same_qk_norms = self.q_norm is not None or not hasattr(attention, "q_norm")
            same = plain and same_qk_norms and _is_rms(norm) and _without_bias(query, key, value, out)
            if out and same and self._has_rotary_of(target, attention):
                self.o.weight.copy_(multiplier * out.weight)

        gate, up, down = (linear_of(mlp, f"{name}_proj") for name in ("gate", "up", "down"))
        norm = getattr(layer, "post_attention_layernorm", None)
        same = plain and _is_rms(norm) and type(getattr(mlp, "act_fn", None)) is type(self._act)
        same = same and _without_bias(gate, up, down)
        self.down.weight.zero_()
        if gate and up and down and same and down.weight.shape == self.down.weight.shape:
            self.gate_up.weight.copy_(torch.cat([gate.weight, up.weight]))
            self.down.weight.copy_(multiplier * down.weight)
            self.mlp_norm.weight.copy_(norm_scale(norm, self.mlp_norm.weight))

    def _copy_qk_norms(self, attention: object, scale: float) -> None:
        """Copy the target's query and key norms if they have the same shape."""
        for name, own_norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            norm = getattr(attention, name, None)
            weight = getattr(norm, "weight", None)
            self.has_target_norms = (
                own_norm is not None and weight is not None and weight.shape == own_norm.weight.shape
            )
            if own_norm is not None and self.has_target_norms:
                own_norm.weight.copy_(norm_scale(norm, own_norm.weight) * (scale if name == "q_norm" else 1))

    def _has_rotary_of(self, target: FrozenModel, attention: object) -> bool:
        """Whether the target has the same rotary positions."""
        rotary = getattr(sys.modules[type(attention).__module__], "rotate_half", rotate_half)
        x_4 = torch.arange(4.0)
        return self.config.rope_parameters == _rope(target) and torch.equal(rotary(x_4), rotate_half(x_4))


def _rope(target: FrozenModel) -> dict[str, Any]:
    """Return the target's rotary settings, of full attention if layer types differ; empty without RoPE."""
    rope = getattr(target.config, "rope_parameters", None) or {}
    rope = rope if "rope_theta" in rope else rope.get("full_attention", {})
    return {"rope_type": "default", **rope} if rope else {}


def linear_of(module: Any, name: str) -> nn.Linear | None:
    """Return the linear layer of this name; None if it does not exist or is quantized."""
    part = getattr(module, name, None)
    if not isinstance(part, nn.Linear) or not part.weight.is_floating_point() or is_quantized(part.weight):
        return None
    return part if part.weight.shape == (part.out_features, part.in_features) else None


def _without_bias(*parts: nn.Linear | None) -> bool:
    return all(part is not None and part.bias is None for part in parts)


def _is_rms(norm: Any) -> bool:
    return "RMSNorm" in type(norm).__name__


def concat_heads(attention_output_BNGTd: Tensor) -> Tensor:
    """Concatenate the heads of each token, [B, T, N * G * d]."""
    return attention_output_BNGTd.permute(0, 3, 1, 2, 4).flatten(2)


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply an RMS norm in the dtype of its input, as the fused operation requires."""
    assert isinstance(norm, nn.RMSNorm), "heads have RMS norms"
    weight = norm.weight.to(x.dtype)
    if norm.eps is not None and (functions := draft_kernels.kernels_for(x)):
        return draft_kernels.norms(functions, [x], [weight], norm.eps)
    return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)


def norm_and_concat(norms: Sequence[nn.RMSNorm], parts: Sequence[Tensor]) -> Tensor:
    """Norm and concatenate parts of equal size and epsilon."""
    eps = norms[0].eps
    if eps is not None and (functions := draft_kernels.kernels_for(parts[0])):
        return draft_kernels.norms(functions, parts, [norm.weight.to(parts[0].dtype) for norm in norms], eps)
    return torch.cat([rms_norm(norm, part) for norm, part in zip(norms, parts, strict=True)], dim=-1)


def aux_layers_error(aux_layers: Sequence[int], which: str = "from 1 on") -> UserError:
    return UserError(
        f"The heads would read layers {list(aux_layers)} of the target, which must be different ones, {which}.",
        "Name them, for example heads.aux_layers=[1,2,3]; a target of few layers needs it.",
    )


def mask_token(target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default `mask_token_id`, unless the settings have one; refuse one that the target's texts use."""
    if "mask_token_id" in settings:
        if (given := settings["mask_token_id"]) in target.end_tokens | used_tokens(target.tokenizer):
            raise UserError(
                f"heads.mask_token_id is {given}, which is in the target's texts: it ends turns or is in the template.",
                "Name a token that no text has, or leave it out.",
            )
        return {}
    if target.spare_token is None:
        raise UserError(
            f"{target.name} has no token that is known to be free, to stand for what is not drafted yet.",
            "Name one that no text has: heads.mask_token_id=<id>.",
        )
    return {"mask_token_id": target.spare_token}


def check_mask_token(mask: int, vocab_size: int) -> None:
    if vocab_size and mask >= vocab_size:
        raise UserError(
            f"heads.mask_token_id is {mask}, and the target has {vocab_size} tokens.",
            "Name a token that no text has, or leave it out.",
        )


def start_from_last_layers(
    target: FrozenModel,
    stack: Sequence[DraftLayer],
    fc: Linear,
    hidden_norm: nn.RMSNorm,
    norm: nn.RMSNorm,
    before: int = 0,
) -> None:
    """Warm-start layers and norms from the target's last ones, and let `fc` select the deepest aux state, which is
    preceded by `before` columns in the first layer's input."""
    if len(stack) > target.num_layers:
        raise UserError(
            f"heads.num_layers is {len(stack)} and the target has {target.num_layers} layers to start from.",
            "Lower heads.num_layers.",
        )
    size = fc.out_features
    fc.weight.zero_()
    fc.weight[:, -size:] = torch.eye(size)
    for number, layer in enumerate(stack):
        layer.warm_start(target, number - len(stack), 0 if number else before)
    last = target.layers[-len(stack)]
    hidden_norm.weight.copy_(norm_scale(getattr(last, "input_layernorm", None), norm.weight))
    norm.weight.copy_(norm_scale(getattr(target.decoder, "norm", None), norm.weight))


def norm_scale(norm: nn.Module | None, like: Tensor) -> Tensor:
    """Return the effective scale of an RMS norm, stored as such or as a difference to 1; ones for other norms."""
    if not _is_rms(norm):
        return torch.ones_like(like)
    rms = cast(nn.Module, norm)
    weight = cast(Tensor, rms.weight)
    with torch.no_grad():
        scale: Tensor = rms(torch.ones_like(weight, dtype=torch.float32))
    return scale.to(like)


def rotate(x_BHTd: Tensor, cos_BTd: Tensor, sin_BTd: Tensor) -> Tensor:
    rotated: Tensor = x_BHTd * cos_BTd[:, None] + rotate_half(x_BHTd) * sin_BTd[:, None]
    return rotated
