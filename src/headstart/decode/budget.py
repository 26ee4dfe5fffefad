"""How many nodes a round verifies: chosen each round from measured costs and from what drafts are expected to bring.

A round that verifies a tree emits one token and, for each node, one more with the probability `gain` that the node's
whole path is accepted. Over a long text the best choice of nodes maximises gain minus rate times cost, with the rate
(tokens per millisecond) that the decoding reaches as a whole: a node pays when it brings more tokens than the time of
its verification would bring otherwise. Plain decoding, chains and static trees are what this comes to in special cases.

A batch is not done before its slowest row is. Of the cost of a round a part is there as long as any row runs; a token
more saves that part only in the row that runs longest, and in the others no more than their own share of the forward.
Rows are weighted accordingly.

Sources: costs as in Sequoia (arXiv 2402.12374) and CaDDTree (2606.01813); the rate is Dinkelbach's for ratios.

Shape suffixes: B rows, N nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp
from typing import Literal

import numpy as np

from headstart.target import DraftTree

Mode = Literal["auto", "on", "off"]

_FIRST_ROUNDS = 6
"""Drafted rounds before the first judgement whether drafting pays."""
_PATIENCE = 1.0
"""Tokens that the first rounds may fall behind plain decoding before they are judged early."""
_MEMORY = 1 / 8
"""Weight of the newest round in the running means."""
_JUDGED = 1 / 16
"""The same in the mean that decides whether drafting pays: pausing by mistake costs more than noticing late."""
_PROBE_ROUNDS = 2
"""Drafted rounds that try again after a pause."""
_LAST_SPREAD = 4.0
"""Rounds by which a row must lag behind another to be e times as likely the last to end."""
_PAUSES = (8, 16, 32, 64)
"""Plain rounds before each try; the last one repeats."""


@dataclass(frozen=True)
class Costs:
    """Measured milliseconds of verification.

    Attributes:
        widths: numbers of tokens read in one forward, rows times nodes, ascending from 1.
        verify_ms: milliseconds of such a forward, choosing and committing included.
        draft_ms: milliseconds of a draft with the heads that were measured, `levels` deep.
        level_ms: of which each level behind the first takes.
        levels: how deep that draft was.
    """

    widths: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float = 0.0
    level_ms: float = 0.0
    levels: int = 0

    def draft(self, depth: int) -> float:
        """Milliseconds of a draft of this depth.

        >>> Costs((1,), (10.0,), 5.0, 1.0, 4).draft(4), Costs((1,), (10.0,), 5.0, 1.0, 4).draft(2)
        (5.0, 3.0)
        """
        if depth == 0:
            return 0.0
        return self.draft_ms - self.level_ms * max(0, self.levels - depth)

    def verify(self, tokens: int) -> float:
        """Milliseconds to verify this many tokens: interpolated, and behind the last width on the last slope.

        >>> Costs((1, 4, 8), (10.0, 13.0, 21.0)).verify(2), Costs((1, 4, 8), (10.0, 13.0, 21.0)).verify(10)
        (11.0, 25.0)
        """
        if tokens > self.widths[-1] and len(self.widths) > 1:
            slope = (self.verify_ms[-1] - self.verify_ms[-2]) / (self.widths[-1] - self.widths[-2])
            return self.verify_ms[-1] + slope * (tokens - self.widths[-1])
        return float(np.interp(tokens, self.widths, self.verify_ms))


def node_worth(costs: Costs, rate: float, rows: int = 1) -> float:
    """What the gain of a node in a tree of usual size must be to pay for its verification.

    Args:
        costs: as measured.
        rate: tokens per millisecond that are to be had otherwise.
        rows: of the batch.
    """
    few, many = 4 * rows, 16 * rows
    return min(0.9, rate * (costs.verify(many) - costs.verify(few)) / (many - few))


class Pace:
    """Decides, round by round, whether a batch drafts and how many nodes it verifies.

    Without costs it drafts always, and verifies what is proposed. Decisions follow from measured costs and from what
    was accepted, never from the clock, so that a seeded text can be had again.

    Args:
        costs: as measured on this machine; None when nothing was measured.
        mode: "on" drafts always, "off" never, "auto" as long as it pays.
        rows: of the batch.
        limit: tokens that a row emits at most.
        draft_ms: milliseconds of a draft, for drafters that cost the same however deep they draft; None takes those
            of `costs`.
    """

    def __init__(
        self, costs: Costs | None, mode: Mode, rows: int, limit: int = 128, draft_ms: float | None = None
    ) -> None:
        if costs is not None and draft_ms is not None:
            costs = replace(costs, draft_ms=draft_ms, level_ms=0.0)
        self._costs = costs
        self._mode = mode
        self.rows = rows
        self._left = [float(limit)] * rows  # tokens that each row may still emit
        self._pace = [1.5] * rows  # tokens a round of each row, lately
        self._tokens_per_round = 1.5  # of a row; a start, soon replaced by what is seen
        self._draft_ms = costs.draft_ms if costs else 0.0  # of recent drafts
        self._depth = 0  # of the newest draft
        self._trust = 1.0  # accepted drafts, as a share of what the gains promised
        self._promised = self._kept = 2.0
        self._rounds = 0
        self._net = 0.0
        self._plain_left = 0
        self._pauses = 0
        self._probes_left = 0

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.rows = len(rows)
        self._left = [self._left[row] for row in rows]
        self._pace = [self._pace[row] for row in rows]

    @property
    def weights(self) -> list[float]:
        """What a token of each row is worth: the time that it saves, on average 1.

        A row is the last to end with a probability that grows with the rounds it has left at its own pace.
        """
        if self._costs is None or self.rows == 1:
            return [1.0] * self.rows
        alone, together = self._costs.verify(1), self._costs.verify(self.rows)
        own = (together - alone) / (self.rows - 1)  # milliseconds that each row adds to a round
        shared = together - own * self.rows
        left = [tokens / pace for tokens, pace in zip(self._left, self._pace, strict=True)]
        last = [exp((rounds - max(left)) / _LAST_SPREAD) for rounds in left]
        return [self.rows * (own + shared * chance / sum(last)) / together for chance in last]

    @property
    def drafts(self) -> bool:
        """Whether this round drafts."""
        if self._mode != "auto" or self._costs is None:
            return self._mode != "off"
        return self._plain_left == 0

    @property
    def worth(self) -> float:
        """What a node's gain must be to pay for its verification; see `Request.worth`."""
        if self._costs is None or self._mode == "off":
            return 0.0
        return node_worth(self._costs, self._rate(4 * self.rows) / self._trust, self.rows)

    @property
    def level_worth(self) -> float:
        """How many tokens another level of drafting must promise; see `Request.level_worth`."""
        if self._costs is None or self._mode == "off":
            return 0.0
        return self._rate(4 * self.rows) * self._costs.level_ms / self._trust

    def prune(self, tree: DraftTree) -> DraftTree:
        """The best nodes of each row, as many as pay together; every row gets the same number, as the forward costs it.

        Trees with children drawn at random stay as they are: leaving out a child for what it turned out to be would
        break losslessness.
        """
        if self._costs is None:
            return tree
        # Levels that another drafter's branch reaches beyond those of the heads cost nothing.
        levels = tree.depth if tree.levels is None else tree.levels
        self._depth = max(1, levels) if self._costs.level_ms else self._costs.levels
        if tree.gains is None or tree.drawn is not None or tree.size == 1:
            return tree
        weights = self.weights
        ranked = [sorted(range(len(row)), key=lambda node: (-row[node], node)) for row in tree.gains]
        columns = [
            sum(
                weight * row[order[place]]
                for weight, row, order in zip(weights, tree.gains, ranked, strict=True)
                if place < len(order)
            )
            for place in range(tree.size)
        ]
        rate = self._rate(tree.size * self.rows)
        columns = [columns[0], *(self._trust * gain for gain in columns[1:])]
        net = [
            gain - rate * self._costs.verify(self.rows * nodes)
            for nodes, gain in enumerate(accumulate(columns), start=1)
        ]
        best = max(range(len(net)), key=net.__getitem__) + 1
        return tree if best == tree.size else _keep(tree, [sorted(order[:best]) for order in ranked])

    def note(self, tree: DraftTree, emitted: Sequence[int]) -> None:
        """Learn what a round came to: the verified tree, and the tokens emitted by each row."""
        if self._costs is None:
            return
        rows, tokens = len(emitted), sum(weight * count for weight, count in zip(self.weights, emitted, strict=True))
        self._left = [max(1.0, left - count) for left, count in zip(self._left, emitted, strict=True)]
        if self._plain_left:
            self._plain_left -= 1
            self._probes_left = _PROBE_ROUNDS
            return
        self._rounds += 1
        self._pace = [pace + _MEMORY * (count - pace) for pace, count in zip(self._pace, emitted, strict=True)]
        self._tokens_per_round += _MEMORY * (tokens / rows - self._tokens_per_round)
        if tree.gains is not None:
            promised = sum(sum(row) - 1 for row in tree.gains)
            self._promised += _MEMORY * (promised / rows - self._promised)
            self._kept += _MEMORY * ((sum(emitted) - rows) / rows - self._kept)
            self._trust = min(1.25, max(0.25, (self._kept + 0.1) / (self._promised + 0.1)))
        plain_ms = self._costs.verify(rows)
        draft_ms = self._costs.draft(max(1, self._depth))
        self._draft_ms += _MEMORY * (draft_ms - self._draft_ms)
        spent_ms = self._costs.verify(rows * tree.size) + draft_ms
        net = tokens / rows - spent_ms / plain_ms  # tokens of a row more than plain decoding in the same time
        if self._probes_left:
            self._net += net / _PROBE_ROUNDS
            self._probes_left -= 1
            if not self._probes_left:
                self._judge(self._net > 0)
        else:
            self._net += max(_JUDGED, 1 / self._rounds) * (net - self._net)
            if self._rounds >= _FIRST_ROUNDS or self._net * self._rounds < -_PATIENCE:
                self._judge(self._net > 0)

    def _judge(self, pays: bool) -> None:
        if pays:
            self._pauses = 0
            return
        if self._mode == "auto":
            self._plain_left = _PAUSES[min(self._pauses, len(_PAUSES) - 1)]
            self._pauses += 1
            self._net = 0.0

    def _rate(self, tokens: int) -> float:
        """Tokens per millisecond of the whole batch, not below those of plain decoding."""
        assert self._costs is not None, "rates follow from costs"
        plain = self.rows / self._costs.verify(self.rows)
        round_ms = self._costs.verify(tokens) + self._draft_ms
        return max(plain, self.rows * self._tokens_per_round / round_ms)


def _keep(tree: DraftTree, kept: list[list[int]]) -> DraftTree:
    """Only these nodes of each row, ascending; a node's parent is always among them."""
    assert tree.gains is not None, "only trees with gains are pruned"
    tokens, parents = [], []
    for row, (own, nodes) in enumerate(zip(tree.tokens_BN.tolist(), kept, strict=True)):
        place = {node: new for new, node in enumerate(nodes)}
        before = tree.parents_of(row)
        tokens.append([own[node] for node in nodes])
        parents.append([place.get(before[node], -1) for node in nodes])
    gains = [[row[node] for node in nodes] for row, nodes in zip(tree.gains, kept, strict=True)]
    return DraftTree.from_rows(tokens, parents, tree.tokens_BN.device, gains)
