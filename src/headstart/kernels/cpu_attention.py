"""Batch-invariant CPU attention in C for a few new tokens per row: trees, and the next token of many rows.

A layer takes 36 us for a tree of 8 nodes after 250 tokens (9 heads, bfloat16, two threads), and torch 75 us. The next
token of a row and head takes 5 us on one core, and torch 13 us. Torch is the fallback if the C code does not compile.

Shape suffixes: B rows, Q query heads, T new tokens, H key-value heads, S visible slots, C slots of a mask, D size of
a query and key, E size of a value.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.kernels.memory import check_status
from headstart.support.compiled import library, may_use_tiles

SOURCE = Path(__file__).with_suffix(".c")
_TOKENS = 256
"""Maximum new tokens per row; the kernel was measured to be faster up to here."""
_Strides3, _Strides2 = ctypes.c_int64 * 3, ctypes.c_int64 * 2


def serves(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel serves a forward of `width` new tokens per row."""
    functions = _compiled(dtype) if width <= _TOKENS and _reads(dtype, device) else None
    return functions is not None and (functions.threads or torch.get_num_threads() == 1)


def few_tokens_attention(
    query_BQTD: Tensor,
    key_BHSD: Tensor,
    value_BHSE: Tensor,
    slots_B: Tensor,
    scaling: float,
    mask_B1TC: Tensor | None = None,
    first: int = 0,
    window: int | None = None,
) -> Tensor | None:
    """Attend over the first `slots_B` slots of each row: [B, T, Q, E].

    The mask is additive and starts at slot `first`. Without a mask, attends to the last `window` slots, or to all.
    Returns None for unsupported or mixed dtypes, non-contiguous slots, or without a compiler.
    """
    (rows, query_heads, tokens, size), (heads, _, out_size) = query_BQTD.shape, value_BHSE.shape[1:]
    dtype, parts = query_BQTD.dtype, [query_BQTD, key_BHSD, value_BHSE]
    contiguous = key_BHSD.stride()[2:] == (size, 1) and value_BHSE.stride()[2:] == (out_size, 1)
    in_pairs = size % 2 == 0 or dtype == torch.float32  # bfloat16 is multiplied in pairs
    if mask_B1TC is not None:
        parts.append(mask_B1TC)
    served = contiguous and in_pairs and _reads(dtype, query_BQTD.device) and all(part.dtype == dtype for part in parts)
    functions = _compiled(dtype) if served else None
    if functions is None:
        return None
    if query_BQTD.stride(3) != 1:
        query_BQTD = query_BQTD.contiguous()
    out = query_BQTD.new_empty(rows, tokens, query_heads, out_size)
    query = query_BQTD.data_ptr(), _Strides3(*query_BQTD.stride()[:3])
    sizes = rows, heads, query_heads // heads, tokens, size, out_size
    functions.attend(
        *(*query, *_cache_arguments(key_BHSD), *_cache_arguments(value_BHSE), *mask_arguments(mask_B1TC)),
        *(slots_B.data_ptr(), out.data_ptr(), *sizes, first, window or 0, scaling, torch.get_num_threads()),
    )
    return out


def _cache_arguments(part_BHCD: Tensor) -> tuple[int, Any]:
    """Return the address, and strides of rows and heads."""
    return part_BHCD.data_ptr(), _Strides2(*part_BHCD.stride()[:2])


def mask_arguments(mask_B1TC: Tensor | None) -> tuple[int | None, Any]:
    """Return the address of a mask, and strides of rows and tokens."""
    if mask_B1TC is None:
        return None, _Strides2()
    return mask_B1TC.data_ptr(), _Strides2(mask_B1TC.stride(0) if len(mask_B1TC) > 1 else 0, mask_B1TC.stride(2))


def attention_address(dtype: torch.dtype) -> int:
    """Return the address of the C attention on merged qkv products (see `steps`)."""
    return ctypes.cast(_compiled(dtype).attend_qkv, ctypes.c_void_p).value or 0


def _reads(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


@cache
def _compiled(dtype: torch.dtype) -> Any:
    """Compile for a dtype and set `threads`; None without a compiler."""
    names = ["BFLOAT16", *(["TILES"] if may_use_tiles() else [])] if dtype == torch.bfloat16 else []
    with_threads = library(SOURCE, names, threads=True)
    functions: Any = with_threads or (library(SOURCE, names) if torch.get_num_threads() == 1 else None)
    if functions is None:
        return None
    functions.threads = with_threads is not None
    functions.attend.argtypes = [*[ctypes.c_void_p] * 10, *[ctypes.c_int64] * 8, ctypes.c_float, ctypes.c_int]
    functions.attend.errcheck = check_status
    return functions
