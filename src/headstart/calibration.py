"""How far the heads' probabilities can be believed: from log-probability to acceptance, by depth.

Fitted by `headstart.tuning.calibrate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Calibration:
    """From the log-probability of a draft to how often such drafts are accepted, by depth; linear between the knots.

    Attributes:
        log_probs: knots of each depth, ascending.
        accepted: share accepted at each knot, never falling.
        reached: at each depth, how often one of the best drafts is right after a path that was right; with `sampled`
            the last of these is drawn.
        sampled: the same for a child that is drawn from what the drafts above its rank leave, read at the
            log-probability of the draft that has this rank; None takes such a child to be that draft. Exact for one
            sampled child; of several under one node, those after the first are accepted more seldom.
    """

    log_probs: tuple[tuple[float, ...], ...] = ()
    accepted: tuple[tuple[float, ...], ...] = ()
    reached: tuple[float, ...] = ()
    sampled: Calibration | None = None

    def knots(self, prefix: str = "") -> dict[str, list[list[float]]]:
        """As plain values for a JSON file, under names that begin with `prefix`."""
        own = {"log_probs": self.log_probs, "accepted": self.accepted, "reached": (self.reached,)}
        values = {prefix + name: [list(part) for part in parts] for name, parts in own.items()}
        return values | self.sampled.knots(prefix + "drawn_") if self.sampled else values

    @classmethod
    def from_knots(cls, knots: Mapping[str, Sequence[Sequence[float]]], prefix: str = "") -> Calibration | None:
        """The inverse of `knots`; None when there is none of this name."""
        if f"{prefix}log_probs" not in knots:
            return None
        log_probs, accepted = (tuple(map(tuple, knots[prefix + name])) for name in ("log_probs", "accepted"))
        (reached,) = knots.get(f"{prefix}reached", [[]])
        return cls(log_probs, accepted, tuple(reached), cls.from_knots(knots, f"{prefix}drawn_"))

    def best_child(self, depth: int) -> float:
        """How often a node at this depth (from 0, the root) has a child that is accepted; 1 where it is unknown."""
        return self.reached[depth] if depth < len(self.reached) else 1.0

    def towards(self, other: Calibration, share: float) -> Calibration:
        """Between this calibration and another one: `share` of the other, of both what is known.

        >>> one = Calibration(((-2.0, 0.0),), ((0.0, 0.8),), (1.0,))
        >>> one.towards(Calibration(((-4.0, 0.0),), ((0.0, 0.5),), (0.5,)), 0.5)
        Calibration(log_probs=((-4.0, -2.0, 0.0),), accepted=((0.0, 0.125, 0.65),), reached=(0.75,), sampled=None)
        """
        log_probs: list[tuple[float, ...]] = []
        accepted: list[tuple[float, ...]] = []
        for first, last in zip(self.log_probs, other.log_probs, strict=False):
            knots = np.array(sorted({*first, *last}), dtype=np.float32)
            depth = len(log_probs)
            log_probs.append(tuple(knots.tolist()))
            both = (1 - share) * self.probs(depth, knots) + share * other.probs(depth, knots)
            accepted.append(tuple(both.tolist()))
        reached = ((1 - share) * a + share * b for a, b in zip(self.reached, other.reached, strict=False))
        sampled = (
            (self.sampled or self).towards(other.sampled or other, share) if self.sampled or other.sampled else None
        )
        return Calibration(tuple(log_probs), tuple(accepted), tuple(reached), sampled)

    def probs(self, depth: int, log_probs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Probability of acceptance of drafts at a depth (from 0); the drafts' own where nothing was measured.

        >>> Calibration(((-2.0, 0.0),), ((0.0, 0.8),)).probs(0, np.array([-1.0, 0.0], dtype=np.float32)).tolist()
        [0.4, 0.8]
        """
        if depth >= len(self.log_probs) or not self.log_probs[depth]:
            return np.exp(log_probs.astype(np.float64))
        return np.interp(log_probs, self.log_probs[depth], self.accepted[depth])
