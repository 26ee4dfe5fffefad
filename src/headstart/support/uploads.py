"""Numbers on their way from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Tensor | Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """These numbers on a device. A CUDA device fetches them from pinned memory while the host goes on; from other
    memory the host waits. Torch keeps pinned memory for the next upload, and only after the copy has been made."""
    on_host, pinned = _on_host(numbers, torch.device(device), dtype)
    return on_host.to(device, non_blocking=pinned)


def upload_into(buffer: Tensor, numbers: Tensor | Sequence[Any]) -> None:
    """Overwrite a buffer with these numbers, which have its shape; the host does not wait, as in `upload`."""
    on_host, pinned = _on_host(numbers, buffer.device, buffer.dtype)
    buffer.copy_(on_host, non_blocking=pinned)


def _on_host(numbers: Tensor | Sequence[Any], device: torch.device, dtype: torch.dtype | None) -> tuple[Tensor, bool]:
    """The numbers as the device takes them best, and whether they lie in pinned memory."""
    on_host, pinned = torch.as_tensor(numbers, dtype=dtype), device.type == "cuda"
    return on_host.pin_memory() if pinned else on_host, pinned
