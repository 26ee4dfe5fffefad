"""Where an attention head looks, set by hand: queries whose scores are highest at one place from every slot of a block.

A fixed pattern, which rotary positions turn, gives a score for every distance. Places of the block and of the context
have keys of opposite signs; see `block_start`.

Shape suffixes: P distances, A atoms (a pair at a phase), R pairs, K slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_PHASES = 8
_ROUNDS, _RATE = 1500, 0.1
"""Of the search for a pattern, see `pattern`."""
_FAR = 2048
"""Distances at which the context is looked at."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """What a query's pairs are set to.

    Attributes:
        real_R: the first components of the pairs.
        imaginary_R: the second ones.
        margin: how far the least favoured of the wanted scores stands above the rest, for keys of size 1 in each pair.
    """

    real_R: Tensor
    imaginary_R: Tensor
    margin: float


@dataclass(frozen=True)
class Places:
    """Where a head is to look from each slot.

    Attributes:
        wanted_K: distance of the place.
        signs_KP: of the scores of the places at all distances, from 1 - K to `_FAR`: those of the block and of the
            context have keys of opposite signs. 0 where there is no place, and at the place that is wanted.
    """

    wanted_K: Tensor
    signs_KP: Tensor


def newest(block: int) -> Places:
    """Of a head that looks at the newest token of the context.

    >>> places = newest(2)
    >>> places.wanted_K.tolist(), places.signs_KP[:, :6].int().tolist()  # distances -1 to 4
    ([1, 2], [[-1, -1, 0, 1, 1, 1], [0, -1, -1, 0, 1, 1]])
    """
    return _places(block, torch.arange(block) + 1, 1.0)


def root(block: int) -> Places:
    """The same of a head that looks at the first slot.

    >>> places = root(2)
    >>> places.wanted_K.tolist(), places.signs_KP[:, :6].int().tolist()
    ([0, 1], [[1, 0, -1, -1, -1, -1], [0, 1, 0, -1, -1, -1]])
    """
    return _places(block, torch.arange(block), -1.0)


def _places(block: int, wanted_K: Tensor, context: float) -> Places:
    slots_K1, distances_P = torch.arange(block)[:, None], torch.arange(1 - block, _FAR + 1)
    signs_KP = torch.where(distances_P > slots_K1, context, -context)
    signs_KP = signs_KP.masked_fill(distances_P < slots_K1 - block + 1, 0.0)
    return Places(wanted_K, signs_KP.masked_fill(distances_P == wanted_K[:, None], 0.0))


def pattern(angles_R: Tensor, places: Places) -> Pattern:
    """The query whose wanted scores stand above all others by most, for its size.

    A matrix game of places against pairs at phases, played by multiplicative weights; the mean of the later rounds is
    near the best.

    Args:
        angles_R: by how much each pair turns over a distance of 1.
        places: where to look.
    """
    block, count = places.signs_KP.shape
    phases = torch.arange(_PHASES) * (2 * torch.pi / _PHASES)
    angle_A = angles_R.repeat_interleave(_PHASES)
    distances_P1 = torch.arange(1 - block, _FAR + 1)[:, None]
    table_PA = (distances_P1 * angle_A - phases.repeat(len(angles_R))).cos()
    wanted_K = places.wanted_K + block - 1

    def above(shares_A: Tensor) -> Tensor:
        scores_P = table_PA @ shares_A
        found_KP = scores_P[wanted_K, None] - places.signs_KP * scores_P
        return found_KP.masked_fill(places.signs_KP == 0, torch.inf)

    logs_A, mean_A = torch.zeros(len(angle_A)), torch.zeros(len(angle_A))
    for played in range(_ROUNDS):
        shares_A = logs_A.softmax(0)
        if played >= _ROUNDS // 2:
            mean_A += shares_A
        slot, place = divmod(int(above(shares_A).argmin()), count)
        logs_A += _RATE * (table_PA[wanted_K[slot]] - places.signs_KP[slot, place] * table_PA[place])
    mean_A /= mean_A.sum()
    weights_RP = mean_A.view(-1, _PHASES)
    real_R, imaginary_R = weights_RP @ phases.cos(), -(weights_RP @ phases.sin())
    size = float((real_R.square() + imaginary_R.square()).sum().sqrt())
    return Pattern(real_R / size, imaginary_R / size, float(above(mean_A).min()) / size)
