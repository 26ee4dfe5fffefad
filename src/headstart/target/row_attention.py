"""Attention of one new token a row over many rows, on one core: how the target writes data on a CPU.

Torch's own attention makes two small products of every row and head, 13 us for three queries over 180 slots of 64
numbers, which is two fifths of what writing takes. `row_attention.c` does the same in 4 us. It is compiled for the
target's layers (see `support.compiled`); where there is no compiler, torch's attention is used.

Shape suffixes: B rows, H key-value heads, G query heads that share one, S slots in sight, D size of a query and key,
E of a value.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.support.compiled import compiler, library

SOURCE = Path(__file__).with_suffix(".c")
ROWS = 16
"""Rows from which it is compiled and used: few rows take as long either way."""


def serves(rows: int, width: int, device: torch.device) -> bool:
    """Whether a forward of so many rows and new tokens in each is one for it: it uses one core."""
    return rows >= ROWS and width == 1 and device.type == "cpu" and torch.get_num_threads() == 1


def row_attention(
    query_BHGD: Tensor, key_BHSD: Tensor, value_BHSE: Tensor, slots_B: Tensor, scaling: float, window: int | None
) -> Tensor | None:
    """What the new token of each row finds, [B, H, G, E], among the first `slots_B` of its slots, or the last `window`
    of these where there is one; None where torch has to find it: without a compiler, in other or mixed dtypes, or
    where slots do not lie together."""
    rows, heads, groups, size = query_BHGD.shape
    room, out_size = value_BHSE.shape[2:]
    dtype, together = query_BHGD.dtype, key_BHSD.stride()[2:] == (size, 1) and value_BHSE.stride()[2:] == (out_size, 1)
    if not together or not _reads(dtype, query_BHGD.device) or not dtype == key_BHSD.dtype == value_BHSE.dtype:
        return None
    attend = _compiled(size, out_size, groups, dtype)
    if attend is None:
        return None
    query_BHGD = query_BHGD.contiguous()
    out_BHGE = query_BHGD.new_empty(rows, heads, groups, out_size)
    scores_GS = query_BHGD.new_empty(groups, room, dtype=torch.float32)
    attend(
        *(tensor.data_ptr() for tensor in (query_BHGD, key_BHSD, value_BHSE, slots_B, out_BHGE)),
        *(rows, heads, *key_BHSD.stride()[:2], *value_BHSE.stride()[:2], window or 0, scaling),
        *(scores_GS.data_ptr(), room),
    )
    return out_BHGE


def would_help(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether two workers that write in this dtype, with half of the threads each, would use it had they a compiler."""
    return _reads(dtype, device) and torch.get_num_threads() < 4 and not compiler()


def _reads(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)


@cache
def _compiled(size: int, out_size: int, groups: int, dtype: torch.dtype) -> Any:
    """The function for layers of these sizes; None where it cannot be had."""
    names = [f"D={size}", f"E={out_size}", f"G={groups}", *(["BFLOAT16"] if dtype == torch.bfloat16 else [])]
    functions = library(SOURCE, names)
    if functions is None:
        return None
    attend = functions.attend
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    attend.argtypes = [pointer] * 5 + [whole] * 7 + [ctypes.c_float, pointer, whole]
    attend.restype = None
    return attend
