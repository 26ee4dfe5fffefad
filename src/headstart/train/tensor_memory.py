"""Memory of tensors on a CPU, kept for the next ones while heads are trained.

Batches have many lengths, so every step asks malloc for other sizes than the one before: free memory comes to lie in
pieces, and after some minutes glibc looks through hundreds of them each time, a sixth of the main thread's time, while
other threads wait. Blocks of a few sizes that wait for their next tensor (`tensor_memory.cpp`) are found at once.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from headstart.support.compiled import torch_library
from headstart.target.memory import free_bytes
from headstart.train.machine import keep_freed_memory
from headstart.train.processes import count_processes

SOURCE = Path(__file__).with_suffix(".cpp")
_SHARE = 0.25
"""Of free memory, what may wait for its next tensor, in all processes together."""


@contextmanager
def keeping_memory(device: torch.device) -> Iterator[None]:
    """A context in which memory of freed tensors on a CPU waits for the next ones; it is let go of afterwards. On
    another device this does nothing, and with another C library than glibc, or a compiler that makes nothing of
    it, memory is found as usual. Not to be nested."""
    if device.type != "cpu":
        yield
        return
    keep_freed_memory()
    keeper = _keeper()
    if keeper is None:
        yield
        return
    keeper.keep(int(_SHARE * free_bytes(device) / count_processes()))
    try:
        yield
    finally:
        keeper.keep(0)


@cache
def _keeper() -> Any:
    functions = torch_library(SOURCE) if platform.libc_ver()[0] == "glibc" else None
    if functions is not None:
        functions.keep.argtypes, functions.keep.restype = [ctypes.c_size_t], ctypes.c_size_t
    return functions
