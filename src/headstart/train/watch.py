"""Watching over a training: a loss that leaves its usual range, the memory of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

import psutil
import torch

FACTOR = 2.0
"""A loss above this many times its running median is far above it."""
WINDOW = 100
"""Steps that the running median is taken over, at most."""
FEWEST = 20
"""Steps without which there is no median to speak of."""


class LossWatch:
    """Says once that the loss diverges: at the first step whose loss is more than 2 times the median of the up to
    100 steps before it, once there are 20 of them. A loss of other positions is another quantity: its median begins
    anew.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._kind: Hashable = None
        self._told = False

    def ratio(self, loss: float, kind: Hashable = None) -> float | None:
        """Take the loss of a step.

        Args:
            loss: of the step.
            kind: changes when the loss begins to mean something else.

        Returns:
            The loss as a multiple of the running median, the first time that it is far above it; None otherwise.

        >>> watch = LossWatch()
        >>> [watch.ratio(loss) for loss in (*[2.0] * 20, 3.9, 4.1, 9.0)][-3:]
        [None, 2.05, None]
        """
        if kind != self._kind:
            self._kind = kind
            self._losses.clear()
        usual = median(self._losses) if len(self._losses) >= FEWEST else 0.0
        self._losses.append(loss)
        if self._told or usual <= 0 or loss <= FACTOR * usual:
            return None
        self._told = True
        return loss / usual


def divergence(loss: float, ratio: float, step: int) -> str:
    """What to say of a loss that is `ratio` times its running median."""
    return (
        f"Warning: the loss of step {step} is {loss:.3f}, {ratio:.1f} times the median of the steps before. "
        "If it stays up, lower train.lr or raise train.warmup. (Said once.)"
    )


def memory(device: torch.device) -> dict[str, float]:
    """Memory in GB (1e9 bytes) by logged name: resident in this process, and on a GPU the most allocated so far."""
    found = {"memory/rss_gigabytes": psutil.Process().memory_info().rss / 1e9}
    if device.type == "cuda":
        found["memory/cuda_peak_gigabytes"] = torch.cuda.max_memory_allocated(device) / 1e9
    return found
