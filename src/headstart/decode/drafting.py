"""Drafters: anything that proposes drafts. The contract, and what keeps the text going when a drafter fails.

Shape suffixes: B rows, T prompt tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from headstart.tree.tree import Committed, Request, Tree, TreeBatch


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

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        """A tree for each row, after its root."""
        ...

    def commit(self, session: Any, committed: Committed) -> None:
        """Learn what was committed. Called every round, also when nothing was drafted."""
        ...

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


class Session:
    """One generation's drafting: a drafter and its state. One that raises is left out from then on.

    Attributes:
        drafter: what drafts now; None when nothing does.
        error: what the drafter raised, if it did.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.error: str | None = None
        self._state: Any = None

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self.drafter.aux_layers if self.drafter else ()

    @property
    def max_nodes(self) -> int:
        """See `Drafter`; 1 when nothing drafts."""
        return self.drafter.max_nodes if self.drafter else 1

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None:
        """See `Drafter.prefill`."""
        with self._guard():
            self._state = self.drafter.prefill(prompts, states) if self.drafter else None

    def propose(self, roots: TreeBatch, request: Request) -> list[Tree]:
        """See `Drafter.propose`; the roots alone when the drafter fails."""
        trees = roots.trees
        with self._guard():
            trees = self.drafter.propose(self._state, roots, request) if self.drafter else trees
        return trees

    def commit(self, committed: Committed) -> None:
        """See `Drafter.commit`."""
        with self._guard():
            if self.drafter:
                self.drafter.commit(self._state, committed)

    def reorder(self, rows: Sequence[int]) -> None:
        """See `Drafter.reorder`."""
        with self._guard():
            if self.drafter:
                self.drafter.reorder(self._state, rows)

    def close(self) -> None:
        """Draft no more, and free what the drafter kept."""
        self.drafter, self._state = None, None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a drafter does wrong, the text goes on
            self.error = f"{type(error).__name__}: {error}"
            self.close()
