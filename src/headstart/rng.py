"""Random draws that can be had again: inverted cumulative sums, with numbers from a row's own stream.

Shape suffixes: W distributions, V tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw(probs_V: Tensor, stream: torch.Generator) -> int:
    """A token from a distribution; one without probability is never drawn."""
    return int(draw_each(probs_V[None], stream).clamp(max=len(probs_V) - 1))


def draw_each(probs_WV: Tensor, stream: torch.Generator) -> Tensor:
    """A token from each distribution, int64 [W], by inverting cumulative sums; V where there is no probability."""
    cumulative_WV = probs_WV.cumsum(-1, dtype=torch.float64)
    chance_W = torch.rand(len(probs_WV), generator=stream, dtype=torch.float64).to(probs_WV.device)
    place_W1 = (cumulative_WV[:, -1] * chance_W)[:, None]
    # The first token whose cumulative sum passes the place: its own probability is then above 0.
    return torch.searchsorted(cumulative_WV, place_W1, right=True)[:, 0]
