"""What draft heads compute for a few rows on a CPU, in C: products with 8-bit weights, norms, attention, layers whose
weights are all in 8 bits, best drafts.

A level of a draft has one row, or a few. Torch takes longer to call its eighty operators, one after the other and with
cold caches, than they compute; and its product with 8-bit weights takes one and a half times as long. See `few_rows.c`.
It is used in inference mode alone, which decoding is in: elsewhere the same code runs on torch, and says
what this has to give but for rounding. Where it cannot be compiled, or the processor has no AVX2, torch does all.

Shape suffixes: B rows of a batch, W new entries of each, F numbers of an entry, I inputs, N outputs, E hidden size, H
all heads, P positions, R ranks, D draft vocabulary, V rows of a table, d head size.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from headstart.support.compiled import vector_library

SOURCE = Path(__file__).with_suffix(".c")
ROWS = 12
"""Rows up to which it is used: with more, weights in 8 bits are not faster than full ones."""
FIELDS = 4
"""Numbers of an entry before its further slots."""

_P, _N = ctypes.c_void_p, ctypes.c_int64


class _Map(ctypes.Structure):
    _fields_: ClassVar = [("weight", _P), ("scale", _P), ("inputs", _N), ("outputs", _N)]


class _LayerWeights(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _Map) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _P) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        ("eps", ctypes.c_float),
    ]


class _Sight(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, _P) for name in ("cos", "sin", "keys", "values", "entries", "last")),
        *((name, _N) for name in ("positions", "slots", "count", "further", "asks", "heads", "key_heads", "size")),
        *((name, _N) for name in ("row_stride", "head_stride")),
    ]


@dataclass(frozen=True)
class Int8Matrix:
    """A matrix in 8 bits: what number (o, i) stands for is `int8_NI[o, i] * scale_N[o]`; rows after the first `outputs`
    are padding."""

    int8_NI: Tensor
    scale_N: Tensor
    outputs: int


def compiled(dtype: torch.dtype) -> Any:
    """The functions for numbers of a dtype; None where there are none."""
    return _compiled(dtype) if dtype in (torch.bfloat16, torch.float32) else None


@cache
def _compiled(dtype: torch.dtype) -> Any:
    functions = vector_library(SOURCE, dtype)
    if functions is None:
        return None
    for name, arguments in {
        "product": [*[_P] * 4, *[_N] * 3, ctypes.c_int],
        "norm": [*[_P] * 3, *[_N] * 3, ctypes.c_float],
        "attend": [*[_P] * 3, ctypes.c_int],
        "layer": [*[_P] * 5, ctypes.c_int],
        "gather": [*[_P] * 3, *[_N] * 3],
        "best": [_P, *[_N] * 3, *[_P] * 2],
    }.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, None
    functions.gather.restype = ctypes.c_int
    return functions


def few(x: Tensor) -> bool:
    """Whether x [.., I] is of a few rows on a CPU."""
    return x.is_cpu and x.numel() <= ROWS * x.shape[-1]


def serves(x: Tensor) -> Any:
    """The functions, where they compute what is asked of x [.., I]: a few rows on a CPU, while decoding."""
    asked = torch.is_inference_mode_enabled() and few(x) and x.numel() > 0
    return compiled(x.dtype) if asked and not torch.is_autocast_enabled("cpu") else None


def product(functions: Any, x: Tensor, matrix: Int8Matrix) -> Tensor:
    """x [.., I] times a matrix, [.., N]."""
    x, inputs = x.contiguous(), x.shape[-1]
    out = x.new_empty(*x.shape[:-1], matrix.outputs)
    pointers = x.data_ptr(), matrix.int8_NI.data_ptr(), matrix.scale_N.data_ptr(), out.data_ptr()
    functions.product(*pointers, x.numel() // inputs, inputs, matrix.outputs, torch.get_num_threads())
    return out


def embedding(functions: Any, table_VE: Tensor, index_BW: Tensor) -> Tensor:
    """Rows of a table [B, W, E]; an IndexError where there is none of a number."""
    index_BW = index_BW.long().contiguous()
    out = table_VE.new_empty(*index_BW.shape, table_VE.shape[1])
    pointers = (part.data_ptr() for part in (table_VE, index_BW, out))
    if not functions.gather(*pointers, index_BW.numel(), *table_VE.shape):
        raise IndexError(f"the table has {len(table_VE)} rows")
    return out


def norms(functions: Any, parts: Sequence[Tensor], weights: Sequence[Tensor], eps: float) -> Tensor:
    """`F.rms_norm` over the last dimension of several [.., I], each with its weight, side by side."""
    size, count = parts[0].shape[-1], len(parts)
    out = parts[0].new_empty(*parts[0].shape[:-1], count * size)
    start, rows = out.data_ptr(), parts[0].numel() // size
    for x, weight_I in zip(parts, weights, strict=True):
        x = x.contiguous()
        functions.norm(x.data_ptr(), weight_I.data_ptr(), start, rows, size, count * size, eps)
        start += size * out.itemsize
    return out


class Layer:
    """The weights of a layer, all in 8 bits, with an MLP that is gated by silu.

    Args:
        maps: of queries, keys and values; of what heads found; of gate and up together; down.
        norms: of the input, of queries, of keys and before the MLP; None where there is none.
        eps: of the norms.
    """

    def __init__(self, maps: Sequence[Int8Matrix], norms: Sequence[Tensor | None], eps: float) -> None:
        self._kept = maps, norms  # for as long as C reads them
        parts = (
            _Map(part.int8_NI.data_ptr(), part.scale_N.data_ptr(), part.int8_NI.shape[1], part.outputs) for part in maps
        )
        self._weights = _LayerWeights(*parts, *(None if norm is None else norm.data_ptr() for norm in norms), eps)

    def __call__(self, functions: Any, read_BWI: Tensor, stream_BWE: Tensor, sight: Sight) -> Tensor:
        """The stream after the layer, [B, asked of a row, E], from what its attention reads and that before it."""
        read_BWI, stream_BWE, (rows, width, size) = read_BWI.contiguous(), stream_BWE.contiguous(), stream_BWE.shape
        out = stream_BWE.new_empty(rows, width if sight.last_B is None else 1, size)
        inputs = ctypes.byref(self._weights), read_BWI.data_ptr(), stream_BWE.data_ptr()
        functions.layer(*inputs, sight.reference(read_BWI.dtype), out.data_ptr(), torch.get_num_threads())
        return out


class Sight(NamedTuple):
    """New entries of a layer, and what they see.

    Attributes:
        entries: numbers [B, W, F] as `Entries` has them, and their shape.
        last_B: of which entry of each row it is asked what it finds; None for all.
        kv: where keys, turned by their position, and values go, [B, key heads, slots, d].
        angles: (cos, sin) [P, d]; positions after the end take the last.
        heads: of queries.
    """

    entries: tuple[array[int], tuple[int, int, int]]
    last_B: array[int] | None
    kv: tuple[Tensor, Tensor]
    angles: tuple[Tensor, Tensor]
    heads: int

    def reference(self, dtype: torch.dtype) -> Any:
        """As C reads it, beside numbers of this dtype."""
        (keys, values), (cos, sin), (entries, (rows, width, fields)) = self.kv, self.angles, self.entries
        assert dtype == cos.dtype == keys.dtype, "all in one dtype"
        _, key_heads, slots, size = keys.shape
        last, asks = (None, rows * width) if self.last_B is None else (self.last_B.buffer_info()[0], rows)
        pointers = (part.data_ptr() for part in (cos, sin, keys, values))
        sizes = len(cos), slots, rows * width, fields - FIELDS, asks, self.heads, key_heads, size, *keys.stride()[:2]
        return ctypes.byref(_Sight(*pointers, entries.buffer_info()[0], last, *sizes))


def attend(functions: Any, qkv_BWHd: Tensor, sight: Sight) -> Tensor:
    """What entries find, [B, asked of a row, heads * d], whose queries, keys and values lie side by side in what a
    layer read."""
    qkv_BWHd = qkv_BWHd.contiguous()
    rows, width, _, size = qkv_BWHd.shape
    found = qkv_BWHd.new_empty(rows, width if sight.last_B is None else 1, sight.heads * size)
    reference = sight.reference(qkv_BWHd.dtype)
    functions.attend(qkv_BWHd.data_ptr(), reference, found.data_ptr(), torch.get_num_threads())
    return found


def best(functions: Any, logits_BWD: Tensor, ranks: int, draft_to_target_D: Tensor) -> Tensor:
    """See `headstart.drafters.captured.best_drafts`."""
    logits_BWD = logits_BWD.contiguous()
    *shape, size = logits_BWD.shape
    assert ranks <= size == len(draft_to_target_D), "a token for each"
    out = torch.empty(3, *shape, ranks, dtype=torch.int32)
    where = logits_BWD.data_ptr(), prod(shape), size, ranks, draft_to_target_D.data_ptr(), out.data_ptr()
    functions.best(*where)
    return out
