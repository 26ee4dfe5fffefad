"""Two drafters at once: their trees as one.

Tokens that both propose after the same path become one node, so the second drafter only costs what it adds: an n-gram
match beside trained heads is one more branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headstart.decode.drafting import Drafter
from headstart.tree.tree import Committed, Request, Tree, TreeBatch


class CombinedDrafter:
    """Draft with two drafters and verify the union of their trees.

    Args:
        first: goes first where acceptance probabilities do not decide.
        second: the other one.
    """

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self.first = first
        self.second = second
        self.name = f"{first.name}+{second.name}"
        self.aux_layers = tuple(dict.fromkeys([*first.aux_layers, *second.aux_layers]))
        self.max_nodes = first.max_nodes + second.max_nodes - 1
        shares: list[float | None] = [getattr(part, "draft_share", None) for part in (first, second)]
        known = [share for share in shares if share is not None]
        self.draft_share = sum(known) if len(known) == len(shares) else None

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> tuple[Any, Any]:
        return self.first.prefill(prompts, states), self.second.prefill(prompts, states)

    def propose(self, session: tuple[Any, Any], roots: TreeBatch, request: Request) -> list[Tree]:
        trees = self.first.propose(session[0], roots, request)
        if any(tree.drawn for tree in trees):  # one random stream, and one distribution, is enough
            request = replace(request, draws=False)
        others = self.second.propose(session[1], roots, request)
        return [union(tree, other, request) for tree, other in zip(trees, others, strict=True)]

    def commit(self, session: tuple[Any, Any], committed: Committed) -> None:
        self.first.commit(session[0], committed)
        self.second.commit(session[1], committed)

    def reorder(self, session: tuple[Any, Any], rows: Sequence[int]) -> None:
        self.first.reorder(session[0], rows)
        self.second.reorder(session[1], rows)


def union(tree: Tree, other: Tree, request: Request) -> Tree:
    """All nodes of two trees with the same root, as far as a request has room; its probability is the larger of two.

    When there are more nodes than allowed, the least probable ones go. Where probabilities are unknown, or one of the
    trees has drawn nodes, that tree stays complete and only the other's additions may go: leaving out a drawn node for
    what it turned out to be would break losslessness.

    >>> both = union(Tree([5, 6], [-1, 0], [1.0, 0.5]), Tree.chain_of([5, 6, 7], [1.0, 0.4, 0.3]), Request(8))
    >>> both.tokens, both.parents, both.accept_probs
    ([5, 6, 7], [-1, 0, 1], [1.0, 0.5, 0.3])
    """
    levels = max((part.levels for part in (tree, other) if part.levels is not None), default=None)
    if tree.size == 1 or other.size == 1:
        return replace(other if tree.size == 1 else tree, levels=levels)
    assert not (tree.drawn and other.drawn), "only one drafter is asked to draw"
    if other.drawn:
        tree, other = other, tree
    if request.chain:
        return replace(tree if tree.drawn or _promise(tree) >= _promise(other) else other, levels=levels)
    known = tree.accept_probs is not None and other.accept_probs is not None
    both = Tree(
        list(tree.tokens), list(tree.parents), list(tree.accept_probs or ()) if known else None, tree.drawn, levels
    )
    index, numbers = both.index, [0]
    for node in range(1, other.size):
        place = (numbers[other.parents[node]], other.tokens[node])
        prob = other.accept_probs[node] if known and other.accept_probs else None
        if place not in index:
            index[place] = both.add(*place, prob)
        elif both.accept_probs is not None and prob is not None:
            both.accept_probs[index[place]] = max(both.accept_probs[index[place]], prob)
        numbers.append(index[place])
    if both.size > request.max_nodes:
        complete = tree.size if tree.drawn or not known else 1
        assert complete <= request.max_nodes, "each drafter keeps to the limit by itself"
        both.keep(both.best(request.max_nodes, complete))
    return both


def _promise(tree: Tree) -> float:
    """Expected tokens, as far as known."""
    return sum(tree.accept_probs) if tree.accept_probs is not None else 1.0
