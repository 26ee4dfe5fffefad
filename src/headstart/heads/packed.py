"""Weights of draft heads in 8 bits, for drafting on a CPU.

A draft reads every weight of the heads for a few rows, so its time is that of fetching them from memory. Rounded to 8
bits, with a scale for each output, they are half as many bytes. Drafts may be wrong without harm, so nothing of what is
decoded changes; the target's own weights stay as they are. Products with many rows (reading a prompt, training) keep
the full weights, which are faster there.

Shape suffixes: M rows, N outputs, I inputs, K stacked matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FEW_ROWS = 12
"""Rows up to which the product with 8 bits is the faster one: 2 to 3 times up to 4 rows, even at 16."""
_LEAST = 1 << 16
"""Numbers of a matrix from which rounding it pays."""
_BLOCK = 32
"""Both sizes of a matrix are multiples of it: torch's product reads whole blocks, beyond the end of other matrices."""
_NAME = "packed"


@dataclass(frozen=True)
class Packed:
    """A matrix in 8 bits: what number (o, i) stands for is `int8_NI[o, i] * scale_N[o]`."""

    int8_NI: Tensor
    scale_N: Tensor


class Linear(nn.Linear):
    """A linear map that uses the packed form of its weights when it has one."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """`F.linear`, in 8 bits where the weight was packed and x [..., I] has few rows."""
    packed: Packed | None = getattr(weight_NI, _NAME, None)
    if packed is None or x.numel() > _FEW_ROWS * x.shape[-1] or x.dtype != packed.scale_N.dtype or not x.is_cpu:
        return F.linear(x, weight_NI, bias_N)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    product: Tensor = torch.ops.aten._weight_int8pack_mm(rows, packed.int8_NI, packed.scale_N)
    product = product.view(*x.shape[:-1], -1)
    return product if bias_N is None else product + bias_N


def unstack(weight_KNI: Tensor) -> list[Tensor]:
    """The matrices of a stack, with their packed forms."""
    parts = list(weight_KNI.unbind(0))
    for part, packed in zip(parts, getattr(weight_KNI, _NAME, ()), strict=False):
        setattr(part, _NAME, packed)
    return parts


@torch.no_grad()
def pack(heads: nn.Module) -> None:
    """Keep the large matrices of heads in 8 bits, too, from their weights as they are now.

    Does nothing where the heads are not on a CPU, or torch has no such product. `unpack` undoes it; so does training
    mode of draft heads.
    """
    for weight in _matrices(heads):
        if weight.is_cpu and _multiplies(weight.dtype):
            whole = _pack(weight) if weight.dim() == 2 else [_pack(part) for part in weight.unbind(0)]
            setattr(weight, _NAME, whole)


def unpack(heads: nn.Module) -> None:
    """Drop the forms in 8 bits."""
    for weight in _matrices(heads):
        if hasattr(weight, _NAME):
            delattr(weight, _NAME)


def _matrices(heads: nn.Module) -> list[Tensor]:
    found = chain(heads.parameters(), heads.buffers())
    return [
        weight
        for weight in found
        if weight.is_floating_point()
        and weight.dim() in (2, 3)
        and weight.shape[-2:].numel() >= _LEAST
        and not any(size % _BLOCK for size in weight.shape[-2:])
    ]


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this torch can multiply with 8 bits in this dtype; the operation is not part of its public interface."""
    try:
        x, ones = torch.ones(1, _BLOCK, dtype=dtype), torch.ones(_BLOCK, _BLOCK, dtype=torch.int8)
        product: Tensor = torch.ops.aten._weight_int8pack_mm(x, ones, x[0])
    except (AttributeError, RuntimeError):
        return False
    return bool((product == _BLOCK).all())


def _pack(weight_NI: Tensor) -> Packed:
    weight_NI = weight_NI.detach()
    scale_N = (weight_NI.float().abs().amax(1) / 127).clamp(min=1e-12).to(weight_NI.dtype)
    int8_NI = (weight_NI.float() / scale_N.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Packed(int8_NI.contiguous(), scale_N)
