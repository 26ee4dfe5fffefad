"""A model's LM head: its weights, quantised or not, and the scaling of its logits.

Shape suffixes: V vocabulary, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_COLUMNS = 256
"""Columns to dequantise together."""


@dataclass(frozen=True)
class LogitTransform:
    """Scaling of LM head outputs: factor (Cohere), divisor (Granite), soft cap (Gemma 2)."""

    factor: float | None = None
    divisor: float | None = None
    cap: float | None = None

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        names = ("logit_scale", "logits_scaling", "final_logit_softcapping")
        return cls(*(getattr(config, name, None) for name in names))

    @property
    def scale(self) -> float:
        """Factor and divisor in one number."""
        return (1.0 if self.factor is None else self.factor) / (1.0 if self.divisor is None else self.divisor)

    def __call__(self, logits: Tensor) -> Tensor:
        """Turn LM head outputs into the model's logits."""
        if self.factor is not None:
            logits = logits * self.factor
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        return logits


def plain_weight(linear: Any, outputs: int, inputs: int) -> Tensor | None:
    """Return a linear layer's weights [outputs, inputs]; None if quantised."""
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or is_quantized(weight) or weight.shape != (outputs, inputs):
        return None
    return weight if weight.is_floating_point() and weight.dtype.itemsize >= 2 else None


def is_quantized(weight: Tensor) -> bool:
    """Whether it is a torchao tensor, which reports a floating-point dtype though it is quantised."""
    return type(weight).__module__.partition(".")[0] == "torchao"


@torch.no_grad()
def dequantized(linear: nn.Module, inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Dequantise any linear layer, [outputs, inputs]: column i is its output for the i-th unit vector."""
    zero_1V = linear(torch.zeros(1, inputs, dtype=dtype, device=device))  # its bias
    parts = []
    for start in range(0, inputs, _COLUMNS):
        units = torch.eye(min(_COLUMNS, inputs - start), inputs, dtype=dtype, device=device).roll(start, 1)
        parts.append((linear(units) - zero_1V).T)
    return torch.cat(parts, dim=1).contiguous()
