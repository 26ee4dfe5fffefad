"""What draft heads compute for a few rows on a CPU, in C: products with 8-bit weights, norms, attention, best drafts.

A level of a draft has one row, or a few. Torch takes longer to call its eighty operators, one after the other and with
cold caches, than they compute; and its product with 8-bit weights takes one and a half times as long. See `few_rows.c`.
It is used in inference mode alone, which decoding is in: elsewhere the same code runs on torch, and says
what this has to give but for rounding. Where it cannot be compiled, or the processor has no AVX2, torch does all.

Shape suffixes: B rows of a batch, W new entries of each, M all of them, K further slots, I inputs, N outputs, P
positions, R ranks, D draft vocabulary, d head size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.support.compiled import library

SOURCE = Path(__file__).with_suffix(".c")
ROWS = 12
"""Rows up to which it is used: with more, weights in 8 bits are not faster than full ones."""
FIELDS = 4
"""Numbers of an entry before its further slots."""
_QUERIES = 16
"""That look at a slot together, in `attend`; those of one entry where these are more."""


class _Map(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale")),
        *((name, ctypes.c_int64) for name in ("inputs", "outputs")),
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
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None
    functions = library(
        SOURCE, [f"QUERIES={_QUERIES}", *(["BFLOAT16"] if dtype == torch.bfloat16 else [])], threads=True
    )
    if functions is None:
        return None
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for name, arguments in {
        "product": [*[pointer] * 4, *[whole] * 3, ctypes.c_int],
        "finish": [*[pointer] * 4, real, *[pointer] * 3, whole, ctypes.c_int],
        "norm": [*[pointer] * 3, *[whole] * 2, real],
        "attend": [*[pointer] * 6, *[whole] * 2, pointer, *[whole] * 6, pointer, whole, pointer, ctypes.c_int],
        "best": [pointer, *[whole] * 3, *[pointer] * 2],
    }.items():
        function = getattr(functions, name)
        function.argtypes, function.restype = arguments, None
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


def finish(
    functions: Any, stream_BWE: Tensor, found_BWH: Tensor, maps: Sequence[Int8Matrix], norm_E: Tensor, eps: float
) -> Tensor:
    """The stream [B, W, E] after a layer whose heads found this, with an MLP that is gated by silu. The maps: of what
    heads found, of gate and up together, and down."""
    stream_BWE, found_BWH = stream_BWE.contiguous(), found_BWH.contiguous()
    out = torch.empty_like(stream_BWE)
    output, gate_up, down = (
        ctypes.byref(_Map(part.int8_NI.data_ptr(), part.scale_N.data_ptr(), part.int8_NI.shape[1], part.outputs))
        for part in maps
    )
    rows, threads = stream_BWE.shape[:2].numel(), torch.get_num_threads()
    before = stream_BWE.data_ptr(), found_BWH.data_ptr(), output, norm_E.data_ptr(), eps
    functions.finish(*before, gate_up, down, out.data_ptr(), rows, threads)
    return out


def rms_norm(functions: Any, x: Tensor, weight_I: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` over the last dimension of x [.., I]."""
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    functions.norm(x.data_ptr(), weight_I.data_ptr(), out.data_ptr(), x.numel() // size, size, eps)
    return out


def attend(
    functions: Any,
    qkv_BWHd: Tensor,
    angles: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    entries_MF: NDArray[np.int64],
    asked: NDArray[np.int64],
    heads: int,
) -> Tensor:
    """What entries find, [B, asked of a row, heads * d], whose queries, keys and values lie side by side in what a
    layer read; their keys, turned by the angles (cos, sin) [P, d], and values go into the cache. Entries are numbers as
    `Entries.table` gives them, `asked` the indices of some, as many of each row."""
    qkv_BWHd, (keys, values), (cos, sin), (count, fields) = qkv_BWHd.contiguous(), kv, angles, entries_MF.shape
    assert qkv_BWHd.dtype == cos.dtype == keys.dtype, "all in one dtype"
    key_heads, size, threads = keys.shape[1], keys.shape[3], torch.get_num_threads()
    room = keys.shape[2] + fields
    scores = qkv_BWHd.new_empty(threads * max(_QUERIES, heads // key_heads) * room, dtype=torch.float32)
    found = qkv_BWHd.new_empty(len(qkv_BWHd), len(asked) // len(qkv_BWHd), heads * size)
    pointers = (part.data_ptr() for part in (qkv_BWHd, cos, sin, keys, values))
    sizes = count, fields - FIELDS, asked.ctypes.data, len(asked), heads, key_heads, size, *keys.stride()[:2]
    functions.attend(*pointers, entries_MF.ctypes.data, *sizes, scores.data_ptr(), room, found.data_ptr(), threads)
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
