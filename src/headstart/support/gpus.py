"""What GPUs can do at most, by the figures of their makers: what MFU is a share of."""

from __future__ import annotations

import re

_TERAFLOPS = {
    r"B200": 2250,
    r"H200": 989,
    r"H100(?!.*PCIe)": 989,
    r"H100.*PCIe": 756,
    r"A100": 312,
    r"MI300X": 1307,
    r"L40S": 362,
    r"\bL4\b": 121,
    r"A10G": 70,
    r"RTX 5090": 209,
    r"RTX 4090": 165,
    r"RTX 3090": 71,
}
"""By what drivers call them, as patterns: dense operations in bfloat16 with sums in float32, in 1e12 a second."""


def bf16_flops(driver_name: str) -> float | None:
    """Operations a second of the GPU that a driver calls so; None when the table does not have it.

    >>> bf16_flops("NVIDIA H100 80GB HBM3"), bf16_flops("NVIDIA H100 PCIe"), bf16_flops("Quadro K620")
    (989000000000000.0, 756000000000000.0, None)
    """
    found = (figure for pattern, figure in _TERAFLOPS.items() if re.search(pattern, driver_name))
    return next((1e12 * figure for figure in found), None)
