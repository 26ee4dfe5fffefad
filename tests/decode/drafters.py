"""For proofs: a drafter that knows the answer and is wrong at random, in random trees; a target that is broken."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation
from headstart.model.model import Target
from headstart.tree.tree import Committed, Request, Tree, TreeBatch


@dataclass
class Session:
    """How far each row has come in its known continuation."""

    rows: list[int]
    at: list[int]


class ReplayDrafter:
    """Drafts the known continuation with probability `right` at each node, anything else otherwise.

    Random tree shapes, a different one for each row, with right tokens at random places: deep and broken paths, paths
    that are not the first child, and rounds where nothing is accepted all occur.
    """

    aux_layers: tuple[int, ...] = ()

    def __init__(self, known: Sequence[Sequence[int]], vocab: int, right: float, nodes: int = 9, seed: int = 0) -> None:
        self.known = known
        self.vocab = vocab
        self.right = right
        self.max_nodes = nodes
        self.rng = random.Random(seed)

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> Session:
        return Session(list(range(len(prompts))), [0] * len(prompts))

    def propose(self, session: Session, roots: TreeBatch, request: Request) -> list[Tree]:
        trees = []
        for row, at, root in zip(session.rows, session.at, roots.root_tokens, strict=True):
            tree = Tree([root])
            depths = [0]
            for node in range(1, self.rng.randint(1, request.max_nodes)):
                parent = self.rng.randrange(node)
                depths.append(depths[parent] + 1)
                index = at + depths[parent] + 1
                truth = self.known[row][index] if index < len(self.known[row]) else 0
                lucky = self.rng.random() < self.right
                tree.add(parent, truth if lucky else self.rng.randrange(self.vocab))
            trees.append(tree)
        return trees

    def commit(self, session: Session, committed: Committed) -> None:
        session.at = [at + count for at, count in zip(session.at, committed.counts, strict=True)]

    def reorder(self, session: Session, rows: Sequence[int]) -> None:
        session.rows = [session.rows[row] for row in rows]
        session.at = [session.at[row] for row in rows]

    def join(self, session: Session, other: Session) -> Session:
        return Session(session.rows + other.rows, session.at + other.at)


class IdleDrafter:
    """A drafter that proposes nothing, for tests to build on."""

    aux_layers: tuple[int, ...] = ()
    max_nodes = 1

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> None:
        return None

    def propose(self, session: None, roots: TreeBatch, request: Request) -> list[Tree]:
        return roots.trees

    def commit(self, session: None, committed: Committed) -> None:
        return None

    def reorder(self, session: None, rows: Sequence[int]) -> None:
        return None

    def join(self, session: None, other: None) -> None:
        return None


def lossless(
    target: Target, drafters: Sequence[Any], texts: list[list[int]], options: DecodeOptions
) -> list[Generation]:
    """Assert that drafts change no text, in a batch or alone; return the batch's rows."""
    plain = [DecodeLoop(target).generate([text], options)[0].tokens for text in texts]
    rows = DecodeLoop(target, *drafters).generate(texts, options)
    assert all(row.drafter_error is None for row in rows)
    assert [row.tokens for row in rows] == plain
    assert [DecodeLoop(target, *drafters).generate([text], options)[0].tokens for text in texts] == plain
    return rows


def broken_trees(honest: Any) -> Any:
    """Return a broken `Target.forward_tree`: with drafts, logits are rolled by one token id."""

    def shifted(self: Any, cache: Any, tree: Any, aux_layers: Any = ()) -> Any:
        out = honest(self, cache, tree, aux_layers)
        if tree.size > 1:
            out.logits_BTV = out.logits_BTV.roll(1, -1)
        return out

    return shifted
