"""Trees that `headstart.tree.growing` grows itself, from drafts that follow their paths, for the proofs.

The drafter is that of `tests.decode.tables`: q(token | last two tokens), so siblings have different children. What
`grow` does is its own code; only its draws are made by `pick`, so that they can be enumerated.

Shape suffixes: B rows, W nodes of a level, V vocabulary, M nodes with sampled children, C sampled children of a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from headstart.tree import growing
from headstart.tree.calibration import Calibration
from headstart.tree.growing import grow
from headstart.tree.proposal import Children, Proposal, Request, Root
from tests.decode.tables import ROOT, VOCAB, Draft, Pick, logits_table, q_table

STEPS = 3
KNOTS = ((-9.0, -3.0, -2.0, -1.0, -0.5, 0.0),) * STEPS
CALIBRATION = Calibration(
    KNOTS,
    ((0.0, 0.05, 0.14, 0.37, 0.61, 1.0),) * STEPS,
    (0.7,) * STEPS,
    left=Calibration(KNOTS, ((0.0, 0.05, 0.13, 0.35, 0.55, 0.9),) * STEPS, (0.6,) * STEPS),
)


def drafted(path: tuple[int, ...]) -> Tensor:
    """The drafter's distribution after a path, [V]: flat enough that siblings get children."""
    q_draft_V = q_table(path).sqrt()
    return q_draft_V / q_draft_V.sum()


class PathTables:
    """Heads that draft from `drafted`, after the path of each node."""

    draft_to_target_D = torch.arange(VOCAB)
    config = SimpleNamespace(draft_width=VOCAB)
    draft_steps = STEPS

    def __init__(self, prefix: tuple[int, ...]) -> None:
        self.prefix = prefix
        self.level: list[tuple[int, ...]] = []

    def draft_step(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        above = self.level
        pairs = zip(tokens_BW[0].tolist(), parents_BW[0].tolist(), strict=True)
        self.level = [(*above[parent], token) for token, parent in pairs] if depth else [()]
        return torch.stack([drafted((*self.prefix, *path)).log() for path in self.level])[None]


@dataclass
class GrownTrees:
    """What `prove_exactly` takes: it grows a tree after a prefix.

    Attributes:
        children: how they are chosen.
        max_nodes, threshold, chain: of the request.
        max_rank: children of a node at most.
        source: of (what the nodes that draw now draw from [M, V], number of the node) the distribution that its
            children really come from; mutations replace it.
        heads: what drafts.
    """

    children: Children
    max_nodes: int = 6
    threshold: float = 0.0
    chain: bool = False
    max_rank: int = 2
    source: Callable[[Tensor, int], Tensor] = lambda q_draft_MV, number: q_draft_MV[number]
    heads: Callable[[tuple[int, ...]], PathTables] = PathTables

    def propose(self, prefix: tuple[int, ...], pick: Pick) -> Proposal:
        """The tree after a prefix, with draws from the stream "draft"."""

        def draws(q_draft_MV: Tensor, number_MC: Tensor) -> Tensor:
            found = torch.full(number_MC.shape, VOCAB)
            for node, numbers in enumerate(number_MC.tolist()):
                rest = self.source(q_draft_MV, node).tolist()
                for index, number in enumerate(numbers):
                    if number > 0 and sum(rest) > 0:  # 0 fills up what a node does not ask for
                        found[node, index] = pick("draft", rest)
                        rest[found[node, index]] = 0.0
            return found

        request = Request(
            self.max_nodes,
            self.threshold,
            0.0,
            self.chain,
            self.children,
            lambda logits: logits.double().softmax(-1),
            [torch.Generator().manual_seed(0)],
            1.0,
            CALIBRATION,
        )
        real = growing.draws
        growing.draws = draws
        try:  # not unittest.mock, which takes longer
            return grow(self.heads(prefix), None, Root.of([ROOT]), request, self.max_rank)
        finally:
            growing.draws = real

    def grow(self, prefix: tuple[int, ...], pick: Pick) -> Draft:
        """The same with the target's logits after each node."""
        tree = self.propose(prefix, pick)
        logits = [logits_table((*prefix, *path)) for path in paths_of(tree)]
        return Draft(tree.tokens[0], tree.parents[0], logits, tree.sampled[0] if tree.sampled else {})


def paths_of(tree: Proposal) -> list[tuple[int, ...]]:
    """Tokens from the root to each node, the root's own left out."""
    found: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents[0], tree.tokens[0], strict=True):
        found.append(() if parent < 0 else (*found[parent], token))
    return found
