"""How far the heads' probabilities can be believed, and what dynamic trees would have come to on known texts.

Shape suffixes: O origins, K steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from headstart.calibration import Calibration
from headstart.decode.budget import Costs, node_threshold

_BINS = 40
"""Bins of equally many drafts that acceptance is counted in, at each depth."""
_MIN_ACCEPT_PROB = 0.01
"""Paths less likely than this are left out of the replay, whatever nodes cost."""
_TRIED = 3
"""Drafts of a node that count as its best: what a tree usually verifies of them."""


def fit_calibration(
    ranks_OK: NDArray[np.int64],
    log_probs_OKR: NDArray[np.float32],
    likely_OKR: NDArray[np.float32] | None = None,
    sampled_OKR: NDArray[np.float32] | None = None,
) -> Calibration:
    """Isotonic regression of acceptance on log-probability at each depth, over drafts whose path so far was drafted.

    Args:
        ranks_OK: rank of the true token among each step's drafts.
        log_probs_OKR: of the best drafts of each step.
        likely_OKR: how likely each of them is to be accepted when it follows the true text; None: it is the true token
            or not, as in greedy decoding.
        sampled_OKR: how likely a child sampled instead of each of the first drafts is to be accepted; None where none
            is. R may be smaller here.
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
        if sampled_OKR is not None:
            sampled_OR = sampled_OKR[alive_O, depth]
            curves.append(_isotonic(log_probs_OKR[alive_O, depth, : sampled_OR.shape[1]].ravel(), sampled_OR.ravel()))
            last = min(_TRIED, sampled_OR.shape[1]) - 1
            best_OR = np.concatenate([right_OR[:, :last], sampled_OR[:, last, None]], axis=1)
        reached.append(float(best_OR.sum(1).mean()) if len(right_OR) else 0.0)
        alive_O &= ranks_OK[:, depth] < ranks
    sampled = (
        Calibration(tuple(knots for knots, _ in curves), tuple(shares for _, shares in curves)) if curves else None
    )
    return Calibration(tuple(log_probs), tuple(accepted), tuple(reached), sampled)


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
    probs = np.stack(
        [calibration.probs(depth, log_probs_OKR[:, depth]) for depth in range(ranks_OK.shape[1])], axis=1
    ).tolist()
    truth = ranks_OK.tolist()
    costs_ms = [costs.verify(nodes) for nodes in range(max_nodes + 1)]
    rate, tokens_per_round, round_ms = 1 / costs_ms[1], 1.0, costs_ms[1]
    for _ in range(3):  # the rate that decoding reaches decides what a node must bring; it settles at once
        position = rounds = emitted = 0
        spent = 0.0
        while position < len(truth):
            tree, nodes, levels = _best_tree(probs[position], rate, calibration, costs, costs_ms)
            depth = 0
            while depth < len(truth[position]) and tuple(truth[position][: depth + 1]) in tree:
                depth += 1
            rounds, emitted, position = rounds + 1, emitted + depth + 1, position + depth + 1
            spent += costs_ms[nodes] + costs.draft(levels)
        tokens_per_round, round_ms = emitted / rounds, spent / rounds
        rate = max(1 / costs_ms[1], tokens_per_round / round_ms)
    return tokens_per_round, round_ms


def _best_tree(
    probs_KR: Sequence[Sequence[float]],
    rate: float,
    calibration: Calibration,
    costs: Costs,
    costs_ms: Sequence[float],
) -> tuple[set[tuple[int, ...]], int, int]:
    """The rank paths that pay at this rate, how many nodes that is with the root, and how many levels were drafted.

    Grown as `heads.growing.grow` grows, and pruned as `decode.budget` prunes.
    """
    threshold = node_threshold(costs, rate)
    found: list[tuple[float, tuple[int, ...]]] = []
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    drafted = 0
    for depth, probs_R in enumerate(probs_KR):
        best_child = calibration.best_child(depth)
        net = sum(max(0.0, accept_prob * best_child - threshold) for accept_prob, _ in level)
        if depth and (not level or net < rate * costs.level_ms):
            break
        drafted += 1
        level = [
            (accept_prob * prob, (*path, rank))
            for accept_prob, path in level
            for rank, prob in enumerate(probs_R)
            if accept_prob * prob >= max(threshold, _MIN_ACCEPT_PROB)
        ]
        found += level
    found = sorted(found, key=lambda one: (-one[0], one[1]))[: len(costs_ms) - 2]
    expected = accumulate([1.0, *(accept_prob for accept_prob, _ in found)])
    nets = [tokens - rate * costs_ms[nodes] for nodes, tokens in enumerate(expected, start=1)]
    best = max(range(len(nets)), key=nets.__getitem__)
    return {path for _, path in found[:best]}, best + 1, drafted
