"""How much memory is left, and whether an error says that there was too little."""

from __future__ import annotations

import psutil
import torch


def free_bytes(device: torch.device) -> int:
    """Memory of a device that nothing uses, or that could be had at once."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(psutil.virtual_memory().available)


def out_of_memory(error: BaseException) -> bool:
    """Whether this is what PyTorch or Python raise when an allocation fails, on any device.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."))
    True
    >>> out_of_memory(RuntimeError("shapes differ"))
    False
    """
    if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    said = str(error).lower()
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return isinstance(error, RuntimeError) and any(word in said for word in words)
