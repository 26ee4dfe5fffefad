"""Peak memory of a piece of work, in bytes of tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

R = TypeVar("R")


def peak_bytes(device: torch.device, work: Callable[[], R]) -> tuple[int, R]:
    """Return the most bytes of tensors that exist at once during some work, beyond those before, and its result. On
    CPUs, memory that an operation frees before it returns is not seen."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        return torch.cuda.max_memory_allocated(device) - before, result
    with _Allocated() as allocated:
        result = work()
    return allocated.peak, result


class _Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that operations inside create, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.peak = self._now = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor) and given.untyped_storage() not in self._known:
                self._known[given.untyped_storage()] = True
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._known:
                self._known[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return made

    def _add(self, count: int) -> None:
        self._now += count
        self.peak = max(self.peak, self._now)
