"""Two drafters at once: their trees as one.

Tokens that both propose after the same path become one node, so the second drafter only costs what it adds: an n-gram
match beside trained heads is one more branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from headstart.decode.drafting import Drafter, Learner
from headstart.tree.proposal import Children, Committed, Proposal, ProposedTree, Request, Root, SampledChildren


@dataclass
class _Part:
    """One row of a tree, as lists.

    Attributes:
        tokens: of each node, the root's first.
        parents: of each node, -1 for the root.
        accept_probs: of each node, None when unknown.
        sampled: see `Proposal.sampled`.
    """

    tokens: list[int]
    parents: list[int]
    accept_probs: list[float] | None
    sampled: dict[int, SampledChildren] = field(default_factory=dict)

    @property
    def promise(self) -> float:
        """Expected tokens, as far as known."""
        return sum(self.accept_probs) if self.accept_probs is not None else 1.0


class CombinedDrafter:
    """Draft with two drafters and verify the union of their trees.

    A node's acceptance probability is the larger of what the two say. When there are more nodes than allowed, those of
    smallest acceptance probability go. Where acceptance probabilities are unknown, or one drafter drew children at
    random, its tree stays complete and only the other's additions may go: leaving out a sampled child for what it
    turned out to be would break losslessness.

    Args:
        first: goes first where acceptance probabilities do not decide.
        second: the other one.

    Attributes:
        learn: there when one of the two learns from rejected nodes; see `Learner`.
    """

    learn: Callable[[tuple[Any, Any], ProposedTree, list[list[int]]], None]

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first = first
        self.second = second
        self.name = f"{first.name}+{second.name}"
        self.aux_layers = tuple(dict.fromkeys([*first.aux_layers, *second.aux_layers]))
        self.max_nodes = first.max_nodes + second.max_nodes - 1
        shares: list[float | None] = [getattr(part, "draft_share", None) for part in (first, second)]
        known = [share for share in shares if share is not None]
        self.draft_share = sum(known) if len(known) == len(shares) else None
        if isinstance(first, Learner) or isinstance(second, Learner):
            self.learn = self._learn  # not a method: the target's choices are read only for drafters that learn

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> tuple[Any, Any]:
        return self.first.prefill(prompts, states), self.second.prefill(prompts, states)

    def propose(self, session: tuple[Any, Any], root: Root, request: Request) -> Proposal:
        one = self.first.propose(session[0], root, request)
        if one.sampled is not None:  # one random stream, and one distribution, is enough
            request = replace(request, children=Children.TOP_K)
        two = self.second.propose(session[1], root, request)
        levels = max((part.levels for part in (one, two) if part.levels is not None), default=None)
        if two.size == 1 or one.size == 1:
            return replace(one if two.size == 1 else two, levels=levels)
        rows = [merge(a, b, request) for a, b in zip(_parts(one), _parts(two), strict=True)]
        accept_probs = [row.accept_probs for row in rows if row.accept_probs is not None]
        return Proposal(
            [row.tokens for row in rows],
            [row.parents for row in rows],
            accept_probs if len(accept_probs) == len(rows) else None,
            [row.sampled for row in rows] if any(row.sampled for row in rows) else None,
            levels,
        )

    def commit(self, session: tuple[Any, Any], committed: Committed) -> None:
        self.first.commit(session[0], committed)
        self.second.commit(session[1], committed)

    def reorder(self, session: tuple[Any, Any], rows: Sequence[int]) -> None:
        self.first.reorder(session[0], rows)
        self.second.reorder(session[1], rows)

    def _learn(self, session: tuple[Any, Any], tree: ProposedTree, choices: list[list[int]]) -> None:
        for drafter, own in zip((self.first, self.second), session, strict=True):
            if isinstance(drafter, Learner):
                drafter.learn(own, tree, choices)


def merge(one: _Part, two: _Part, request: Request) -> _Part:
    """The union of two trees with the same root.

    Args:
        one: keeps its order; when it or `two` has sampled children, that tree comes first.
        two: what it adds follows.
        request: whose limits on nodes and children hold.
    """
    assert not (one.sampled and two.sampled), "only one drafter is asked to draw"
    if two.sampled:
        one, two = two, one
    if request.chain:
        return one if one.sampled or one.promise >= two.promise else two
    tokens, parents = list(one.tokens), list(one.parents)
    accept_probs = None if one.accept_probs is None or two.accept_probs is None else list(one.accept_probs)
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    indices = [0] * len(two.tokens)
    for node in range(1, len(two.tokens)):
        parent = indices[two.parents[node]]
        index = children.setdefault((parent, two.tokens[node]), len(tokens))
        if index == len(tokens):
            tokens.append(two.tokens[node])
            parents.append(parent)
            if accept_probs is not None and two.accept_probs is not None:
                accept_probs.append(two.accept_probs[node])
        elif accept_probs is not None and two.accept_probs is not None:
            accept_probs[index] = max(accept_probs[index], two.accept_probs[node])
        indices[node] = index
    merged = _Part(tokens, parents, accept_probs, one.sampled)
    complete = len(one.tokens) if one.sampled or accept_probs is None else 1
    return merged if len(tokens) <= request.max_nodes else _best(merged, complete, request.max_nodes)


def _best(part: _Part, complete: int, count: int) -> _Part:
    """The first `complete` nodes and the best of the others; acceptance probabilities never rise along a path, so
    parents stay."""
    assert complete <= count, "each drafter keeps to the limit by itself"
    accept_probs = part.accept_probs or [0.0] * len(part.tokens)
    others = sorted(range(complete, len(part.tokens)), key=lambda node: (-accept_probs[node], node))
    kept = [*range(complete), *sorted(others[: count - complete])]
    index = {node: new for new, node in enumerate(kept)}
    return _Part(
        [part.tokens[node] for node in kept],
        [index.get(part.parents[node], -1) for node in kept],
        None if part.accept_probs is None else [part.accept_probs[node] for node in kept],
        part.sampled,  # their nodes are all kept, so their numbers hold
    )


def _parts(proposal: Proposal) -> list[_Part]:
    """The rows of a proposal."""
    return [
        _Part(
            proposal.tokens[row],
            proposal.parents[row],
            None if proposal.accept_probs is None else proposal.accept_probs[row],
            {} if proposal.sampled is None else proposal.sampled[row],
        )
        for row in range(proposal.rows)
    ]
