"""Trees grown by `headstart.drafters.heads` from path-dependent drafts, for the proofs.

The drafter comes from `tests.decode.tables`: q(token | last two tokens), so siblings have different children.
`grow` runs its own code; only its draws go through `pick`, so that they can be enumerated.

Shape suffixes: B rows, W nodes of a level, V vocabulary, M nodes with sampled children, C sampled children of a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.drafters import draft_sampling
from headstart.drafters.heads import grow
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Request, Tree, TreeBatch
from tests.decode.tables import ROOT, VOCAB, Draft, Pick, logits_table, q_table

STEPS = 3
KNOTS = ((-9.0, -3.0, -2.0, -1.0, -0.5, 0.0),) * STEPS
CALIBRATION = Calibration(
    KNOTS,
    ((0.0, 0.05, 0.14, 0.37, 0.61, 1.0),) * STEPS,
    (0.7,) * STEPS,
    off_best=Calibration(KNOTS, ((0.0, 0.05, 0.13, 0.35, 0.55, 0.9),) * STEPS, (0.6,) * STEPS),
)


def drafted(path: tuple[int, ...]) -> Tensor:
    """Return the drafter's distribution after a path, [V]: flat enough that siblings get children."""
    q_draft_V = q_table(path).sqrt()
    return q_draft_V / q_draft_V.sum()


class PathTables:
    """Heads that draft from `drafted`, after the path of each node."""

    draft_to_target_D = torch.arange(VOCAB)
    max_children = VOCAB
    draft_steps = STEPS

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self.prefix = prefix
        self.level: list[tuple[int, ...]] = []

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        above = self.level
        pairs = zip(tokens_BW[0].tolist(), parents_BW[0].tolist(), strict=True)
        self.level = [(*above[parent], token) for token, parent in pairs] if depth else [()]
        return torch.stack([drafted((*self.prefix, *path)).log() for path in self.level])[None]


@dataclass
class GrownTrees:
    """A grower for `prove_exactly`.

    Attributes:
        sampling, max_nodes, threshold, chain: the request.
        max_rank: most children of a node.
        source: maps (distributions of the sampling nodes [M, V], index of a node) to the distribution that its child
            really comes from; mutants replace it.
        heads: heads to draft with.
    """

    sampling: bool
    max_nodes: int = 6
    threshold: float = 0.0
    chain: bool = False
    max_rank: int = 2
    source: Callable[[Tensor, int], Tensor] = lambda q_draft_MV, number: q_draft_MV[number]
    heads: Callable[[tuple[int, ...]], PathTables] = PathTables

    def propose(self, prefix: tuple[int, ...], pick: Pick) -> Tree:
        """Grow the tree after a prefix, with draws from the stream "draft"."""

        def fall_on(q_draft_MV: Tensor, number_M: Tensor) -> Tensor:
            sources = (self.source(q_draft_MV, node).tolist() for node in range(len(number_M)))
            return torch.tensor([pick("draft", source) if sum(source) > 0 else VOCAB for source in sources])

        request = Request(
            self.max_nodes,
            self.threshold,
            chain=self.chain,
            sample_drafts=self.sampling,
            warp=lambda logits: logits.double().softmax(-1),
            generators=[torch.Generator().manual_seed(0)],
            temperature=1.0,
            calibration=CALIBRATION,
        )
        real = draft_sampling.fall_on
        draft_sampling.fall_on = fall_on
        try:  # not unittest.mock, which takes longer
            return grow(self.heads(prefix), None, TreeBatch.roots([ROOT]), request, self.max_rank)[0]
        finally:
            draft_sampling.fall_on = real

    def grow(self, prefix: tuple[int, ...], pick: Pick) -> Draft:
        """Grow the tree, with the target's logits after each node."""
        tree = self.propose(prefix, pick)
        return Draft(tree, [logits_table((*prefix, *path)) for path in ((), *tree.paths)], prefix)
