"""Blocks that draft before they are trained: attention that looks where it should, and output maps that are solved for.

All mask slots of a block read the same embedding, so what tells them apart is their distance to everything else. Some
attention heads are therefore given queries and keys that see distances and kinds alone: a number read off the layer's
input is 1 for the context and -1 for a block, whatever the token, and head norms make it exactly one of the two. Times
a fixed pattern, which rotary positions turn, it gives a score that is highest at the newest token of the context, from
every slot; with the other sign, at the root. What such heads find there is passed on by as many directions as they
have numbers, those that say most about the states to come. The other heads keep the target's queries and keys, on the
slowly turning pairs of a head alone.

What all heads find, and what the MLP makes of it, then goes through linear maps that are solved for: ridge regression
on the target's final states.

Shape suffixes: E hidden size, B rows, T tokens, M origins, S drafted slots, P distances, A atoms (a pair at a phase), R
pairs, K slots, F what a map reads, I what is read at an origin, C features, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.block_layer import BlockLayer

_PHASES = 8
_ROUNDS, _RATE = 1500, 0.1
"""Of the search for a pattern, see `pattern`."""
_FAR = 2048
"""Distances at which the context is looked at."""
_MARGIN = 6.0
"""How far the score of where a head looks stands above any other."""
_RIDGE = 0.03
"""Of the solved maps, as a share of the mean squared size of each number that they read."""
_SOFT = (1.0, 0.1, 0.03)
"""Of the query heads that share a key head, in turn: how much of their size is the pattern. Soft ones see the rest of
the text, each slot another share of it."""


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


def fast_pairs(layer: BlockLayer) -> Tensor:
    """Components of a head that patterns take: the first half of its pairs, which turn quickly, bool [d]."""
    width = layer.config.head_dim
    return (torch.arange(width) % (width // 2)) < (width + 2) // 4


@torch.no_grad()
def look(layer: BlockLayer, heads: tuple[int, int], seen: tuple[Pattern, Pattern], number_E: Tensor) -> None:
    """Set the queries and keys of a layer's first key heads so that they look at the context's newest token, and those
    of as many after them so that they look at the root; the others keep what the slow pairs hold.

    Args:
        layer: whose `qkv` and head norms are written.
        heads: key heads of the two kinds.
        seen: patterns of the two kinds, with margins above 0.
        number_E: gives 1 for the context and -1 for a block.
    """
    config, width = layer.config, layer.config.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    fast_d = fast_pairs(layer)
    count = int(fast_d.sum()) // 2
    weight_HdE = layer.qkv.weight.view(-1, width, layer.qkv.in_features)
    keys = config.num_attention_heads
    taken = sum(heads)
    weight_HdE[groups * taken : keys, fast_d] = 0
    weight_HdE[keys + taken : keys + config.num_key_value_heads, fast_d] = 0
    spare = int((~fast_d).nonzero()[-1])
    for head in range(taken):
        kind = 0 if head < heads[0] else 1
        sign = 1.0 if kind == 0 else -1.0
        key_d = torch.zeros(width)
        key_d[:count] = 1.0
        weight_HdE[keys + head] = (key_d[:, None] * (sign * number_E)).to(weight_HdE)
        one = seen[kind]
        for group in range(groups):
            soft = _SOFT[min(group, len(_SOFT) - 1)]
            query_d = torch.zeros(width)
            query_d[:count], query_d[width // 2 : width // 2 + count] = soft * one.real_R, soft * one.imaginary_R
            query_d[spare] = (1 - soft**2) ** 0.5
            weight_HdE[head * groups + group] = (query_d[:, None] * -number_E).to(weight_HdE)
    margin = min(one.margin for one in seen)
    layer.q_norm.weight[fast_d] = _MARGIN / (margin * (width / count) ** 0.5)
    layer.k_norm.weight[fast_d] = 1.0


@torch.no_grad()
def telling(context_ME: Tensor, *blocks: Tensor) -> Tensor:
    """What gives 1 for the context and -1 for what a block reads, as nearly as a linear map can, [E].

    Args:
        context_ME: of some tokens.
        blocks: normed embeddings, of kinds that count alike.
    """
    gram_EE = context_ME.T @ context_ME / len(context_ME)
    wanted_E = context_ME.mean(0)
    for block_ME in blocks:
        gram_EE = gram_EE + block_ME.T @ block_ME / len(block_ME) / len(blocks)
        wanted_E = wanted_E - block_ME.mean(0) / len(blocks)
    ridge = 1e-4 * gram_EE.diagonal().mean()
    number_E: Tensor = torch.linalg.solve(gram_EE + ridge * torch.eye(len(gram_EE)).to(gram_EE), wanted_E)
    return number_E


class Ridge:
    """Ridge regression from what is read to what is wanted, in parts."""

    def __init__(self) -> None:
        self.gram_FF: Tensor | None = None
        self.cross_FE: Tensor | None = None
        self.rows = 0.0

    @torch.no_grad()
    def add(self, read_MF: Tensor, wanted_ME: Tensor, weight_M1: Tensor | float = 1.0) -> None:
        read_MF = read_MF.float()
        left_FM = (read_MF * weight_M1).T
        gram_FF, cross_FE = left_FM @ read_MF, left_FM @ wanted_ME.float()
        self.gram_FF = gram_FF if self.gram_FF is None else self.gram_FF.add_(gram_FF)
        self.cross_FE = cross_FE if self.cross_FE is None else self.cross_FE.add_(cross_FE)
        self.rows += len(read_MF)

    def solve(self) -> Tensor:
        """The map [E, F]."""
        assert self.gram_FF is not None and self.cross_FE is not None, "there is something to learn from"
        # Some of what is read is a hundred times as large as the rest: the ridge is a share of each number's own size.
        sizes_F = self.gram_FF.diagonal().sqrt().clamp_min(1e-6)
        scaled_FF = self.gram_FF / sizes_F / sizes_F[:, None]
        ridged_FF = scaled_FF + _RIDGE * torch.eye(len(scaled_FF)).to(scaled_FF)
        found_EF: Tensor = (torch.linalg.solve(ridged_FF, self.cross_FE / sizes_F[:, None]) / sizes_F[:, None]).T
        return found_EF

    def features(self, part: slice, count: int) -> Tensor:
        """Of some of what is read, the directions that say most about what is wanted, [count, part]."""
        assert self.gram_FF is not None
        map_EI = self.solve()[:, part]
        gram_II = self.gram_FF[part, part] / self.rows
        ridge = 1e-4 * gram_II.diagonal().mean()
        lower_II = torch.linalg.cholesky(gram_II + ridge * torch.eye(len(gram_II)).to(gram_II))
        axes_II = torch.linalg.svd(lower_II.T @ map_EI.T, full_matrices=False)[0][:, :count]
        found_CI: Tensor = torch.linalg.solve(lower_II.T, axes_II).T
        return found_CI
