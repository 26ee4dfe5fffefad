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
from headstart.train.processes import count_processes

SOURCE = Path(__file__).with_suffix(".cpp")
_FRACTION = 0.25  # of free memory: limit of cached blocks over all processes
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 30


@contextmanager
def cache_tensor_memory(device: torch.device) -> Iterator[None]:
    """A context that caches the memory of freed CPU tensors, released at exit; not reentrant. A no-op on other devices
    and without glibc. If the extension does not compile, it only sets glibc's thresholds."""
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc":
        yield
        return
    _reuse_freed_blocks()
    allocator = _allocator()
    if allocator is None:
        yield
        return
    allocator.set_cache_limit(int(_FRACTION * free_bytes(device) / count_processes()))
    try:
        yield
    finally:
        allocator.set_cache_limit(0)


def _reuse_freed_blocks() -> None:
    """Raise glibc's thresholds for the rest of the process: it reuses freed blocks below 1 GiB, to save page faults.

    By default every block above 32 MiB (a table of logits, the gradient of an LM head) is mapped, faulted in and zeroed
    anew each time. Peak memory is the same, but it is not returned to the system. An old glibc refuses this
    mmap threshold.
    """
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_MMAP_THRESHOLD, _LARGE)
    mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE - 1)


@cache
def _allocator() -> Any:
    functions = torch_library(SOURCE)
    if functions is not None:
        functions.set_cache_limit.argtypes, functions.set_cache_limit.restype = [ctypes.c_size_t], ctypes.c_size_t
    return functions
