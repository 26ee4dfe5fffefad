"""How far the heads' probabilities can be believed, and what dynamic trees would have come to on known texts.

Shape suffixes: O origins, K steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from headstart.decode.budget import Costs, node_worth

_BINS = 40
"""Bins of equally many drafts that acceptance is counted in, at each depth."""
_LEAST_GAIN = 0.01
"""Paths less likely than this are left out of the replay, whatever nodes cost."""
_TRIED = 3
"""Drafts of a node that count as its best: what a tree usually verifies of them."""


@dataclass(frozen=True)
class Calibration:
    """From the log-probability of a draft to how often such drafts are accepted, by depth; linear between the knots.

    Attributes:
        log_probs: knots of each depth, ascending.
        accepted: share accepted at each knot, never falling.
        reached: at each depth, how often one of the best drafts is right behind a path that was right; with `drawn`
            the last of these is drawn.
        drawn: the same for a child that is drawn from what the drafts above its rank leave, read at the log-probability
            of the draft that has this rank; None takes such a child to be that draft. Exact for one drawn child; of
            several under one node, those after the first are accepted more seldom.
    """

    log_probs: tuple[tuple[float, ...], ...] = ()
    accepted: tuple[tuple[float, ...], ...] = ()
    reached: tuple[float, ...] = ()
    drawn: Calibration | None = None

    def knots(self, prefix: str = "") -> dict[str, list[list[float]]]:
        """As plain values for a JSON file, under names that begin with `prefix`."""
        own = {"log_probs": self.log_probs, "accepted": self.accepted, "reached": (self.reached,)}
        values = {prefix + name: [list(part) for part in parts] for name, parts in own.items()}
        return values | self.drawn.knots(prefix + "drawn_") if self.drawn else values

    @classmethod
    def from_knots(cls, knots: Mapping[str, Sequence[Sequence[float]]], prefix: str = "") -> Calibration | None:
        """The inverse of `knots`; None when there is none of this name."""
        if f"{prefix}log_probs" not in knots:
            return None
        log_probs, accepted = (tuple(map(tuple, knots[prefix + name])) for name in ("log_probs", "accepted"))
        (reached,) = knots.get(f"{prefix}reached", [[]])
        return cls(log_probs, accepted, tuple(reached), cls.from_knots(knots, f"{prefix}drawn_"))

    def reach(self, depth: int) -> float:
        """How often a node at this depth (from 0, the root) has a child that is accepted; 1 where it is unknown."""
        return self.reached[depth] if depth < len(self.reached) else 1.0

    def towards(self, other: Calibration, share: float) -> Calibration:
        """Between this calibration and another one: `share` of the other, of both what is known.

        >>> one = Calibration(((-2.0, 0.0),), ((0.0, 0.8),), (1.0,))
        >>> one.towards(Calibration(((-4.0, 0.0),), ((0.0, 0.5),), (0.5,)), 0.5)
        Calibration(log_probs=((-4.0, -2.0, 0.0),), accepted=((0.0, 0.125, 0.65),), reached=(0.75,), drawn=None)
        """
        log_probs: list[tuple[float, ...]] = []
        accepted: list[tuple[float, ...]] = []
        for first, last in zip(self.log_probs, other.log_probs, strict=False):
            knots = np.array(sorted({*first, *last}), dtype=np.float32)
            depth = len(log_probs)
            log_probs.append(tuple(knots.tolist()))
            both = (1 - share) * self.chances(depth, knots) + share * other.chances(depth, knots)
            accepted.append(tuple(both.tolist()))
        reached = ((1 - share) * a + share * b for a, b in zip(self.reached, other.reached, strict=False))
        drawn = (self.drawn or self).towards(other.drawn or other, share) if self.drawn or other.drawn else None
        return Calibration(tuple(log_probs), tuple(accepted), tuple(reached), drawn)

    def chances(self, depth: int, log_probs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Probability of acceptance of drafts at a depth (from 0); the drafts' own where nothing was measured.

        >>> Calibration(((-2.0, 0.0),), ((0.0, 0.8),)).chances(0, np.array([-1.0, 0.0], dtype=np.float32)).tolist()
        [0.4, 0.8]
        """
        if depth >= len(self.log_probs) or not self.log_probs[depth]:
            return np.exp(log_probs.astype(np.float64))
        return np.interp(log_probs, self.log_probs[depth], self.accepted[depth])


def fit_calibration(
    ranks_OK: NDArray[np.int64],
    log_probs_OKR: NDArray[np.float32],
    likely_OKR: NDArray[np.float32] | None = None,
    drawn_OKR: NDArray[np.float32] | None = None,
) -> Calibration:
    """Isotonic regression of acceptance on log-probability at each depth, over drafts whose path so far was drafted.

    Args:
        ranks_OK: rank of the true token among each step's drafts.
        log_probs_OKR: of the best drafts of each step.
        likely_OKR: how likely each of them is to be accepted when it follows the true text; None: it is the true token
            or not, as in greedy decoding.
        drawn_OKR: how likely a child drawn in place of each of the first drafts is to be accepted; None where nothing
            is drawn. R may be smaller here.
    """
    ranks = log_probs_OKR.shape[2]
    alive_O = np.ones(len(ranks_OK), dtype=bool)
    log_probs, accepted, reached = [], [], []
    curves: list[tuple[tuple[float, ...], tuple[float, ...]]] = []
    for depth in range(ranks_OK.shape[1]):
        right_OR = ranks_OK[:, depth, None] == np.arange(ranks) if likely_OKR is None else likely_OKR[:, depth]
        right_OR = right_OR[alive_O]
        knots, shares = _isotonic(log_probs_OKR[alive_O, depth].ravel(), right_OR.ravel())
        log_probs.append(knots)
        accepted.append(shares)
        best_OR = right_OR[:, :_TRIED]
        if drawn_OKR is not None:
            drawn_OR = drawn_OKR[alive_O, depth]
            curves.append(_isotonic(log_probs_OKR[alive_O, depth, : drawn_OR.shape[1]].ravel(), drawn_OR.ravel()))
            last = min(_TRIED, drawn_OR.shape[1]) - 1
            best_OR = np.concatenate([right_OR[:, :last], drawn_OR[:, last, None]], axis=1)
        reached.append(float(best_OR.sum(1).mean()) if len(right_OR) else 0.0)
        alive_O &= ranks_OK[:, depth] < ranks
    drawn = Calibration(tuple(knots for knots, _ in curves), tuple(shares for _, shares in curves)) if curves else None
    return Calibration(tuple(log_probs), tuple(accepted), tuple(reached), drawn)


def _isotonic(values: NDArray[np.float32], right: NDArray[np.generic]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means of equally filled bins, pooled until they never fall (pool adjacent violators).

    >>> _isotonic(np.array([0.0, 1.0, 2.0, 3.0], dtype=np.float32), np.array([False, True, False, True]))
    ((0.0, 1.5, 3.0), (0.0, 0.5, 1.0))
    """
    order = np.argsort(values, kind="stable")
    pools: list[tuple[float, float, int]] = []  # sum of values, number right, size
    for part in np.array_split(order, min(_BINS, len(order))) if len(order) else []:
        pools.append((float(values[part].sum()), float(right[part].sum()), len(part)))
        while len(pools) > 1 and pools[-2][1] * pools[-1][2] > pools[-1][1] * pools[-2][2]:
            (total, hits, size), (more_total, more_hits, more) = pools[-2:]
            pools[-2:] = [(total + more_total, hits + more_hits, size + more)]
    return tuple(total / size for total, _, size in pools), tuple(hits / size for _, hits, size in pools)


def replay_dynamic(
    ranks_OK: NDArray[np.int64],
    log_probs_OKR: NDArray[np.float32],
    calibration: Calibration,
    costs: Costs,
    max_nodes: int = 32,
) -> tuple[float, float]:
    """(τ, milliseconds of a round) that dynamic trees would have reached on these origins, decoded one after the other.

    Drafts of a depth are taken to be the same whatever the path before them; for families whose drafts follow the
    path this looks at the true path only.
    """
    chances = np.stack(
        [calibration.chances(depth, log_probs_OKR[:, depth]) for depth in range(ranks_OK.shape[1])], axis=1
    ).tolist()
    truth = ranks_OK.tolist()
    costs_ms = [costs.verify(nodes) for nodes in range(max_nodes + 1)]
    rate, tokens_per_round, round_ms = 1 / costs_ms[1], 1.0, costs_ms[1]
    for _ in range(3):  # the rate that decoding reaches decides what a node must bring; it settles at once
        position = rounds = emitted = 0
        spent = 0.0
        while position < len(truth):
            tree, nodes, levels = _best_tree(chances[position], rate, calibration, costs, costs_ms)
            depth = 0
            while depth < len(truth[position]) and tuple(truth[position][: depth + 1]) in tree:
                depth += 1
            rounds, emitted, position = rounds + 1, emitted + depth + 1, position + depth + 1
            spent += costs_ms[nodes] + costs.draft(levels)
        tokens_per_round, round_ms = emitted / rounds, spent / rounds
        rate = max(1 / costs_ms[1], tokens_per_round / round_ms)
    return tokens_per_round, round_ms


def _best_tree(
    chances_KR: Sequence[Sequence[float]],
    rate: float,
    calibration: Calibration,
    costs: Costs,
    costs_ms: Sequence[float],
) -> tuple[set[tuple[int, ...]], int, int]:
    """The rank paths that pay at this rate, how many nodes that is with the root, and how many levels were drafted.

    Grown as `decode.grow` grows, and pruned as `decode.budget` prunes.
    """
    worth = node_worth(costs, rate)
    found: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    drafted = 0
    for depth, chances_R in enumerate(chances_KR):
        reach = calibration.reach(depth)
        net = sum(max(0.0, gain * reach - worth) for gain, _ in level)
        if depth and (not level or net < rate * costs.level_ms):
            break
        drafted += 1
        level = [
            (gain * chance, (*path, rank))
            for gain, path in level
            for rank, chance in enumerate(chances_R)
            if gain * chance >= max(worth, _LEAST_GAIN)
        ]
        found += level
    found = sorted(found, key=lambda one: (-one[0], one[1]))[: len(costs_ms) - 2]
    expected = accumulate([1.0, *(gain for gain, _ in found)])
    nets = [gain - rate * costs_ms[nodes] for nodes, gain in enumerate(expected, start=1)]
    best = max(range(len(nets)), key=nets.__getitem__)
    return {path for _, path in found[:best]}, best + 1, drafted
