"""Attention of a few new tokens of each row on a CPU, in C: trees, and the next token of many rows.

Torch's own attention takes 75 us a layer for a tree of 8 nodes after 250 tokens (9 heads, bfloat16, two threads), and
13 us for the next token of a row and head where the target writes on one core. `cpu_attention.c` takes 36 and 5. What a
token finds has the same bits in every tree and batch. Where it cannot be compiled, torch's is used.

Shape suffixes: B rows, Q query heads, T new tokens, H key-value heads, S slots in sight, C slots of a mask, D size of
a query and key, E size of a value.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.support.compiled import library, may_use_tiles
from headstart.target.memory import check_status

SOURCE = Path(__file__).with_suffix(".c")
_TOKENS = 256
"""New tokens of a row up to which it is used, and tried: it is faster for all of them."""
_Strides3, _Strides2 = ctypes.c_int64 * 3, ctypes.c_int64 * 2


def serves(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a forward of so many new tokens of each row is one for it."""
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
    """What new tokens find, [B, T, Q, E], among the first `slots_B` slots of their row: in all to which a mask adds no
    -inf, which has the slots from `first` on; without one in the last `window` of them, or in all. None where torch has
    to find it: in other or mixed dtypes, without a compiler, or where slots do not lie together."""
    (rows, query_heads, tokens, size), (heads, _, out_size) = query_BQTD.shape, value_BHSE.shape[1:]
    dtype, parts = query_BQTD.dtype, [query_BQTD, key_BHSD, value_BHSE]
    together = key_BHSD.stride()[2:] == (size, 1) and value_BHSE.stride()[2:] == (out_size, 1)
    in_pairs = size % 2 == 0 or dtype == torch.float32  # as bfloat16 is multiplied
    if mask_B1TC is not None:
        parts.append(mask_B1TC)
    read = together and in_pairs and _reads(dtype, query_BQTD.device) and all(part.dtype == dtype for part in parts)
    functions = _compiled(dtype) if read else None
    if functions is None:
        return None
    if query_BQTD.stride(3) != 1:
        query_BQTD = query_BQTD.contiguous()
    out = query_BQTD.new_empty(rows, tokens, query_heads, out_size)
    query = query_BQTD.data_ptr(), _Strides3(*query_BQTD.stride()[:3])
    sizes = rows, heads, query_heads // heads, tokens, size, out_size
    functions.attend(
        *(*query, *_kept(key_BHSD), *_kept(value_BHSE), *masked(mask_B1TC), slots_B.data_ptr(), out.data_ptr()),
        *(*sizes, first, window or 0, scaling, torch.get_num_threads()),
    )
    return out


def joined_attention(
    joined_BTXD: Tensor,
    angles_MD: tuple[Tensor, Tensor],
    heads: int,
    key_BHCD: Tensor,
    value_BHCD: Tensor,
    slots_B: Tensor,
    scaling: float,
    norms: tuple[Tensor, Tensor, float] | None = None,
    mask_B1TC: Tensor | None = None,
    first: int = 0,
    window: int | None = None,
) -> Tensor | None:
    """`few_tokens_attention` of queries, keys and values that lie side by side, X = Q + 2 H. There queries and keys get
    their RMS norms, weights [D] and an epsilon, and are turned by cosines and sines [.., D] (of the first half with the
    other sign); keys and values are written to the last slots in sight of their row. None, with nothing written, where
    that has to be done on torch."""
    (rows, tokens, _, size), dtype = joined_BTXD.shape, joined_BTXD.dtype
    norms_D = [] if norms is None else norms[:2]
    parts = [joined_BTXD, *angles_MD, key_BHCD, value_BHCD, *norms_D, *([] if mask_B1TC is None else [mask_B1TC])]
    together = all(part.stride()[2:] == (size, 1) for part in (key_BHCD, value_BHCD)) and joined_BTXD.is_contiguous()
    whole = all(part.numel() == rows * tokens * size for part in angles_MD) and all(len(x) == size for x in norms_D)
    read = together and whole and all(part.dtype == dtype for part in parts) and _reads(dtype, joined_BTXD.device)
    functions = _compiled(dtype) if read else None
    if functions is None:
        return None
    key_heads = key_BHCD.shape[1]
    out = joined_BTXD.new_empty(rows, tokens, heads, size)
    query_norm, key_norm, eps = (
        (None, None, 0.0) if norms is None else (*(part.data_ptr() for part in norms[:2]), norms[2])
    )
    joined = joined_BTXD.data_ptr(), query_norm, key_norm, eps, *(part.data_ptr() for part in angles_MD)
    kept = *_kept(key_BHCD), *_kept(value_BHCD), *masked(mask_B1TC)
    functions.attend_joined(
        *(*joined, *kept, slots_B.data_ptr(), out.data_ptr(), rows, key_heads, heads // key_heads, tokens, size),
        *(first, window or 0, scaling, torch.get_num_threads()),
    )
    return out


def _kept(part_BHCD: Tensor) -> tuple[int, Any]:
    """Where keys or values of a cache lie: of rows and of heads."""
    return part_BHCD.data_ptr(), _Strides2(*part_BHCD.stride()[:2])


def masked(mask_B1TC: Tensor | None) -> tuple[int | None, Any]:
    """Where a mask lies: of rows and of tokens."""
    if mask_B1TC is None:
        return None, _Strides2()
    return mask_B1TC.data_ptr(), _Strides2(mask_B1TC.stride(0) if len(mask_B1TC) > 1 else 0, mask_B1TC.stride(2))


def attender(dtype: torch.dtype) -> int:
    """The address of `joined_attention` in C (see `steps`)."""
    return ctypes.cast(_compiled(dtype).attend_joined, ctypes.c_void_p).value or 0


def _reads(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


@cache
def _compiled(dtype: torch.dtype) -> Any:
    """The functions for numbers of a dtype, which say whether they use threads; None where they cannot be had."""
    names = ["BFLOAT16", *(["TILES"] if may_use_tiles() else [])] if dtype == torch.bfloat16 else []
    with_threads = library(SOURCE, names, threads=True)
    functions: Any = with_threads or (library(SOURCE, names) if torch.get_num_threads() == 1 else None)
    if functions is None:
        return None
    functions.threads = with_threads is not None
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    functions.attend.argtypes = [*[pointer] * 10, *[whole] * 8, ctypes.c_float, ctypes.c_int]
    functions.attend_joined.argtypes = [
        *[pointer] * 3,
        ctypes.c_float,
        *[pointer] * 10,
        *[whole] * 7,
        ctypes.c_float,
        ctypes.c_int,
    ]
    functions.attend.errcheck = functions.attend_joined.errcheck = check_status
    return functions
