"""The exponential moving average of the weights in training, which is judged and kept when a recipe asks for it.

After step n (from 1) the average moves by 1 - d towards the weights, d = min(decay, (1 + n) / (10 + n)): a young one
follows quickly, so that the start of a training does not weigh in it for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """Averages of the weights that training changes; as large as they are, in float32.

    accelerate keeps it in checkpoints (`register_for_checkpointing`).

    Args:
        heads: in training, or their low-rank updates.
        decay: in (0, 1).
    """

    def __init__(self, heads: nn.Module, decay: float) -> None:
        self._decay, self._steps = decay, 0
        self._weights = {name: weight for name, weight in heads.named_parameters() if weight.requires_grad}
        self._averages = {name: weight.detach().float().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        self._steps += 1
        share = 1 - min(self._decay, (1 + self._steps) / (10 + self._steps))
        for name, average in self._averages.items():
            average.lerp_(self._weights[name].detach().float(), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the heads have the averages for weights; the optimiser must not step."""
        own = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._take(self._averages)
        try:
            yield
        finally:
            self._take(own)

    @torch.no_grad()
    def _take(self, values: dict[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            weight.copy_(values[name])

    def state_dict(self) -> dict[str, Any]:
        """The averages, on the CPU, and the steps taken."""
        return {"steps": self._steps, "averages": {name: average.cpu() for name, average in self._averages.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, on any number of processes."""
        self._steps = int(state["steps"])
        for name, average in self._averages.items():
            average.copy_(state["averages"][name])
