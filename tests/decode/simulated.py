"""A simulated machine with a table of times, and heads with random acceptance: no clock, no model.

The budget may see noisy times; results count the time without noise. Drafts are a comb: at each depth the best draft
and its siblings, and only the best one has children.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headstart.decode.budget import Budget
from headstart.decode.costs import Costs
from headstart.decode.experience import Experience, size_of
from headstart.tree.tree import Tree

LEVELS = 5
BF16 = Costs((1, 2, 4, 8, 16, 32, 64), (23.7, 24.2, 24.8, 27.1, 32.0, 43.0, 65.0), 6.0, 1.0, LEVELS, 0.05)
"""As measured on two cores with the quickstart's heads."""
FP32 = Costs((1, 2, 4, 8, 16, 32, 64), (46.0, 47.5, 50.0, 58.0, 74.0, 110.0, 180.0), 12.0, 2.0, LEVELS, 0.1)
GOOD = (0.5, 0.12, 0.06, 0.03)
"""Probabilities that the best draft of a depth, and each sibling, is right."""
FAIR = (0.27, 0.1, 0.05, 0.03)
NONE = (0.0, 0.0, 0.0, 0.0)


@dataclass
class Machine:
    """Simulated time.

    Attributes:
        truth: true costs.
        noise: slow-down factor by the time in milliseconds.
        jitter: spread of single measurements.
        by_rows: extra factor of forwards, by rows and nodes.
    """

    truth: Costs
    noise: Callable[[float], float] = lambda _: 1.0
    jitter: float = 0.03
    by_rows: Callable[[int, int], float] = lambda rows, nodes: 1.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    now: float = 0.0

    def seen(self, ms: float) -> float:
        """Return the measured time: noisy, with rare spikes."""
        spike = 4.0 if self.rng.random() < 0.01 else 1.0
        self.now += ms
        return ms * self.noise(self.now) * (1 + abs(self.rng.gauss(0, self.jitter))) * spike

    def verify(self, rows: int, nodes: int) -> float:
        return self.truth.verify(rows * nodes) * self.by_rows(rows, nodes)

    def draft(self, rows: int, depth: int, unread: int) -> float:
        return self.truth.draft(depth, rows) + self.truth.read_ms * unread * rows


@dataclass
class Decoding:
    """Totals of simulated calls, in milliseconds without noise."""

    ms: float = 0.0
    plain_ms: float = 0.0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.ms


class SimulatedLoop:
    """A decode loop's calls of the budget, and the experience it keeps.

    Args:
        machine: to run on.
        costs: given to the budget.
        promised: acceptance that the heads' calibration promises; see `GOOD`.
        accepted: true acceptance.
        greedy: whether times of rounds are learned.
        fixed: nodes of a tree to verify in every round, in place of the budget's choice.
    """

    def __init__(
        self,
        machine: Machine,
        costs: Costs,
        promised: Sequence[float] = GOOD,
        accepted: Sequence[float] = GOOD,
        greedy: bool = True,
        fixed: int | None = None,
    ) -> None:
        self.machine, self.costs, self.promised, self.accepted = machine, costs, promised, accepted
        self.greedy, self.fixed = greedy, fixed
        self.experience: dict[int, Experience] = {}
        self.rng = random.Random(1)
        self.totals = Decoding()
        self._always = None if fixed is None else self._comb(1, fixed, 0.0, 0.0)

    def call(self, tokens: int = 128, rows: int = 1, prompt: int = 60) -> None:
        """Decode a batch of answers with `tokens` tokens each."""
        experience = self.experience.setdefault(size_of(rows), Experience()) if self.greedy else None
        budget = Budget(self.costs, "auto", rows, limit=tokens, prompt=prompt, experience=experience)
        self.totals.plain_ms += (tokens - 1) * self.machine.verify(rows, 1)
        self.totals.tokens += rows * tokens
        left, unread, opened = [tokens - 1] * rows, prompt, budget.will_draft
        while left:
            drafts = self.fixed is not None or budget.drafts
            draft_ms = 0.0
            trees = [Tree([0]) for _ in left]
            if drafts:
                assert opened or self.fixed, "nothing drafts without a session"
                trees, depth = self._draft(budget, len(left))
                draft_ms = self.machine.draft(len(left), depth, unread)
                unread = 0
            else:
                unread += 1
            verify_ms = self.machine.verify(len(left), trees[0].size)
            self.totals.ms += draft_ms + verify_ms
            self.totals.rounds += 1
            self.totals.drafted += drafts
            emitted = [self._accept(tree) for tree in trees]
            if self.fixed is None:
                seen_ms = self.machine.seen(draft_ms) if drafts else 0.0, self.machine.seen(verify_ms)
                budget.record(trees, emitted, seen_ms)
            left = [have - got for have, got in zip(left, emitted, strict=True)]
            kept = [row for row, have in enumerate(left) if have > 0]
            if len(kept) < len(left):
                left = [left[row] for row in kept]
                if left:
                    budget.reorder(kept)

    def _draft(self, budget: Budget, rows: int) -> tuple[list[Tree], int]:
        """Return the trees to verify and the number of drafted levels; a node's token is its depth and rank."""
        if self._always is not None:
            return [self._always] * rows, self._always.depth
        limits = budget.node_limit(32), budget.threshold, budget.level_threshold
        trees = [self._comb(rows, *limits) for _ in range(rows)]
        assert trees[0].levels is not None, "heads draft them"
        return budget.prune(trees), trees[0].levels

    def _comb(self, rows: int, room: int, threshold: float, level_threshold: float) -> Tree:
        best, shares = self.promised[0], self.promised
        nodes: list[tuple[float, int, int]] = []
        depth, accept_prob = 0, 1.0
        while depth < LEVELS:
            best_child = sum(shares[:3])
            if depth and max(0.0, accept_prob * best_child - threshold) * rows < level_threshold:
                break
            found = [
                (accept_prob * share, depth, rank)
                for rank, share in enumerate(shares)
                if accept_prob * share >= max(threshold, 1e-3)
            ]
            nodes += found
            depth += 1
            accept_prob *= best
            if not found:
                break
        nodes = sorted(nodes, key=lambda node: (-node[0], node[1:]))[: room - 1]
        nodes.sort(key=lambda node: node[1:])
        indices = {(at, rank): number for number, (_, at, rank) in enumerate(nodes, start=1)}
        parents = [-1, *(0 if at == 0 else indices[at - 1, 0] for _, at, _ in nodes)]
        tokens = [0, *(10 * at + rank for _, at, rank in nodes)]
        accept_probs = [1.0, *(one for one, _, _ in nodes)]
        return Tree(tokens, parents, accept_probs, levels=depth)

    def _accept(self, tree: Tree) -> int:
        """Return the tokens that the row emits: down the comb until a draft is wrong or the tree ends."""
        own = set(tree.tokens[1:])
        for depth in range(LEVELS):
            luck = self.rng.random()
            right = next((rank for rank in range(len(self.accepted)) if luck < sum(self.accepted[: rank + 1])), None)
            if right is None or 10 * depth + right not in own:
                return depth + 1
            if right:
                return depth + 2
        return LEVELS + 1


def best_fixed(
    machine: Callable[[], Machine], calls: Callable[[SimulatedLoop], None], accepted: Sequence[float]
) -> float:
    """Return the speed-up of the best fixed tree, plain decoding included."""
    found = [1.0]
    for nodes in (2, 3, 4, 5, 6, 8, 12, 16):
        loop = SimulatedLoop(machine(), machine().truth, accepted, accepted, fixed=nodes)
        calls(loop)
        found.append(loop.totals.speedup)
    return max(found)
