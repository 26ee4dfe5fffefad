"""Prepacked copies of weights for products with a few rows.

oneDNN reorders the weights in every call, which for a few rows takes as long as the product. Here they are packed once,
in the layout that `prepacked.c` streams at memory bandwidth: a tree of 8 nodes takes as long as a token, and of 16 with
bfloat16 tiles (AMX). torch multiplies without a compiler or AVX2. Each copy doubles a weight's memory; float32 weights
that bfloat16 represents exactly are stored as halves, at half the memory and traffic.

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

from headstart.kernels.memory import check_status, free_bytes
from headstart.support.compiled import may_use_tiles, vector_library

SOURCE = Path(__file__).with_suffix(".c")
MAX_ROWS = 256
"""With more rows, plain products are as fast."""
_SHARE = 0.5
"""Maximum share of free memory for the copies."""
_HALVES = 1
"""`HALVES` of panels.h: store the upper halves of floats."""
_COPIES = WeakTensorKeyDictionary()
"""`PackedCopy` objects by weight, then by `int8`."""


@dataclass(frozen=True)
class Panels:
    """Weights in the layout of `prepacked.c`, as bytes."""

    kept: Tensor
    outputs: int
    dtype: torch.dtype
    int8: bool


def prepack(weight_OI: Tensor, int8: bool = False) -> Panels:
    """Pack weights for `product`, in 8 bits if asked for and supported; see `can_pack`."""
    weight_OI, int8 = weight_OI.detach(), int8 and can_pack(weight_OI, int8)
    functions, (outputs, inputs) = _compiled(weight_OI.dtype, int8), weight_OI.shape
    start, threads = weight_OI.data_ptr(), torch.get_num_threads()
    how = functions.best_kept(start, weight_OI.numel(), threads)
    kept = torch.empty(functions.room(inputs, outputs, how), dtype=torch.uint8)
    functions.pack(start, kept.data_ptr(), inputs, outputs, how, threads)
    return Panels(kept, outputs, weight_OI.dtype, int8)


def can_pack(weight: Tensor, int8: bool = False) -> bool:
    """Whether `product` supports these linear weights on this CPU, in 8 bits with `int8`."""
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.is_contiguous()
    if not plain or weight.ndim != 2 or (int8 and by_tiles(weight.dtype)):
        return False
    functions = _compiled(weight.dtype, int8)
    return functions is not None and bool(functions.reads(weight.shape[1]))


def by_tiles(dtype: torch.dtype) -> bool:
    """Whether products of this dtype use tiles."""
    functions = _compiled(dtype)
    return functions is not None and bool(functions.in_tiles())


def in_halves(weight_OI: Tensor) -> bool:
    """Whether its panels store halves of floats, judged by the middle row."""
    if not can_pack(weight_OI):
        return False
    row_I = weight_OI.detach()[len(weight_OI) // 2]
    return bool(_compiled(row_I.dtype).best_kept(row_I.data_ptr(), len(row_I), 1) == _HALVES)


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

    Applies an RMS norm before (weight [I], epsilon), and after it either a gate, the second half of the outputs times
    silu of the first [.., O / 2], or a sum with `added`."""
    rows, (norm_I, eps) = rows.contiguous(), norm or (None, 0.0)
    inputs, outputs = rows.shape[-1], packed.outputs
    out = rows.new_empty(*rows.shape[:-1], outputs // 2 if gates else outputs)
    vectors = [None if part is None else part.contiguous() for part in (norm_I, bias_O, added)]
    assert all(part is None or part.dtype == rows.dtype for part in (*vectors, packed)), "all in one dtype"
    assert added is None or added.shape == out.shape, "a number for each output"
    weight, bias, sums = (None if part is None else part.data_ptr() for part in vectors)
    read = rows.data_ptr(), weight, eps, packed.kept.data_ptr(), bias, gates, sums, out.data_ptr()
    _compiled(rows.dtype, packed.int8).product(*read, rows.numel() // inputs, inputs, outputs, torch.get_num_threads())
    return out


def multiplier(dtype: torch.dtype, int8: bool) -> int:
    """Address of the C product with panels (see `steps`)."""
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
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    around = pointer, ctypes.c_float, pointer, pointer, ctypes.c_int, pointer
    functions.product.argtypes = [pointer, *around, pointer, *[whole] * 3, ctypes.c_int]
    functions.best_kept.argtypes = [pointer, whole, ctypes.c_int]
    functions.pack.argtypes = [*[pointer] * 2, *[whole] * 2, *[ctypes.c_int] * 2]
    functions.room.argtypes = [*[whole] * 2, ctypes.c_int]
    functions.reads.argtypes = functions.can_gate.argtypes = [whole]
    functions.product.errcheck, functions.pack.restype = check_status, None
    functions.room.restype = whole
    return functions


def fits(weights: Iterable[Tensor]) -> bool:
    """Whether free memory has room for copies of the weights."""
    return sum(weight.nbytes for weight in weights) <= _SHARE * free_bytes(torch.device("cpu"))


@dataclass(frozen=True)
class Packed:
    """Prepacked weights, stacked, with biases and the data to detect changes."""

    weight: Panels
    bias_O: Tensor | None
    changes: list[tuple[int, int]]
    samples: list[tuple[Tensor, ...]]


class PackedCopy:
    """The prepacked copy of a weight, or of several that multiply the same rows; in 8 bits with `int8`.

    `of` detects in-place changes that PyTorch counts, and weights that moved (as after `weight.data = ...`). In-place
    changes through `weight.data`, as of merged adapters, are not counted: `refresh`, called when a text begins,
    compares a row and a column. A stale copy is dropped, and packed again on demand.

    Thread-safe: each thread gets a complete copy, and two at once make the same one.
    """

    def __init__(self, int8: bool = False) -> None:
        self._int8 = int8
        self._packed: Packed | None = None
        self._met: list[tuple[int, int]] | None = None

    def of(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), waits: bool = False) -> Packed | None:
        """Return the copy of the weights, which must be the same at every call; None if unsupported.

        With `waits`, packs only at the second call with unchanged weights and returns None before: training changes
        weights at every step, and views of a weight are new tensors every time.
        """
        tensors, packed = [*weights, *biases], self._packed
        changes = [_changes(tensor) for tensor in tensors]
        if packed is not None and packed.changes == changes:
            return packed
        if waits and self._met != changes:
            self._packed, self._met = None, changes
            return None
        if not all(map(can_pack, weights)):
            return None
        joined = weights[0].detach() if len(weights) == 1 else torch.cat([weight.detach() for weight in weights])
        bias_O = torch.cat([bias.detach() for bias in biases]) if biases else None
        samples = [tuple(part.clone() for part in _sample(tensor)) for tensor in tensors]
        self._packed = packed = Packed(prepack(joined, self._int8), bias_O, changes, samples)
        return packed

    def refresh(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> Packed | None:
        """Drop the copy if weights moved, or a row, a column or a bias has changed; return the current copy."""
        packed, tensors = self._packed, [*weights, *biases]
        if packed is not None:
            pairs = zip(packed.samples, map(_sample, tensors), strict=True)
            moved = packed.changes != [_changes(tensor) for tensor in tensors]
            if moved or not all(all(map(torch.equal, old, new)) for old, new in pairs):
                self._packed = None
        return self._packed


def copy_of(weight: Tensor, int8: bool = False) -> PackedCopy:
    """Return the `PackedCopy` of one weight, shared by target and heads and freed with the weight."""
    copies: dict[bool, PackedCopy] | None = _COPIES.get(weight)  # type: ignore[no-untyped-call]  # torch has no types
    if copies is None:
        copies = _COPIES[weight] = {}
    return copies.get(int8) or copies.setdefault(int8, PackedCopy(int8))


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


def multiplied(
    rows: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    waits: bool = False,
    int8: bool = False,
    any_rows: bool = False,
) -> Tensor | None:
    """`F.linear` with the prepacked copy of the weight (see `PackedCopy.of`), for a few rows [.., I], or any number
    with `int8` or `any_rows`. None without a copy, and if gradients are needed."""
    few = any_rows or int8 or rows.numel() <= MAX_ROWS * rows.shape[-1]
    if not rows.is_cpu or not few or rows.dtype != weight_OI.dtype:
        return None
    if torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in (rows, weight_OI, bias_O)):
        return None
    packed = copy_of(weight_OI, int8).of([weight_OI], waits=waits)
    return None if packed is None else product(rows, packed.weight, bias_O)


def _changes(tensor: Tensor) -> tuple[int, int]:
    """Return address and in-place version; torch does not count versions of inference tensors."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _sample(tensor: Tensor) -> tuple[Tensor, ...]:
    """A row and a column of a matrix; all of a bias."""
    tensor = tensor.detach()
    return (tensor,) if tensor.ndim < 2 else (tensor[tensor.shape[0] // 2], tensor[:, tensor.shape[1] // 2])
