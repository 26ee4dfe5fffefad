"""Drafters: anything that proposes a token tree. Heads are one kind.

Shape suffixes: B rows, T prompt tokens, P committed tokens of a round, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from headstart.errors import UserError
from headstart.heads import DraftHead
from headstart.target import DraftTree, TreeShape


class Drafter(Protocol):
    """What the decode loop asks of a drafter. One object serves many generations; `open` starts one.

    Attributes:
        name: what reports call it.
        taps: hidden states of the target that it wants to see.
        max_nodes: the widest tree it proposes, root included; the loop reserves cache for it.
    """

    name: str
    taps: tuple[int, ...]
    max_nodes: int

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        """Start drafting for a batch; see `DraftHead.open`."""
        ...

    def propose(self, session: Any, root_B: Tensor) -> DraftTree:
        """Draft behind each row's root token."""
        ...

    def observe(self, session: Any, tokens_BP: Tensor, states: dict[int, Tensor], counts: Sequence[int]) -> None:
        """Learn what was committed; see `DraftHead.observe`."""
        ...

    def select(self, session: Any, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        ...


class NoDrafter:
    """Plain decoding: a tree that is only the root."""

    name = "none"
    taps: tuple[int, ...] = ()
    max_nodes = 1

    def __init__(self) -> None:
        self._root = TreeShape.chain(0)

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None:
        return None

    def propose(self, session: Any, root_B: Tensor) -> DraftTree:
        return DraftTree.from_shape(root_B[:, None], self._root)

    def observe(self, session: Any, tokens_BP: Tensor, states: dict[int, Tensor], counts: Sequence[int]) -> None:
        return None

    def select(self, session: Any, rows: Sequence[int]) -> None:
        return None


class HeadDrafter:
    """Draft with trained heads, in a static tree.

    Args:
        heads: any registered family.
        shape: the tree; no deeper than the heads.

    Raises:
        UserError: when the tree is deeper than the heads, or wider than their draft vocabulary.
    """

    name = "heads"

    def __init__(self, heads: DraftHead, shape: TreeShape) -> None:
        if shape.depth > heads.steps:
            raise UserError(
                f"The tree is {shape.depth} deep and the heads draft {heads.steps} tokens ahead.",
                "Use a shallower tree, or train heads with more steps.",
            )
        if shape.width > heads.config.draft_width:
            raise UserError(
                f"The tree uses {shape.width} drafts of a depth and the draft vocabulary has "
                f"{heads.config.draft_width} tokens.",
                "Use a narrower tree.",
            )
        self.heads = heads.eval()
        self.shape = shape
        self.taps = heads.taps
        self.max_nodes = shape.size

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        return self.heads.open(prompts, states)

    def propose(self, session: Any, root_B: Tensor) -> DraftTree:
        return self.heads.propose(session, root_B, self.shape)

    def observe(self, session: Any, tokens_BP: Tensor, states: dict[int, Tensor], counts: Sequence[int]) -> None:
        self.heads.observe(session, tokens_BP, states, counts)

    def select(self, session: Any, rows: Sequence[int]) -> None:
        self.heads.select(session, rows)
