"""How far the heads' probabilities can be believed: from log-probability to acceptance, by depth and by path.

A draft's chance depends on how its path began. Once a token on the way was not its node's best draft, heads that draft
all depths in one forward go on as if it had been, and are right less often than they say; heads that read the path
are wrong in another way, having met a less likely text. So paths that *left* the best one have curves of their own.

Fitted by `headstart.tuning.calibrate`.

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
"""Levels that heads draft at most."""
_LEAST = 1e-4
"""What drafts leave of a distribution, below which differences say nothing."""


_ROUNDED = 1e-4
"""Rounding error of knots and shares, which are float32 means over thousands of drafts."""


def _rises(numbers: Sequence[float]) -> bool:
    return all(map(isfinite, numbers)) and all(before <= after + _ROUNDED for before, after in pairwise(numbers))


def _are_shares(numbers: Sequence[float]) -> bool:
    return all(-_ROUNDED <= number <= 1 + _ROUNDED for number in numbers)


@dataclass(frozen=True)
class Calibration:
    """From the log-probability of a draft to how often such drafts are accepted, by depth; linear between the knots.

    Attributes:
        log_probs: knots of each depth, ascending.
        accepted: share accepted at each knot, never falling.
        reached: at each depth, how often one of the best drafts is right after a path that was right; with `sampled`
            the last of these is drawn.
        sampled: the same for a child that is drawn from what the drafts above its rank leave, read at the
            log-probability of the draft that has this rank; None takes such a child to be that draft. This is of a
            child that is drawn from everything. Its own `sampled`, where there is one, is of children that are drawn
            from what other drafts leave, and is read at the logarithm of how much they leave.
        off_best: the same after a path that has left the best one: it holds a token that is not its node's best draft.
            All that stands above is then for the other paths. None makes no difference between the two.
    """

    log_probs: tuple[tuple[float, ...], ...] = ()
    accepted: tuple[tuple[float, ...], ...] = ()
    reached: tuple[float, ...] = ()
    sampled: Calibration | None = None
    off_best: Calibration | None = None

    def knots(self, prefix: str = "") -> dict[str, list[list[float]]]:
        """As plain values for a JSON file, under names that begin with `prefix`."""
        curves = {"log_probs": self.log_probs, "accepted": self.accepted, "reached": (self.reached,)}
        values = {prefix + name: [list(part) for part in parts] for name, parts in curves.items()}
        for name, part in (("drawn_", self.sampled), ("left_", self.off_best)):
            values |= part.knots(prefix + name) if part else {}
        return values

    @classmethod
    def from_knots(cls, knots: Mapping[str, Sequence[Sequence[float]]], prefix: str = "") -> Calibration | None:
        """Rebuild a calibration from its `knots`; None if there are none under this prefix.

        Raises:
            ValueError: C reads the curves unchecked, and one of them is missing, unordered or out of range.
        """
        if f"{prefix}log_probs" not in knots:
            return None
        log_probs, accepted = (tuple(map(tuple, knots.get(prefix + name, ()))) for name in ("log_probs", "accepted"))
        reached = tuple(map(tuple, knots.get(f"{prefix}reached", [[]])))
        if not all(map(_rises, log_probs)):
            raise ValueError(f"{prefix}log_probs holds knots that are not finite and ascending")
        if list(map(len, accepted)) != list(map(len, log_probs)):
            raise ValueError(f"{prefix}accepted does not hold one share for each knot of {prefix}log_probs")
        if not all(_rises(curve) and _are_shares(curve) for curve in accepted):
            raise ValueError(f"{prefix}accepted holds shares that fall, or are not between 0 and 1")
        if len(reached) != 1 or not _are_shares(reached[0]):
            raise ValueError(f"{prefix}reached is not one list of shares between 0 and 1")
        sampled, off_best = (cls.from_knots(knots, prefix + name) for name in ("drawn_", "left_"))
        return cls(log_probs, accepted, reached[0], sampled, off_best)

    def curve(self, depth: int) -> Curve:
        """Knots and shares of a depth."""
        return self.log_probs[depth], self.accepted[depth]

    def after(self, off_best: bool) -> Calibration:
        """What holds after paths that have left the best one, or after those that have not."""
        return self.off_best or self if off_best else self

    def best_child(self, depth: int, off_best: float = 0.0) -> float:
        """How often a node at this depth (from 0, the root) has a child that is accepted, where its path has left the
        best one with the probability `off_best`; 1 where it is unknown."""
        reached = self.reached[depth] if depth < len(self.reached) else 1.0
        if self.off_best is None or not off_best:
            return reached
        return reached + off_best * (self.off_best.best_child(depth) - reached)

    def towards(self, other: Calibration, share: float) -> Calibration:
        """Between this calibration and another one: `share` of the other, of both what is known.

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
        """Probability of acceptance of drafts at a depth (from 0); the drafts' own where nothing was measured.

        >>> Calibration(((-2.0, 0.0),), ((0.0, 0.8),)).probs(0, np.array([-1.0, 0.0], dtype=np.float32)).tolist()
        [0.4, 0.8]
        """
        if depth >= len(self.log_probs) or not self.log_probs[depth]:
            return np.exp(log_probs.astype(np.float64))
        return np.interp(log_probs, *self._curves[depth])

    @cached_property
    def _curves(self) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Knots and shares of each depth, as numpy reads them without ado."""
        return [
            (np.array(knots), np.array(shares)) for knots, shares in zip(self.log_probs, self.accepted, strict=True)
        ]

    @cached_property
    def flat(self) -> tuple[array[float], array[float], array[float], array[int]]:
        """As C reads it: knots and shares, one depth after the other, `best_child` of each depth, and where the knots
        of each depth begin, with the end.

        >>> Calibration(((-2.0, 0.0), (-1.0,)), ((0.0, 0.8), (0.5,)), (0.7,)).flat[3].tolist()
        [0, 2, 3]
        """
        knots, shares = (array("d", chain.from_iterable(part)) for part in (self.log_probs, self.accepted))
        reached = array("d", map(self.best_child, range(DEEPEST)))
        return knots, shares, reached, array("q", accumulate(map(len, self.log_probs), initial=0))

    def drawn(self, depth: int, log_probs_XR: NDArray[np.float32]) -> NDArray[np.float64]:
        """Probability of acceptance of a child that is drawn in place of each draft of a node, the best draft first.

        >>> below = Calibration(((-2.0, 0.0),), ((0.0, 0.5),))
        >>> whole = Calibration(sampled=Calibration(((-2.0, 0.0),), ((0.0, 0.8),), sampled=below))
        >>> whole.drawn(0, np.log(np.array([np.exp(-1), 0.1], dtype=np.float32))).round(3).tolist()
        [0.4, 0.385]
        """
        if self.sampled is None:
            return self.probs(depth, log_probs_XR)
        probs_XR = self.sampled.probs(depth, log_probs_XR)
        if self.sampled.sampled is not None:
            probs_XR[..., 1:] = self.sampled.sampled.probs(depth, rest(log_probs_XR)[..., 1:])
        return probs_XR


def rest(log_probs_XR: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logarithm of what the drafts before each of a node's leave of its distribution, the best draft first.

    >>> np.exp(rest(np.log(np.array([0.5, 0.25, 0.125], dtype=np.float32)))).tolist()
    [1.0, 0.5, 0.25]
    """
    before_XR = np.cumsum(np.exp(log_probs_XR), axis=-1) - np.exp(log_probs_XR)
    left_XR: NDArray[np.float32] = np.log(np.maximum(1.0 - before_XR, _LEAST)).astype(np.float32)
    return left_XR


def between(depth: int, near: Calibration, far: Calibration, share: float) -> Curve:
    """The curve of a depth that lies between those of two calibrations: `share` of the other."""
    knots = np.array(sorted({*near.log_probs[depth], *far.log_probs[depth]}), dtype=np.float32)
    both = (1 - share) * near.probs(depth, knots) + share * far.probs(depth, knots)
    return tuple(knots.tolist()), tuple(both.tolist())
