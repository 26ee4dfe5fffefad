"""Prepacked copies of weights for products with a few rows.

oneDNN reorders the weights in every call, which for a few rows takes as long as the product. Here they are packed once,
in the layout that `prepacked.c` streams at memory bandwidth: a tree of 8 nodes takes as long as a token, and of 16 with
bfloat16 tiles (AMX). torch multiplies without a compiler or AVX2. Each copy doubles a weight's memory; float32 weights
that bfloat16 represents exactly are stored in bfloat16, at half the memory and traffic.

For writing data, weights and activations may be rounded to 8 bits, for twice the arithmetic throughput. Tiles are
faster still, so weights for them are not rounded.

Shape suffixes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from headstart.kernels.memory import address, check_status, free_bytes
from headstart.support.compiled import may_use_tiles, vector_library

SOURCE = Path(__file__).with_suffix(".c")
MAX_ROWS = 256
"""With more rows, plain products are as fast."""
_SHARE = 0.5
"""Maximum share of free memory for the copies."""
_HALVES = 1
"""`HALVES` of panels.h: floats stored as their upper halves, which is bfloat16."""
_COPIES = WeakTensorKeyDictionary()
"""`PrepackedCopy` objects by weight, then by `int8`."""


@dataclass(frozen=True)
class Panels:
    """Weights in the layout of `prepacked.c`, as bytes."""

    data: Tensor
    outputs: int
    dtype: torch.dtype
    int8: bool


def prepack(weight_OI: Tensor, int8: bool = False) -> Panels:
    """Pack weights for `product`, in 8 bits if asked for and supported; see `can_pack`."""
    weight_OI, int8 = weight_OI.detach(), int8 and can_pack(weight_OI, int8)
    functions, (outputs, inputs) = _compiled(weight_OI.dtype, int8), weight_OI.shape
    start, threads = weight_OI.data_ptr(), torch.get_num_threads()
    storage = functions.best_storage(start, weight_OI.numel(), threads)
    data = torch.empty(functions.packed_bytes(inputs, outputs, storage), dtype=torch.uint8)
    functions.pack(start, data.data_ptr(), inputs, outputs, storage, threads)
    return Panels(data, outputs, weight_OI.dtype, int8)


def can_pack(weight: Tensor, int8: bool = False) -> bool:
    """Whether `product` supports these linear weights on this CPU, in 8 bits with `int8`."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.is_contiguous()
    if not plain or weight.ndim != 2 or (int8 and uses_tiles(weight.dtype)):
        return False
    functions = _compiled(weight.dtype, int8)
    return functions is not None and bool(functions.reads(weight.shape[1]))


def uses_tiles(dtype: torch.dtype) -> bool:
    """Whether products of this dtype use tiles."""
    functions = _compiled(dtype)
    return functions is not None and bool(functions.in_tiles())


def stored_as_bfloat16(weight_OI: Tensor) -> bool:
    """Whether float32 weights are stored in bfloat16, judged by the middle row."""
    if not can_pack(weight_OI):
        return False
    row_I = weight_OI.detach()[len(weight_OI) // 2]
    return bool(_compiled(row_I.dtype).best_storage(row_I.data_ptr(), len(row_I), 1) == _HALVES)


def can_gate(weights: Sequence[Tensor]) -> bool:
    """Whether `product` supports `gates` for these weights, stacked."""
    return bool(_compiled(weights[0].dtype).can_gate(sum(map(len, weights))))


def product(
    rows: Tensor,
    packed: Panels,
    bias_O: Tensor | None,
    norm: tuple[Tensor, float] | None = None,
    gates: bool = False,
    added: Tensor | None = None,
) -> Tensor:
    """Multiply rows [.., I] by prepacked weights: [.., O].

    Before the product, applies an RMS norm (weight [I], epsilon). After it, applies a gate, the second half of the
    outputs times silu of the first [.., O / 2], or adds `added`.
    """
    rows, (norm_I, eps) = rows.contiguous(), norm or (None, 0.0)
    inputs, outputs = rows.shape[-1], packed.outputs
    out = rows.new_empty(*rows.shape[:-1], outputs // 2 if gates else outputs)
    vectors = [None if part is None else part.contiguous() for part in (norm_I, bias_O, added)]
    assert all(part is None or part.dtype == rows.dtype for part in (*vectors, packed)), "all in one dtype"
    assert added is None or added.shape == out.shape, "one summand per output"
    norm_at, bias_at, added_at = map(address, vectors)
    read = rows.data_ptr(), norm_at, eps, packed.data.data_ptr(), bias_at, gates, added_at, out.data_ptr()
    _compiled(rows.dtype, packed.int8).product(*read, rows.numel() // inputs, inputs, outputs, torch.get_num_threads())
    return out


def product_address(dtype: torch.dtype, int8: bool) -> int:
    """Return the address of the C product with panels (see `steps`)."""
    return ctypes.cast(_compiled(dtype, int8).product, ctypes.c_void_p).value or 0


@cache
def _compiled(dtype: torch.dtype, int8: bool = False) -> Any:
    """Compile the kernels for a dtype; None if unsupported."""
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    tiles = not int8 and dtype == torch.bfloat16 and may_use_tiles()
    functions = vector_library(SOURCE, dtype, "TILES") if tiles else None
    functions = functions or vector_library(SOURCE, dtype, *(["EIGHT_BITS"] if int8 else []))
    if functions is None:
        return None
    p, n, i = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    functions.product.argtypes = [p, p, ctypes.c_float, p, p, i, p, p, n, n, n, i]
    functions.best_storage.argtypes = [p, n, i]
    functions.pack.argtypes = [p, p, n, n, i, i]
    functions.packed_bytes.argtypes = [n, n, i]
    functions.reads.argtypes = functions.can_gate.argtypes = [n]
    functions.product.errcheck, functions.pack.restype, functions.packed_bytes.restype = check_status, None, n
    return functions


def fits(weights: Iterable[Tensor]) -> bool:
    """Whether free memory has room for copies of the weights."""
    return sum(weight.nbytes for weight in weights) <= _SHARE * free_bytes(torch.device("cpu"))


@dataclass(frozen=True)
class PrepackedWeights:
    """Prepacked weights, stacked, with biases, and data to detect changes."""

    weight: Panels
    bias_O: Tensor | None
    changes: list[tuple[int, int]]
    samples: list[tuple[Tensor, ...]]


class PrepackedCopy:
    """The prepacked copy of a weight, or of several that multiply the same rows; in 8 bits with `int8`.

    `of` detects in-place changes that PyTorch counts, and weights that moved (as after `weight.data = ...`). In-place
    changes through `weight.data`, as of merged adapters, are not counted: `refresh`, called when a text begins,
    compares a row and a column. A stale copy is dropped, and packed again on demand.

    Thread-safe: each thread gets a complete copy, and two threads at once make equal copies.
    """

    def __init__(self, int8: bool = False) -> None:
        self._int8 = int8
        self._packed: PrepackedWeights | None = None
        self._seen: list[tuple[int, int]] | None = None

    def of(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), if_stable: bool = False
    ) -> PrepackedWeights | None:
        """Return the copy of the weights, which must be the same at every call; None if unsupported.

        With `if_stable`, packs only at the second call with unchanged weights and returns None before: training changes
        weights at every step, and views of a weight are new tensors every time.
        """
        tensors, packed = [*weights, *biases], self._packed
        changes = [_changes(tensor) for tensor in tensors]
        if packed is not None and packed.changes == changes:
            return packed
        if if_stable and self._seen != changes:
            self._packed, self._seen = None, changes
            return None
        if not all(map(can_pack, weights)):
            return None
        stacked = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        bias_O = torch.cat([bias.detach() for bias in biases]) if biases else None
        samples = [tuple(part.clone() for part in _sample(tensor)) for tensor in tensors]
        self._packed = packed = PrepackedWeights(prepack(stacked, self._int8), bias_O, changes, samples)
        return packed

    def refresh(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> PrepackedWeights | None:
        """Drop the copy if weights moved, or a row, a column or a bias has changed; return the current copy."""
        packed, tensors = self._packed, [*weights, *biases]
        if packed is not None:
            pairs = zip(packed.samples, map(_sample, tensors), strict=True)
            moved = packed.changes != [_changes(tensor) for tensor in tensors]
            if moved or not all(all(map(torch.equal, old, new)) for old, new in pairs):
                self._packed = None
        return self._packed


def copy_of(weight: Tensor, int8: bool = False) -> PrepackedCopy:
    """Return the `PrepackedCopy` of one weight, shared by target and heads and freed with the weight."""
    copies: dict[bool, PrepackedCopy] | None = _COPIES.get(weight)  # type: ignore[no-untyped-call]  # torch has no types
    if copies is None:
        copies = _COPIES[weight] = {}
    return copies.get(int8) or copies.setdefault(int8, PrepackedCopy(int8))


def refresh(weights: Iterable[Tensor]) -> None:
    """Drop stale copies of single weights."""
    for weight in weights:
        copies = _COPIES.get(weight)  # type: ignore[no-untyped-call]  # torch has no types
        for known in list((copies or {}).values()):
            known.refresh([weight])


def drop(weights: Iterable[Tensor]) -> None:
    """Free the copies of single weights; the next product packs again."""
    for weight in weights:
        _COPIES.pop(weight, None)  # type: ignore[no-untyped-call]  # torch has no types


def prepacked_linear(
    rows: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    if_stable: bool = False,
    int8: bool = False,
    any_rows: bool = False,
) -> Tensor | None:
    """Apply `F.linear` with the prepacked copy of the weight (see `PrepackedCopy.of`), to a few rows [.., I], or to any
    number with `int8` or `any_rows`. None without a copy, and if gradients are needed."""
    few = any_rows or int8 or rows.numel() <= MAX_ROWS * rows.shape[-1]
    if not rows.is_cpu or not few or rows.dtype != weight_OI.dtype:
        return None
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (rows, weight_OI, bias_O)):
        return None
    packed = copy_of(weight_OI, int8).of([weight_OI], if_stable=if_stable)
    return None if packed is None else product(rows, packed.weight, bias_O)


def _changes(tensor: Tensor) -> tuple[int, int]:
    """Return address and in-place version; torch does not count versions of inference tensors."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return a row and a column of a matrix, or a complete bias."""
    tensor = tensor.detach()
    return (tensor,) if tensor.ndim < 2 else (tensor[tensor.shape[0] // 2], tensor[:, tensor.shape[1] // 2])
