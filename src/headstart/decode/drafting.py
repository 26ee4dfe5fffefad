"""Drafters: anything that proposes drafts. The contract, and the simplest of them.

Shape suffixes: B rows, T prompt tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from headstart.tree.proposal import Committed, Proposal, ProposedTree, Request, Root


class Drafter(Protocol):
    """What the decode loop asks of a drafter. One object serves many generations; `prefill` starts one and returns its
    state, which the other methods are given as `session`.

    Attributes:
        name: what reports call it.
        aux_layers: layers of the target whose hidden states it reads.
        max_nodes: the widest tree it proposes, root included; the loop reserves cache for it.

    An optional attribute `draft_share` says what a draft costs, as a share of a plain decoding step; drafters without
    it cost what was measured for the heads.
    """

    name: str
    aux_layers: tuple[int, ...]
    max_nodes: int

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Start drafting for a batch; see `DraftHead.prefill`."""
        ...

    def propose(self, session: Any, root: Root, request: Request) -> Proposal:
        """Draft after each row's root."""
        ...

    def commit(self, session: Any, committed: Committed) -> None:
        """Learn what was committed. Called every round, also when nothing was drafted."""
        ...

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


@runtime_checkable
class Learner(Protocol):
    """A drafter that also learns from the target's choices at nodes that were not accepted (lookahead decoding)."""

    def learn(self, session: Any, tree: ProposedTree, choices: list[list[int]]) -> None:
        """The target's argmax after every node of each row's verified tree; called before `commit`."""
        ...


class NoDrafter:
    """Plain decoding: a proposal that is only the root."""

    name = "none"
    aux_layers: tuple[int, ...] = ()
    max_nodes = 1

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None:
        return None

    def propose(self, session: None, root: Root, request: Request) -> Proposal:
        return Proposal.roots(root.tokens)

    def commit(self, session: None, committed: Committed) -> None:
        return None

    def reorder(self, session: None, rows: Sequence[int]) -> None:
        return None
