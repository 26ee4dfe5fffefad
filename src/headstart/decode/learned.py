"""What rounds really take, beside what was measured, and how drafting has fared so far.

A neighbour on the machine slows everything alike, and says nothing about whether drafting pays: only ratios count. So a
drafted round is compared with the plain rounds before it, each as a multiple of what the costs say, and only such pairs
correct the costs. Where drafting pays, plain rounds now and then start new pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import copysign, log2, sqrt

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
_LATE = 24
"""The same for a kind that is not known yet, within a call: there may be few rounds of it."""
_ENOUGH = 12
"""Newest pairs of a kind that are kept; where there are so many of drafts, plain rounds are seldom due."""
_SELDOM = 2
"""How many times as seldom."""


Curve = tuple[list[float], list[float]]
"""Points between which is interpolated."""


@dataclass
class RoundTimes:
    """What rounds of batches of a like number of rows took.

    Attributes:
        ratios: how much slower a kind of work is, relative to plain rounds, than the costs say: one ratio for each of
            the newest pairs. Kinds are forwards over trees, by `size_of` the nodes of a row, and under 0 drafts that
            had no more to read than the round before. Replaced, not changed: threads read while another writes.
        plain: newest plain rounds in a row, as multiples of what the costs say.
        fresh: whether these are of the call that runs.
        since_plain: drafted rounds since then.
        wider: whether one of them verified a tree of a size that is not known yet.
        verified: sizes of trees that they verified.
        unlike: drafted rounds, in all, that were not what such rounds take.
    """

    ratios: dict[int, tuple[float, ...]] = field(default_factory=dict)
    plain: tuple[float, ...] = ()
    fresh: bool = False
    since_plain: int = 0
    wider: bool = False
    verified: frozenset[int] = frozenset()
    unlike: int = 0

    def note(self, nodes: int, verify_ratio: float, draft_ratio: float | None) -> None:
        """Learn from a round: milliseconds of its forward, and of its draft, as multiples of what the costs say. The
        latter is None when nothing was drafted, or the draft had more to read than usual."""
        if nodes == 1 and draft_ratio is None:
            self.plain = (*(self.plain if not self.since_plain else ()), verify_ratio)[-LEAST_PAIRS:]
            if self.since_plain:
                self._forget()
            self.fresh, self.since_plain, self.wider, self.verified = True, 0, False, frozenset()
            return
        self.since_plain += 1
        size = size_of(nodes)
        self.verified |= {size}
        self.wider = self.wider or size > self._largest
        for kind, ratio in ((size, verify_ratio if nodes > 1 else None), (0, draft_ratio)):
            pairs = self.ratios.get(kind, ())
            late = self.since_plain > (_LATE if self.fresh and len(pairs) < LEAST_PAIRS else _NEAR)
            if ratio is not None and self.plain and not late:
                self.ratios = {**self.ratios, kind: (*pairs, ratio / min(self.plain))[-_ENOUGH:]}

    def _forget(self) -> None:
        """A size that is taken to be dear is verified no more, and would never be seen to be cheap: it loses a pair."""
        stay = {0, *self.verified}
        self.ratios = {kind: pairs if kind in stay else pairs[1:] for kind, pairs in self.ratios.items()}

    @property
    def unknown(self) -> bool:
        """Whether the next round may still show what drafting costs, and too few have."""
        return len(self.ratios.get(0, ())) < LEAST_PAIRS and self.since_plain < _NEAR and self.unlike < _MOST_UNLIKE

    @property
    def wants_plain(self) -> int:
        """How many plain rounds are due."""
        seldom = _SELDOM if len(self.ratios.get(0, ())) >= _ENOUGH else 1
        due = self.since_plain * SHARE >= LEAST_PAIRS * seldom or (self.wider and self.since_plain >= _LATE)
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
        pairs = self.ratios.get(0, ())
        return _middle(pairs if len(pairs) >= LEAST_PAIRS else ())

    @property
    def verifying(self) -> Curve:
        """How much slower trees are than the costs say, by the logarithm to base 2 of their nodes; nothing is known of
        no trees.

        A size is believed to differ from all others by no more than chance leaves: medians of a few pairs differ, and
        between two of them a node would cost much, or nothing.
        """
        known = {size: pairs for size, pairs in sorted(self.ratios.items()) if size and len(pairs) >= LEAST_PAIRS}
        middles = {size: _middle(pairs) for size, pairs in known.items()}
        together = _middle([ratio for pairs in known.values() for ratio in pairs])
        # Each median is one of its pairs, which says nothing of how they spread.
        beside = [sorted(abs(ratio - middles[size]) for ratio in pairs)[1:] for size, pairs in known.items()]
        spread = _middle([far for of_size in beside for far in of_size])
        logs, slower = [0.0], [1.0]
        for size, pairs in known.items():
            off = middles[size] - together
            logs.append(log2((2 ** (size - 1) + 1 + 2**size) / 2))  # the middle of those that are taken together
            slower.append(together + copysign(max(0.0, abs(off) - spread / sqrt(len(pairs))), off))
        return logs, slower


def _middle(numbers: Sequence[float]) -> float:
    """The median, the lower one of two; 1 of none."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 1.0


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
