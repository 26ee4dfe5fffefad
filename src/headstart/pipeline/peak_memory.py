"""Peak tensor memory of a call, in bytes."""

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
    """Call `work`; return the peak bytes of tensors that it adds, and its result.

    On a CPU this misses scratch memory that an operation frees before it returns.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        return torch.cuda.max_memory_allocated(device) - before, result
    with _Allocated() as allocated:
        result = work()
    return allocated.peak, result


class _Allocated(TorchDispatchMode):
    """Dispatch mode that tracks the live bytes of tensors created under it."""

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
