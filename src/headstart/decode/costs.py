"""Costs of drafting and verifying in milliseconds, and the conditions under which they were measured.

Costs hold for one machine, dtype, thread count and kind of forward. Elsewhere they are only a guess: int8 weights that
make a draft three times as fast in bfloat16 make it ten times as slow in float32.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter

from headstart.kernels import draft_kernels
from headstart.kernels.prepacked import uses_tiles
from headstart.model.model import Target

_LEVEL_NODES = 4
"""Typical nodes of a row per draft level, used only for ratios between batches."""


@dataclass(frozen=True)
class Costs:
    """Measured milliseconds of drafting and verifying a single row.

    Attributes:
        node_counts: measured numbers of nodes in one forward, ascending from 1.
        verify_ms: milliseconds to verify that many: forward, acceptance and commit.
        draft_ms: milliseconds of a draft with the measured heads, `levels` deep.
        level_ms: milliseconds of each level after the first, included in `draft_ms`.
        levels: depth of that draft.
        read_ms: extra milliseconds of a draft for each text token that the heads have not read yet.
    """

    node_counts: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float = 0.0
    level_ms: float = 0.0
    levels: int = 0
    read_ms: float = 0.0

    def __post_init__(self) -> None:
        counts = self.node_counts
        if counts[:1] != (1,) or any(before >= after for before, after in pairwise(counts)):
            raise ValueError(f"node_counts is {counts}, which does not ascend from 1")
        if len(self.verify_ms) != len(counts) or not all(0 < ms < inf for ms in self.verify_ms):
            raise ValueError(f"verify_ms is {self.verify_ms}, not a positive time for each of node_counts {counts}")
        for name in ("draft_ms", "level_ms", "read_ms"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, not a finite time from 0 on")

    def draft(self, depth: int, rows: int = 1) -> float:
        """Milliseconds of a draft of this depth; with rows it grows as the target's forward does.

        >>> Costs((1,), (10.0,), 5.0, 1.0, 4).draft(4), Costs((1,), (10.0,), 5.0, 1.0, 4).draft(2)
        (5.0, 3.0)
        >>> Costs((1, 4, 8), (10.0, 10.0, 20.0), 5.0, 1.0, 4).draft(4, rows=2)
        10.0
        """
        if depth == 0:
            return 0.0
        alone = self.draft_ms - self.level_ms * max(0, self.levels - depth)
        return alone if rows == 1 else alone * self.verify(_LEVEL_NODES * rows) / self.verify(_LEVEL_NODES)

    def verify(self, tokens: int) -> float:
        """Milliseconds to verify this many tokens, all rows together: interpolated, and extrapolated by the last slope.

        >>> Costs((1, 4, 8), (10.0, 13.0, 21.0)).verify(2), Costs((1, 4, 8), (10.0, 13.0, 21.0)).verify(10)
        (11.0, 25.0)
        """
        counts, ms = self.node_counts, self.verify_ms
        if tokens > counts[-1] and len(counts) > 1:
            return ms[-1] + (ms[-1] - ms[-2]) / (counts[-1] - counts[-2]) * (tokens - counts[-1])
        return float(np.interp(tokens, counts, ms))


@dataclass(frozen=True)
class Measured:
    """Result of measuring the costs of some heads.

    Attributes:
        packed: whether the heads drafted clearly faster with int8 weights; `costs` are then of int8 drafts.
        steady: whether the machine's speed stayed constant meanwhile.
    """

    costs: Costs
    packed: bool
    steady: bool = True


@dataclass(frozen=True)
class Conditions:
    """Conditions that costs depend on besides the target and the heads.

    `machine` names the GPU or the processor; `threads` is 0 on a GPU. `prepacked` weights and a `replayed` forward make
    verification faster. `compiled` (the C draft kernels), `halves` (weights stored as bfloat16) and `tiles` (tiled
    matmuls) make drafts and matmuls of few rows faster.
    """

    machine: str
    device: str
    dtype: str
    threads: int
    torch: str
    prepacked: bool = False
    quantization: str = "none"
    replayed: bool = False
    compiled: bool = False
    halves: bool = False
    tiles: bool = False

    @classmethod
    def of(cls, target: Target) -> Conditions:
        """Describe decoding with this target on this machine."""
        device, on_gpu = target.device, target.device.type == "cuda"
        machine = torch.cuda.get_device_name(device) if on_gpu else f"{cpu_model()}, {os.cpu_count()} cores"
        threads = 0 if on_gpu else torch.get_num_threads()
        return cls(
            *(machine, device.type, target.dtype_name, threads, str(torch.__version__)),
            prepacked=target.prepacked,
            quantization=target.quantization,
            replayed=target.replays,
            compiled=device.type == "cpu" and draft_kernels.compiled(target.dtype) is not None,
            halves=target.stored_as_bfloat16,
            tiles=target.prepacked and device.type == "cpu" and uses_tiles(target.dtype),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Conditions | None:
        """Rebuild from `to_json`, or raise a ValidationError; None for imported heads that are not tuned yet."""
        return TypeAdapter(cls).validate_python(values) if values else None

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = TypeAdapter(Conditions).dump_python(self, exclude_defaults=True)
        return values

    def difference(self, other: Conditions) -> str:
        """Format the fields that differ from other conditions.

        >>> here = Conditions("EPYC", "cpu", "float32", 2, "2.13")
        >>> here.difference(Conditions("EPYC", "cpu", "bfloat16", 1, "2.13"))
        'dtype=float32, threads=2'
        """
        others = asdict(other)
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value != others[name])


@cache
def cpu_model() -> str:
    """Return the processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def core_count() -> int | None:
    """Return the number of cores that this process may use; None if unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
