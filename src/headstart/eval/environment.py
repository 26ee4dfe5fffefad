"""Machine and versions of a measurement."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
import transformers

import headstart
from headstart.decode.costs import core_count, cpu_model
from headstart.model.model import Target


def environment(target: Target, drafters: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the machine, the versions, and how the target and the drafters compute."""
    device = target.device
    drafts = [drafter.forwards for drafter in drafters if hasattr(drafter, "forwards")]
    return {
        "threads": torch.get_num_threads(),
        "device": str(device),
        "dtype": target.dtype_name,
        "exact": target.exact,
        "prepacked": target.prepacked,
        "forward": target.forwards,
        "drafts": "; ".join(dict.fromkeys(drafts)) or None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **machine(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def machine() -> dict[str, Any]:
    """Return the machine, the version of headstart, and the current time."""
    return {
        **machine_facts(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "headstart": headstart.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine_facts() -> dict[str, Any]:
    """Return CPU, core count and GPU, which timings depend on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu_model(), "cores": core_count(), "gpu": gpu}
