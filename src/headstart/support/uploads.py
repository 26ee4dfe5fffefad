"""Numbers on their way from the host to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(numbers: Tensor | Sequence[Any], device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """These numbers on a device. A CUDA device fetches them from pinned memory while the host goes on; from other
    memory the host waits. Torch keeps pinned memory for the next upload, and only after the copy has been made."""
    on_host = torch.as_tensor(numbers, dtype=dtype)
    if torch.device(device).type != "cuda":
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)


def upload_into(buffer: Tensor, numbers: Sequence[Any]) -> None:
    """Overwrite a buffer with these numbers, which have its shape; the host does not wait, as in `upload`."""
    on_host = torch.as_tensor(numbers, dtype=buffer.dtype)
    if buffer.device.type != "cuda":
        buffer.copy_(on_host)
    else:
        buffer.copy_(on_host.pin_memory(), non_blocking=True)
