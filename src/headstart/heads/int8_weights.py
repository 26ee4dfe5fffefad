"""Int8 weights for drafting on a CPU.

Drafting is bound by memory bandwidth: it reads every weight for a few rows. Int8 with a scale per output halves the
bytes. Products with many rows (prefill, training) use the full weights, which are faster there. Without int8 weights
drafting uses prepacked weights, as the target does (see `kernels.prepacked`).

Shape suffixes: M rows, N outputs, I inputs, K stacked matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from headstart.kernels import draft_kernels
from headstart.kernels.prepacked import prepacked_linear

_MIN = 1 << 16
"""Smallest matrix (in elements) that is worth quantizing."""
_BLOCK = 32
"""Inputs must be a multiple: torch's kernel would read past the end of rows. Outputs are padded."""
_ROWS = 4096
"""Output rows per quantization step, in float32."""
_NAME = "int8"


@dataclass(frozen=True)
class Int8Weight(draft_kernels.Int8Matrix):
    """An int8 matrix, with torch's in-place version counter of the source matrix when it was quantized."""

    version: int


class Linear(nn.Linear):
    """A linear layer that uses its int8 weights if it has them."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight_NI: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute `F.linear`, in int8 if the weight has it and x [..., I] has few rows. Autocast supports neither the int8
    nor the prepacked product."""
    if torch.is_autocast_enabled("cpu") and x.is_cpu:
        return F.linear(x, weight_NI, bias_N)
    int8 = packed(weight_NI, x)
    if int8 is None:
        prepacked = prepacked_linear(x, weight_NI, bias_N, if_stable=True) if weight_NI.numel() >= _MIN else None
        return F.linear(x, weight_NI, bias_N) if prepacked is None else prepacked
    if int8.in_panels and (functions := draft_kernels.kernels_for(x)):
        product = draft_kernels.product(functions, x, int8)
    else:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = torch.ops.aten._weight_int8pack_mm(rows, int8.rows(), int8.scale_N)
        product = product[:, : int8.outputs].reshape(*x.shape[:-1], int8.outputs)
    return product if bias_N is None else product + bias_N


def packed(weight_NI: Tensor, x: Tensor) -> Int8Weight | None:
    """Return the weight's int8 copy, if it is current and can multiply x [..., I]."""
    int8: Int8Weight | None = getattr(weight_NI, _NAME, None)
    if int8 is None or int8.version != _version(weight_NI):  # loading other weights keeps the old int8 copy
        return None
    return int8 if draft_kernels.has_few_rows(x) and x.dtype == int8.scale_N.dtype else None


def in_panels(weight_NI: Tensor, x: Tensor) -> Int8Weight | None:
    """Return `packed`, if the C kernels can multiply it."""
    int8 = packed(weight_NI, x)
    return int8 if int8 is not None and int8.in_panels else None


def unstack(weight_KNI: Tensor) -> list[Tensor]:
    """Unbind a stack of matrices, with their int8 copies."""
    parts = list(weight_KNI.unbind(0))
    for part, int8 in zip(parts, getattr(weight_KNI, _NAME, ()), strict=False):
        setattr(part, _NAME, int8)
    return parts


@torch.no_grad()
def to_int8(heads: nn.Module) -> bool:
    """Add int8 copies to the large CPU matrices and stacks of them, where they are missing or outdated; return whether
    there are any. Training mode drops them."""
    weights = [weight for weight in _matrices(heads) if weight.is_cpu and _multiplies(weight.dtype)]
    for weight in weights:
        known: Int8Weight | list[Int8Weight] | None = getattr(weight, _NAME, None)
        first = known[0] if isinstance(known, list) else known
        if first is None or first.version != _version(weight):
            setattr(weight, _NAME, _pack(weight) if weight.dim() == 2 else [_pack(part) for part in weight.unbind(0)])
    return bool(weights)


def drop_int8(heads: nn.Module) -> None:
    for weight in _matrices(heads):
        if hasattr(weight, _NAME):
            delattr(weight, _NAME)


def _matrices(heads: nn.Module) -> list[Tensor]:
    return [
        weight
        for weight in chain(heads.parameters(), heads.buffers())
        if weight.is_floating_point()
        and weight.dim() in (2, 3)
        and weight.shape[-2:].numel() >= _MIN
        and not weight.shape[-1] % _BLOCK
    ]


def _version(weight: Tensor) -> int:
    """In-place version counter; torch has none for inference tensors."""
    return 0 if weight.is_inference() else weight._version


@cache
def _multiplies(dtype: torch.dtype) -> bool:
    """Whether this torch has the private int8 product in this dtype."""
    try:
        x, ones = torch.ones(1, _BLOCK, dtype=dtype), torch.ones(_BLOCK, _BLOCK, dtype=torch.int8)
        product: Tensor = torch.ops.aten._weight_int8pack_mm(x, ones, x[0])
    except (AttributeError, RuntimeError):
        return False
    return bool((product == _BLOCK).all())


def _pack(weight_NI: Tensor) -> Int8Weight:
    outputs, inputs = weight_NI.shape
    padded = -(-outputs // _BLOCK) * _BLOCK
    int8_NI = torch.zeros(padded, inputs, dtype=torch.int8)
    scale_N = torch.zeros(padded, dtype=weight_NI.dtype)
    for start in range(0, outputs, _ROWS):
        part_RI = weight_NI.detach()[start : start + _ROWS].float()
        rows = slice(start, start + len(part_RI))
        scale_N[rows] = (part_RI.abs().amax(1) / 127).clamp(min=1e-12)
        int8_NI[rows] = (part_RI / scale_N[rows, None].float()).round().clamp(-127, 127).to(torch.int8)
    functions = draft_kernels.compiled(weight_NI.dtype)
    kept = int8_NI if functions is None else draft_kernels.in_panels(functions, int8_NI)
    return Int8Weight(kept, scale_N, outputs, _version(weight_NI))


if hasattr(torch.ops.aten, "_weight_int8pack_mm"):

    @register_flop_formula(torch.ops.aten._weight_int8pack_mm)
    def _operations(rows: Sequence[int], int8: Sequence[int], *_: object, **__: object) -> int:
        return 2 * rows[0] * rows[1] * int8[0]
