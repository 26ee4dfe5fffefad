"""A tiny world for proving verification rules: a target and drafters, given as tables.

The target is p(token | last two tokens) over five tokens, with one always impossible; the drafter's q likewise. A
tree's shape is written as nested tuples: a node is the tuple of its children.

All randomness of drafting comes through a function `pick`, so that tests can enumerate it; see `tests.decode.proofs`.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.tree.tree import DraftDistribution, Tree
from tests.reference import Node

VOCAB = 5
ROOT = 0
Shape = tuple["Shape", ...]
Pick = Callable[[str, list[float]], int]
"""All randomness of an experiment: (name of the random stream, weights of the options) to the option taken."""

SHAPES: dict[str, Shape] = {
    "root only": (),
    "chain of 1": ((),),
    "chain of 3": ((((),),),),
    "wide": ((), (), ()),
    "bushy": (((), ()), ((),)),
}


def depth(shape: Shape) -> int:
    """Return the number of nodes below the root on the longest path."""
    return max((1 + depth(child) for child in shape), default=0)


@dataclass(frozen=True)
class Kind:
    """How the children of a node are chosen.

    Attributes:
        sampling: the last child is sampled from the drafter's distribution without the most likely tokens.
        guesses: children are fixed guesses, as in an n-gram lookup, and the drafter has no distribution.
        branch: further guesses in a row below the root, beside all other nodes (heads + n-gram).
        adaptive: the second child of a node gets children only when the first one's token is even.
    """

    sampling: bool = False
    guesses: bool = False
    branch: int = 0
    adaptive: bool = False


KINDS = {
    "top": Kind(),
    "guesses": Kind(guesses=True),
    "top and sampled": Kind(sampling=True),
    "top and sampled, guesses": Kind(sampling=True, branch=2),
    "top and sampled, adaptive": Kind(sampling=True, adaptive=True),
}


def context(prefix: Sequence[int]) -> tuple[int, ...]:
    """Return the part of a prefix that target and drafters condition on."""
    return (ROOT, ROOT, *prefix)[-2:]


@cache
def _logits_V(last_two: tuple[int, ...]) -> Tensor:
    noise = torch.Generator().manual_seed(101 + last_two[0] * VOCAB + last_two[1])
    return 1.2 * torch.randn(2, VOCAB, generator=noise, dtype=torch.float64)


@cache
def _warped(last_two: tuple[int, ...], mix: float) -> Tensor:
    target_V, other_V = _logits_V(last_two)
    logits_V = mix * target_V + (1 - mix) * other_V
    logits_V[logits_V.argmin()] = -torch.inf
    return torch.softmax(logits_V / 0.8, -1)


def p_table(prefix: Sequence[int]) -> Tensor:
    """Return the target's distribution after a prefix, float64 [V]: temperature 0.8, the least likely token cut off."""
    return _warped(context(prefix), 1.0)


def q_table(prefix: Sequence[int]) -> Tensor:
    """Return the drafter's distribution after a prefix: related to the target's, with another token cut off."""
    return _warped(context(prefix), 0.4)


def logits_table(prefix: Sequence[int]) -> Tensor:
    """Return the target's logits, before temperature and cut."""
    return _logits_V(context(prefix))[0]


@cache
def exact_joint(prefix: tuple[int, ...], length: int) -> NDArray[np.float64]:
    """Return the target's joint distribution of the next `length` tokens, one axis per token."""
    if length == 0:
        return np.array(1.0)
    p_target = p_table(prefix).tolist()
    return np.stack([p_target[token] * exact_joint((*prefix, token), length - 1) for token in range(VOCAB)])


# -- drafting --------------------------------------------------------------------------------------------------------


@dataclass
class Draft:
    """A tree for one row after a prefix, with the target's logits after each node."""

    tree: Tree
    logits: list[Tensor]
    prefix: tuple[int, ...]

    @property
    def root(self) -> Node:
        """The tree in the reference's form."""
        nodes = [Node(token) for token in self.tree.tokens]
        for number, one in self.tree.sampled.items():
            nodes[number].q_draft_V = one.q_draft_V(VOCAB)
        for node, parent in zip(nodes[1:], self.tree.parents[1:], strict=True):
            nodes[parent].children.append(node)
        return nodes[0]

    def p_target(self, path: Sequence[int]) -> Tensor:
        """Return the target's distribution after a path of tokens, root first."""
        return p_table((*self.prefix, *path[1:]))


class Grower:
    """Grows trees of a kind and a shape. Mutations override `keep`, `source` and `sampled_from`, and `draft_type`."""

    draft_type: type[Draft] = Draft

    def __init__(self, kind: Kind, shape: Shape) -> None:
        self.kind, self.shape = kind, shape

    def keep(self, token: int, q_draft: list[float]) -> bool:
        """Decide whether a sampled child stays in the tree; must not look at its arguments."""
        return True

    def source(self, q_sampled_V: Tensor, q_draft_V: Tensor) -> Tensor:
        """Return the distribution that the tree claims for its sampled child, given the true one and the whole q."""
        return q_sampled_V

    def sampled_from(self, prefix: tuple[int, ...], q_sampled_V: Tensor, top_k: list[int]) -> Tensor:
        """Return the distribution for sampling the child of the node after `prefix`, without its top-k tokens."""
        return q_sampled_V

    def grow(self, prefix: tuple[int, ...], pick: Pick) -> Draft:
        """Draft after a prefix; with draws from the stream "draft"."""
        draft = self.draft_type(Tree([ROOT]), [logits_table(prefix)], prefix)
        self._extend(draft, 0, prefix, self.shape, self.kind.branch, pick)
        return draft

    def _extend(self, draft: Draft, node: int, prefix: tuple[int, ...], shape: Shape, branch: int, pick: Pick) -> None:
        children: dict[int, int] = {}

        def add(token: int) -> None:
            children[token] = draft.tree.add(node, token)
            draft.logits.append(logits_table((*prefix, token)))

        top_k, q_sampled_V = _plan(self.kind, context(prefix), len(shape))
        for token in top_k:
            add(token)
        if len(top_k) < len(shape):
            token = pick("draft", self.sampled_from(prefix, q_sampled_V, top_k).tolist())
            if self.keep(token, q_sampled_V.tolist()):
                add(token)
                draft.tree.sampled[children[token]] = DraftDistribution(self.source(q_sampled_V, q_table(prefix)))
        below = dict(zip(children, shape, strict=False))
        if self.kind.adaptive and len(children) > 1 and next(iter(children)) % 2:
            below[list(children)[1]] = ()
        guess = _guess(prefix)
        if branch and guess not in children:
            add(guess)
        for token, child in children.items():
            left = max(branch - 1, 0) if token == guess else 0
            self._extend(draft, child, (*prefix, token), below.get(token, ()), left, pick)


def _guess(prefix: tuple[int, ...]) -> int:
    before, last = context(prefix)
    return (2 * before + last + 1) % VOCAB


@cache
def _plan(kind: Kind, last_two: tuple[int, ...], width: int) -> tuple[list[int], Tensor]:
    """Return the fixed tokens of a node with `width` children, and the distribution of its sampled child (or zeros)."""
    q_draft_V = q_table(last_two)
    if kind.guesses:
        return [(_guess(last_two) + rank) % VOCAB for rank in range(width)], torch.zeros_like(q_draft_V)
    fixed = max(width - 1, 0) if kind.sampling else width
    top_k = q_draft_V.argsort(descending=True)[:fixed].tolist()
    if fixed == width:
        return top_k, torch.zeros_like(q_draft_V)
    rest_V = q_draft_V.clone()
    rest_V[top_k] = 0.0
    return top_k, rest_V / rest_V.sum()
