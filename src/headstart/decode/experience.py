"""Timings of rounds relative to the costs, and the success of drafting so far.

A busy machine slows all work alike and says nothing about whether drafting pays: only ratios count. A drafted round is
compared with the plain rounds before it, after each time is divided by its predicted cost. Only such pairs correct the
costs. While drafting pays, occasional plain rounds start new pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import copysign, log2, sqrt

STAKE = 2.0
"""Tokens that drafting may lose before it has won any."""
EXPLORATION = 1 / 50
"""Nominal fraction of rounds spent on exploration: trials during a pause, plain rounds while drafting."""
MIN_PAIRS = 2
"""Fewest pairs that correct a cost, since a single one may be disturbed; also the number of plain rounds per
measurement."""
_MAX_UNTIMED = 32
"""Untimed drafted rounds after which the stored costs are trusted."""
_PAIRED_ROUNDS = 4
"""Drafted rounds compared with the plain ones before them; later the machine's load may differ."""
_PAIRED_RARE_ROUNDS = 24
"""The same limit for a kind with too few pairs, if the newest plain round belongs to this call."""
_MAX_PAIRS = 12
"""Newest pairs stored per kind. With this many pairs of drafts, plain rounds are due half as often."""


@dataclass
class RoundTimes:
    """Times of rounds of batches with a similar number of rows.

    Attributes:
        ratios: per kind of work, (measured / predicted time) / (the same ratio of the preceding plain rounds), newest
            pairs last. Key 0 is drafting without extra text to read, key `size_of(nodes)` a tree forward.
            Copy-on-write, because other threads read it.
        plain: measured / predicted time of the newest consecutive plain rounds that were timed, at most `MIN_PAIRS`.
        fresh: whether the newest round in `plain` belongs to the current call.
        since_plain: timed drafted rounds since the rounds in `plain`.
        verified_larger: whether one of these verified a larger size than any with `MIN_PAIRS` pairs.
        verified: tree sizes (`size_of`) of the timed drafted rounds since `plain`.
        untimed: drafted rounds without a usable time, in total.
    """

    ratios: dict[int, tuple[float, ...]] = field(default_factory=dict)
    plain: tuple[float, ...] = ()
    fresh: bool = False
    since_plain: int = 0
    verified_larger: bool = False
    verified: frozenset[int] = frozenset()
    untimed: int = 0

    def add(self, nodes: int, verify_ratio: float, draft_ratio: float | None) -> None:
        """Add a timed round: measured / predicted time of its forward and of its draft. `draft_ratio` is None without a
        draft, and for a draft that read extra text."""
        if nodes == 1 and draft_ratio is None:
            self.plain = (*(self.plain if not self.since_plain else ()), verify_ratio)[-MIN_PAIRS:]
            if self.since_plain:
                # A size that looks too expensive is never tried again, so a bad measurement would stick: forget the
                # oldest pair of each size that was not verified.
                stay = {0, *self.verified}
                self.ratios = {kind: pairs if kind in stay else pairs[1:] for kind, pairs in self.ratios.items()}
            self.fresh, self.since_plain, self.verified_larger, self.verified = True, 0, False, frozenset()
            return
        self.since_plain += 1
        size = size_of(nodes)
        self.verified |= {size}
        self.verified_larger = self.verified_larger or size > self._largest
        for kind, ratio in ((size, verify_ratio if nodes > 1 else None), (0, draft_ratio)):
            pairs = self.ratios.get(kind, ())
            limit = _PAIRED_RARE_ROUNDS if self.fresh and len(pairs) < MIN_PAIRS else _PAIRED_ROUNDS
            if ratio is not None and self.plain and self.since_plain <= limit:
                self.ratios = {**self.ratios, kind: (*pairs, ratio / min(self.plain))[-_MAX_PAIRS:]}

    @property
    def needs_pairs(self) -> bool:
        """Whether the cost of drafting has too few pairs and still counts as unknown."""
        untimed = self.untimed >= _MAX_UNTIMED
        return len(self.ratios.get(0, ())) < MIN_PAIRS and self.since_plain < _PAIRED_ROUNDS and not untimed

    @property
    def plain_rounds_due(self) -> int:
        rarer = 2 if len(self.ratios.get(0, ())) >= _MAX_PAIRS else 1
        due = self.since_plain * EXPLORATION >= MIN_PAIRS * rarer
        due = due or (self.verified_larger and self.since_plain >= _PAIRED_RARE_ROUNDS)
        return MIN_PAIRS if due or not self.plain else 0

    @property
    def max_nodes(self) -> int:
        """Largest trusted number of nodes of a row: twice the largest size measured."""
        return int(2 ** (1 + self._largest))

    @property
    def _largest(self) -> int:
        return max((size for size, pairs in self.ratios.items() if len(pairs) >= MIN_PAIRS), default=0)

    @property
    def draft_slowdown(self) -> float:
        """Time of drafts relative to the costs; 1 if unknown."""
        pairs = self.ratios.get(0, ())
        return _median(pairs if len(pairs) >= MIN_PAIRS else ())

    @property
    def verify_slowdown(self) -> tuple[list[float], list[float]]:
        """Points to interpolate between: log2 of the nodes, and verification time relative to the costs.

        Each size's median is shrunk towards the overall median by its noise. Otherwise noise between two sizes would
        make an extra node look free or very expensive.
        """
        known = {size: pairs for size, pairs in sorted(self.ratios.items()) if size and len(pairs) >= MIN_PAIRS}
        medians = {size: _median(pairs) for size, pairs in known.items()}
        overall = _median([ratio for pairs in known.values() for ratio in pairs])
        # Each median is itself one of the pairs, so its deviation of 0 is left out.
        deviations = [sorted(abs(ratio - medians[size]) for ratio in pairs)[1:] for size, pairs in known.items()]
        spread = _median([deviation for of_size in deviations for deviation in of_size])
        logs, slowdowns = [0.0], [1.0]
        for size, pairs in known.items():
            off = medians[size] - overall
            logs.append(log2((2 ** (size - 1) + 1 + 2**size) / 2))  # the middle of the sizes grouped together
            slowdowns.append(overall + copysign(max(0.0, abs(off) - spread / sqrt(len(pairs))), off))
        return logs, slowdowns


def _median(values: Sequence[float]) -> float:
    """The lower median; 1 without values."""
    return sorted(values)[(len(values) - 1) // 2] if values else 1.0


def size_of(count: int) -> int:
    """Group counts of nodes or rows: 1, 2, up to 4, up to 8, ...

    >>> [size_of(count) for count in (1, 2, 3, 4, 5, 8, 9)]
    [0, 1, 2, 2, 3, 3, 4]
    """
    return (count - 1).bit_length()


@dataclass
class Experience:
    """State of drafting for batches with a similar number of rows.

    Greedy "auto" calls of a decode loop share it unless they are deterministic; `Budget` creates a private one for
    every other call.

    Attributes:
        account: tokens that drafting may still lose; see `budget.py`.
        lost_trials: trials lost since the last one that paid.
        tokens_per_round: running mean per row.
        rounds: times of rounds.
    """

    account: float = STAKE
    lost_trials: int = 0
    tokens_per_round: float = 1.5
    rounds: RoundTimes = field(default_factory=RoundTimes)
