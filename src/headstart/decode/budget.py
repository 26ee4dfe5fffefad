"""How many nodes a round verifies, and when drafting pauses: from measured costs and from what drafts bring.

Nodes: a round that verifies a tree emits one token and, for each draft, one more with the probability that its whole
path is accepted. Over a long text the best choice of nodes maximises expected tokens minus rate times cost, where the
rate (tokens per millisecond) is that of the decoding as a whole: a node pays when it brings more tokens than the time
of its verification would bring otherwise. Plain decoding, chains and static trees are special cases of this. Nothing
is cut where some tree has drawn nodes, or none of the probabilities.

Pauses ("auto"). Amounts are tokens a row; nodes include the root, so that 4 nodes are 3 drafts. A drafted round is
worth what it emitted less the plain rounds that take its time. What is left is what the row with the most of it may
still emit, of `max_new_tokens`.

1. The account starts with a stake of 2 (`STAKE`); when sampling or `deterministic`, with a twelfth of
   `max_new_tokens` if that is less.
2. A drafted round adds its worth, or takes it; the account is not raised above 8 (`_MOST_HELD`). Every plain round adds
   1/50 (`SHARE`) / (1 + lost tries), as far as 2 or, if that is more, the reserve and the price of a try.
3. A try is a drafted round with 4 nodes of a row and 3 levels (`_SMALL`); two of them while costs are unknown. Its cost
   is the plain rounds that take its time, less the round itself, and what the heads have to read first: the prompt, and
   every plain round since their last draft. Its price is the same, with at most 4 (`_MOST_OF_TRY`) beside the reading.
4. The reserve is 2 where what is left cannot win a try back: where (1 - the time of its round in plain rounds / the
   larger of 2 and the mean tokens a round) * (what is left - its rounds) is not above its cost. That holds, too, where
   costs say that drafting never wins. Else it is 0.
5. A plan is made when a call starts, when costs were just measured, and when a try is lost; price and reserve stay as
   they are until the next. It drafts at once where the reserve is 0, costs are known and no try is lost. Else plain
   rounds come first, until the account covers reserve and price. Where they would take more than half of what is left,
   or any while costs are unknown, nothing more is drafted in this call: of a new loop the whole first answer is plain
   where a try costs more than the stake, as after a long prompt. When sampling or `deterministic`, a reserve ends
   drafting as well.
6. A try is lost when a drafted round leaves the account at the reserve or below, the very first time too. The lost try
   counts before the plan is made: rounds of the first pause add 1/100, those of the next 1/150.
7. After a loss drafting is on trial, with trees of 4 nodes at most, until the account is above what it held when the
   trial began (then no try counts as lost any more) or the next is lost. What is known of promises is forgotten.
8. Account, lost tries, mean tokens a round and measured rounds serve later calls of the loop with a like number of
   rows (`size_of`). When sampling or `deterministic`, every call starts anew.

So drafting can lose the stake, that share of plain rounds, and eight tokens of what it won.

Measuring (greedy "auto", not `deterministic`; `learned.py`): a drafted round and the plain ones before it make a pair,
which says by how much costs are wrong, if it is among the first 4 after them, or the first 24 of a call where fewer
than 2 pairs are known of its kind: of trees of its size, or of drafts. The draft counts only if it had no more to read
than usual, which the first one has. A round in which something was captured for all later ones is not timed. A new loop
starts with 2 plain rounds. Until 2 pairs of drafts are known, for 4 timed drafted rounds at most and 32 of the others,
costs are unknown: trees have 4 nodes at most, thresholds are 0, nothing is cut, and no round enters the account; then
all of them do, by the corrected costs. After that trees have at most twice the nodes of the largest size with 2 pairs.
Two plain rounds are due after 100 drafted ones, or after 200 where 12 pairs of drafts are known; and after 24 where one
of them verified a larger size. A size that none of the rounds before them verified then loses a pair.

A batch is done when its slowest row is. Part of a round's cost is paid as long as any row runs; one more token saves
that part only in the row that runs longest, and in the others no more than their own share of the forward. Rows are
weighted accordingly.

Sources: costs as in Sequoia (arXiv 2402.12374) and CaDDTree (2606.01813); the rate is Dinkelbach's for ratios.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, exp, sqrt

import numpy as np

from headstart.decode.costs import Costs as Costs
from headstart.decode.learned import LEAST_PAIRS, SHARE, STAKE, Experience, RoundTimes
from headstart.decode.options import Draft
from headstart.tree.tree import Tree

_SMALL = 4
"""Nodes of a row, root included, while drafting is tried: a small tree shows whether it pays, too. Until it is known
how many are accepted, half of them are taken to be."""
_MEMORY = 1 / 8
"""Weight of the newest round in the running means."""
_SMOOTHING = 1 / 8
"""Drafts that are added to those promised and to those accepted, so that few of them say little."""
_MOST_HELD = 4 * STAKE
"""Tokens in the account above which drafted rounds add nothing."""
_MOST_OF_TRY = 2 * STAKE
"""Tokens that a try is saved for at most, beside what the heads have to read first."""
_MOST_OPTIMISM = 1.25
"""How far above what was promised the next drafts are believed to be accepted."""
_LOGS = np.log2(np.arange(1, 1025))
"""Of numbers of nodes, as many as a tree has at most."""
_STAKE_SHARE = 1 / 12
"""The stake is at most this share of the answer's tokens, where nothing is known of earlier answers."""


class _Now:
    """What rounds with this many rows cost: as measured, corrected by what rounds really took."""

    def __init__(self, costs: Costs, rows: int, rounds: RoundTimes, per_row: bool) -> None:
        self._costs, self._rows, self._rounds, self._per_row = costs, rows, rounds, per_row
        self._measured: dict[int, float] = {}
        self._known: object = None  # the ratios that what follows is of
        self.refresh()

    def refresh(self) -> None:
        """Take in what was learned since."""
        if self._known is not self._rounds.ratios:
            self._known = self._rounds.ratios
            # By the nodes of a row, worked out outside of what is timed.
            self._slower: list[float] = np.interp(_LOGS, *self._rounds.verifying).tolist()
            self._drafting = self._rounds.drafting

    def measured(self, tokens: int) -> float:
        """Milliseconds of a forward over so many tokens, without corrections."""
        if tokens not in self._measured:
            self._measured[tokens] = self._costs.verify(tokens)
        return self._measured[tokens]

    def measured_draft(self, depth: int) -> float:
        """The same of a draft of this depth that has nothing more to read."""
        return self._rows * self._costs.draft(depth) if self._per_row else self._costs.draft(depth, self._rows)

    def verify(self, tokens: int) -> float:
        slower = self._slower[min(max(1, tokens // self._rows), len(_LOGS)) - 1]
        return max(self.measured(tokens) * slower, self.measured(self._rows))  # more tokens never take less

    def draft(self, depth: int, unread: int = 0) -> float:
        """Milliseconds of a draft that has so many tokens of each row to read first."""
        return self.measured_draft(depth) * self._drafting + self._costs.read_ms * unread * self._rows

    def plain_rounds(self, nodes: int, depth: int, unread: int = 0) -> float:
        """Plain rounds in the time of a drafted one: what it must emit to pay."""
        return (self.verify(self._rows * nodes) + self.draft(depth, unread)) / self.verify(self._rows)


class Budget:
    """Decides, round by round, whether a batch drafts and how many nodes it verifies.

    Without costs it drafts always, and verifies what is proposed. Decisions follow from costs and from what was
    accepted. With an experience, the costs are corrected by what rounds take, and what was learned is kept for the next
    call; without one the clock decides nothing, so that a seeded text is reproducible.

    Args:
        costs: as measured on this machine; None when nothing was measured.
        mode: "on" never pauses, "off" never drafts, "auto" pauses while drafting does not pay.
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
        learned = experience if mode == "auto" else None
        if learned is not None:
            learned.rounds.fresh = False
        self._learns = learned is not None
        self._experience = learned or Experience(min(STAKE, _STAKE_SHARE * limit))
        self._left = [max(1.0, limit - 1.0)] * rows  # tokens that each row may still emit after its first one
        self._row_tokens_per_round = [1.5] * rows  # tokens a round of each row, lately
        self._draft_ms = costs.draft_ms if costs else 0.0  # of recent drafts
        self._depth = 0  # of the newest draft
        self._unread = prompt  # tokens of the text that the heads have not read, beyond those of the last round
        self._promised = self._accepted = _SMALL / 2  # drafts of a row that probabilities promised, and those accepted
        self._unsettled: list[tuple[float, int, int, int]] = []  # rounds that wait for their costs to be seen
        self._plain_left = 0  # plain rounds before the next draft
        self._price = 0.0  # tokens that are saved for a try
        self._reserve = 0.0  # tokens that must stay in the account
        self._before_try: float | None = None  # what the account held at the start of a try that has not paid yet
        self._set_rows(rows)
        if costs is not None and mode == "auto":
            self._plan()

    def reorder(self, rows: Sequence[int]) -> None:
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
        per_row = (together - alone) / (self.rows - 1)  # milliseconds that each row adds to a round
        shared = together - per_row * self.rows
        rounds = [tokens / pace for tokens, pace in zip(self._left, self._row_tokens_per_round, strict=True)]
        most = max(rounds)
        # A number of rounds ahead is uncertain by about its root.
        last = [exp((ahead - most) / (sqrt(most) / 4)) for ahead in rounds]
        total = sum(last)
        return [self.rows * (per_row + shared * prob / total) / together for prob in last]

    @property
    def will_draft(self) -> bool:
        """Whether anything will be drafted before the answer is complete, as far as is known now."""
        return self._mode != "off" and self._plain_left < max(self._left)

    @property
    def drafts(self) -> bool:
        """Whether this round drafts."""
        return self._mode != "off" and self._plain_left == 0

    def room(self, max_nodes: int) -> int:
        """Nodes of a row that this round may draft, at most the `max_nodes` that memory and target allow."""
        if self._now is None:
            return max_nodes
        if self._costs_unknown or self._before_try is not None:
            return min(max_nodes, _SMALL)
        return min(max_nodes, self._experience.rounds.most_nodes) if self._learns else max_nodes

    @property
    def threshold(self) -> float:
        """What the acceptance probability of a node must be to pay for its verification, by the mean time of one more
        node in trees of 4 to 16; `prune` decides exactly, afterwards.

        It is not below what was measured, corrected as a whole: of two costs that each were corrected by a few rounds
        nothing may be left between them, and then the heads draft all that there is room for.
        """
        if self._now is None or self._mode == "off" or self._costs_unknown:
            return 0.0
        few, many = 4 * self.rows, 16 * self.rows
        slower = self._now.verify(few) / self._now.measured(few)
        measured_ms = slower * (self._now.measured(many) - self._now.measured(few))
        node_ms = max(measured_ms, self._now.verify(many) - self._now.verify(few)) / (many - few)
        return min(0.9, self._rate(few) / self._calibration_factor * node_ms)

    @property
    def level_threshold(self) -> float:
        """How many tokens another level of drafting must promise; see `Request.level_threshold`."""
        if self._now is None or self._mode == "off" or self._costs_unknown:
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
        probs_by_row = [tree.accept_probs for tree in trees if tree.accept_probs is not None and not tree.drawn]
        if len(probs_by_row) < len(trees) or width == 1 or self._costs_unknown:
            return trees
        ranked = [tree.best(tree.size) for tree in trees]
        # Expected tokens that the root and then the next best node of every row add.
        gains, factors = [0.0] * width, [1.0, *[self._calibration_factor] * (width - 1)]
        for weight, probs, order in zip(self.weights, probs_by_row, ranked, strict=True):
            for place, node in enumerate(order):
                gains[place] += weight * probs[node] * factors[place]
        rate = self._rate(width * self.rows)
        net = [
            tokens - rate * self._now.verify(self.rows * nodes)
            for nodes, tokens in enumerate(accumulate(gains), start=1)
        ]
        best = max(range(len(net)), key=net.__getitem__) + 1
        if best < width:
            for tree, order in zip(trees, ranked, strict=True):
                tree.keep(order[:best])
        return trees

    def note(
        self,
        trees: Sequence[Tree],
        emitted: Sequence[int],
        spent_ms: tuple[float, float] | None = None,
        could_draft: bool = True,
    ) -> None:
        """Learn from the outcome of a round: the trees as verified, the tokens that each row emitted, and the
        milliseconds that draft and forward took, if that is what such rounds take. Where it could not draft (no room,
        or no drafter that works) it says nothing of drafting."""
        if self._now is None:
            return
        rows, tokens = len(emitted), sum(weight * count for weight, count in zip(self.weights, emitted, strict=True))
        self._left = [max(1.0, left - count) for left, count in zip(self._left, emitted, strict=True)]
        if self.drafts and not could_draft:
            return
        drafted, depth = self.drafts, max(1, self._depth)
        width = max(tree.size for tree in trees)
        if self._learns and spent_ms is not None:
            expected_ms = self._now.measured_draft(depth) if drafted and not self._unread else 0.0
            ratio = spent_ms[0] / expected_ms if expected_ms > 0 else None
            self._experience.rounds.note(width, spent_ms[1] / self._now.measured(rows * width), ratio)
            self._now.refresh()
        elif self._learns:
            self._experience.rounds.unlike += drafted
        if not drafted:
            self._plain_left -= 1
            self._unread += 1
            self._enter(self._share, max(STAKE, self._reserve + self._price))
            return
        self._row_tokens_per_round = [
            pace + _MEMORY * (count - pace) for pace, count in zip(self._row_tokens_per_round, emitted, strict=True)
        ]
        self._experience.tokens_per_round += _MEMORY * (tokens / rows - self._experience.tokens_per_round)
        known = [tree.accept_probs for tree in trees if tree.accept_probs is not None]
        if len(known) == len(trees):
            promised = sum(sum(probs) - 1 for probs in known)
            self._promised += _MEMORY * (promised / rows - self._promised)
            self._accepted += _MEMORY * ((sum(emitted) - rows) / rows - self._accepted)
        self._draft_ms += _MEMORY * (self._now.draft(depth) - self._draft_ms)
        self._unsettled.append((tokens / rows, width, depth, self._unread))
        self._unread = 0
        if self._mode == "auto":
            self._judge()

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        self._now = _Now(self._costs, rows, self._experience.rounds, self._per_row) if self._costs is not None else None

    def _judge(self) -> None:
        """Settle the account, and go on drafting or pause; rules 2, 6 and 7 above."""
        assert self._now is not None, "without costs nothing is weighed"
        self._plain_left = self._experience.rounds.wants_plain if self._learns else 0
        if self._costs_unknown:
            return
        gain = sum(tokens - self._now.plain_rounds(*spent) for tokens, *spent in self._unsettled)
        self._enter(gain, _MOST_HELD)
        just_seen, self._unsettled = len(self._unsettled) > 1, []
        if self._before_try is not None and self._experience.account > self._before_try:
            self._before_try, self._experience.lost_tries = None, 0
        lost = self._experience.account <= self._reserve
        self._experience.lost_tries += lost
        if lost or just_seen:
            self._plan()

    def _enter(self, tokens: float, most: float) -> None:
        """Add to the account, not above `most`, or take from it."""
        account = self._experience.account
        self._experience.account = min(account + tokens, max(account, most))

    def _plan(self) -> None:
        """How many plain rounds come before the next draft, down to the end of the answer; rules 3 to 5 above."""
        assert self._now is not None, "without costs nothing is weighed"
        left, depth, lost_tries = max(self._left), _SMALL - 1, self._experience.lost_tries
        drafted = self._now.plain_rounds(_SMALL, depth)
        reading = self._now.plain_rounds(_SMALL, depth, self._unread) - drafted
        gain = 1 - drafted / max(_SMALL / 2, self._experience.tokens_per_round)  # of a round, as a share of its tokens
        rounds = LEAST_PAIRS if self._costs_unknown else 1  # that a try takes
        cost = reading + rounds * (drafted - 1)
        self._price = reading + min(_MOST_OF_TRY, rounds * (drafted - 1))
        # What cannot win by these costs may win if they are wrong: but only what plain rounds earn is spent on it.
        self._reserve = STAKE if gain * (left - rounds) <= cost else 0.0
        certain = not (self._reserve or self._costs_unknown or lost_tries)
        missing = 0.0 if certain else max(0.0, self._reserve + self._price - self._experience.account)
        saving = missing / self._share
        due = self._experience.rounds.wants_plain if self._learns else 0
        # Costs are measured at the start of an answer or not at all; where the clock is not read, they are not wrong.
        never = saving > (0 if self._costs_unknown else left / 2) or (self._reserve > 0 and not self._learns)
        self._plain_left = ceil(left if never else max(saving, due))
        if lost_tries:
            self._promised = self._accepted = _SMALL / 2
            self._before_try = max(self._experience.account, self._reserve + self._price)

    @property
    def _share(self) -> float:
        """Of a token that a plain round pays for the next try."""
        return SHARE / (1 + self._experience.lost_tries)

    @property
    def _costs_unknown(self) -> bool:
        """Whether what drafting costs here is still to be seen."""
        return self._learns and self._experience.rounds.unknown

    @property
    def _calibration_factor(self) -> float:
        """Accepted drafts, as a share of what the acceptance probabilities promised."""
        # A lucky run says little of the next drafts.
        return min(_MOST_OPTIMISM, (self._accepted + _SMOOTHING) / (self._promised + _SMOOTHING))

    def _rate(self, tokens: int) -> float:
        """Tokens per millisecond of the whole batch, not below those of plain decoding."""
        assert self._now is not None, "rates follow from costs"
        plain = self.rows / self._now.verify(self.rows)
        round_ms = self._now.verify(tokens) + self._draft_ms
        return max(plain, self.rows * self._experience.tokens_per_round / round_ms)
