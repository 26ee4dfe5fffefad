"""Host-to-device copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Tensor | Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy numbers to a device; asynchronous on CUDA, through pinned memory, which torch reuses after the copy."""
    on_host, pinned = _on_host(numbers, torch.device(device), dtype)
    return on_host.to(device, non_blocking=pinned)


def upload_into(buffer: Tensor, numbers: Tensor | Sequence[Any]) -> None:
    """Overwrite a buffer with numbers of its shape; asynchronous as `upload`."""
    on_host, pinned = _on_host(numbers, buffer.device, buffer.dtype)
    buffer.copy_(on_host, non_blocking=pinned)


def _on_host(numbers: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None) -> tuple[Tensor, bool]:
    on_host, pinned = torch.as_tensor(numbers, dtype=dtype), device.type == "cuda"
    return on_host.pin_memory() if pinned else on_host, pinned
