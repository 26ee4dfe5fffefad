"""Settings and decoder layers of block drafters (see `block`), with and without convolutions over the slots (DFlash 2).

A slot's convolution coefficients are a per-channel kernel plus a linear map of the sublayer's normed input, shared
within each group of channels. Attention and MLP each convolve their input and their output, with separate coefficients.
Slots before the block are zero.

Shape suffixes: B rows, T tokens, E hidden size, N key heads, d head size, X width of keys and values (in convolutions:
slots of a row's blocks), A blocks, K slots of a block, G groups, c channels of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.parts.layer import (
    Angles,
    DraftLayer,
    LayerConfig,
    aux_layers_error,
    check_mask_token,
    linear_of,
    mask_token,
    norm_scale,
    rms_norm,
    rotate,
)
from headstart.heads.settings import FromTarget
from headstart.model.frozen import FrozenModel

_NEWEST, _ROOT = 2 / 3, 1 / 3
"""Width, as a fraction of the hidden size, of the positional heads for the newest state and for the root."""
LAYERS = "ascending, from 1 to the last but one"
"""Target layers that blocks can read."""
_INPUT, _OUTPUT = 0, 1
"""Sides of a convolved sublayer."""


class BlockConfig(LayerConfig):
    """Settings of heads that draft a block in one pass."""

    num_layers: int = Field(1, ge=1, le=12, description="Decoder layers.")
    block_size: int = Field(8, ge=2, le=64, description="Slots per block; only dspark drafts from the first one.")
    aux_layers: Annotated[tuple[int, ...], FromTarget()] = Field(
        (),
        description="Target layers to read, as indices of transformers' hidden_states, ascending and below the "
        "last; (2, L // 2, L - 1). Published configs count one less (target_layer_ids).",
    )
    mask_token_id: Annotated[int, FromTarget()] = Field(
        -1, ge=0, description="Token in the block's slots after the root; must not occur in any text."
    )
    sliding_window: int = Field(
        0, ge=0, description="Tokens that a slot attends to, itself included; more than block_size, or 0 for all."
    )
    full_layers: tuple[int, ...] = Field(
        (), description="Layers, counted from 0, that attend to the whole text despite heads.sliding_window."
    )
    causal: bool = Field(
        False, description="Causal attention inside a block; with heads.sliding_window, only in the layers with one."
    )
    init: Literal["target", "linear", "random"] = Field(
        "target",
        description="target: start from the target's last layers and norm. linear: also add attention heads for the "
        "newest state and the root, and fit the output maps to the data. random: initialise randomly.",
    )

    @classmethod
    def of_target(cls, target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, Any]:
        values = super().of_target(target, settings)
        last = target.num_layers - 1
        if (layers := settings.get("aux_layers")) and max(layers) > last:
            raise aux_layers_error(layers, f"ascending, from 1 to {last}")
        values["aux_layers"] = tuple(sorted({min(2, last), max(1, target.num_layers // 2), last}))
        if settings.get("init") == "linear":
            heads = values["num_key_value_heads"] + sum(positional_heads(target.hidden_size, values["head_dim"]))
            values |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        return {**values, **mask_token(target, settings)}

    @property
    def start_layers(self) -> int:
        return self.num_layers

    def window(self, layer: int) -> int:
        """Return the number of tokens that a slot attends to in a layer, itself included; 0 for all."""
        return 0 if layer in self.full_layers else self.sliding_window

    def check(self) -> None:
        super().check()
        if self.sliding_window and self.sliding_window <= self.block_size:
            raise UserError(
                f"heads.sliding_window is {self.sliding_window} and a block has {self.block_size} slots: the last ones "
                "would not see the text.",
                "Raise heads.sliding_window, or leave it out.",
            )
        full = sorted(set(self.full_layers))
        fewer = self.sliding_window > 0 and set(full) < set(range(self.num_layers))
        if full != list(self.full_layers) or (full and not fewer):
            raise UserError(
                f"heads.full_layers is {list(self.full_layers)}: with heads.sliding_window it may name some, not all, "
                f"of the {self.num_layers} layers, ascending from 0.",
                "Leave it out, or set heads.sliding_window and name fewer layers.",
            )
        layers = self.aux_layers
        if list(layers) != sorted(set(layers)) or any(layer < 1 for layer in layers):
            raise aux_layers_error(layers, LAYERS)
        check_mask_token(self.mask_token_id, self.vocab_size)


class ConvolvedConfig(BlockConfig):
    """Settings of heads that draft a block with convolutions."""

    conv_kernel_size: int = Field(2, ge=1, description="Kernel size of the convolutions: a slot and slots before it.")
    conv_group_size: int = Field(
        16, ge=1, description="Channels that share the input-dependent part of their kernel; divides the hidden size."
    )

    def check(self) -> None:
        super().check()
        if self.conv_kernel_size > self.block_size:
            raise UserError(
                f"heads.conv_kernel_size is {self.conv_kernel_size}, and a block has {self.block_size} slots.",
                "Lower heads.conv_kernel_size; 2 is usual.",
            )
        if self.hidden_size % self.conv_group_size:
            raise UserError(
                f"heads.conv_group_size {self.conv_group_size} does not divide the hidden size {self.hidden_size}.",
                "Set heads.conv_group_size to a divisor, for example 8.",
            )


def positional_heads(hidden_size: int, head_dim: int) -> tuple[int, int]:
    """Return the numbers of key heads that attend to the newest state and to the root, with `heads.init=linear`."""
    return max(1, round(_NEWEST * hidden_size / head_dim)), max(1, round(_ROOT * hidden_size / head_dim))


class BlockLayer(DraftLayer):
    """Decoder layer with per-head query and key norms that also attends to a context.

    Attributes:
        mixes_slots: whether slots also mix outside attention, so that every slot must be computed.
    """

    mixes_slots: ClassVar[bool] = False
    q_norm: nn.RMSNorm
    k_norm: nn.RMSNorm

    def __init__(self, config: BlockConfig, number: int) -> None:
        super().__init__(config, config.hidden_size, qk_norm=True)
        self.window = config.window(number)
        self.causal = config.causal and self.window == config.sliding_window

    def context(self, context_BTE: Tensor, rotary: Angles) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, N, T, d] of the context."""
        config = self.config
        queries = config.num_attention_heads * config.head_dim
        read_BTX = F.linear(context_BTE, self.qkv.weight[queries:])
        keys, values = read_BTX.view(*context_BTE.shape[:2], -1, config.head_dim).transpose(1, 2).chunk(2, dim=1)
        return rotate(rms_norm(self.k_norm, keys), *rotary), values

    @torch.no_grad()
    def warm_start(self, target: FrozenModel, number: int = -1, offset: int = 0) -> None:
        """Also copy the target's query, key and value weights to the last heads of a layer with more heads."""
        super().warm_start(target, number, offset)
        config, layer = self.config, cast(Any, target.layers[number])
        attention = getattr(layer, "self_attn", None)
        given = [linear_of(attention, f"{name}_proj") for name in "qkv"]
        every = self.head_rows()
        weights = [linear.weight for linear in given if linear is not None]
        if config.head_dim != target.kv_shapes[number][0][1] or len(weights) < 3:
            return
        grouped = weights[0].view(len(weights[1]) // config.head_dim, -1, config.head_dim, weights[0].shape[1])
        weights[0] = grouped[:, : self.groups].flatten(0, 2)  # the largest number of query heads per key head that fits
        if any(len(weight) >= len(rows) for weight, rows in zip(weights, every, strict=True)):
            return
        for weight, rows in zip(weights, every, strict=True):
            rows[-len(weight) :] = weight
        if self.input_norm is not None:
            self.input_norm.weight.copy_(norm_scale(getattr(layer, "input_layernorm", None), self.input_norm.weight))


class Convolution(nn.Module):
    """Convolutions of a sublayer's input and output, which start as the identity."""

    def __init__(self, config: ConvolvedConfig) -> None:
        super().__init__()
        size, self.taps, self.block_size = config.hidden_size, config.conv_kernel_size, config.block_size
        self.groups = size // config.conv_group_size
        identity = torch.arange(self.taps)[:, None] == 0
        self.base_kernel = nn.Parameter(identity.float().expand(2, self.taps, size).clone())
        self.kernel_projection = nn.Linear(size, 2 * self.taps * self.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, side: int, normed_BXE: Tensor, x_BXE: Tensor) -> Tensor:
        """Convolve a sublayer's input or output, given its normed input."""
        dynamic = F.linear(normed_BXE, self.kernel_projection.weight.chunk(2)[side])
        dynamic = dynamic.view(len(x_BXE), -1, self.block_size, self.taps, self.groups, 1)
        base = self.base_kernel[side].view(self.taps, self.groups, -1).to(x_BXE.dtype)
        x_BAKGc = x_BXE.view(len(x_BXE), -1, self.block_size, self.groups, base.shape[2])
        output: Tensor = (base[0] + dynamic[:, :, :, 0]) * x_BAKGc
        for tap in range(1, min(self.taps, self.block_size)):
            before = F.pad(x_BAKGc[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            output = output + (base[tap] + dynamic[:, :, :, tap]) * before
        return output.flatten(-2).flatten(1, 2)


class ConvolvedLayer(BlockLayer):
    """Decoder layer of a block with convolutions around attention and MLP."""

    mixes_slots = True

    def __init__(self, config: ConvolvedConfig, number: int) -> None:
        super().__init__(config, number)
        self.attention_conv, self.mlp_conv = Convolution(config), Convolution(config)

    def attention_input(self, x_BTI: Tensor) -> Tensor:
        normed_BTE = super().attention_input(x_BTI)
        convolved_BTE: Tensor = self.attention_conv(_INPUT, normed_BTE, normed_BTE)
        return convolved_BTE

    def mlp_input(self, stream_BTE: Tensor) -> Tensor:
        normed_BTE = super().mlp_input(stream_BTE)
        convolved_BTE: Tensor = self.mlp_conv(_INPUT, normed_BTE, normed_BTE)
        return convolved_BTE

    def write_concat(self, residual_BTE: Tensor, attention_output_BTH: Tensor) -> Tensor:
        normed_BTE = super().attention_input(residual_BTE)
        x_BTE = residual_BTE + self.attention_conv(_OUTPUT, normed_BTE, self.o(attention_output_BTH))
        inner_BTE = self.down(self.mlp_inner(x_BTE))
        stream_BTE: Tensor = x_BTE + self.mlp_conv(_OUTPUT, super().mlp_input(x_BTE), inner_BTE)
        return stream_BTE

    def by_published_name(self, number: int) -> dict[str, Tensor]:
        weights = {name: weight for name, weight in self.named_parameters() if "_conv." in name}
        return super().by_published_name(number) | {f"layers.{number}.{name}": one for name, one in weights.items()}
