"""GPUs by name: memory, bf16 arithmetic, bandwidth, link. What plans reckon with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headstart.errors import UserError, nearest


@dataclass(frozen=True)
class Gpu:
    """One GPU, by the figures of its maker.

    Attributes:
        name: as people write it.
        memory: bytes that PyTorch finds.
        flops: dense bf16 operations a second; those of sparse matrices are not counted.
        bandwidth: bytes a second from its memory.
        link: bytes a second to another GPU of the same machine, in one direction.
        known_as: what its driver calls it, as a pattern.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    known_as: str


def _gpu(name: str, gib: float, teraflops: float, gigabytes: float, link: float, known_as: str) -> Gpu:
    return Gpu(name, gib * 2**30, teraflops * 1e12, gigabytes * 1e9, link * 1e9, known_as)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178, 2250, 8000, 900, r"B200"),
        _gpu("h200", 139.8, 989, 4800, 450, r"H200"),
        _gpu("h100", 79.1, 989, 3350, 450, r"H100(?!.*PCIe)"),
        _gpu("h100-pcie", 79.1, 756, 2000, 64, r"H100.*PCIe"),
        _gpu("a100", 79.1, 312, 2039, 300, r"A100.*80GB"),
        _gpu("a100-40gb", 39.4, 312, 1555, 300, r"A100.*40GB"),
        _gpu("mi300x", 191.5, 1307, 5300, 448, r"MI300X"),
        _gpu("l40s", 44.4, 362, 864, 32, r"L40S"),
        _gpu("l4", 22.0, 121, 300, 32, r"\bL4\b"),
        _gpu("a10g", 22.0, 70, 600, 32, r"A10G"),
        _gpu("rtx5090", 31.4, 209, 1792, 64, r"RTX 5090"),
        _gpu("rtx4090", 23.5, 165, 1008, 32, r"RTX 4090"),
        _gpu("rtx3090", 23.6, 71, 936, 32, r"RTX 3090"),
    )
}
"""By name. Arithmetic is that of tensor cores with sums in float32."""


def find_gpu(name: str) -> Gpu:
    """The GPU that a name means; case, blanks and hyphens do not count.

    Raises:
        UserError: when the table has none of this name; the nearest is named.

    >>> find_gpu("RTX 4090").name, find_gpu("H100").name
    ('rtx4090', 'h100')
    """
    plain = {_plain(known): gpu for known, gpu in GPUS.items()}
    if (gpu := plain.get(_plain(name))) is not None:
        return gpu
    raise UserError(f"The table of GPUs has no {name!r}.", f"{nearest(name.lower(), GPUS)} It has: {', '.join(GPUS)}.")


def gpu_of(driver_name: str) -> Gpu | None:
    """The GPU that a driver calls so; None when the table does not have it.

    >>> gpu_of("NVIDIA H100 80GB HBM3").name, gpu_of("NVIDIA H100 PCIe").name, gpu_of("Quadro K620")
    ('h100', 'h100-pcie', None)
    """
    return next((gpu for gpu in GPUS.values() if re.search(gpu.known_as, driver_name)), None)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
