"""Reproducible sampling by inverse CDF, with uniform numbers from a row's own stream.

Shape suffixes: M distributions, V tokens, G groups of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 256
"""Tokens of a group: the group is drawn first, then the token in it."""
_INSIDE = 1 - 1e-12
"""Upper limit of a uniform number: the sum itself would fall after the last token."""
_AHEAD = 64
"""Block size of the generated random numbers."""
_CACHED, _TOGETHER = 1 << 18, 1 << 27
"""Probabilities per slice of rows: cache size on a CPU, more on other devices."""


def in_parts(rows: int, vocab: int, device: torch.device) -> list[slice]:
    """Split rows into slices to compute distributions of together."""
    size = max(1, (_CACHED if device.type == "cpu" else _TOGETHER) // vocab)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def draw(probs_V: Tensor, generator: torch.Generator) -> int:
    """Draw a token; one with probability 0 is never drawn."""
    uniform_1 = torch.rand(1, generator=generator, dtype=torch.float64).to(probs_V.device)
    return int(fall_on(probs_V[None], uniform_1).clamp(max=len(probs_V) - 1))


def fall_on(weights_MV: Tensor, uniform_M: Tensor) -> Tensor:
    """Return the tokens [M] drawn by uniform numbers (float64, [0, 1)) from unnormalised weights; V if all are 0.

    Never a token of weight 0. Fewer operations than `draw_at`, but each over the whole vocabulary.
    """
    cumulative_MV = weights_MV.cumsum(-1, dtype=torch.float64)
    index_M1 = (cumulative_MV[:, -1] * uniform_M)[:, None]
    # The first cumulative sum above the number belongs to a token with positive weight.
    return torch.searchsorted(cumulative_MV, index_M1, right=True)[:, 0]


def draw_at(weights_MV: Tensor, uniform_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens [M] drawn by uniform numbers (float64, [0, 1)) from unnormalised weights, and the sums of the
    weights (float64 [M]). Never a token of weight 0 unless all are.

    >>> token_M, sum_M = draw_at(torch.tensor([[0.0, 2.0, 6.0]] * 3), torch.tensor([0.0, 0.2, 0.9]).double())
    >>> token_M.tolist(), sum_M.tolist()
    ([1, 1, 2], [8.0, 8.0, 8.0])
    """
    size = weights_MV.shape[1]
    whole = size // _GROUP * _GROUP
    sums_MG = weights_MV[:, :whole].reshape(len(weights_MV), -1, _GROUP).sum(-1).double() if whole else None
    if whole < size or sums_MG is None:
        rest_M1 = weights_MV[:, whole:].sum(-1, keepdim=True).double()
        sums_MG = rest_M1 if sums_MG is None else torch.cat([sums_MG, rest_M1], 1)
    until_MG = sums_MG.cumsum(1)
    sum_M = until_MG[:, -1]
    index_M1 = (uniform_M.clamp(max=_INSIDE) * sum_M)[:, None]
    group_M1 = torch.searchsorted(until_MG, index_M1, right=True).clamp(max=sums_MG.shape[1] - 1)
    own_M1 = sums_MG.gather(1, group_M1)
    token_MG = group_M1 * _GROUP + torch.arange(min(_GROUP, size), device=weights_MV.device)
    inside_MG = weights_MV.gather(1, token_MG.clamp(max=size - 1)).double().masked_fill(token_MG >= size, 0.0).cumsum(1)
    share_M1 = ((index_M1 - until_MG.gather(1, group_M1) + own_M1) / own_M1).clamp(0.0, _INSIDE)
    inside_M1 = torch.searchsorted(inside_MG, share_M1 * inside_MG[:, -1:], right=True)
    return (group_M1 * _GROUP + inside_M1).clamp(max=size - 1)[:, 0], sum_M


class UniformStream:
    """Look-ahead over one stream of uniform numbers, as single calls of `torch.rand` would draw them.

    >>> uniforms = UniformStream(torch.Generator().manual_seed(0))
    >>> uniforms.peek(3)[1:] == (uniforms.skip(1), uniforms.peek(2))[1]
    True
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._ahead: list[float] = []

    def peek(self, count: int) -> list[float]:
        """Return the next numbers without consuming them."""
        while len(self._ahead) < count:
            self._ahead += torch.rand(_AHEAD, generator=self._generator, dtype=torch.float64).tolist()
        return self._ahead[:count]

    def skip(self, count: int) -> None:
        """Consume numbers."""
        self.peek(count)
        del self._ahead[:count]
