"""For proofs: a drafter that knows the answer and is wrong at random, in random trees; a target that is broken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headstart.tree.proposal import Committed, Proposal, Request, Root


@dataclass
class Session:
    """How far each row has come in its known continuation."""

    rows: list[int]
    at: list[int]


class ReplayDrafter:
    """Draft the known continuation with probability `right` at each node, anything else otherwise.

    Random tree shapes, a different one for each row, with right tokens at random places: deep and broken paths, paths
    that are not the first child, and rounds where nothing is accepted all occur.
    """

    name = "replay"
    aux_layers: tuple[int, ...] = ()

    def __init__(self, known: Sequence[Sequence[int]], vocab: int, right: float, nodes: int = 9, seed: int = 0) -> None:
        self.known = known
        self.vocab = vocab
        self.right = right
        self.max_nodes = nodes
        self.rng = random.Random(seed)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Session:
        return Session(list(range(len(prompts))), [0] * len(prompts))

    def propose(self, session: Session, root: Root, request: Request) -> Proposal:
        tokens, parents = [], []
        for row, at, token in zip(session.rows, session.at, root.tokens, strict=True):
            row_parents, depths, row_tokens = [-1], [0], [token]
            for node in range(1, self.rng.randint(1, request.max_nodes)):
                parent = self.rng.randrange(node)
                depth = depths[parent] + 1
                index = at + depth
                truth = self.known[row][index] if index < len(self.known[row]) else 0
                lucky = self.rng.random() < self.right
                row_tokens.append(truth if lucky else self.rng.randrange(self.vocab))
                row_parents.append(parent)
                depths.append(depth)
            tokens.append(row_tokens)
            parents.append(row_parents)
        return Proposal(tokens, parents)

    def commit(self, session: Session, committed: Committed) -> None:
        session.at = [at + count for at, count in zip(session.at, committed.counts, strict=True)]

    def reorder(self, session: Session, rows: Sequence[int]) -> None:
        session.rows = [session.rows[row] for row in rows]
        session.at = [session.at[row] for row in rows]


def broken_trees(honest: Any) -> Any:
    """`Target.forward_tree` whose logits belong to the token before, wherever there are drafts."""

    def shifted(self: Any, cache: Any, tree: Any, aux_layers: Any = ()) -> Any:
        out = honest(self, cache, tree, aux_layers)
        if tree.size > 1:
            out.logits_BTV = out.logits_BTV.roll(1, -1)
        return out

    return shifted
