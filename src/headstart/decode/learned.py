"""What rounds really take, beside what was measured, and how drafting has fared so far.

A neighbour on the machine slows everything alike, and says nothing about whether drafting pays: only ratios count. So a
drafted round is compared with the plain rounds just before it, each as a multiple of what the costs say, and only such
pairs correct the costs. Where drafting pays, plain rounds now and then start new pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

STAKE = 2.0
"""Tokens that drafting may lose before it has won any."""
SHARE = 1 / 50
"""Of all rounds, what finding out may cost: lost tries while decoding is plain, plain rounds while it drafts."""
LEAST_PAIRS = 2
"""Pairs that correct a cost, and plain rounds that others are compared with, at least: one alone may be disturbed."""
_MOST_UNLIKE = 32
"""Drafted rounds that were not like others before costs that are still unknown are taken to be as measured."""
_NEAR = 4
"""Drafted rounds that are compared with the plain ones before them: later the machine may be busier, or less busy."""


@dataclass
class RoundTimes:
    """What rounds of batches of a like number of rows took.

    Attributes:
        ratios: how much slower a kind of work is, relative to plain rounds, than the costs say: one ratio for each of
            the newest pairs. Kinds are forwards over trees, by `size_of` the nodes of a row, and under 0 drafts that
            had no more to read than the round before. Replaced, not changed: threads read while another writes.
        plain: newest plain rounds in a row, as multiples of what the costs say.
        since_plain: drafted rounds since then.
        wider: whether one of them verified a tree of a size that is not known yet.
        unlike: drafted rounds, in all, that were not what such rounds take.
    """

    ratios: dict[int, tuple[float, ...]] = field(default_factory=dict)
    plain: tuple[float, ...] = ()
    since_plain: int = 0
    wider: bool = False
    unlike: int = 0

    def note(self, nodes: int, verify_ratio: float, draft_ratio: float | None) -> None:
        """Learn from a round: milliseconds of its forward, and of its draft, as multiples of what the costs say. The
        latter is None when nothing was drafted, or the draft had more to read than usual."""
        if nodes == 1 and draft_ratio is None:
            self.plain = (*(self.plain if not self.since_plain else ()), verify_ratio)[-LEAST_PAIRS:]
            self.since_plain, self.wider = 0, False
            return
        self.since_plain += 1
        self.wider = self.wider or size_of(nodes) > self._largest
        if not self.plain or self.since_plain > _NEAR:
            return
        for kind, ratio in ((size_of(nodes), verify_ratio if nodes > 1 else None), (0, draft_ratio)):
            if ratio is not None:
                pairs = (*self.ratios.get(kind, ()), ratio / min(self.plain))
                self.ratios = {**self.ratios, kind: pairs[-3 * _NEAR :]}

    @property
    def unknown(self) -> bool:
        """Whether the next round may still show what drafting costs, and too few have."""
        return len(self.ratios.get(0, ())) < LEAST_PAIRS and self.since_plain < _NEAR and self.unlike < _MOST_UNLIKE

    @property
    def wants_plain(self) -> int:
        """How many plain rounds are due."""
        due = self.since_plain * SHARE >= LEAST_PAIRS or (self.wider and self.since_plain >= _NEAR)
        return LEAST_PAIRS if due or not self.plain else 0

    @property
    def most_nodes(self) -> int:
        """Nodes of a row up to which costs can be believed: at most twice as many as were seen."""
        return int(2 ** (1 + self._largest))

    @property
    def _largest(self) -> int:
        """The largest size that is known."""
        return max((size for size, pairs in self.ratios.items() if len(pairs) >= LEAST_PAIRS), default=0)

    @property
    def drafting(self) -> float:
        """How much slower drafts are than the costs say; 1 where nothing is known."""
        return self._typical(0) or 1.0

    def verifying(self, size: int) -> float:
        """How much slower trees of a size are than the costs say: interpolated between known ones, 1 for size 0."""
        known = {0: 1.0} | {other: ratio for other in sorted(self.ratios) if other and (ratio := self._typical(other))}
        return float(np.interp(size, list(known), list(known.values())))

    def _typical(self, kind: int) -> float | None:
        """The median, the lower one of two; None as long as too little is known."""
        ratios = sorted(self.ratios.get(kind, ()))
        return ratios[(len(ratios) - 1) // 2] if len(ratios) >= LEAST_PAIRS else None


def size_of(count: int) -> int:
    """Numbers of nodes, or of rows, that are taken together: 1, 2, up to 4, up to 8, ...

    >>> [size_of(count) for count in (1, 2, 3, 4, 5, 8, 9)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return (count - 1).bit_length()


@dataclass
class Experience:
    """What a decode loop learned in greedy decoding, for batches of a like number of rows.

    Attributes:
        account: tokens that drafting may still lose.
        lost_tries: tries at drafting that did not pay, since the last one that did.
        tokens_per_round: of a row, lately.
        rounds: what they took.
    """

    account: float = STAKE
    lost_tries: int = 0
    tokens_per_round: float = 1.5
    rounds: RoundTimes = field(default_factory=RoundTimes)
