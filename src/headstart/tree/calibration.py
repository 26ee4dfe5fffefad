"""Calibration of the heads' probabilities: from log-probability to acceptance rate, by depth and by path.

Acceptance depends on the path. After a token that was not its node's best draft, heads that draft all depths in one
forward are overconfident, since they assume the best one; heads that read the path see a less likely text. So paths
that *left* the best one have their own curves. `headstart.tuning.calibrate` fits them.

Shape suffixes: X nodes, in any dimensions, R ranks.
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
        reached: at each depth, how often one of the best drafts is accepted after an accepted path; with `sampled` the
            last one is sampled.
        sampled: calibration of a child sampled from the full distribution, evaluated at the log-probability of the
            draft that it replaces; None treats it as that draft. Its own `sampled` is for children sampled from the
            remainder of the distribution, evaluated at the log of that rest.
        off_best: calibration after paths that left the best one; the other fields then hold on the best path only. None
            makes no difference between the two.
    """

    log_probs: tuple[tuple[float, ...], ...] = ()
    accepted: tuple[tuple[float, ...], ...] = ()
    reached: tuple[float, ...] = ()
    sampled: Calibration | None = None
    off_best: Calibration | None = None

    def knots(self, prefix: str = "") -> dict[str, list[list[float]]]:
        """Convert to JSON values by name, with the prefix `drawn_` for `sampled` and `left_` for `off_best`."""
        curves = {"log_probs": self.log_probs, "accepted": self.accepted, "reached": (self.reached,)}
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

    def after(self, off_best: bool) -> Calibration:
        """Return the calibration after paths that left the best one, or stayed on it."""
        return self.off_best or self if off_best else self

    def best_child(self, depth: int, off_best: float = 0.0) -> float:
        """Return the probability that a node at this depth (from 0, the root) has an accepted child; 1 if unknown.
        `off_best` is the probability that its path has left the best one."""
        reached = self.reached[depth] if depth < len(self.reached) else 1.0
        if self.off_best is None or not off_best:
            return reached
        return reached + off_best * (self.off_best.best_child(depth) - reached)

    def towards(self, other: Calibration, share: float) -> Calibration:
        """Interpolate to another calibration, with weight `share` for the other, where both have data.

        >>> near = Calibration(((-2.0, 0.0),), ((0.0, 0.8),), (1.0,))
        >>> near.towards(Calibration(((-4.0, 0.0),), ((0.0, 0.5),), (0.5,)), 0.5).accepted
        ((0.0, 0.125, 0.65),)
        """
        curves = [between(depth, self, other, share) for depth in range(min(len(self.log_probs), len(other.log_probs)))]
        reached = tuple((1 - share) * a + share * b for a, b in zip(self.reached, other.reached, strict=False))
        sampled = off_best = None
        if self.sampled or other.sampled:
            near, far = (part.sampled or replace(part, off_best=None) for part in (self, other))
            sampled = near.towards(far, share)
        if self.off_best or other.off_best:
            off_best = (self.off_best or self).towards(other.off_best or other, share)
        log_probs, accepted = (tuple(part[index] for part in curves) for index in (0, 1))
        return Calibration(log_probs, accepted, reached, sampled, off_best)

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
        """Knots and shares of each depth as arrays."""
        return [
            (np.array(knots), np.array(shares)) for knots, shares in zip(self.log_probs, self.accepted, strict=True)
        ]

    @cached_property
    def flat(self) -> tuple[array[float], array[float], array[float], array[int]]:
        """Convert for C: knots and rates, concatenated over depths, `best_child` of each depth, and knot offsets.

        >>> Calibration(((-2.0, 0.0), (-1.0,)), ((0.0, 0.8), (0.5,)), (0.7,)).flat[3].tolist()
        [0, 2, 3]
        """
        knots, shares = (array("d", chain.from_iterable(part)) for part in (self.log_probs, self.accepted))
        reached = array("d", map(self.best_child, range(DEEPEST)))
        return knots, shares, reached, array("q", accumulate(map(len, self.log_probs), initial=0))

    def sampled_probs(self, depth: int, log_probs_XR: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the acceptance probability of a child sampled in place of each draft of a node, the best draft first.

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
    """Return the log of the probability mass left by the drafts before each one of a node, the best draft first.

    >>> np.exp(rest(np.log(np.array([0.5, 0.25, 0.125], dtype=np.float32)))).tolist()
    [1.0, 0.5, 0.25]
    """
    before_XR = np.cumsum(np.exp(log_probs_XR), axis=-1) - np.exp(log_probs_XR)
    left_XR: NDArray[np.float32] = np.log(np.maximum(1.0 - before_XR, _LEAST)).astype(np.float32)
    return left_XR


def between(depth: int, near: Calibration, far: Calibration, share: float) -> Curve:
    """Interpolate the curves of a depth, with weight `share` for the other."""
    knots = np.array(sorted({*near.log_probs[depth], *far.log_probs[depth]}), dtype=np.float32)
    both = (1 - share) * near.probs(depth, knots) + share * far.probs(depth, knots)
    return tuple(knots.tolist()), tuple(both.tolist())
