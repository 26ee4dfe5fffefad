"""A caching allocator for CPU tensors during training.

Batches have many lengths, so allocation sizes vary from step to step and the heap fragments: after some minutes glibc
searches hundreds of free blocks per call, a sixth of the main thread's time, while other threads wait. A cache of
blocks in a few sizes (`tensor_memory.cpp`) finds one at once.
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

from headstart.kernels.memory import free_bytes
from headstart.support.compiled import torch_library
from headstart.train.machine import keep_freed_memory
from headstart.train.processes import count_processes

SOURCE = Path(__file__).with_suffix(".cpp")
_SHARE = 0.25  # limit of cached blocks, as a fraction of free memory, over all processes


@contextmanager
def cache_tensor_memory(device: torch.device) -> Iterator[None]:
    """A context that caches the memory of freed CPU tensors, released at exit; not reentrant. A no-op on other devices,
    without glibc, or if the extension does not compile."""
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
