"""Trees of drafts that follow their paths: the decode loop's own growing and rules together give the target's text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from headstart.decode.rules import RULES
from headstart.drafters.combine import _parts, merge
from headstart.tree import growing
from headstart.tree.proposal import Children, Proposal, Request
from tests.decode.grown import GrownTrees, PathTables, drafted, paths_of
from tests.decode.proofs import outcomes, prove_exactly
from tests.decode.tables import ROOT, Pick, _guess

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
DRAWN = (Children.TOP_K_AND_SAMPLED, Children.SAMPLED)


def trees(grower: GrownTrees, prefix: tuple[int, ...] = (1,)) -> list[Proposal]:
    """All that are grown after a prefix."""
    return [tree for tree, _ in outcomes(lambda pick: grower.propose(prefix, pick))]


def chains(rule: str) -> bool:
    return RULES[rule].chains_only


@pytest.mark.parametrize("children", list(Children))
@pytest.mark.parametrize("rule", LOSSLESS)
def test_lossless_by_enumeration(rule: str, children: Children) -> None:
    """Every outcome of drafting and of verifying; room is short, and thresholds that drop some nodes and not others."""
    for max_nodes, threshold in ((4, 0.0), (5, 0.1)) if children is Children.SAMPLED else ((6, 0.0), (7, 0.1)):
        prove_exactly(RULES[rule].accept_row, GrownTrees(children, max_nodes, threshold, chains(rule)))


@pytest.mark.parametrize("children", list(Children))
def test_children_follow_the_path_to_their_parent(children: Children) -> None:
    """Of every tree that can be grown: guesses are the best tokens after the path, and the rest are drawn from what is
    left of q after it."""
    for tree in trees(GrownTrees(children, max_nodes=5 if children is Children.SAMPLED else 7)):
        follow_their_paths(tree)


def follow_their_paths(tree: Proposal, prefix: tuple[int, ...] = (1,)) -> None:
    paths, sampled = paths_of(tree), tree.sampled[0] if tree.sampled else {}
    assert max(map(len, paths)) > 1 and len({path[0] for path in paths if len(path) > 1}) >= 1
    for node, path in enumerate(paths):
        children = [child for child, parent in enumerate(tree.parents[0]) if parent == node]
        drawn = sampled[node].children if node in sampled else []
        guesses = [tree.tokens[0][child] for child in children if child not in drawn]
        expected_V = drafted((*prefix, *path)).clone()
        assert guesses == expected_V.argsort(descending=True)[: len(guesses)].tolist(), "guesses follow the path"
        if drawn:
            expected_V[guesses] = 0.0
            found_V = sampled[node].q_draft_D
            # float32 logits, as heads give them
            torch.testing.assert_close(found_V, expected_V / expected_V.sum(), rtol=0, atol=1e-6, msg="drawn from")


def test_the_number_of_children_is_settled_before_they_are_drawn() -> None:
    """Of all trees that agree on what was drawn above a level, the level has the same shape."""
    for children in DRAWN:
        shapes: dict[Any, set[Any]] = {}
        for tree in trees(GrownTrees(children, max_nodes=5)):
            depths = [len(path) for path in paths_of(tree)]
            for depth in range(1, max(depths) + 1):
                above = tuple(path for path in paths_of(tree) if len(path) < depth)
                shape = tuple(p for p, own in zip(tree.parents[0], depths, strict=True) if own == depth)
                shapes.setdefault(above, set()).add(shape)
        assert all(len(found) == 1 for found in shapes.values())


class AlongBest(PathTables):
    """Depths are drafted along the best path, whatever path a node is on."""

    def draft_step(self, state: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        if depth:
            tokens_BW = drafted((*self.prefix, *self.level[0])).argmax().view(1, 1)
        return super().draft_step(state, tokens_BW, torch.zeros_like(tokens_BW), depth)


class Beside(GrownTrees):
    """With an n-gram's guesses beside it, as two drafters together have them: they may go through drawn nodes."""

    def propose(self, prefix: tuple[int, ...], pick: Pick) -> Proposal:
        tree, guesses = super().propose(prefix, pick), [ROOT]
        for _ in range(3):
            guesses.append(_guess((*prefix, *guesses[1:])))
        (grown,), (guessed,) = _parts(tree), _parts(Proposal([guesses], [[-1, 0, 1, 2]], [[1.0, 0.5, 0.4, 0.3]]))
        both = merge(grown, guessed, Request(self.max_nodes + 2))
        return Proposal([both.tokens], [both.parents], None, [both.sampled])


@pytest.mark.parametrize("children", DRAWN)
def test_lossless_beside_n_grams(children: Children) -> None:
    rule = "greedy_draft" if children is Children.TOP_K_AND_SAMPLED else "traversal"
    for max_nodes in (4, 5):
        prove_exactly(RULES[rule].accept_row, Beside(children, max_nodes))


# -- mutants -----------------------------------------------------------------------------------------------------------


def test_drafts_of_independent_depths_stay_lossless() -> None:
    """As long as children are tested against what they were drawn from; but they are no trees of paths."""
    prove_exactly(RULES["traversal"].accept_row, GrownTrees(Children.SAMPLED, max_nodes=5, heads=AlongBest))
    with pytest.raises(AssertionError, match="guesses follow the path"):
        for tree in trees(GrownTrees(Children.TOP_K, max_nodes=8, heads=AlongBest)):
            follow_their_paths(tree)


@pytest.mark.parametrize("children", DRAWN)
def test_siblings_whose_children_come_from_the_best_path_are_noticed(children: Children) -> None:
    """The children of every node of a level are drawn from what the level's first node says, and tested against what
    their own parent says."""
    grower = GrownTrees(children, 5, source=lambda q_draft_MV, number: q_draft_MV[0])
    rule = "greedy_draft" if children is Children.TOP_K_AND_SAMPLED else "traversal"
    with pytest.raises(AssertionError, match="differs from the target"):
        prove_exactly(RULES[rule].accept_row, grower)


def test_drawn_nodes_that_go_for_what_they_are_are_noticed() -> None:
    """A drawn node goes when nothing below it is worth a place, which depends on its token."""
    grower = Pruned(Children.SAMPLED, max_nodes=5, threshold=0.06)
    with pytest.raises(AssertionError, match="differs from the target"):
        prove_exactly(RULES["traversal"].accept_row, grower)


class Pruned(GrownTrees):
    """Drawn children of the root that have no children are taken out."""

    def propose(self, prefix: tuple[int, ...], pick: Pick) -> Proposal:
        tree = super().propose(prefix, pick)
        assert tree.accept_probs is not None
        row = growing._Growing(tree.tokens[0], tree.parents[0], tree.accept_probs[0])
        row.left = row.shape_nodes = [0] * len(row.tokens)
        row.sampled = tree.sampled[0] if tree.sampled else {}
        gone = set(row.sampled[0].children if 0 in row.sampled else []) - set(row.parents)
        if 0 in row.sampled:
            row.sampled[0].children = [child for child in row.sampled[0].children if child not in gone]
        row.drop(gone)
        return Proposal([row.tokens], [row.parents], None, [row.sampled])


def test_guesses_of_another_node_are_noticed() -> None:
    """Every node of a level gets the guesses of the first one: lossless, but no tree of paths."""
    honest = growing._Table.drafts

    def drafts(self: Any, *arguments: Any) -> Any:
        return [[nodes[0]] * len(nodes) for nodes in honest(self, *arguments)]

    with patch.object(growing._Table, "drafts", drafts), pytest.raises(AssertionError, match="guesses follow the path"):
        for tree in trees(GrownTrees(Children.TOP_K, max_nodes=8)):
            follow_their_paths(tree)


def test_draws_of_another_node_are_noticed() -> None:
    def wanted(row: int, node: int, column: int, top_k: Sequence[int], children: list[int]) -> Any:
        return honest(row, node, 0, list(top_k), children)

    honest = growing._Wanted
    with patch.object(growing, "_Wanted", wanted), pytest.raises(AssertionError, match="drawn from"):
        for tree in trees(GrownTrees(Children.TOP_K_AND_SAMPLED, max_nodes=6)):
            follow_their_paths(tree)


def test_the_tables_differ_from_path_to_path() -> None:
    """Or else nothing above would say anything."""
    best = [drafted((1, token)) for token in drafted((1,)).argsort(descending=True)[:3].tolist()]
    assert all((one - other).abs().max() > 0.05 for one, other in itertools.pairwise(best))
