"""Watching over a training: a loss that leaves its usual range, the memory of the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

import psutil
import torch

from headstart.heads.base import DraftHead
from headstart.recipes.sections import TrainSection
from headstart.support.gpus import bf16_flops

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


def draft_passes(heads: DraftHead, section: TrainSection) -> float:
    """Draft steps that learn from a position, on average.

    Where drafts are subsampled, `step_weight` of them go on to each further step.
    """
    if section.position_weight != "subsampled":
        return float(heads.draft_steps)
    return sum(section.step_weight**step for step in range(heads.draft_steps))


def training_flops(heads: DraftHead, section: TrainSection, flops_per_draft: int) -> float:
    """Operations that training takes for each position that is learnt from, backward included.

    Those of the drafts (`DraftHead.flops_per_draft`) three times, and the teacher's distribution once; attention over
    the text is left out, so that a share of a device's peak that follows from it is a little low.
    """
    teacher = 2 * heads.config.hidden_size * heads.config.draft_width
    return 3 * draft_passes(heads, section) * flops_per_draft + teacher


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations a second that a device can do at most; None where the table of GPUs does not say: CPUs, float32."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    return bf16_flops(torch.cuda.get_device_name(device))
