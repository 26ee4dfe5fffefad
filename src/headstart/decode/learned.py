"""Measured times of rounds relative to the costs, and the success of drafting so far.

A busy machine slows everything alike and says nothing about whether drafting pays: only ratios count. So a drafted
round is compared with the plain rounds before it, each as a multiple of its cost, and only such pairs correct the
costs. Where drafting pays, occasional plain rounds start new pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import copysign, log2, sqrt

STAKE = 2.0
"""Tokens that drafting may lose before it has won any."""
SHARE = 1 / 50
"""Share of rounds spent on exploration: tries during a pause, plain rounds while drafting."""
LEAST_PAIRS = 2
"""Least pairs that correct a cost, and least plain rounds to compare with: a single one may be disturbed."""
_MOST_UNLIKE = 32
"""Drafted rounds without a usable time after which the stored costs are trusted."""
_NEAR = 4
"""Drafted rounds compared with the plain ones before them; later the machine's load may differ."""
_LATE = 24
"""The same limit for a kind with too few pairs, if the plain rounds are of this call."""
_ENOUGH = 12
"""Newest pairs of a kind that are kept; with this many of drafts, plain rounds are due half as often."""


Curve = tuple[list[float], list[float]]
"""Points to interpolate between."""


@dataclass
class RoundTimes:
    """Times of rounds of batches with a similar number of rows.

    Attributes:
        ratios: how much slower a kind of work is, relative to plain rounds, than the costs say; one ratio for each of
            the newest pairs. Kinds are forwards over trees, by `size_of` the nodes of a row, and 0 for drafts without
            extra text to read. Replaced, not changed: threads read while another writes.
        plain: newest plain rounds in a row, as multiples of their cost.
        fresh: whether these belong to the current call.
        since_plain: drafted rounds since then.
        wider: whether one of them verified a tree larger than any measured size.
        verified: tree sizes that they verified.
        unlike: untypical drafted rounds in all.
    """

    ratios: dict[int, tuple[float, ...]] = field(default_factory=dict)
    plain: tuple[float, ...] = ()
    fresh: bool = False
    since_plain: int = 0
    wider: bool = False
    verified: frozenset[int] = frozenset()
    unlike: int = 0

    def note(self, nodes: int, verify_ratio: float, draft_ratio: float | None) -> None:
        """Learn from a round: times of its forward and its draft, as multiples of their costs. The latter is None if
        nothing was drafted, or the draft had extra text to read."""
        if nodes == 1 and draft_ratio is None:
            self.plain = (*(self.plain if not self.since_plain else ()), verify_ratio)[-LEAST_PAIRS:]
            if self.since_plain:
                # A size that looks expensive is no longer verified, and would never be seen to be cheap: drop a pair.
                stay = {0, *self.verified}
                self.ratios = {kind: pairs if kind in stay else pairs[1:] for kind, pairs in self.ratios.items()}
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

    @property
    def unknown(self) -> bool:
        """Whether too few rounds have shown the cost of drafting, and the next may still do so."""
        return len(self.ratios.get(0, ())) < LEAST_PAIRS and self.since_plain < _NEAR and self.unlike < _MOST_UNLIKE

    @property
    def wants_plain(self) -> int:
        """Number of plain rounds that are due."""
        rarer = 2 if len(self.ratios.get(0, ())) >= _ENOUGH else 1
        due = self.since_plain * SHARE >= LEAST_PAIRS * rarer or (self.wider and self.since_plain >= _LATE)
        return LEAST_PAIRS if due or not self.plain else 0

    @property
    def most_nodes(self) -> int:
        """Largest trusted number of nodes of a row: twice the largest size measured."""
        return int(2 ** (1 + self._largest))

    @property
    def _largest(self) -> int:
        """The largest known size."""
        return max((size for size, pairs in self.ratios.items() if len(pairs) >= LEAST_PAIRS), default=0)

    @property
    def drafting(self) -> float:
        """How much slower drafts are than the costs say; 1 if unknown."""
        pairs = self.ratios.get(0, ())
        return _middle(pairs if len(pairs) >= LEAST_PAIRS else ())

    @property
    def verifying(self) -> Curve:
        """How much slower trees are than the costs say, by log2 of their nodes; 1 for a single node.

        Sizes differ only by more than chance explains: between the noisy medians of two sizes a node would seem to
        cost much, or nothing.
        """
        known = {size: pairs for size, pairs in sorted(self.ratios.items()) if size and len(pairs) >= LEAST_PAIRS}
        middles = {size: _middle(pairs) for size, pairs in known.items()}
        together = _middle([ratio for pairs in known.values() for ratio in pairs])
        # Each median is itself one of the pairs, so its deviation of 0 is left out.
        beside = [sorted(abs(ratio - middles[size]) for ratio in pairs)[1:] for size, pairs in known.items()]
        spread = _middle([far for of_size in beside for far in of_size])
        logs, slower = [0.0], [1.0]
        for size, pairs in known.items():
            off = middles[size] - together
            logs.append(log2((2 ** (size - 1) + 1 + 2**size) / 2))  # the middle of the sizes grouped together
            slower.append(together + copysign(max(0.0, abs(off) - spread / sqrt(len(pairs))), off))
        return logs, slower


def _middle(numbers: Sequence[float]) -> float:
    """The median, the lower one of two; 1 of none."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 1.0


def size_of(count: int) -> int:
    """Group counts of nodes or rows: 1, 2, up to 4, up to 8, ...

    >>> [size_of(count) for count in (1, 2, 3, 4, 5, 8, 9)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return (count - 1).bit_length()


@dataclass
class Experience:
    """Experience of a decode loop in greedy decoding, for batches with a similar number of rows.

    Attributes:
        account: tokens that drafting may still lose.
        lost_tries: tries at drafting that did not pay since the last one that did.
        tokens_per_round: of a row, lately.
        rounds: their times.
    """

    account: float = STAKE
    lost_tries: int = 0
    tokens_per_round: float = 1.5
    rounds: RoundTimes = field(default_factory=RoundTimes)
