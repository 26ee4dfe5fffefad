"""Calibration of the heads' probabilities: from log-probability to acceptance rate, by depth and by path.

Acceptance depends on the path. A path *leaves* the best one at the first token that is not its parent's best draft.
After that, heads that draft all depths in one forward are overconfident, because they assume the best path, and heads
that read the path continue a less likely text. Such paths have their own curves. `headstart.tuning.calibrate` fits all
curves.

Shape suffixes: X nodes (any dimensions), R ranks.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import isfinite

import numpy as np
from numpy.typing import NDArray

Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Knots and values, linear in between."""
DEEPEST = 16
"""Maximum levels that heads draft."""
_LEAST = 1e-4
"""Floor of the probability mass left by drafts."""
_TOLERANCE = 1e-4
"""Rounding error of knots and rates, which are float32 means over thousands of drafts."""


def _is_ascending(values: Sequence[float]) -> bool:
    return all(map(isfinite, values)) and all(before <= after + _TOLERANCE for before, after in pairwise(values))


def _are_rates(values: Sequence[float]) -> bool:
    return all(-_TOLERANCE <= value <= 1 + _TOLERANCE for value in values)


@dataclass(frozen=True)
class Calibration:
    """Acceptance rate by log-probability of a draft, per depth; linear between the knots.

    Attributes:
        log_probs: knots of each depth, ascending.
        accepted: acceptance rate at each knot, ascending.
        any_child_accepted: per depth, P(some child is accepted | its parent was accepted), for the few best children
            that a tree usually verifies.
        sampled: curves for a sampled child without siblings (q is the complete distribution), by the log-probability of
            the best draft. Its own `sampled` is reused for a child sampled after deterministic siblings, by the log of
            the mass that these leave. If None, a sampled child is rated like the draft that it replaces.
        off_best: curves after paths that left the best one; the other fields then hold on the best path only. None uses
            the same curves for all paths.
    """

    log_probs: tuple[tuple[float, ...], ...] = ()
    accepted: tuple[tuple[float, ...], ...] = ()
    any_child_accepted: tuple[float, ...] = ()
    sampled: Calibration | None = None
    off_best: Calibration | None = None

    def knots(self, prefix: str = "") -> dict[str, list[list[float]]]:
        """Convert to JSON values by name, with the prefix `drawn_` for `sampled` and `left_` for `off_best`."""
        curves = {"log_probs": self.log_probs, "accepted": self.accepted, "reached": (self.any_child_accepted,)}
        values = {prefix + name: [list(part) for part in parts] for name, parts in curves.items()}
        for name, part in (("drawn_", self.sampled), ("left_", self.off_best)):
            values |= part.knots(prefix + name) if part else {}
        return values

    @classmethod
    def from_knots(cls, knots: Mapping[str, Sequence[Sequence[float]]], prefix: str = "") -> Calibration | None:
        """Rebuild a calibration from its `knots`; None if there are none with this prefix.

        Raises:
            ValueError: a curve is missing, unordered or out of range. C code reads the curves unchecked.
        """
        if f"{prefix}log_probs" not in knots:
            return None
        log_probs, accepted = (tuple(map(tuple, knots.get(prefix + name, ()))) for name in ("log_probs", "accepted"))
        reached = tuple(map(tuple, knots.get(f"{prefix}reached", [[]])))
        if not all(map(_is_ascending, log_probs)):
            raise ValueError(f"{prefix}log_probs holds knots that are not finite and ascending")
        if list(map(len, accepted)) != list(map(len, log_probs)):
            raise ValueError(f"{prefix}accepted does not hold one rate for each knot of {prefix}log_probs")
        if not all(_is_ascending(curve) and _are_rates(curve) for curve in accepted):
            raise ValueError(f"{prefix}accepted holds rates that fall, or are not between 0 and 1")
        if len(reached) != 1 or not _are_rates(reached[0]):
            raise ValueError(f"{prefix}reached is not one list of rates between 0 and 1")
        sampled, off_best = (cls.from_knots(knots, prefix + name) for name in ("drawn_", "left_"))
        return cls(log_probs, accepted, reached[0], sampled, off_best)

    def after(self, has_left: bool) -> Calibration:
        """Return the calibration after paths that left the best one, or stayed on it."""
        return self.off_best or self if has_left else self

    def child_acceptance(self, depth: int, off_best_prob: float = 0.0) -> float:
        """Return P(a node at this depth has an accepted child | it was accepted), 1 if unknown. The root has depth 0;
        `off_best_prob` is the probability that the node's path has left the best one."""
        on_best = self.any_child_accepted[depth] if depth < len(self.any_child_accepted) else 1.0
        if self.off_best is None or not off_best_prob:
            return on_best
        return on_best + off_best_prob * (self.off_best.child_acceptance(depth) - on_best)

    def towards(self, other: Calibration, weight: float) -> Calibration:
        """Interpolate to another calibration where both have data; `weight` is the other's.

        >>> near = Calibration(((-2.0, 0.0),), ((0.0, 0.8),), (1.0,))
        >>> near.towards(Calibration(((-4.0, 0.0),), ((0.0, 0.5),), (0.5,)), 0.5).accepted
        ((0.0, 0.125, 0.65),)
        """
        curves = [
            between(depth, self, other, weight) for depth in range(min(len(self.log_probs), len(other.log_probs)))
        ]
        pairs = zip(self.any_child_accepted, other.any_child_accepted, strict=False)
        any_child_accepted = tuple((1 - weight) * a + weight * b for a, b in pairs)
        sampled = off_best = None
        if self.sampled or other.sampled:
            near, far = (part.sampled or replace(part, off_best=None) for part in (self, other))
            sampled = near.towards(far, weight)
        if self.off_best or other.off_best:
            off_best = (self.off_best or self).towards(other.off_best or other, weight)
        log_probs, accepted = (tuple(part[index] for part in curves) for index in (0, 1))
        return Calibration(log_probs, accepted, any_child_accepted, sampled, off_best)

    def probs(self, depth: int, log_probs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return acceptance probabilities of drafts at a depth (from 0); without data the drafts' own probabilities.

        >>> Calibration(((-2.0, 0.0),), ((0.0, 0.8),)).probs(0, np.array([-1.0, 0.0], dtype=np.float32)).tolist()
        [0.4, 0.8]
        """
        if depth >= len(self.log_probs) or not self.log_probs[depth]:
            return np.exp(log_probs.astype(np.float64))
        return np.interp(log_probs, *self._curves[depth])

    @cached_property
    def _curves(self) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Knots and rates of each depth as arrays."""
        return [(np.array(knots), np.array(rates)) for knots, rates in zip(self.log_probs, self.accepted, strict=True)]

    @cached_property
    def flat(self) -> tuple[array[float], array[float], array[float], array[int]]:
        """Convert for C: knots and rates, concatenated over depths, `child_acceptance` of each depth, and knot offsets.

        >>> Calibration(((-2.0, 0.0), (-1.0,)), ((0.0, 0.8), (0.5,)), (0.7,)).flat[3].tolist()
        [0, 2, 3]
        """
        knots, rates = (array("d", chain.from_iterable(part)) for part in (self.log_probs, self.accepted))
        child_acceptance = array("d", map(self.child_acceptance, range(DEEPEST)))
        return knots, rates, child_acceptance, array("q", accumulate(map(len, self.log_probs), initial=0))

    def sampled_probs(self, depth: int, log_probs_XR: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return, by rank, the acceptance probability of a child that is sampled instead of this draft.

        >>> below = Calibration(((-2.0, 0.0),), ((0.0, 0.5),))
        >>> whole = Calibration(sampled=Calibration(((-2.0, 0.0),), ((0.0, 0.8),), sampled=below))
        >>> whole.sampled_probs(0, np.log(np.array([np.exp(-1), 0.1], dtype=np.float32))).round(3).tolist()
        [0.4, 0.385]
        """
        if self.sampled is None:
            return self.probs(depth, log_probs_XR)
        probs_XR = self.sampled.probs(depth, log_probs_XR)
        if self.sampled.sampled is not None:
            probs_XR[..., 1:] = self.sampled.sampled.probs(depth, rest(log_probs_XR)[..., 1:])
        return probs_XR


def rest(log_probs_XR: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for each draft of a node (best first), the log of the probability mass that the drafts before it leave.

    >>> np.exp(rest(np.log(np.array([0.5, 0.25, 0.125], dtype=np.float32)))).tolist()
    [1.0, 0.5, 0.25]
    """
    before_XR = np.cumsum(np.exp(log_probs_XR), axis=-1) - np.exp(log_probs_XR)
    left_XR: NDArray[np.float32] = np.log(np.maximum(1.0 - before_XR, _LEAST)).astype(np.float32)
    return left_XR


def between(depth: int, near: Calibration, far: Calibration, weight: float) -> Curve:
    """Interpolate the curves of a depth; `weight` is that of `far`."""
    knots = np.array(sorted({*near.log_probs[depth], *far.log_probs[depth]}), dtype=np.float32)
    both = (1 - weight) * near.probs(depth, knots) + weight * far.probs(depth, knots)
    return tuple(knots.tolist()), tuple(both.tolist())
