"""Trees of path-dependent drafts: the loop's growing and the rule together give the target's text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from headstart.drafters import heads as growing
from headstart.tree.tree import Request, Tree, union
from tests.decode.grown import GrownTrees, PathTables, drafted
from tests.decode.proofs import outcomes, prove_exactly
from tests.decode.tables import ROOT, Pick, _guess


def trees(grower: GrownTrees, prefix: tuple[int, ...] = (1,)) -> list[Tree]:
    """Return all trees that can grow after a prefix."""
    return [tree for tree, _ in outcomes(lambda pick: grower.propose(prefix, pick))]


@pytest.mark.parametrize("sampling", [False, True])
def test_lossless_by_enumeration(sampling: bool) -> None:
    """Enumerate every outcome of drafting and verifying, with little room and with thresholds that drop some nodes."""
    for max_nodes, threshold in ((6, 0.0), (7, 0.1)):
        for chain in (False, True):
            prove_exactly(GrownTrees(sampling, max_nodes, threshold, chain))


@pytest.mark.parametrize("sampling", [False, True])
def test_children_follow_the_path_to_their_parent(sampling: bool) -> None:
    """Guesses are the best tokens after the path, and the other children are sampled from the rest of q after it."""
    for tree in trees(GrownTrees(sampling, max_nodes=7)):
        follow_their_paths(tree)


def follow_their_paths(tree: Tree, prefix: tuple[int, ...] = (1,)) -> None:
    assert tree.depth > 1
    for path, children in zip([(), *tree.paths], tree.children, strict=True):
        guesses = [tree.tokens[child] for child in children if child not in tree.sampled]
        expected_V = drafted((*prefix, *path)).clone()
        assert guesses == expected_V.argsort(descending=True)[: len(guesses)].tolist(), "guesses follow the path"
        expected_V[guesses] = 0.0
        for child in children:
            if child in tree.sampled:  # float32 logits, as heads give them
                found_V, expected_V = tree.sampled[child].q_draft_D, expected_V / expected_V.sum()
                torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-6, msg="sampled from")


def test_the_number_of_children_is_settled_before_they_are_sampled() -> None:
    """Trees with the same draws above a level have the same shape at that level."""
    shapes: dict[Any, set[Any]] = {}
    for tree in trees(GrownTrees(True, max_nodes=5)):
        for depth in range(1, tree.depth + 1):
            above = tuple(path for path in tree.paths if len(path) < depth)
            shape = tuple(parent for parent, own in zip(tree.parents, tree.depths, strict=True) if own == depth)
            shapes.setdefault(above, set()).add(shape)
    assert all(len(found) == 1 for found in shapes.values())


class AlongBest(PathTables):
    """Depths are drafted along the best path, whatever path a node is on."""

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        if depth:
            tokens_BW = drafted((*self.prefix, *self.level[0])).argmax().view(1, 1)
        return super().draft_step(session, tokens_BW, torch.zeros_like(tokens_BW), depth)


class Beside(GrownTrees):
    """Trees with an n-gram's guesses beside them, which may go through sampled nodes."""

    def propose(self, prefix: tuple[int, ...], pick: Pick) -> Tree:
        guesses = [ROOT]
        for _ in range(3):
            guesses.append(_guess((*prefix, *guesses[1:])))
        chain = Tree.chain_of(guesses, [1.0, 0.5, 0.4, 0.3])
        return union(super().propose(prefix, pick), chain, Request(self.max_nodes + 2))


def test_lossless_beside_n_grams() -> None:
    for max_nodes in (4, 5):
        prove_exactly(Beside(True, max_nodes))


class FewCandidates(PathTables):
    """Two tokens can follow a path; all others have no probability."""

    max_children = 2

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        logits_BWV = super().draft_step(session, tokens_BW, parents_BW, depth)
        return logits_BWV.masked_fill(logits_BWV < logits_BWV.topk(2).values[..., -1:], -torch.inf)


@pytest.mark.parametrize("sampling", [False, True])
def test_lossless_with_few_candidates(sampling: bool) -> None:
    """The rest of q after a guess is one token, and no tree is wider than the candidates."""
    for max_rank in (2, 8):
        grower = GrownTrees(sampling, max_nodes=6, max_rank=max_rank, heads=FewCandidates)
        prove_exactly(grower)
        assert max(len(children) for tree in trees(grower) for children in tree.children) == 2


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_drafts_of_independent_depths_stay_lossless() -> None:
    """Children are tested against the distribution they were sampled from, but the trees do not follow their paths."""
    prove_exactly(GrownTrees(True, max_nodes=5, heads=AlongBest))
    with pytest.raises(AssertionError, match="guesses follow the path"):
        for tree in trees(GrownTrees(False, max_nodes=8, heads=AlongBest)):
            follow_their_paths(tree)


def test_siblings_whose_children_come_from_the_best_path_are_noticed() -> None:
    """All children of a level are sampled from the first node's distribution, and tested against their own parent's."""
    with pytest.raises(AssertionError, match="differs from the target"):
        prove_exactly(GrownTrees(True, 7, source=lambda q_draft_MV, number: q_draft_MV[0]))


def test_dropping_sampled_nodes_by_their_token_is_noticed() -> None:
    """Whether anything below a sampled node is worth a place depends on its token."""
    with pytest.raises(AssertionError, match="differs from the target"):
        prove_exactly(Pruned(True, max_nodes=5, threshold=0.06))


class Pruned(GrownTrees):
    """Sampled children of the root that have no children are taken out."""

    def propose(self, prefix: tuple[int, ...], pick: Pick) -> Tree:
        tree = super().propose(prefix, pick)
        gone = {node for node in tree.sampled if tree.parents[node] == 0} - set(tree.parents)
        tree.keep(node for node in range(tree.size) if node not in gone)
        return tree


def test_guesses_of_another_node_are_noticed() -> None:
    """Every node of a level gets the guesses of the first one: lossless, but no tree of paths."""
    honest = growing._Table.candidates

    def candidates(self: Any, *arguments: Any) -> Any:
        return [[nodes[0]] * len(nodes) for nodes in honest(self, *arguments)]

    with patch.object(growing._Table, "candidates", candidates), pytest.raises(AssertionError, match="guesses follow"):
        for tree in trees(GrownTrees(False, max_nodes=8)):
            follow_their_paths(tree)


def test_samples_of_another_node_are_noticed() -> None:
    def pending_child(row: int, node: int, column: int, siblings: Sequence[int]) -> Any:
        return honest(row, node, 0, list(siblings))

    honest = growing.PendingChild
    with patch.object(growing, "PendingChild", pending_child), pytest.raises(AssertionError, match="sampled from"):
        for tree in trees(GrownTrees(True, max_nodes=6)):
            follow_their_paths(tree)


def test_the_tables_differ_from_path_to_path() -> None:
    """Otherwise the proofs above would show nothing."""
    best = [drafted((1, token)) for token in drafted((1,)).argsort(descending=True)[:3].tolist()]
    assert all((one - other).abs().max() > 0.05 for one, other in itertools.pairwise(best))
