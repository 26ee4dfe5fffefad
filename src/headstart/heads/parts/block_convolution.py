"""Block layers with short convolutions over the slots, around attention and MLP (DFlash 2).

A slot's coefficients are a kernel for each channel plus a linear map of the sublayer's normed input for each group of
channels. One set convolves the sublayer's input, another its output. Slots before the block count as zero.

Shape suffixes: B rows, X slots of a row's blocks, A blocks, K slots of a block, E hidden size, G groups, c channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.heads.parts.block_layer import BlockConfig, BlockLayer

_INPUT, _OUTPUT = 0, 1


class ConvolvedConfig(BlockConfig):
    """Settings of heads that draft a block with convolutions."""

    conv_kernel_size: int = Field(2, ge=1, description="Slots that a convolution reads: the slot and ones before it.")
    conv_group_size: int = Field(
        16, ge=1, description="Channels that share the input-dependent part of their kernel; divides the hidden size."
    )

    def check(self) -> None:
        super().check()
        if self.hidden_size % self.conv_group_size:
            raise UserError(
                f"heads.conv_group_size {self.conv_group_size} does not divide the hidden size {self.hidden_size}.",
                "Set heads.conv_group_size to a divisor, for example 8.",
            )


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
        dynamic = dynamic.unflatten(1, (-1, self.block_size)).unflatten(-1, (self.taps, self.groups, 1))
        base = self.base_kernel[side].unflatten(-1, (self.groups, -1)).to(x_BXE.dtype)
        x_BAKGc = x_BXE.unflatten(1, (-1, self.block_size)).unflatten(-1, (self.groups, -1))
        output = (base[0] + dynamic[:, :, :, 0]) * x_BAKGc
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
