"""Trained heads as a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from headstart.heads.base import DraftHead
from headstart.options import Tree as TreeKind
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Committed, Request, Tree, TreeBatch, TreeShape


class HeadDrafter:
    """Draft with trained heads.

    Args:
        heads: any registered family.
        shape: the static tree; no deeper than the heads.
        tree: "static" drafts `shape`; "dynamic" chooses nodes each round; "chain" the best draft of each depth of
            `shape`.
        calibration: of the heads' probabilities, for dynamic trees.
        sampled: the same at temperature 1; between 0 and 1 what lies between the two is taken. None: `calibration`.
        max_nodes: nodes of a dynamic tree at most, root included.

    Raises:
        UserError: when the tree is deeper than the heads, or wider than their draft vocabulary.
    """

    name = "heads"

    def __init__(
        self,
        heads: DraftHead,
        shape: TreeShape,
        tree: TreeKind = "static",
        calibration: Calibration | None = None,
        max_nodes: int = 32,
        sampled: Calibration | None = None,
    ) -> None:
        heads.check_tree(shape)
        self.heads = heads.eval()
        self.tree = tree
        self.shape = {"dynamic": None, "static": shape, "chain": TreeShape.chain(shape.depth)}[tree]
        self.calibration = calibration or Calibration()
        self._sampled = sampled
        self._warm: dict[float, Calibration] = {}
        self.aux_layers = heads.aux_layers
        self.max_nodes = max_nodes if self.shape is None else self.shape.size

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Any:
        return self.heads.prefill(prompts, states)

    def propose(self, session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        nodes, shape = min(request.max_nodes, self.max_nodes), self.shape
        if shape is not None and (nodes < shape.size or (request.chain and shape.width > 1)):
            # Memory is short, or the rule takes chains only.
            shape = TreeShape.chain(min(shape.depth, nodes - 1))
        calibration = self._calibration_at(request.temperature)
        return self.heads.draft(session, roots, replace(request, max_nodes=nodes, calibration=calibration, shape=shape))

    def _calibration_at(self, temperature: float) -> Calibration:
        share = min(1.0, temperature)
        if self._sampled is None or share == 0:
            return self.calibration
        if share not in self._warm:
            self._warm[share] = self.calibration.towards(self._sampled, share)
        return self._warm[share]

    def commit(self, session: Any, committed: Committed) -> None:
        self.heads.commit(session, committed)

    def reorder(self, session: Any, rows: Sequence[int]) -> None:
        self.heads.reorder(session, rows)
