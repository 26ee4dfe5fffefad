"""How many nodes a round verifies: chosen each round from measured costs and from what drafts are expected to bring.

A round that verifies a tree emits one token and, for each node, one more with the probability that the node's whole
path is accepted. Over a long text the best choice of nodes maximises expected tokens minus rate times cost, where the
rate (tokens per millisecond) is that of the decoding as a whole: a node pays when it brings more tokens than the time
of its verification would bring otherwise. Plain decoding, chains and static trees are special cases of this.

A batch is done when its slowest row is. Part of a round's cost is paid as long as any row runs; one more token saves
that part only in the row that runs longest, and in the others no more than their own share of the forward. Rows are
weighted accordingly.

Sources: costs as in Sequoia (arXiv 2402.12374) and CaDDTree (2606.01813); the rate is Dinkelbach's for ratios.

Shape suffixes: B rows, N nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, exp
from typing import Protocol

from headstart.decode.costs import Costs as Costs
from headstart.decode.learned import Experience, Rounds, size_of
from headstart.decode.options import Draft
from headstart.tree.tree import Tree

_PATIENCE = 1.0
"""Tokens that drafting may fall behind plain decoding before it was judged over so many rounds; more once it won."""
_SEEN = 4
"""Drafted rounds in which costs are seen at work, the first of them having a prompt to read."""
_MEMORY = 1 / 8
"""Weight of the newest round in the running means."""
_JUDGED = 24
"""Rounds whose mean decides whether drafting pays: pausing by mistake costs more than noticing late."""
_PROBE_ROUNDS = 6
"""Drafted rounds that try again after a pause, at most: they end as soon as they pay, or have lost `_PROBE_LOSS`."""
_PROBE_LOSS = 0.5
"""Tokens that such a try may lose."""
_PROBE_NODES = 4
"""Nodes of a row in such rounds, root included: whether drafts are accepted shows in small trees, too."""
_PROBE_THRESHOLD = 0.05
"""Acceptance probability from which a node is tried in such rounds, however much the costs say it takes."""
_LAST_SPREAD = 4.0
"""Rounds by which a row must lag behind another to be e times as likely the last to end."""
_PAUSES = (8, 16, 32, 64)
"""Plain rounds before each try at least; the last one repeats."""
_STAKE = 2.0
"""Tokens that drafting may lose before it has won any."""
_DEAREST = 3.0
"""Tokens that plain rounds earn ahead of a first try, at most: the costs may take it to be dearer than it is."""
_EASILY = 0.125
"""Share of what an answer may gain by drafting that its first try may always cost."""
_MAX = 4.0
"""The same after it has won, at most."""
_EARNED = 0.015
"""Tokens that each plain round adds to what may be lost, up to the first stake; less after tries that did not pay."""
_DISCOURAGED = 2
"""Tries in a row that did not pay after which plain rounds earn half as much."""
_LATE = 0.25
"""Share of what is left of an answer after which another try at drafting comes too late to be worth its drafter."""
_GUESS = 2.0
"""Tokens a round before anything was drafted."""


class _Verifying(Protocol):
    def verify(self, tokens: int) -> float: ...


def node_threshold(costs: _Verifying, rate: float, rows: int = 1) -> float:
    """What the acceptance probability of a node in a tree of usual size must be to pay for its verification.

    Args:
        costs: as measured.
        rate: tokens per millisecond that decoding reaches without the node.
        rows: of the batch.
    """
    few, many = 4 * rows, 16 * rows
    return min(0.9, rate * (costs.verify(many) - costs.verify(few)) / (many - few))


class _Now:
    """What rounds with this many rows cost: as measured, corrected by what rounds really took."""

    def __init__(self, costs: Costs, rows: int, rounds: Rounds | None, per_row: bool) -> None:
        self._costs, self._rows, self._rounds, self._per_row = costs, rows, rounds, per_row
        self._known: dict[int, float] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what was learned since."""
        self._verifying = self._rounds.verifying if self._rounds else [1.0]
        self._drafting = self._rounds.drafting if self._rounds else 1.0

    def measured(self, tokens: int) -> float:
        """Milliseconds of a forward over so many tokens, without corrections."""
        if tokens not in self._known:
            self._known[tokens] = self._costs.verify(tokens)
        return self._known[tokens]

    def measured_draft(self, depth: int) -> float:
        """The same of a draft of this depth that has nothing more to read."""
        return self._rows * self._costs.draft(depth) if self._per_row else self._costs.draft(depth, self._rows)

    def verify(self, tokens: int) -> float:
        nodes = max(1, tokens // self._rows)
        return self.measured(tokens) * self._verifying[min(size_of(nodes), len(self._verifying) - 1)]

    def draft(self, depth: int, unread: int = 0) -> float:
        """Milliseconds of a draft that has so many tokens of each row to read first."""
        return self.measured_draft(depth) * self._drafting + self._costs.read_ms * unread * self._rows


class Controller:
    """Decides, round by round, whether a batch drafts and how many nodes it verifies.

    Without costs it drafts always, and verifies what is proposed. Decisions follow from costs and from what was
    accepted. With an experience, the costs are corrected by what rounds take, and what was learned is kept for the next
    call; without one the clock decides nothing, so that a seeded text is reproducible.

    Drafting may lose a stake: a small share of the answer's tokens, more once it has won some. When that is lost,
    nothing is drafted until plain rounds have earned another try.

    Args:
        costs: as measured on this machine; None when nothing was measured.
        mode: "on" drafts always, "off" never, "auto" as long as it pays.
        rows: of the batch.
        limit: tokens that a row emits at most.
        draft_ms: milliseconds of a draft for one row, for drafters that cost the same however deep they draft; None
            takes those of `costs`.
        prompt: tokens of the longest prompt, which the heads read before their first draft.
        experience: of earlier calls, changed in place; "auto" alone uses it.
    """

    def __init__(
        self,
        costs: Costs | None,
        mode: Draft,
        rows: int,
        limit: int = 128,
        draft_ms: float | None = None,
        prompt: int = 0,
        experience: Experience | None = None,
    ) -> None:
        self._per_row = draft_ms is not None
        if costs is not None and draft_ms is not None:
            costs = replace(costs, draft_ms=draft_ms, level_ms=0.0, read_ms=0.0)
        self._costs = costs
        self._mode = mode
        self._learns = experience is not None and mode == "auto"
        self._known = experience if experience is not None and mode == "auto" else Experience()
        self._left = [float(limit)] * rows  # tokens that each row may still emit
        self._row_tokens_per_round = [1.5] * rows  # tokens a round of each row, lately
        self._tokens_per_round = self._known.tokens_per_round or 1.5  # of a row; a start, soon replaced
        self._draft_ms = costs.draft_ms if costs else 0.0  # of recent drafts
        self._depth = 0  # of the newest draft
        self._unread = prompt  # tokens of the text that the heads have not read, beyond those of the last round
        self._calibration_factor = 1.0  # accepted drafts, as a share of what the acceptance probabilities promised
        self._promised = self._kept = 2.0
        self._judged: deque[tuple[float, int, int, int]] = deque(maxlen=_JUDGED)
        self._plain_left = 0
        self._paused = False
        self._pauses = 0
        self._probes_left = 0
        self._saved = self._known.balance if self._known.balance is not None else _STAKE
        self._limit = _STAKE  # that plain rounds may earn
        self._set_rows(rows)
        if costs is not None and mode == "auto":
            self._start(limit)

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._left = [self._left[row] for row in rows]
        self._row_tokens_per_round = [self._row_tokens_per_round[row] for row in rows]
        self._set_rows(len(rows))

    @property
    def weights(self) -> list[float]:
        """What a token of each row is worth: the time that it saves, on average 1.

        A row is the last to end with a probability that grows with the rounds it has left at its own pace.
        """
        if self._now is None or self.rows == 1:
            return [1.0] * self.rows
        alone, together = self._now.measured(1), self._now.measured(self.rows)
        own = (together - alone) / (self.rows - 1)  # milliseconds that each row adds to a round
        shared = together - own * self.rows
        left = [tokens / per_round for tokens, per_round in zip(self._left, self._row_tokens_per_round, strict=True)]
        last = [exp((rounds - max(left)) / _LAST_SPREAD) for rounds in left]
        return [self.rows * (own + shared * prob / sum(last)) / together for prob in last]

    @property
    def will_draft(self) -> bool:
        """Whether anything will be drafted before the answer is complete, as far as is known now."""
        return self._mode != "off" and self._plain_left < max(self._left)

    @property
    def drafts(self) -> bool:
        """Whether this round drafts."""
        if self._mode != "auto" or self._now is None:
            return self._mode != "off"
        return self._plain_left == 0

    def room(self, max_nodes: int) -> int:
        """Nodes of a row that this round may draft, at most the `max_nodes` that fit into memory."""
        return min(max_nodes, _PROBE_NODES) if self._probes_left else max_nodes

    @property
    def threshold(self) -> float:
        """What a node's acceptance probability must be to pay for its verification; see `Request.threshold`."""
        if self._now is None or self._mode == "off":
            return 0.0
        threshold = node_threshold(self._now, self._rate(4 * self.rows) / self._calibration_factor, self.rows)
        return min(threshold, _PROBE_THRESHOLD) if self._probes_left else threshold

    @property
    def level_threshold(self) -> float:
        """How many tokens another level of drafting must promise; see `Request.level_threshold`."""
        if self._now is None or self._mode == "off" or self._probes_left:
            return 0.0
        level_ms = self._now.draft(2) - self._now.draft(1)
        return self._rate(4 * self.rows) * level_ms / self._calibration_factor

    def prune(self, trees: list[Tree]) -> list[Tree]:
        """The best nodes of each row, as many as pay together; every row gets the same number, as the forward costs it.

        Trees with drawn nodes stay as they are: leaving one out for what it turned out to be would break losslessness.
        """
        if self._now is None or self._costs is None:
            return trees
        width = max(tree.size for tree in trees)
        # Levels that another drafter's branch reaches beyond those of the heads cost nothing.
        levels = max(tree.depth if tree.levels is None else tree.levels for tree in trees)
        self._depth = max(1, levels) if self._costs.level_ms else max(1, self._costs.levels)
        known = [tree.accept_probs for tree in trees if tree.accept_probs is not None and not tree.drawn]
        if len(known) < len(trees) or width == 1 or self._probes_left:
            return trees
        ranked = [tree.best(tree.size) for tree in trees]
        columns = [
            sum(
                weight * probs[order[index]]
                for weight, probs, order in zip(self.weights, known, ranked, strict=True)
                if index < len(order)
            )
            for index in range(width)
        ]
        rate = self._rate(width * self.rows)
        columns = [columns[0], *(self._calibration_factor * accept_prob for accept_prob in columns[1:])]
        net = [
            tokens - rate * self._now.verify(self.rows * nodes)
            for nodes, tokens in enumerate(accumulate(columns), start=1)
        ]
        best = max(range(len(net)), key=net.__getitem__) + 1
        if best < width:
            for tree, order in zip(trees, ranked, strict=True):
                tree.keep(order[:best])
        return trees

    def note(self, trees: Sequence[Tree], emitted: Sequence[int], spent_ms: tuple[float, float] | None = None) -> None:
        """Learn from the outcome of a round.

        Args:
            trees: as verified.
            emitted: tokens by each row.
            spent_ms: milliseconds that its draft and its forward took; None when a drafter failed.
        """
        if self._now is None:
            return
        rows, tokens = len(emitted), sum(weight * count for weight, count in zip(self.weights, emitted, strict=True))
        self._left = [max(1.0, left - count) for left, count in zip(self._left, emitted, strict=True)]
        drafted, width = self.drafts, max(tree.size for tree in trees)
        if self._learns and spent_ms is not None:
            self._time(width, drafted, *spent_ms)
        if not drafted:
            self._note_plain()
            return
        self._row_tokens_per_round = [
            per_round + _MEMORY * (count - per_round)
            for per_round, count in zip(self._row_tokens_per_round, emitted, strict=True)
        ]
        self._tokens_per_round += _MEMORY * (tokens / rows - self._tokens_per_round)
        self._known.tokens_per_round = self._tokens_per_round
        known = [tree.accept_probs for tree in trees if tree.accept_probs is not None]
        if len(known) == len(trees):
            promised = sum(sum(probs) - 1 for probs in known)
            self._promised += _MEMORY * (promised / rows - self._promised)
            self._kept += _MEMORY * ((sum(emitted) - rows) / rows - self._kept)
            self._calibration_factor = min(1.25, max(0.25, (self._kept + 0.1) / (self._promised + 0.1)))
        self._draft_ms += _MEMORY * (self._now.draft(max(1, self._depth)) - self._draft_ms)
        if len(self._judged) == _JUDGED:
            self._save(self._net(self._judged[0]))
        self._judged.append((tokens / rows, width, max(1, self._depth), self._unread))
        self._unread = 0
        self._judge()

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        rounds = self._known.of(rows) if self._learns else None
        self._now = _Now(self._costs, rows, rounds, self._per_row) if self._costs is not None else None

    def _start(self, limit: int) -> None:
        """What the first rounds of a call are: drafted, plain to see how fast the machine is, or plain until a try."""
        assert self._now is not None, "without costs nothing is weighed"
        tokens_per_round = max(_GUESS, self._known.tokens_per_round or 0.0)
        round_ms = self._now.verify(_PROBE_NODES * self.rows) + self._now.draft(_PROBE_NODES - 1)
        drafted = round_ms / self._now.verify(self.rows)  # plain rounds in the time of a drafted one
        won = (limit - 1) * (1 - drafted / tokens_per_round)
        rounds = self._known.of(self.rows)
        if self._known.losses and self._saved < _PATIENCE + self._reading:
            self._wait(0)
        elif rounds.known or not self._learns:
            if won < self._reading:
                self._plain_left = limit
        elif not self._affords(self._reading + _SEEN * (drafted - 1), won):
            self._plain_left = limit
        else:
            self._plain_left = rounds.wants_plain
            self._paused = not rounds.known  # the first drafts are small, until their costs are known

    def _affords(self, price: float, won: float) -> bool:
        """Whether the first try, at this price in tokens, can be afforded: from the stake where the answer would win it
        back, else from what plain rounds have earned."""
        if price <= max(min(self._saved, won), _EASILY * won):
            return True
        self._limit = _STAKE + min(price, _DEAREST)
        if self._saved < self._limit:
            return False
        self._saved = _STAKE
        return True

    def _time(self, nodes: int, drafted: bool, draft_ms: float, verify_ms: float) -> None:
        """Compare a round's times with the costs."""
        assert self._now is not None, "without costs there is nothing to compare"
        expected_ms = self._now.measured_draft(max(1, self._depth)) if drafted and not self._unread else 0.0
        ratio = draft_ms / expected_ms if expected_ms > 0 else None
        self._known.of(self.rows).note(nodes, verify_ms / self._now.measured(self.rows * nodes), ratio)
        self._now.refresh()

    def _note_plain(self) -> None:
        self._plain_left -= 1
        self._unread += 1
        self._save(max(0.0, min(self._earned, self._limit - self._saved)))
        if self._plain_left == 0 and self._paused:
            self._paused, self._probes_left = False, _PROBE_ROUNDS

    def _judge(self) -> None:
        """Go on drafting or pause, by what the newest rounds came to at the costs as they are known now."""
        net = sum(map(self._net, self._judged))
        self._known.balance = min(_MAX, self._saved + net)
        if self._learns and len(self._judged) < _SEEN and not self._known.of(self.rows).known:
            return
        if self._probes_left:
            self._probes_left -= 1
            if self._probes_left and -_PROBE_LOSS < net <= 0:
                return
            pays, self._probes_left = net > 0, 0
        else:
            pays = net > (0 if len(self._judged) == _JUDGED else -max(_PATIENCE, self._saved / 2))
        if pays:
            if net > 0:
                self._pauses = self._known.losses = 0
            if self._learns:
                self._plain_left = self._known.of(self.rows).wants_plain
        elif self._mode == "auto":
            self._known.losses += 1
            self._save(net)
            self._judged.clear()
            self._wait(_PAUSES[min(self._pauses, len(_PAUSES) - 1)])
            self._pauses += 1

    def _wait(self, minimum: int) -> None:
        """Decode plainly for some rounds, until a try at drafting can be afforded; then try."""
        assert self._now is not None, "without costs nothing is weighed"
        lost = self._reading + _PROBE_LOSS
        self._plain_left = max(minimum, ceil((lost - self._saved) / self._earned))
        if self._plain_left > _LATE * max(self._left):  # what is saved is for the next call
            self._plain_left = max(self._plain_left, ceil(max(self._left)))
        self._paused = self._plain_left > 0
        self._probes_left = 0 if self._paused else _PROBE_ROUNDS

    def _net(self, judged: tuple[float, int, int, int]) -> float:
        """Tokens of a row more than plain decoding in the time of a round."""
        assert self._now is not None, "without costs nothing is weighed"
        tokens, nodes, depth, unread = judged
        spent_ms = self._now.verify(self.rows * nodes) + self._now.draft(depth, unread)
        return tokens - spent_ms / self._now.verify(self.rows)

    @property
    def _earned(self) -> float:
        """Tokens that a plain round adds to what may be lost."""
        return _EARNED / (1 + self._known.losses / _DISCOURAGED)

    @property
    def _reading(self) -> float:
        """Plain rounds in the time that the heads need for the text that they have not read."""
        return self._now.draft(0, self._unread) / self._now.verify(self.rows) if self._now else 0.0

    def _save(self, tokens: float) -> None:
        """Add to what may be lost."""
        self._saved = self._known.balance = min(max(_MAX, self._limit), self._saved + tokens)

    def _rate(self, tokens: int) -> float:
        """Tokens per millisecond of the whole batch, not below those of plain decoding."""
        assert self._now is not None, "rates follow from costs"
        plain = self.rows / self._now.verify(self.rows)
        round_ms = self._now.verify(tokens) + self._draft_ms
        return max(plain, self.rows * self._tokens_per_round / round_ms)
