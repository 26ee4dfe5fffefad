"""Choose how many nodes each round verifies, and pause drafting while it does not pay.

Nodes: a round emits one token and, for each draft, one more with the probability that its whole path is accepted. The
best choice of nodes maximises expected tokens - rate * cost, where the rate (tokens per millisecond) is that of the
whole text: a node pays if it adds more tokens than plain progress would in its verification time. Plain decoding,
chains and static trees are special cases. Nothing is pruned if a tree has sampled nodes or no probabilities.

Pauses ("auto"). Amounts are tokens per row; node counts include the root, so 4 nodes are 3 drafts. A drafted round is
worth its tokens less the plain rounds that fit into its time. "Left" is the most that a row may still emit.

1. The account starts with a stake of 2 (`STAKE`); when sampling or `deterministic`, at most a twelfth of
   `max_new_tokens`.
2. A drafted round adds its worth, which may be negative, up to an account of 8 (`_MOST_HELD`). A plain round adds
   1/50 (`SHARE`) / (1 + lost tries), up to 2 or reserve + price, whichever is more.
3. A try is one drafted round (two while costs are unknown) of 4 nodes a row and 3 levels (`_SMALL`). Its cost, in
   tokens: the plain rounds that fit into its time, minus one per round, plus the time in which the heads read the text
   they have not read yet (the prompt at first, then one token per plain round). Its price is the same, with at most 4
   (`_MOST_OF_TRY`) beside the reading.
4. The reserve is 2 if the tokens left cannot win back a try: (1 - its round's time in plain rounds / max(2, mean tokens
   a round)) * (left - its rounds) <= cost. This includes costs at which drafting never wins. Otherwise it is 0.
5. A plan is made when a call starts, when costs become known, and when a try is lost; it fixes price and reserve until
   the next plan. Drafting starts at once if the reserve is 0, costs are known and no try is lost. Otherwise plain
   rounds come first, until the account covers reserve + price. If these are more than half of the tokens left, or any
   while costs are unknown, the call drafts no more; so the first answer of a new loop is plain if a try costs more than
   the stake, as after a long prompt. When sampling or `deterministic`, a reserve ends drafting as well.
6. A try is lost when a drafted round leaves the account at the reserve or below. The loss is counted first, so plain
   rounds of the first pause already add 1/100, and of the second 1/150.
7. After a loss drafting is on trial, with 4 nodes at most, until the account exceeds its value at the start of the
   trial (which resets the lost tries) or the next try is lost. Statistics of promised drafts start anew.
8. Account, lost tries, mean tokens a round and measured rounds serve later calls of the loop with a similar number of
   rows (`size_of`). When sampling or `deterministic`, every call starts anew.

So drafting can lose the stake, that share of plain rounds, and eight tokens of its gains.

Measuring (greedy "auto", not `deterministic`; `learned.py`): a drafted round and the plain rounds before it make a
pair, which shows how wrong the costs are. Only the first 4 drafted rounds after plain ones count, or the first 24 of a
call while their kind (trees of this size, or drafts) has fewer than 2 pairs. A draft counts only if it read no more
text than usual, which the first one does. Rounds that captured a graph for later ones are not timed. A new loop starts
with 2 plain rounds. Costs are unknown until 2 pairs of drafts exist, for 4 timed and 32 untimed drafted rounds at most:
until then trees have at most 4 nodes, thresholds are 0, nothing is pruned, and rounds enter the account only
afterwards, at the corrected costs. From then on trees have at most twice the nodes of the largest size with 2 pairs.
Two plain rounds are due after 100 drafted ones (200 with 12 pairs of drafts), and after 24 if one of these verified a
larger size. Each time plain rounds are measured again, every tree size not verified since the previous ones drops its
oldest pair.

A token of a row is worth the time it saves: for the row that ends last, the shared part of a round's cost and the row's
own; for any other row, its own part only.

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
"""Nodes of a row, root included, while drafting is tried. Prior: half of them promised and accepted, so a try is
expected to emit 2 tokens a round."""
_MEMORY = 1 / 8
"""Weight of the newest round in the running means."""
_SMOOTHING = 1 / 8
"""Drafts added to both promised and accepted ones, so that a handful of drafts barely moves their ratio."""
_MOST_HELD = 4 * STAKE
"""Tokens in the account above which drafted rounds add nothing."""
_MOST_OF_TRY = 2 * STAKE
"""Most tokens saved for a try, beside reading the text."""
_MOST_OPTIMISM = 1.25
"""Upper bound of accepted / promised drafts, as expected of the next ones."""
_LOGS = np.log2(np.arange(1, 1025))
"""log2 of 1 to 1024 nodes."""
_STAKE_SHARE = 1 / 12
"""Largest stake, as a share of the answer's tokens, without experience of earlier answers."""


class _Now:
    """Costs of rounds with this many rows, corrected by the times of real rounds."""

    def __init__(self, costs: Costs, rows: int, rounds: RoundTimes, per_row: bool) -> None:
        self._costs, self._rows, self._rounds, self._per_row = costs, rows, rounds, per_row
        self._measured: dict[int, float] = {}
        self._known: object = None  # the ratios that the corrections follow from
        self.refresh()

    def refresh(self) -> None:
        """Update the corrections after new measurements."""
        if self._known is not self._rounds.ratios:
            self._known = self._rounds.ratios
            # By nodes of a row, computed outside the timed part.
            self._slower: list[float] = np.interp(_LOGS, *self._rounds.verifying).tolist()
            self._drafting = self._rounds.drafting

    def measured(self, tokens: int) -> float:
        """Milliseconds of a forward over this many tokens, uncorrected."""
        if tokens not in self._measured:
            self._measured[tokens] = self._costs.verify(tokens)
        return self._measured[tokens]

    def measured_draft(self, depth: int) -> float:
        """Milliseconds of a draft of this depth without extra text to read, uncorrected."""
        return self._rows * self._costs.draft(depth) if self._per_row else self._costs.draft(depth, self._rows)

    def verify(self, tokens: int) -> float:
        slower = self._slower[min(max(1, tokens // self._rows), len(_LOGS)) - 1]
        return max(self.measured(tokens) * slower, self.measured(self._rows))  # more tokens never take less

    def draft(self, depth: int, unread: int = 0) -> float:
        """Milliseconds of a draft that first reads `unread` tokens of each row."""
        return self.measured_draft(depth) * self._drafting + self._costs.read_ms * unread * self._rows

    def plain_rounds(self, nodes: int, depth: int, unread: int = 0) -> float:
        """Plain rounds in the time of a drafted one: the tokens it must emit to pay."""
        return (self.verify(self._rows * nodes) + self.draft(depth, unread)) / self.verify(self._rows)


class Budget:
    """Decides each round whether a batch drafts and how many nodes it verifies.

    Without costs it always drafts, and verifies every proposed node. With an experience, costs are corrected by
    measured rounds and the result serves the next call; without one decisions ignore the clock, so that a seeded text
    is reproducible.

    Args:
        costs: as measured on this machine; None when nothing was measured.
        mode: "on" never pauses, "off" never drafts, "auto" pauses while drafting does not pay.
        rows: of the batch.
        limit: most tokens that a row emits.
        draft_ms: milliseconds of a draft for one row at any depth; None takes those of `costs`.
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
        self._unread = prompt  # tokens that the heads have yet to read, beyond the last round's
        self._promised = self._accepted = _SMALL / 2  # drafts of a row: expected by probabilities, and accepted
        self._unsettled: list[tuple[float, int, int, int]] = []  # rounds not in the account while costs are unknown
        self._plain_left = 0  # plain rounds before the next draft
        self._price = 0.0  # tokens to save for a try
        self._reserve = 0.0  # tokens that must stay in the account
        self._before_try: float | None = None  # account at the start of a trial that has not paid yet
        self._set_rows(rows)
        if costs is not None and mode == "auto":
            self._plan()

    def reorder(self, rows: Sequence[int]) -> None:
        self._left = [self._left[row] for row in rows]
        self._row_tokens_per_round = [self._row_tokens_per_round[row] for row in rows]
        self._set_rows(len(rows))

    @property
    def weights(self) -> list[float]:
        """Value of a token of each row, on average 1: the time that it saves.

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
        """Whether a draft is still expected before the answer is complete."""
        return self._mode != "off" and self._plain_left < max(self._left)

    @property
    def drafts(self) -> bool:
        """Whether this round drafts."""
        return self._mode != "off" and self._plain_left == 0

    def room(self, max_nodes: int) -> int:
        """Nodes of a row that this round may draft; `max_nodes` is the limit of memory and target."""
        if self._now is None:
            return max_nodes
        if self._costs_unknown or self._before_try is not None:
            return min(max_nodes, _SMALL)
        return min(max_nodes, self._experience.rounds.most_nodes) if self._learns else max_nodes

    @property
    def threshold(self) -> float:
        """Acceptance probability at which a node pays, by the mean time of a further node in trees of 4 to 16; `prune`
        decides exactly, afterwards.

        The node time is never below the measured slope, scaled by the 4-node correction. Corrections per size rest on
        few rounds and can make 4 and 16 nodes look equally fast; nodes would then seem free, and the heads would draft
        up to the limit."""
        if self._now is None or self._mode == "off" or self._costs_unknown:
            return 0.0
        few, many = 4 * self.rows, 16 * self.rows
        slower = self._now.verify(few) / self._now.measured(few)
        measured_ms = slower * (self._now.measured(many) - self._now.measured(few))
        node_ms = max(measured_ms, self._now.verify(many) - self._now.verify(few)) / (many - few)
        return min(0.9, self._rate(few) / self._calibration_factor * node_ms)

    @property
    def level_threshold(self) -> float:
        """Expected tokens at which another level of drafting pays; see `Request.level_threshold`."""
        if self._now is None or self._mode == "off" or self._costs_unknown:
            return 0.0
        return self._rate(4 * self.rows) * (self._now.draft(2) - self._now.draft(1)) / self._calibration_factor

    def threads_changed(self) -> None:
        """Forget the plain rounds that were timed with another number of threads."""
        self._experience.rounds.plain = ()

    def prune(self, trees: list[Tree]) -> list[Tree]:
        """Keep the best nodes of each row that pay. Every row gets the same number: the widest sets the cost.

        Trees with sampled nodes stay as they are: dropping a node because of its token would break losslessness.
        """
        if self._now is None or self._costs is None:
            return trees
        width = max(tree.size for tree in trees)
        # Deeper levels than the heads' come from another drafter and cost nothing.
        levels = max(tree.depth if tree.levels is None else tree.levels for tree in trees)
        self._depth = max(1, levels) if self._costs.level_ms else max(1, self._costs.levels)
        probs_by_row = [tree.accept_probs for tree in trees if tree.accept_probs is not None and not tree.sampled]
        if len(probs_by_row) < len(trees) or width == 1 or self._costs_unknown:
            return trees
        ranked = [tree.best(tree.size) for tree in trees]
        # Expected tokens added by the root, then by the next best node of every row.
        gains, factors = [0.0] * width, [1.0, *[self._calibration_factor] * (width - 1)]
        for weight, probs, order in zip(self.weights, probs_by_row, ranked, strict=True):
            for place, node in enumerate(order):
                gains[place] += weight * probs[node] * factors[place]
        rate = self._rate(width * self.rows)
        totals = enumerate(accumulate(gains), start=1)
        net = [tokens - rate * self._now.verify(self.rows * nodes) for nodes, tokens in totals]
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
        """Learn from a round: its verified trees, the tokens that each row emitted, and the milliseconds of draft and
        forward unless they are untypical. `could_draft` is false without room or a working drafter: such a round says
        nothing about drafting."""
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
            self._promised += _MEMORY * (sum(sum(probs) - 1 for probs in known) / rows - self._promised)
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
        """Settle the account, then keep drafting or pause; rules 2, 6 and 7 above."""
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
        """Add to the account up to `most`, or subtract."""
        account = self._experience.account
        self._experience.account = min(account + tokens, max(account, most))

    def _plan(self) -> None:
        """Set the number of plain rounds before the next draft, or before the end of the answer; rules 3 to 5 above."""
        assert self._now is not None, "without costs nothing is weighed"
        left, depth, lost_tries = max(self._left), _SMALL - 1, self._experience.lost_tries
        drafted = self._now.plain_rounds(_SMALL, depth)
        reading = self._now.plain_rounds(_SMALL, depth, self._unread) - drafted
        gain = 1 - drafted / max(_SMALL / 2, self._experience.tokens_per_round)  # of a round, as a share of its tokens
        rounds = LEAST_PAIRS if self._costs_unknown else 1  # of a try
        cost = reading + rounds * (drafted - 1)
        self._price = reading + min(_MOST_OF_TRY, rounds * (drafted - 1))
        # Wrong costs may hide a gain, but only tokens earned by plain rounds are spent on finding out.
        self._reserve = STAKE if gain * (left - rounds) <= cost else 0.0
        certain = not (self._reserve or self._costs_unknown or lost_tries)
        missing = 0.0 if certain else max(0.0, self._reserve + self._price - self._experience.account)
        saving = missing / self._share
        due = self._experience.rounds.wants_plain if self._learns else 0
        # Costs are measured at the start of an answer or not at all; without the clock they count as right.
        never = saving > (0 if self._costs_unknown else left / 2) or (self._reserve > 0 and not self._learns)
        self._plain_left = ceil(left if never else max(saving, due))
        if lost_tries:
            self._promised = self._accepted = _SMALL / 2
            self._before_try = max(self._experience.account, self._reserve + self._price)

    @property
    def _share(self) -> float:
        """Tokens that a plain round adds to the account."""
        return SHARE / (1 + self._experience.lost_tries)

    @property
    def _costs_unknown(self) -> bool:
        """Whether too few drafted rounds were measured to trust the costs."""
        return self._learns and self._experience.rounds.unknown

    @property
    def _calibration_factor(self) -> float:
        """Accepted over promised drafts, capped since a lucky run says little about the next drafts."""
        return min(_MOST_OPTIMISM, (self._accepted + _SMOOTHING) / (self._promised + _SMOOTHING))

    def _rate(self, tokens: int) -> float:
        """Tokens per millisecond of the whole batch, not below plain decoding."""
        assert self._now is not None, "rates follow from costs"
        plain = self.rows / self._now.verify(self.rows)
        round_ms = self._now.verify(tokens) + self._draft_ms
        return max(plain, self.rows * self._experience.tokens_per_round / round_ms)
