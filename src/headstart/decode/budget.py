"""Choose how many nodes each round verifies, and pause drafting while it does not pay.

Glossary, in tokens per row:

- account: tokens that drafting may still lose.
- trial: all drafted rounds from one plan to the next; the plan prices only the first one or two. It is lost when a
  drafted round brings the account down to the reserve or lower.
- price: tokens that the account must hold beyond the reserve before a trial, unless drafting starts at once.
- reserve: tokens of the account that a trial must not spend; 0 or the stake.

Nodes: a round emits one token, and one more for each accepted draft. The best node count maximises expected
tokens - rate * cost, where the rate (tokens per millisecond) is that of the whole text: a node pays if it adds more
tokens than the text gains in its verification time. Plain decoding, chains and static trees are special cases. Nothing
is pruned if a tree has sampled nodes or no probabilities.

Pauses ("auto"). Node counts include the root, so 4 nodes are 3 drafts. A drafted round gains its tokens minus the
number of plain rounds that fit into its time. "Left" is the most that a row may still emit.

1. The account starts with a stake of 2 (`STAKE`); when sampling or `deterministic`, at most a twelfth of
   `max_new_tokens`.
2. A drafted round adds its gain, which may be negative, up to an account of 8 (`_MAX_ACCOUNT`). A plain round adds
   1/50 (`EXPLORATION`) / (1 + lost trials), up to 2 or reserve + price, whichever is more.
3. A plan prices one drafted round (two while costs are unknown) with 4 nodes per row and 3 levels (`_TRIAL_NODES`).
   The cost, in plain rounds, is the time of the priced rounds minus 1 for each (the token that it emits in any case),
   plus the time in which the heads read unread text (the prompt at first, then one token per plain round). The price is
   the cost, but its part other than reading is capped at 4 (`_MAX_PRICE`).
4. The reserve is 2 if the tokens left cannot win back the cost: gain * (left - rounds) <= cost. `rounds` are the priced
   ones; `gain` per token is 1 - drafted / max(2, mean tokens per round), where `drafted` is the time of a drafted round
   in plain rounds. The condition also holds if `gain` <= 0: drafting cannot win at these costs. Else the reserve is 0.
5. A plan is made when a call starts, when costs become known, when a trial is lost, and when rows come or go in a
   served batch; price and reserve hold until the next plan. Plain rounds that are due come first. Drafting then starts
   at once if the reserve is 0, costs are known and no trial is lost. Otherwise plain rounds save until the account
   covers reserve + price. If saving takes more plain rounds than half of the tokens left, or takes any while costs are
   unknown, the call drafts no more. So the first answer of a new loop is plain if it measures and the price exceeds the
   stake, as after a long prompt. When sampling or `deterministic`, a reserve ends drafting as well.
6. A loss counts before the plan that follows it, so plain rounds already add 1/100 after a first loss, and 1/150 after
   a second.
7. After a loss trees have at most 4 nodes until the account exceeds both its value at the plan and reserve + price
   (`_recovery_balance`), which resets the lost trials. Statistics of expected and accepted drafts start anew.
8. Account, lost trials, mean tokens per round and measured rounds serve later calls of the loop with a similar number
   of rows (`size_of`). When sampling or `deterministic`, every call starts without them.

So, at the corrected costs, a call loses against plain decoding at most the sum of the account at its start (8 tokens or
less), 1/50 token per plain round, and the overdraft of the last lost trial.

Measuring (greedy "auto", not `deterministic`; `experience.py`): a drafted round gives a pair for each kind of work: its
draft, and the forward of its tree size. A pair compares this work with the plain rounds before it, which shows how
wrong the costs are. Only the first 4 timed drafted rounds after plain ones give pairs, or the first 24 for a kind with
fewer than 2 pairs if the newest plain one belongs to this call. A draft counts only if it read no more text than usual;
the first one of a call reads the prompt. Rounds that captured a graph for later ones are untimed. A new loop starts
with 2 plain rounds. Costs count as unknown until there are 2 pairs of drafts, 4 timed drafted rounds since the last
plain one, or 32 untimed drafted rounds in all. While they are unknown, trees have at most 4 nodes, thresholds are 0,
and nothing is pruned; these rounds enter the account afterwards, at the corrected costs. From then on trees have at
most twice the nodes of the largest size with 2 pairs. Two plain rounds are due after 100 drafted ones (200 with 12
pairs of drafts), and after 24 if one of these verified a tree size larger than any with 2 pairs. Each time plain rounds
are measured again, every tree size not verified since the previous ones drops its oldest pair.

A token of a row is worth the time it saves: for the row that ends last, the shared part of a round's cost and the row's
own; for any other row, its own part only.

Sources: costs as in Sequoia (arXiv 2402.12374) and CaDDTree (2606.01813); the rate is the multiplier of Dinkelbach's
method for maximising a ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil, exp, sqrt

import numpy as np

from headstart.decode.costs import Costs as Costs
from headstart.decode.experience import EXPLORATION, MIN_PAIRS, STAKE, Experience, RoundTimes
from headstart.decode.options import Draft
from headstart.tree.tree import Tree

_TRIAL_NODES = 4
"""Nodes per row of the rounds that a plan prices, root included.

Half of this is the initial value of both expected and accepted drafts per row, and the fewest tokens per round that a
plan assumes."""
_EMA_WEIGHT = 1 / 8
"""Weight of the newest round in moving averages."""
_SMOOTHING = 1 / 8
"""Added to both moving averages of drafts, expected and accepted, so that their ratio stays near 1 when both are close
to 0."""
_MAX_ACCOUNT = 4 * STAKE
"""Tokens in the account above which drafted rounds add nothing."""
_MAX_PRICE = 2 * STAKE
"""Maximum price of a trial, apart from reading text."""
_MAX_CALIBRATION_FACTOR = 1.25
"""Upper bound of accepted / expected drafts, as assumed for the next ones."""
_LOGS = np.log2(np.arange(1, 1025))
"""log2 of 1 to 1024 nodes."""
_STAKE_FRACTION = 1 / 12
"""Largest stake, as a fraction of the answer's tokens, without experience of earlier answers."""


class _CorrectedCosts:
    """Costs of rounds with this many rows, corrected by the times of real rounds.

    `draft_time_per_row`: if true, draft time scales linearly with the rows, else like the target's forward.
    """

    def __init__(self, costs: Costs, rows: int, rounds: RoundTimes, draft_time_per_row: bool) -> None:
        self._costs, self._rows, self._rounds, self._draft_time_per_row = costs, rows, rounds, draft_time_per_row
        self._verify_ms: dict[int, float] = {}
        self._ratios: object = None  # the ratios that the corrections follow from
        self.refresh()

    def refresh(self) -> None:
        """Update the corrections after new measurements."""
        if self._ratios is not self._rounds.ratios:
            self._ratios = self._rounds.ratios
            # By nodes of a row, computed outside the timed part.
            self._verify_slowdown: list[float] = np.interp(_LOGS, *self._rounds.verify_slowdown).tolist()
            self._draft_slowdown = self._rounds.draft_slowdown

    def stored_verify(self, tokens: int) -> float:
        """Milliseconds of a forward over this many tokens, uncorrected."""
        if tokens not in self._verify_ms:
            self._verify_ms[tokens] = self._costs.verify(tokens)
        return self._verify_ms[tokens]

    def stored_draft(self, depth: int) -> float:
        """Milliseconds of a draft of this depth without extra text to read, uncorrected."""
        return (
            self._rows * self._costs.draft(depth) if self._draft_time_per_row else self._costs.draft(depth, self._rows)
        )

    def verify(self, tokens: int) -> float:
        slowdown = self._verify_slowdown[min(max(1, tokens // self._rows), len(_LOGS)) - 1]
        # Never less than a plain round.
        return max(self.stored_verify(tokens) * slowdown, self.stored_verify(self._rows))

    def draft(self, depth: int, unread: int = 0) -> float:
        """Milliseconds of a draft that first reads `unread` tokens of each row."""
        return self.stored_draft(depth) * self._draft_slowdown + self._costs.read_ms * unread * self._rows

    def plain_rounds(self, nodes: int, depth: int, unread: int = 0) -> float:
        """Plain rounds in the time of a drafted one: the tokens it must emit to pay."""
        return (self.verify(self._rows * nodes) + self.draft(depth, unread)) / self.verify(self._rows)


class Budget:
    """Decides each round whether a batch drafts and how many nodes it verifies.

    Without costs it always drafts, and verifies every proposed node. With an experience, measured rounds correct the
    costs and the result serves the next call; without one decisions ignore the clock, so that a seeded text is
    reproducible.

    Args:
        costs: as measured on this machine; None if nothing was measured.
        mode: "on" never pauses, "off" never drafts, "auto" pauses while drafting does not pay.
        rows: number of rows of the batch.
        limit: maximum tokens that a row emits.
        draft_ms: milliseconds of a draft for one row at any depth; None takes those of `costs`.
        prompt: tokens of the longest prompt, which the heads read before their first draft.
        experience: of earlier calls, changed in place; only "auto" uses it.
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
        self._draft_time_per_row = draft_ms is not None
        if costs is not None and draft_ms is not None:
            costs = replace(costs, draft_ms=draft_ms, level_ms=0.0, read_ms=0.0)
        self._costs = costs
        self._mode = mode
        shared = experience if mode == "auto" else None
        if shared is not None:
            shared.rounds.fresh = False
        self._learns = shared is not None
        self._experience = shared or Experience(min(STAKE, _STAKE_FRACTION * limit))
        self._left = [max(1.0, limit - 1.0)] * rows  # tokens that each row may still emit after its first one
        self._row_tokens_per_round = [1.5] * rows  # moving average of each row
        self._draft_ms = costs.draft_ms if costs else 0.0  # moving average
        self._depth = 0  # of the newest draft
        self._unread = prompt  # tokens that the heads have yet to read, beyond the last round's
        self._expected = self._accepted = _TRIAL_NODES / 2  # drafts per row, by their probabilities and in fact
        self._unsettled: list[tuple[float, int, int, int]] = []  # rounds not in the account while costs are unknown
        self._plain_left = 0  # plain rounds before the next draft
        self._price = self._reserve = 0.0
        self._recovery_balance: float | None = None  # after a loss: limits trees until the account exceeds it
        self._set_rows(rows)
        if self._corrected is not None and mode == "auto":
            self._plan(self._corrected)

    def _set_rows(self, rows: int) -> None:
        rounds, self.rows = self._experience.rounds, rows
        self._corrected = _CorrectedCosts(self._costs, rows, rounds, self._draft_time_per_row) if self._costs else None

    def reorder(self, rows: Sequence[int]) -> None:
        self._left = [self._left[row] for row in rows]
        self._row_tokens_per_round = [self._row_tokens_per_round[row] for row in rows]
        self._set_rows(len(rows))

    def join(self, other: Budget) -> None:
        """Append the rows of another budget. The heads have as much text to read, spread over all rows."""
        unread = self._unread * self.rows + other._unread * other.rows
        self._left += other._left
        self._row_tokens_per_round += other._row_tokens_per_round
        self._set_rows(len(self._left))
        self._unread = ceil(unread / self.rows)

    def plan(self, experience: Experience) -> None:
        """Plan anew after rows have come or gone, with the experience of batches of this size."""
        if self._learns and experience is not self._experience:
            experience.rounds.fresh = False
            self._experience, self._unsettled, self._recovery_balance = experience, [], None
            self._set_rows(self.rows)
        if self._corrected is not None and self._mode == "auto":
            self._plan(self._corrected)

    @property
    def weights(self) -> list[float]:
        """Value of a token of each row, on average 1: the time that it saves.

        The probability that a row ends last grows with its predicted number of remaining rounds.
        """
        if self._corrected is None or self.rows == 1:
            return [1.0] * self.rows
        single_ms, batch_ms = self._corrected.stored_verify(1), self._corrected.stored_verify(self.rows)
        per_row = (batch_ms - single_ms) / (self.rows - 1)  # milliseconds that each row adds to a round
        shared = batch_ms - per_row * self.rows
        rounds = [left / rate for left, rate in zip(self._left, self._row_tokens_per_round, strict=True)]
        most = max(rounds)
        # Predictions are uncertain, so P(row ends last) is a softmax of the predicted rounds, with temperature
        # sqrt(n) / 4 for the largest prediction n.
        last = [exp((count - most) / (sqrt(most) / 4)) for count in rounds]
        total = sum(last)
        return [self.rows * (per_row + shared * prob / total) / batch_ms for prob in last]

    @property
    def will_draft(self) -> bool:
        """Whether a draft is still expected before the answer is complete."""
        return self._mode != "off" and self._plain_left < max(self._left)

    @property
    def drafts(self) -> bool:
        """Whether this round drafts."""
        return self._mode != "off" and self._plain_left == 0

    def node_limit(self, max_nodes: int) -> int:
        """Nodes of a row that this round may draft; `max_nodes` is the limit of memory and target."""
        if self._corrected is None:
            return max_nodes
        if self._costs_unknown or self._recovery_balance is not None:
            return min(max_nodes, _TRIAL_NODES)
        return min(max_nodes, self._experience.rounds.max_nodes) if self._learns else max_nodes

    @property
    def threshold(self) -> float:
        """Minimum acceptance probability of a node that pays. The time of a node is the mean slope of verification
        between 4 and 16 nodes per row; `prune` then decides with the exact times.

        The slope is never below the stored one, scaled by the 4-node correction. Corrections per size rest on few
        rounds and can make 4 and 16 nodes look equally fast; nodes would then seem free, and the heads would draft up
        to the limit."""
        if self._corrected is None or self._mode == "off" or self._costs_unknown:
            return 0.0
        costs, few, many = self._corrected, 4 * self.rows, 16 * self.rows
        slowdown = costs.verify(few) / costs.stored_verify(few)
        stored_ms = slowdown * (costs.stored_verify(many) - costs.stored_verify(few))
        node_ms = max(stored_ms, costs.verify(many) - costs.verify(few)) / (many - few)
        return min(0.9, self._rate(costs, few) / self._calibration_factor * node_ms)

    @property
    def level_threshold(self) -> float:
        """Expected tokens at which another level of drafting pays; see `Request.level_threshold`."""
        if self._corrected is None or self._mode == "off" or self._costs_unknown:
            return 0.0
        level_ms = self._corrected.draft(2) - self._corrected.draft(1)
        return self._rate(self._corrected, 4 * self.rows) * level_ms / self._calibration_factor

    def threads_changed(self) -> None:
        """Forget the plain rounds that were timed with another number of threads."""
        self._experience.rounds.plain = ()

    def prune(self, trees: list[Tree]) -> list[Tree]:
        """Keep the best nodes of each row that pay. Every row gets the same number: the largest tree sets the cost.

        One tree with sampled nodes leaves every tree of the batch complete: dropping a node because of its token would
        break losslessness.
        """
        if self._corrected is None or self._costs is None:
            return trees
        nodes = max(tree.size for tree in trees)
        # Deeper levels than the heads' come from another drafter and cost nothing.
        levels = max(tree.depth if tree.levels is None else tree.levels for tree in trees)
        self._depth = max(1, levels) if self._costs.level_ms else max(1, self._costs.levels)
        probs_by_row = [tree.accept_probs for tree in trees if tree.accept_probs is not None and not tree.sampled]
        if len(probs_by_row) < len(trees) or nodes == 1 or self._costs_unknown:
            return trees
        ranked = [tree.best(tree.size) for tree in trees]
        # Expected tokens added by the root, then by the next best node of every row.
        gains, factors = [0.0] * nodes, [1.0, *[self._calibration_factor] * (nodes - 1)]
        for weight, probs, order in zip(self.weights, probs_by_row, ranked, strict=True):
            for place, node in enumerate(order):
                gains[place] += weight * probs[node] * factors[place]
        rate = self._rate(self._corrected, nodes * self.rows)
        totals = enumerate(accumulate(gains), start=1)
        net = [tokens - rate * self._corrected.verify(self.rows * count) for count, tokens in totals]
        best = max(range(len(net)), key=net.__getitem__) + 1
        if best < nodes:
            for tree, order in zip(trees, ranked, strict=True):
                tree.keep(order[:best])
        return trees

    def record(
        self,
        trees: Sequence[Tree],
        emitted: Sequence[int],
        spent_ms: tuple[float, float] | None = None,
        could_draft: bool = True,
    ) -> None:
        """Record a round: its verified trees, the tokens that each row emitted, and the milliseconds of draft and
        verification, or None for an untimed round. A round that was to draft and could not (`could_draft` is
        false: no memory for drafts, or no working drafter) says nothing about drafting."""
        costs = self._corrected
        if costs is None:
            return
        rows, tokens = len(emitted), sum(weight * count for weight, count in zip(self.weights, emitted, strict=True))
        self._left = [max(1.0, left - count) for left, count in zip(self._left, emitted, strict=True)]
        if self.drafts and not could_draft:
            return
        drafted, depth = self.drafts, max(1, self._depth)
        nodes = max(tree.size for tree in trees)
        if self._learns and spent_ms is not None:
            draft_ms = costs.stored_draft(depth) if drafted and not self._unread else 0.0
            draft_ratio = spent_ms[0] / draft_ms if draft_ms > 0 else None
            self._experience.rounds.add(nodes, spent_ms[1] / costs.stored_verify(rows * nodes), draft_ratio)
            costs.refresh()
        elif self._learns:
            self._experience.rounds.untimed += drafted
        if not drafted:
            self._plain_left -= 1
            self._unread += 1
            self._add_to_account(self._tokens_per_plain_round, max(STAKE, self._reserve + self._price))
            return
        self._row_tokens_per_round = [
            rate + _EMA_WEIGHT * (count - rate) for rate, count in zip(self._row_tokens_per_round, emitted, strict=True)
        ]
        self._experience.tokens_per_round += _EMA_WEIGHT * (tokens / rows - self._experience.tokens_per_round)
        known = [tree.accept_probs for tree in trees if tree.accept_probs is not None]
        if len(known) == len(trees):
            self._expected += _EMA_WEIGHT * (sum(sum(probs) - 1 for probs in known) / rows - self._expected)
            self._accepted += _EMA_WEIGHT * ((sum(emitted) - rows) / rows - self._accepted)
        self._draft_ms += _EMA_WEIGHT * (costs.draft(depth) - self._draft_ms)
        self._unsettled.append((tokens / rows, nodes, depth, self._unread))
        self._unread = 0
        if self._mode == "auto":
            self._settle(costs)

    def _settle(self, costs: _CorrectedCosts) -> None:
        """Enter drafted rounds into the account, then keep drafting or pause; rules 2, 6 and 7."""
        self._plain_left = self._experience.rounds.plain_rounds_due if self._learns else 0
        if self._costs_unknown:
            return
        gain = sum(tokens - costs.plain_rounds(*spent) for tokens, *spent in self._unsettled)
        self._add_to_account(gain, _MAX_ACCOUNT)
        just_known, self._unsettled = len(self._unsettled) > 1, []
        if self._recovery_balance is not None and self._experience.account > self._recovery_balance:
            self._recovery_balance, self._experience.lost_trials = None, 0
        lost = self._experience.account <= self._reserve
        self._experience.lost_trials += lost
        if lost or just_known:
            self._plan(costs)

    def _add_to_account(self, tokens: float, most: float) -> None:
        """Add tokens up to a balance of `most`, or subtract."""
        account = self._experience.account
        self._experience.account = min(account + tokens, max(account, most))

    def _plan(self, costs: _CorrectedCosts) -> None:
        """Set the number of plain rounds before the next draft, or before the end of the answer; rules 3 to 5."""
        left, depth, lost_trials = max(self._left), _TRIAL_NODES - 1, self._experience.lost_trials
        drafted = costs.plain_rounds(_TRIAL_NODES, depth)
        reading = costs.plain_rounds(_TRIAL_NODES, depth, self._unread) - drafted
        gain = 1 - drafted / max(_TRIAL_NODES / 2, self._experience.tokens_per_round)  # of a round, per token
        rounds = MIN_PAIRS if self._costs_unknown else 1  # priced ones
        cost = reading + rounds * (drafted - 1)
        self._price = reading + min(_MAX_PRICE, rounds * (drafted - 1))
        # Wrong costs may hide a gain, but only tokens beyond the stake are spent on finding out.
        self._reserve = STAKE if gain * (left - rounds) <= cost else 0.0
        drafts_at_once = not (self._reserve or self._costs_unknown or lost_trials)
        missing = 0.0 if drafts_at_once else max(0.0, self._reserve + self._price - self._experience.account)
        saving = missing / self._tokens_per_plain_round
        due = self._experience.rounds.plain_rounds_due if self._learns else 0
        # With unknown costs a call does not save for a trial. A call that does not measure trusts its costs, and makes
        # no trial that cannot pay.
        never = saving > (0 if self._costs_unknown else left / 2) or (self._reserve > 0 and not self._learns)
        self._plain_left = ceil(left if never else max(saving, due))
        if lost_trials:
            self._expected = self._accepted = _TRIAL_NODES / 2
            self._recovery_balance = max(self._experience.account, self._reserve + self._price)

    @property
    def _tokens_per_plain_round(self) -> float:
        """Tokens that a plain round adds to the account."""
        return EXPLORATION / (1 + self._experience.lost_trials)

    @property
    def _costs_unknown(self) -> bool:
        """Whether too few drafted rounds were measured to trust the costs."""
        return self._learns and self._experience.rounds.needs_pairs

    @property
    def _calibration_factor(self) -> float:
        """Accepted over expected drafts, capped since a lucky run says little about the next drafts."""
        return min(_MAX_CALIBRATION_FACTOR, (self._accepted + _SMOOTHING) / (self._expected + _SMOOTHING))

    def _rate(self, costs: _CorrectedCosts, tokens: int) -> float:
        """Tokens per millisecond of the whole batch, not below plain decoding."""
        plain = self.rows / costs.verify(self.rows)
        round_ms = costs.verify(tokens) + self._draft_ms
        return max(plain, self.rows * self._experience.tokens_per_round / round_ms)
