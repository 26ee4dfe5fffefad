"""Costs of drafting and verifying in milliseconds, and the conditions under which they were measured.

Costs hold for one machine, dtype, thread count and way of verifying. Elsewhere they are only a guess: int8 weights that
make a draft three times as fast in bfloat16 make it ten times as slow in float32.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
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
"""Typical nodes of a row per draft level; only ratios between batches follow from it."""


@dataclass(frozen=True)
class Costs:
    """Measured milliseconds of drafting and verifying a single row.

    Attributes:
        widths: numbers of tokens read in one forward, rows times nodes, ascending from 1.
        verify_ms: milliseconds of such a forward, including choice and commit.
        draft_ms: milliseconds of a draft with the measured heads, `levels` deep.
        level_ms: the part of each level after the first.
        levels: depth of that draft.
        read_ms: extra milliseconds of a draft for each token of the text that the heads have yet to read.
    """

    widths: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float = 0.0
    level_ms: float = 0.0
    levels: int = 0
    read_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.widths[:1] != (1,) or any(before >= after for before, after in pairwise(self.widths)):
            raise ValueError(f"widths are {self.widths}, which do not rise from 1")
        if len(self.verify_ms) != len(self.widths) or not all(0 < ms < inf for ms in self.verify_ms):
            raise ValueError(
                f"verify_ms is {self.verify_ms}, not one positive time for each of the {len(self.widths)} widths"
            )
        for name in ("draft_ms", "level_ms", "read_ms"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} is {getattr(self, name)}, which is no time")

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
        """Milliseconds to verify this many tokens: interpolated, beyond the last width by the last slope.

        >>> Costs((1, 4, 8), (10.0, 13.0, 21.0)).verify(2), Costs((1, 4, 8), (10.0, 13.0, 21.0)).verify(10)
        (11.0, 25.0)
        """
        if tokens > self.widths[-1] and len(self.widths) > 1:
            slope = (self.verify_ms[-1] - self.verify_ms[-2]) / (self.widths[-1] - self.widths[-2])
            return self.verify_ms[-1] + slope * (tokens - self.widths[-1])
        return float(np.interp(tokens, self.widths, self.verify_ms))


@dataclass(frozen=True)
class Measured:
    """Costs measured for some heads.

    Attributes:
        packed: whether int8 weights drafted clearly faster; the costs are then theirs.
        steady: whether the machine's speed stayed the same during the measurement.
    """

    costs: Costs
    packed: bool
    steady: bool = True


@dataclass(frozen=True)
class Conditions:
    """Conditions that costs depend on besides the target and the heads.

    The machine is the name of the GPU or the processor; threads are 0 on a GPU. Verifying a tree is faster with
    prepacked weights or a replayed forward; products and drafts of a few rows are faster with `draft_kernels`, most of
    all with half-precision weights or products by tiles.
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
        """The conditions of decoding with this target on this machine."""
        device, dtype = target.device, target.dtype_name
        on_gpu = device.type == "cuda"
        machine = torch.cuda.get_device_name(device) if on_gpu else f"{cpu_model()}, {os.cpu_count()} cores"
        threads = 0 if on_gpu else torch.get_num_threads()
        return cls(
            *(machine, device.type, dtype, threads, str(torch.__version__)),
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
        usual = {field.name: field.default for field in fields(self)}
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    def beside(self, other: Conditions) -> str:
        """The fields that differ from other conditions, as words.

        >>> here = Conditions("EPYC", "cpu", "float32", 2, "2.13")
        >>> here.beside(Conditions("EPYC", "cpu", "bfloat16", 1, "2.13"))
        'dtype=float32, threads=2'
        """
        rest = asdict(other)
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value != rest[name])


@cache
def cpu_model() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def core_count() -> int | None:
    """Cores that this process may use; None if unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
