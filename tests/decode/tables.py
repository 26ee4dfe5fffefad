"""A tiny world in which verification rules can be proven: a target and drafters, given as tables.

The target is p(token | last two tokens) over five tokens, one of which is always impossible; the drafter's q likewise.
A tree's shape is written as nested tuples: a node is the tuple of its children.

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

from headstart.decode.verify import Row
from headstart.tree.proposal import Children, SampledChildren

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
    """Nodes below the root on the longest path."""
    return max((1 + depth(child) for child in shape), default=0)


@dataclass(frozen=True)
class Kind:
    """How a tree's children are chosen.

    Attributes:
        children: of the drafter's distribution; None takes fixed guesses, as an n-gram lookup does.
        branch: further guesses in a row below the root, beside whatever else is there (heads + n-gram).
        adaptive: the second child of a node gets children only when the first one's token is even.
    """

    children: Children | None
    branch: int = 0
    adaptive: bool = False


KINDS = {
    "top": Kind(Children.TOP_K),
    "guesses": Kind(None),
    "top and drawn": Kind(Children.TOP_K_AND_SAMPLED),
    "drawn": Kind(Children.SAMPLED),
    "top and drawn, guesses": Kind(Children.TOP_K_AND_SAMPLED, branch=2),
    "drawn, guesses": Kind(Children.SAMPLED, branch=2),
    "drawn, adaptive": Kind(Children.SAMPLED, adaptive=True),
}


def context(prefix: Sequence[int]) -> tuple[int, ...]:
    """All of a prefix that target and drafters look at."""
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
    """The target's distribution after a prefix, float64 [V]: temperature 0.8, the least likely token cut off."""
    return _warped(context(prefix), 1.0)


def q_table(prefix: Sequence[int]) -> Tensor:
    """The drafter's distribution after a prefix: related to the target's, with another token cut off."""
    return _warped(context(prefix), 0.4)


def logits_table(prefix: Sequence[int]) -> Tensor:
    """The target's logits, before temperature and cut."""
    return _logits_V(context(prefix))[0]


@cache
def exact_joint(prefix: tuple[int, ...], length: int) -> NDArray[np.float64]:
    """The target's joint distribution of the next `length` tokens, one axis per token."""
    if length == 0:
        return np.array(1.0)
    p_target = p_table(prefix).tolist()
    return np.stack([p_target[token] * exact_joint((*prefix, token), length - 1) for token in range(VOCAB)])


# -- drafting --------------------------------------------------------------------------------------------------------


@dataclass
class Draft:
    """A tree for one row, as a list of nodes, each with the target's logits after it."""

    tokens: list[int]
    parents: list[int]
    logits: list[Tensor]
    sampled: dict[int, SampledChildren]

    def row(self, prefix: tuple[int, ...], row_type: type[Row] = Row) -> Row:
        logits_NV = torch.stack(self.logits)
        return row_type(self.tokens, self.parents, self.sampled, logits_NV, lambda _, path: p_table((*prefix, *path)))


class Grower:
    """Grows trees of a kind and a shape. Mutations override `keep`, `source` and `drawn_from`."""

    def __init__(self, kind: Kind, shape: Shape) -> None:
        self.kind, self.shape = kind, shape

    def keep(self, token: int, q_draft: list[float]) -> bool:
        """Whether a sampled child stays in the tree; must not look at its arguments."""
        return True

    def source(self, q_sampled_V: Tensor, q_draft_V: Tensor) -> Tensor:
        """What the tree says its first sampled child came from, given what it came from, and the whole q."""
        return q_sampled_V

    def drawn_from(self, prefix: tuple[int, ...], q_sampled_V: Tensor, top_k: list[int]) -> Tensor:
        """What sampled children of the node after `prefix` are drawn from, beside those top-k ones."""
        return q_sampled_V

    def grow(self, prefix: tuple[int, ...], pick: Pick) -> Draft:
        """Draft after a prefix; with draws from the stream "draft"."""
        draft = Draft([ROOT], [-1], [logits_table(prefix)], {})
        self._extend(draft, 0, prefix, self.shape, self.kind.branch, pick)
        return draft

    def _extend(self, draft: Draft, node: int, prefix: tuple[int, ...], shape: Shape, branch: int, pick: Pick) -> None:
        children: dict[int, int] = {}

        def add(token: int) -> None:
            draft.tokens.append(token)
            draft.parents.append(node)
            draft.logits.append(logits_table((*prefix, token)))
            children[token] = len(draft.tokens) - 1

        top_k, q_sampled_V = _plan(self.kind.children, context(prefix), len(shape))
        for token in top_k:
            add(token)
        rest = self.drawn_from(prefix, q_sampled_V, top_k).tolist()
        sampled = []
        for _ in range(len(shape) - len(top_k)):
            if not sum(rest) > 0:  # q holds fewer tokens
                break
            token = pick("draft", rest)
            rest[token] = 0.0
            if self.keep(token, q_sampled_V.tolist()):
                add(token)
                sampled.append(children[token])
        if sampled:
            draft.sampled[node] = SampledChildren(sampled, self.source(q_sampled_V, q_table(prefix)))
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
def _plan(children: Children | None, last_two: tuple[int, ...], width: int) -> tuple[list[int], Tensor]:
    """Guessed tokens of a node with `width` children, and the distribution of its first sampled child (or zeros)."""
    q_draft_V = q_table(last_two)
    if children is None:
        return [(_guess(last_two) + rank) % VOCAB for rank in range(width)], torch.zeros_like(q_draft_V)
    fixed = {Children.TOP_K: width, Children.TOP_K_AND_SAMPLED: max(width - 1, 0), Children.SAMPLED: 0}[children]
    top_k = q_draft_V.argsort(descending=True)[:fixed].tolist()
    if fixed == width:
        return top_k, torch.zeros_like(q_draft_V)
    rest_V = q_draft_V.clone()
    rest_V[top_k] = 0.0
    return top_k, rest_V / rest_V.sum()
