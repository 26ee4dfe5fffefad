"""How many nodes a round verifies, and when drafting pauses: from measured costs and from what drafts bring.

Nodes: a round that verifies a tree emits one token and, for each node, one more with the probability that the node's
whole path is accepted. Over a long text the best choice of nodes maximises expected tokens minus rate times cost, where
the rate (tokens per millisecond) is that of the decoding as a whole: a node pays when it brings more tokens than the
time of its verification would bring otherwise. Plain decoding, chains and static trees are special cases of this.

Pauses: drafting has an account, in tokens, which begins with a stake of two (`STAKE`). A drafted round adds the tokens
that it emitted, and takes as many as plain decoding would have emitted in its time; the account holds eight at the
most. At its reserve, which is zero but where too little of the answer is left to win a try back, drafting pauses. Each
plain round then pays a fiftieth of a token (`SHARE`), until the account covers the reserve and the cost of a try: a
drafted round with a small tree. A try that is lost makes the next one later; where saving up would take more than half
of what is left, nothing more is drafted. So drafting can lose the stake, that share, and eight tokens of what it won.

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

from headstart.decode.costs import Costs as Costs
from headstart.decode.learned import SHARE, STAKE, TWICE, Experience, Rounds, size_of
from headstart.decode.options import Draft
from headstart.tree.tree import Tree

_SMALL = 4
"""Nodes of a row, root included, while drafting is tried: a small tree shows whether it pays, too. Until it is known
how many are accepted, half of them are taken to be."""
_MEMORY = 1 / 8
"""Weight of the newest round in the running means."""
_LUCK = 1.25
"""How far above what was promised the next drafts are believed to be accepted."""
_STAKE_SHARE = 1 / 12
"""The stake is at most this share of the answer's tokens, where nothing is known of earlier answers."""


class _Now:
    """What rounds with this many rows cost: as measured, corrected by what rounds really took."""

    def __init__(self, costs: Costs, rows: int, rounds: Rounds, per_row: bool) -> None:
        self._costs, self._rows, self._rounds, self._per_row = costs, rows, rounds, per_row
        self._measured: dict[int, float] = {}
        self.refresh()

    def refresh(self) -> None:
        """Take in what was learned since."""
        self._verifying: dict[int, float] = {}  # by size
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
        size = size_of(max(1, tokens // self._rows))
        if size not in self._verifying:
            self._verifying[size] = self._rounds.verifying(size)
        corrected = self.measured(tokens) * self._verifying[size]
        return max(corrected, self.measured(self._rows))  # more tokens never take less

    def draft(self, depth: int, unread: int = 0) -> float:
        """Milliseconds of a draft that has so many tokens of each row to read first."""
        return self.measured_draft(depth) * self._drafting + self._costs.read_ms * unread * self._rows

    def plain_rounds(self, nodes: int, depth: int, unread: int = 0) -> float:
        """Plain rounds in the time of a drafted one: what it must emit to pay."""
        return (self.verify(self._rows * nodes) + self.draft(depth, unread)) / self.verify(self._rows)


class Controller:
    """Decides, round by round, whether a batch drafts and how many nodes it verifies.

    Without costs it drafts always, and verifies what is proposed. Decisions follow from costs and from what was
    accepted. With an experience, the costs are corrected by what rounds take, and what was learned is kept for the next
    call; without one the clock decides nothing, so that a seeded text is reproducible.

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
        learned = experience if mode == "auto" else None
        self._learns = learned is not None
        self._known = learned or Experience(min(STAKE, _STAKE_SHARE * limit))
        self._left = [max(1.0, limit - 1.0)] * rows  # tokens that each row may still emit after its first one
        self._row_tokens_per_round = [1.5] * rows  # tokens a round of each row, lately
        self._draft_ms = costs.draft_ms if costs else 0.0  # of recent drafts
        self._depth = 0  # of the newest draft
        self._unread = prompt  # tokens of the text that the heads have not read, beyond those of the last round
        self._promised = self._accepted = _SMALL / 2  # drafts of a row that probabilities promised, and those accepted
        self._unsettled: list[tuple[float, int, int, int]] = []  # rounds that wait for their costs to be seen
        self._plain_left = 0  # plain rounds before the next draft
        self._try_cost = 0.0  # tokens that a try costs which brings nothing
        self._reserve = 0.0  # tokens that must stay in the account
        self._before_try: float | None = None  # what the account held at the start of a try that has not paid yet
        self._set_rows(rows)
        if costs is not None and mode == "auto":
            self._plan()

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
        """Nodes of a row that this round may draft, at most the `max_nodes` that fit into memory."""
        if self._now is None:
            return max_nodes
        if self._unseen or self._before_try is not None:
            return min(max_nodes, _SMALL)
        return min(max_nodes, self._known.rounds.most_nodes) if self._learns else max_nodes

    @property
    def threshold(self) -> float:
        """What the acceptance probability of a node must be to pay for its verification, by what one takes in trees of
        4 to 16 nodes; `prune` decides exactly, afterwards."""
        if self._now is None or self._mode == "off" or self._unseen:
            return 0.0
        few, many = 4 * self.rows, 16 * self.rows
        rate = self._rate(few) / self._calibration_factor
        return min(0.9, rate * (self._now.verify(many) - self._now.verify(few)) / (many - few))

    @property
    def level_threshold(self) -> float:
        """How many tokens another level of drafting must promise; see `Request.level_threshold`."""
        if self._now is None or self._mode == "off" or self._unseen:
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
        if len(probs_by_row) < len(trees) or width == 1 or self._unseen:
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

    def note(self, trees: Sequence[Tree], emitted: Sequence[int], spent_ms: tuple[float, float] | None = None) -> None:
        """Learn from the outcome of a round: the trees as verified, the tokens that each row emitted, and the
        milliseconds that draft and forward took, None when a drafter failed."""
        if self._now is None:
            return
        rows, tokens = len(emitted), sum(weight * count for weight, count in zip(self.weights, emitted, strict=True))
        self._left = [max(1.0, left - count) for left, count in zip(self._left, emitted, strict=True)]
        drafted, depth = self.drafts, max(1, self._depth)
        width = max(tree.size for tree in trees)
        if self._learns and spent_ms is not None:
            expected_ms = self._now.measured_draft(depth) if drafted and not self._unread else 0.0
            ratio = spent_ms[0] / expected_ms if expected_ms > 0 else None
            self._known.rounds.note(width, spent_ms[1] / self._now.measured(rows * width), ratio)
            self._now.refresh()
        if not drafted:
            self._plain_left -= 1
            self._unread += 1
            self._enter(self._share, max(STAKE, self._reserve + self._try_cost))
            return
        self._row_tokens_per_round = [
            pace + _MEMORY * (count - pace) for pace, count in zip(self._row_tokens_per_round, emitted, strict=True)
        ]
        self._known.tokens_per_round += _MEMORY * (tokens / rows - self._known.tokens_per_round)
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
        self._now = _Now(self._costs, rows, self._known.rounds, self._per_row) if self._costs is not None else None

    def _judge(self) -> None:
        """Settle the account, and go on drafting or pause."""
        assert self._now is not None, "without costs nothing is weighed"
        self._plain_left = self._known.rounds.wants_plain if self._learns else 0
        if self._unseen:
            return
        gain = sum(tokens - self._now.plain_rounds(*spent) for tokens, *spent in self._unsettled)
        self._enter(gain, 4 * STAKE)
        just_seen, self._unsettled = len(self._unsettled) > 1, []
        if self._before_try is not None and self._known.account > self._before_try:
            self._before_try, self._known.lost_tries = None, 0
        if self._known.account <= self._reserve:
            self._known.lost_tries += 1
        if self._known.account <= self._reserve or just_seen:
            self._plan()

    def _enter(self, tokens: float, most: float) -> None:
        """Add to the account, not above `most`, or take from it."""
        account = self._known.account
        self._known.account = min(account + tokens, max(account, most))

    def _plan(self) -> None:
        """How many plain rounds come before the next draft, and whether that is a try: all that are left where the
        answer cannot win the try back."""
        assert self._now is not None, "without costs nothing is weighed"
        left, depth, lost_tries = max(self._left), _SMALL - 1, self._known.lost_tries
        drafted = self._now.plain_rounds(_SMALL, depth)
        reading = self._now.plain_rounds(_SMALL, depth, self._unread) - drafted
        gain = 1 - drafted / max(_SMALL / 2, self._known.tokens_per_round)  # of a round, as a share of its tokens
        rounds = TWICE if self._unseen else 1  # that a try takes
        cost = reading + rounds * (drafted - 1)
        self._try_cost = reading + min(2 * STAKE, rounds * (drafted - 1))
        # What cannot win by these costs may win if they are wrong: but only what plain rounds earn is spent on it.
        self._reserve = STAKE if gain * (left - rounds) <= cost else 0.0
        certain = not (self._reserve or self._unseen or lost_tries)
        saving = 0.0 if certain else max(0.0, self._reserve + self._try_cost - self._known.account) / self._share
        if self._reserve and not self._learns:
            saving = left  # where the clock is not read, costs are not wrong
        plain = self._known.rounds.wants_plain if self._learns else 0
        # Where saving takes more than half of what is left, nothing more is drafted; nor where costs are still to be
        # seen, which is done at the start of an answer.
        never = saving > (0 if self._unseen else left / 2)
        self._plain_left = ceil(left if never else max(saving, plain))
        if lost_tries:
            self._promised = self._accepted = _SMALL / 2
            self._before_try = max(self._known.account, self._reserve + self._try_cost)

    @property
    def _share(self) -> float:
        """Of a token that a plain round pays for the next try."""
        return SHARE / (1 + self._known.lost_tries)

    @property
    def _unseen(self) -> bool:
        """Whether what drafting costs here is still to be seen."""
        return self._learns and self._known.rounds.unseen

    @property
    def _calibration_factor(self) -> float:
        """Accepted drafts, as a share of what the acceptance probabilities promised."""
        # A lucky run says little of the next drafts.
        return min(_LUCK, (self._accepted + _MEMORY) / (self._promised + _MEMORY))

    def _rate(self, tokens: int) -> float:
        """Tokens per millisecond of the whole batch, not below those of plain decoding."""
        assert self._now is not None, "rates follow from costs"
        plain = self.rows / self._now.verify(self.rows)
        round_ms = self._now.verify(tokens) + self._draft_ms
        return max(plain, self.rows * self._known.tokens_per_round / round_ms)
