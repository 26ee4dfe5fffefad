"""Two drafters at once: their trees as one.

Tokens that both propose at the same place become one node, so the second drafter only costs what it adds: an n-gram
match beside trained heads is one more branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from headstart.decode.drafting import Drafter, Learner
from headstart.proposal import Children, Committed, Drawn, Proposal, ProposedTree, Request, Root


@dataclass
class _Part:
    """One row of a tree, as lists.

    Attributes:
        tokens: of each node, the root's first.
        parents: of each node, -1 for the root.
        gains: of each node, None when unknown.
        drawn: see `DraftTree.drawn`.
    """

    tokens: list[int]
    parents: list[int]
    gains: list[float] | None
    drawn: dict[int, Drawn] = field(default_factory=dict)

    @property
    def promise(self) -> float:
        """Expected tokens, as far as known."""
        return sum(self.gains) if self.gains is not None else 1.0


class CombinedDrafter:
    """Draft with two drafters and verify the union of their trees.

    A node's gain is the larger of what the two say. When there are more nodes than allowed, those of smallest gain go.
    Where gains are unknown, or one drafter drew children at random, its tree stays whole and only the other's additions
    may go: leaving out a drawn child for what it turned out to be would break losslessness.

    Args:
        first: goes first where gains do not decide.
        second: the other one.

    Attributes:
        learn: there when one of the two learns from rejected nodes; see `Learner`.
    """

    learn: Callable[[tuple[Any, Any], ProposedTree, list[list[int]]], None]

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first = first
        self.second = second
        self.name = f"{first.name}+{second.name}"
        self.taps = tuple(dict.fromkeys([*first.taps, *second.taps]))
        self.max_nodes = first.max_nodes + second.max_nodes - 1
        shares: list[float | None] = [getattr(part, "draft_share", None) for part in (first, second)]
        known = [share for share in shares if share is not None]
        self.draft_share = sum(known) if len(known) == len(shares) else None
        if isinstance(first, Learner) or isinstance(second, Learner):
            self.learn = self._learn  # not a method: the target's choices are read only for drafters that learn

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> tuple[Any, Any]:
        return self.first.open(prompts, states), self.second.open(prompts, states)

    def propose(self, session: tuple[Any, Any], root: Root, request: Request) -> Proposal:
        one = self.first.propose(session[0], root, request)
        if one.drawn is not None:  # one random stream, and one distribution, is enough
            request = replace(request, children=Children.TOP)
        two = self.second.propose(session[1], root, request)
        levels = max((part.levels for part in (one, two) if part.levels is not None), default=None)
        if two.size == 1 or one.size == 1:
            return replace(one if two.size == 1 else two, levels=levels)
        rows = [merge(a, b, request) for a, b in zip(_parts(one), _parts(two), strict=True)]
        gains = [row.gains for row in rows if row.gains is not None]
        return Proposal(
            [row.tokens for row in rows],
            [row.parents for row in rows],
            gains if len(gains) == len(rows) else None,
            [row.drawn for row in rows] if any(row.drawn for row in rows) else None,
            levels,
        )

    def observe(self, session: tuple[Any, Any], committed: Committed) -> None:
        self.first.observe(session[0], committed)
        self.second.observe(session[1], committed)

    def select(self, session: tuple[Any, Any], rows: Sequence[int]) -> None:
        self.first.select(session[0], rows)
        self.second.select(session[1], rows)

    def _learn(self, session: tuple[Any, Any], tree: ProposedTree, choices: list[list[int]]) -> None:
        for drafter, own in zip((self.first, self.second), session, strict=True):
            if isinstance(drafter, Learner):
                drafter.learn(own, tree, choices)


def merge(one: _Part, two: _Part, request: Request) -> _Part:
    """The union of two trees behind the same root.

    Args:
        one: keeps its order; when it or `two` has drawn children, that tree comes first.
        two: what it adds follows.
        request: whose limits on nodes and children hold.
    """
    assert not (one.drawn and two.drawn), "only one drafter is asked to draw"
    if two.drawn:
        one, two = two, one
    if request.chain:
        return one if one.drawn or one.promise >= two.promise else two
    tokens, parents = list(one.tokens), list(one.parents)
    gains = None if one.gains is None or two.gains is None else list(one.gains)
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    places = [0] * len(two.tokens)
    for node in range(1, len(two.tokens)):
        parent = places[two.parents[node]]
        place = children.setdefault((parent, two.tokens[node]), len(tokens))
        if place == len(tokens):
            tokens.append(two.tokens[node])
            parents.append(parent)
            if gains is not None and two.gains is not None:
                gains.append(two.gains[node])
        elif gains is not None and two.gains is not None:
            gains[place] = max(gains[place], two.gains[node])
        places[node] = place
    merged = _Part(tokens, parents, gains, one.drawn)
    whole = len(one.tokens) if one.drawn or gains is None else 1
    return merged if len(tokens) <= request.max_nodes else _best(merged, whole, request.max_nodes)


def _best(part: _Part, whole: int, count: int) -> _Part:
    """The first `whole` nodes and the best of the others; gains never rise along a path, so parents stay."""
    assert whole <= count, "each drafter keeps to the limit by itself"
    gains = part.gains or [0.0] * len(part.tokens)
    others = sorted(range(whole, len(part.tokens)), key=lambda node: (-gains[node], node))
    kept = [*range(whole), *sorted(others[: count - whole])]
    place = {node: new for new, node in enumerate(kept)}
    return _Part(
        [part.tokens[node] for node in kept],
        [place.get(part.parents[node], -1) for node in kept],
        None if part.gains is None else [part.gains[node] for node in kept],
        part.drawn,  # of nodes that are kept whole, so their numbers hold
    )


def _parts(proposal: Proposal) -> list[_Part]:
    """The rows of a proposal."""
    return [
        _Part(
            proposal.tokens[row],
            proposal.parents[row],
            None if proposal.gains is None else proposal.gains[row],
            {} if proposal.drawn is None else proposal.drawn[row],
        )
        for row in range(proposal.rows)
    ]
