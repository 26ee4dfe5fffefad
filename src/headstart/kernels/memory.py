"""Reusable memory with CUDA graphs, free memory, and helpers for calls of C kernels."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_NO_MEMORY = -1
"""`NO_MEMORY` of panels.h."""


class Memory:
    """Tensors reused by successive texts, with the CUDA graphs captured over them (see `cuda_graphs`)."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.graphs: dict[Any, Any] = {}
        self.pool: Any = None
        self.lent: Any = None  # finalizer that returns this memory to the pool
        self.weights: Any = None  # addresses of the weights that the graphs read

    @property
    def bytes(self) -> int:
        storages = (leaf.untyped_storage() for leaf in tree_leaves(vars(self)) if isinstance(leaf, Tensor))
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def clear(self) -> None:
        """Zero the tensors: leftover NaN or inf would pass through masks."""


def free_bytes(device: torch.device) -> int:
    """Return the memory that the process can still allocate: of a GPU, or of the machine within its cgroup's limits."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(int(psutil.virtual_memory().available), cgroup_free_bytes())


def cgroup_free_bytes(root: Path = Path("/")) -> int:
    """Return the bytes left under the limits of this process's cgroup and its parents; `sys.maxsize` without any.

    The page cache counts as free, because the kernel reclaims it. `root` holds `proc` and `sys`.
    """
    free = sys.maxsize
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                mount, limit, usage, prefix = "sys/fs/cgroup", "memory.max", "memory.current", ""
            elif "memory" in controllers.split(","):
                mount, prefix = "sys/fs/cgroup/memory", "total_"
                limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            else:
                continue
            # A container sees the host's path, and its own cgroup at the mount point.
            parts = path.strip("/").split("/")
            for depth in range(len(parts) + 1):
                folder = root.joinpath(mount, *parts[:depth])
                with suppress(OSError, ValueError):  # no such folder, or the limit is "max"
                    left = int((folder / limit).read_text()) - int((folder / usage).read_text())
                    stats = dict(each.split() for each in (folder / "memory.stat").read_text().splitlines())
                    cached = (stats.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                    free = min(free, max(0, left + sum(map(int, cached))))
    return free


def check_status(status: Any, _function: Any, _arguments: Any) -> Any:
    """Raise MemoryError if a kernel could not allocate its scratch buffers; an `errcheck` of ctypes."""
    if status == _NO_MEMORY:
        raise MemoryError("A kernel cannot allocate its scratch buffers: shorten the prompt, or batch less.")
    return status


def address(tensor: Tensor | None) -> int | None:
    """Return a tensor's address; None, which ctypes passes as NULL, without a tensor."""
    return None if tensor is None else tensor.data_ptr()
