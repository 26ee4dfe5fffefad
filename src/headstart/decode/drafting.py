"""Drafters: anything that proposes a token tree. The contract, and the two simplest of them.

Shape suffixes: B rows, T prompt tokens, P committed tokens of a round, V vocabulary, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from headstart.target import DraftTree, TreeShape


class Children(Enum):
    """How the children of a node are chosen; a verifier says which choice it is lossless for.

    Attributes:
        TOP: the most likely ones, without randomness. Every verifier is lossless for these.
        TOP_AND_DRAWN: all but the last are the most likely ones, the last is drawn from the rest of the drafter's
            distribution.
        DRAWN: all are drawn from the drafter's distribution, one after the other, without replacement.
    """

    TOP = "top"
    TOP_AND_DRAWN = "top and drawn"
    DRAWN = "drawn"


@dataclass
class Request:
    """What the decode loop asks of a drafter in one round.

    A drafter that finds less may propose less, down to the root alone.

    Attributes:
        max_nodes: nodes of a row at most, root included.
        worth: how much a node must add to the accepted tokens to pay for its verification: the probability that its
            whole path is accepted, where children are drawn less what its siblings would have come to without it.
            Drafters that know such probabilities leave out nodes below it. 0 asks for all that add something.
        level_worth: how many accepted tokens, over all rows and less the worth of their nodes, another level of
            drafting must promise to pay for its time; 0 asks for all levels.
        chain: no node may have more than one child.
        children: how children may be chosen. Drafters without a distribution of their own always choose TOP.
        warp: draft logits [..., D] to the distribution to draw from, float [..., D], temperature included.
        streams: one random generator per row, for drawing children; used for nothing else.
        temperature: of the decoding, 0 when greedy; drafts are accepted more seldom above.
    """

    max_nodes: int
    worth: float = 0.0
    level_worth: float = 0.0
    chain: bool = False
    children: Children = Children.TOP
    warp: Callable[[Tensor], Tensor] | None = None
    streams: Sequence[torch.Generator] = ()
    temperature: float = 0.0


class Drafter(Protocol):
    """What the decode loop asks of a drafter. One object serves many generations; `open` starts one.

    Attributes:
        name: what reports call it.
        taps: hidden states of the target that it wants to see.
        max_nodes: the widest tree it proposes, root included; the loop reserves cache for it.

    An optional attribute `draft_share` says what a draft costs, as a share of a plain decoding step; drafters without
    it cost what was measured for the heads.
    """

    name: str
    taps: tuple[int, ...]
    max_nodes: int

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Start drafting for a batch; see `DraftHead.open`."""
        ...

    def propose(self, session: Any, root_B: Tensor, request: Request) -> DraftTree:
        """Draft behind each row's root token (int64 [B], decided, not yet read by the target)."""
        ...

    def observe(self, session: Any, tokens_BP: Tensor, states: dict[int, Tensor], counts: Sequence[int]) -> None:
        """Learn what was committed; see `DraftHead.observe`. Called every round, also when nothing was drafted."""
        ...

    def select(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A drafter that also learns from the target's choices at nodes that were not accepted (lookahead decoding)."""

    def learn(self, session: Any, tree: DraftTree, choices: list[list[int]]) -> None:
        """The target's argmax after every node of each row's verified tree; called before `observe`."""
        ...


def root_only(root_B: Tensor) -> DraftTree:
    """A tree without drafts: a plain decoding step."""
    return DraftTree.from_shape(root_B[:, None], _ROOT)


_ROOT = TreeShape.chain(0)


class NoDrafter:
    """Plain decoding: a tree that is only the root."""

    name = "none"
    taps: tuple[int, ...] = ()
    max_nodes = 1

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None:
        return None

    def propose(self, session: None, root_B: Tensor, request: Request) -> DraftTree:
        return root_only(root_B)

    def observe(self, session: None, tokens_BP: Tensor, states: dict[int, Tensor], counts: Sequence[int]) -> None:
        return None

    def select(self, session: None, rows: Sequence[int]) -> None:
        return None
