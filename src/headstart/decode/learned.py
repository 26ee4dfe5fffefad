"""What rounds really take, beside what was measured, and whether drafting has paid so far.

A neighbour on the machine slows everything alike, and says nothing about whether drafting pays: only ratios count. So a
drafted round is compared with a plain one that ran just before, each as a multiple of what the costs say, and only such
pairs correct the costs. Where drafting pays, a plain round now and then starts new pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

_WINDOW = 12
"""Newest pairs of a kind whose median counts."""
_ENOUGH = 2
"""Pairs of a kind before it counts: a single one may have been disturbed."""
_PAIRED = 4
"""Drafted rounds that are compared with the plain rounds before them."""
_REFERENCE = 2
"""Plain rounds in a row, of which the faster one is compared with."""
_REFRESH = 64
"""Drafted rounds after which plain ones start new pairs."""
_SIZES = 16
"""Sizes of trees that are told apart, see `size_of`; far more than fit into memory."""


@dataclass
class _Kind:
    """How much slower one kind of work is, relative to plain rounds, than the costs say: one ratio for each pair."""

    ratios: tuple[float, ...] = ()  # replaced, not changed, so that threads can read while another writes

    def note(self, ratio: float) -> None:
        self.ratios = (*self.ratios, ratio)[-_WINDOW:]

    @property
    def typical(self) -> float | None:
        """The median, the lower one of two; None as long as too little is known."""
        count = len(self.ratios)
        return sorted(self.ratios)[(count - 1) // 2] if count >= _ENOUGH else None


@dataclass
class Rounds:
    """What rounds of batches of a like number of rows took.

    Attributes:
        wide: forwards over trees, by `size_of` the nodes of a row.
        draft: drafts that had no more to read than the round before.
        plain: newest plain rounds in a row, as multiples of what the costs say.
        since_plain: drafted rounds since then.
    """

    wide: dict[int, _Kind] = field(default_factory=dict)
    draft: _Kind = field(default_factory=_Kind)
    plain: tuple[float, ...] = ()
    since_plain: int = 0

    @property
    def known(self) -> bool:
        """Whether the costs of drafting were seen at work."""
        return self.draft.typical is not None

    @property
    def wants_plain(self) -> int:
        """How many plain rounds are due."""
        return _REFERENCE if not self.plain or self.since_plain >= _REFRESH else 0

    def note(self, nodes: int, verify_ratio: float, draft_ratio: float | None) -> None:
        """Learn from a round.

        Args:
            nodes: of a row, root included.
            verify_ratio: milliseconds of the forward, as a multiple of what the costs say.
            draft_ratio: the same of the draft; None when it was not drafted, or had more to read than usual.
        """
        if nodes == 1 and draft_ratio is None:
            self.plain = (*(self.plain if not self.since_plain else ()), verify_ratio)[-_REFERENCE:]
            self.since_plain = 0
            return
        self.since_plain += 1
        if not self.plain or self.since_plain > _PAIRED:
            return
        plain = min(self.plain)
        if nodes > 1:
            kind = self.wide.get(size_of(nodes), _Kind())
            kind.note(verify_ratio / plain)
            self.wide = {**self.wide, size_of(nodes): kind}
        if draft_ratio is not None:
            self.draft.note(draft_ratio / plain)

    @property
    def verifying(self) -> list[float]:
        """How much slower trees are than the costs say, by size: interpolated between known ones, 1 at width 1."""
        typical = {size: kind.typical for size, kind in sorted(self.wide.items())}
        known = [(0, 1.0), *((size, ratio) for size, ratio in typical.items() if ratio is not None)]
        sizes, ratios = zip(*known, strict=True)
        return [float(ratio) for ratio in np.interp(range(_SIZES), sizes, ratios)]

    @property
    def drafting(self) -> float:
        """How much slower drafts are than the costs say; 1 where nothing is known."""
        typical = self.draft.typical
        return 1.0 if typical is None else typical


def size_of(count: int) -> int:
    """Numbers of nodes, or of rows, that are taken together: 1, 2, up to 4, up to 8, ...

    >>> [size_of(count) for count in (1, 2, 3, 4, 5, 8, 9)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return (count - 1).bit_length()


@dataclass
class Experience:
    """What an engine learned in greedy decoding, for batches of a like number of rows.

    Attributes:
        rounds: what they took, by `size_of` the rows that were running.
        balance: tokens that drafting may still lose; None before the first call.
        losses: tries at drafting that did not pay, since the last one that did.
        tokens_per_round: of a row, lately; None before the first drafted round.
    """

    rounds: dict[int, Rounds] = field(default_factory=dict)
    balance: float | None = None
    losses: int = 0
    tokens_per_round: float | None = None

    def of(self, rows: int) -> Rounds:
        """What rounds with so many rows took."""
        return self.rounds.setdefault(size_of(rows), Rounds())
