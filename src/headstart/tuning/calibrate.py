"""Calibration of the heads' probabilities: acceptance curves fitted to known texts.

Shape suffixes: O origins, K steps, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.tree.calibration import Calibration, Curve, between, rest

_BINS = 40
"""Equally filled bins for the acceptance at each depth."""
_BEST = 3
"""Drafts of a node that count as its best: a tree usually verifies this many."""
_EPSILON = 1e-4
"""Minimum distance of a probability from 0 and 1 in a cross entropy."""
_BETTER = 0.998
"""Cross entropy relative to simpler curves below which others are better; noise explains a smaller gain."""
_PRIOR_ORIGINS = 100
"""Weight of the curves of all paths as a prior for the curves of some."""


def fit_calibration(
    ranks_OK: NDArray[np.int64],
    log_probs_OKR: NDArray[np.float32],
    likely_OKR: NDArray[np.float32] | None = None,
    sampled_OKR: NDArray[np.float32] | None = None,
) -> Calibration:
    """Fit isotonic regressions of acceptance on log-probability at each depth, over drafts after a drafted path.

    A path has left the best one if the true token of an earlier step was drafted, but not first. Such paths get their
    own curves if these predict acceptance better: the curves of each half of the origins are tested on the other half,
    and both must be better. Curves of few origins have the curves of all paths as a prior.

    `Drafts` describes the tables.
    """
    tables = Tables(ranks_OK, log_probs_OKR, likely_OKR, sampled_OKR)
    pairs = zip(tables.cross_validate(by_path=True), tables.cross_validate(by_path=False), strict=True)
    return tables.fit(by_path=all(split < _BETTER * joint for split, joint in pairs))


@dataclass(frozen=True)
class Tables:
    """Drafts to fit a calibration to, see `Drafts`."""

    ranks_OK: NDArray[np.int64]
    log_probs_OKR: NDArray[np.float32]
    likely_OKR: NDArray[np.float32] | None = None
    sampled_OKR: NDArray[np.float32] | None = None

    def cross_validate(self, by_path: bool) -> tuple[float, float]:
        """Compute the cross entropy of each half under the curves of the other half."""
        half = len(self.ranks_OK) // 2
        first, second = self.of(slice(half)), self.of(slice(half, None))
        return second.cross_entropy(first.fit(by_path)), first.cross_entropy(second.fit(by_path))

    def of(self, origins: slice) -> Tables:
        optional = (None if part is None else part[origins] for part in (self.likely_OKR, self.sampled_OKR))
        return Tables(self.ranks_OK[origins], self.log_probs_OKR[origins], *optional)

    @cached_property
    def paths(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Whether the path before each step was drafted, and whether it was the best one, each [O, K]."""
        before_OK, best_OK = (
            np.logical_and.accumulate(np.concatenate([np.ones_like(part[:, :1]), part[:, :-1]], axis=1), axis=1)
            for part in (self.ranks_OK < self.log_probs_OKR.shape[2], self.ranks_OK == 0)
        )
        return before_OK, best_OK

    def right(self, depth: int) -> NDArray[Any]:
        """Acceptance probability of each draft at a depth after the true text, [O, R]."""
        if self.likely_OKR is not None:
            return self.likely_OKR[:, depth]
        right_OR: NDArray[Any] = self.ranks_OK[:, depth, None] == np.arange(self.log_probs_OKR.shape[2])
        return right_OR

    def cross_entropy(self, calibration: Calibration) -> float:
        """Sum the cross entropy of acceptance after drafted paths, in nats."""
        before_OK, best_OK = self.paths
        total = 0.0
        for depth in range(before_OK.shape[1]):
            right_OR = self.right(depth)
            for has_left, counts_O in ((False, best_OK[:, depth]), (True, before_OK[:, depth] & ~best_OK[:, depth])):
                probs = calibration.after(has_left).probs(depth, self.log_probs_OKR[counts_O, depth])
                probs, right = np.clip(probs, _EPSILON, 1 - _EPSILON), right_OR[counts_O]
                total -= float((right * np.log(probs) + (1.0 - right) * np.log(1 - probs)).sum())
        return total

    def fit(self, by_path: bool) -> Calibration:
        """Fit the calibration, optionally with separate curves for paths that have left the best one."""
        before_OK, best_OK = self.paths
        overall, left_OK = self._fit(before_OK), before_OK & ~best_OK
        if not by_path or not left_OK.any():
            return overall
        on_best, off_best = (_with_prior(self._fit(part_OK), overall, part_OK) for part_OK in (best_OK, left_OK))
        return replace(on_best, off_best=off_best)

    def _fit(self, counts_OK: NDArray[np.bool_]) -> Calibration:
        """Fit to the origins that count at each depth."""
        any_child_accepted, curves, drawn, drawn_below = list[float](), list[Curve](), list[Curve](), list[Curve]()
        for depth, counts_O in enumerate(counts_OK.T):
            log_probs_OR = self.log_probs_OKR[counts_O, depth]
            right_OR = self.right(depth)[counts_O]
            curves.append(_isotonic(log_probs_OR.ravel(), right_OR.ravel()))
            best_OR = drawn_OR = right_OR[:, :_BEST]  # as if the most likely token were drawn
            if self.sampled_OKR is not None:
                drawn_OR = self.sampled_OKR[counts_O, depth]
                last = min(_BEST, drawn_OR.shape[1]) - 1
                best_OR = np.concatenate([right_OR[:, :last], drawn_OR[:, last, None]], axis=1)
            rest_OR = rest(log_probs_OR)[:, : drawn_OR.shape[1]]
            drawn.append(_isotonic(log_probs_OR[:, 0], drawn_OR[:, 0]))
            drawn_below.append(_isotonic(rest_OR[:, 1:].ravel(), drawn_OR[:, 1:].ravel()))
            any_child_accepted.append(float(best_OR.sum(1).mean()) if len(right_OR) else 0.0)
        sampled = replace(_of_curves(drawn), sampled=_of_curves(drawn_below))
        return replace(_of_curves(curves), any_child_accepted=tuple(any_child_accepted), sampled=sampled)


def _of_curves(curves: Sequence[Curve]) -> Calibration:
    return Calibration(tuple(knots for knots, _ in curves), tuple(rates for _, rates in curves))


def _with_prior(some: Calibration, prior: Calibration, counts_OK: NDArray[np.bool_]) -> Calibration:
    """Interpolate to the curves of some origins as if the prior came from `_PRIOR_ORIGINS` further origins."""
    weights = [count / (count + _PRIOR_ORIGINS) for count in counts_OK.sum(0).tolist()]
    curves = [
        between(depth, prior, some, weight) if weight else (prior.log_probs[depth], prior.accepted[depth])
        for depth, weight in enumerate(weights)
    ]
    pairs = zip(some.any_child_accepted, prior.any_child_accepted, weights, strict=False)
    any_child_accepted = tuple(weight * of_some + (1 - weight) * of_prior for of_some, of_prior, weight in pairs)
    sampled = _with_prior(some.sampled, prior.sampled, counts_OK) if some.sampled and prior.sampled else None
    return replace(_of_curves(curves), any_child_accepted=any_child_accepted, sampled=sampled)


def _isotonic(values: NDArray[np.float32], right: NDArray[np.generic]) -> Curve:
    """Compute means of equally filled bins, pooled until they never fall (pool adjacent violators).

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
