"""Two trees as one, by hand, and the output of drafters that draft together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.decode.loop import CombinedDrafter, Drafter, Engine
from headstart.drafters.draft_model import DraftModelDrafter, early_exit
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.target.model import Target
from headstart.tree.tree import Drawn, Request, Tree, TreeBatch, TreeShape
from tests.decode.drafters import IdleDrafter, ReplayDrafter
from tests.drafters.test_draft_model import OPTIONS, plain, texts, tiny
from tests.drafters.test_lookahead import verified
from tests.heads.test_contract import build

ROOTS = TreeBatch.roots([5])


class Fixed(IdleDrafter):
    """Always the same trees."""

    def __init__(self, *trees: Tree, aux_layers: tuple[int, ...] = ()) -> None:
        self.max_nodes = max(tree.size for tree in trees)
        self.aux_layers = aux_layers
        self.requests: list[Request] = []
        self._trees = trees

    def propose(self, session: None, roots: TreeBatch, request: Request) -> list[Tree]:
        self.requests.append(request)
        return [copy.deepcopy(tree) for tree in self._trees]


ONE = Tree([5, 6, 7, 8], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.2])
TWO = Tree([5, 7, 9, 9, 8], [-1, 0, 1, 0, 3], [1.0, 0.5, 0.4, 0.1, 0.05])


def together(one: Tree, two: Tree, request: Request | None = None) -> Tree:
    (both,) = CombinedDrafter(Fixed(one), Fixed(two)).propose((None, None), ROOTS, request or Request(32))
    return both


def test_the_union_by_hand() -> None:
    drafter = CombinedDrafter(Fixed(ONE, aux_layers=(-1, 3)), Fixed(TWO, aux_layers=(3, 1)))
    assert (drafter.aux_layers, drafter.max_nodes) == ((-1, 3, 1), 8)
    (tree,) = drafter.propose((None, None), ROOTS, Request(8))
    #     5 - 6 - 8, 5 - 7 - 9, 5 - 9 - 8
    assert tree.tokens == [5, 6, 7, 8, 9, 9, 8]
    assert tree.parents == [-1, 0, 0, 1, 2, 0, 5]
    assert tree.accept_probs == [1.0, 0.6, 0.5, 0.2, 0.4, 0.1, 0.05]
    assert not tree.drawn


def test_the_best_nodes_stay_when_room_is_short() -> None:
    tree = together(ONE, TWO, Request(5))
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9], [-1, 0, 0, 1, 2])
    tree = together(ONE, TWO, Request(4))
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 9], [-1, 0, 0, 2])


def test_levels_of_the_heads_are_remembered() -> None:
    """What drafting cost does not follow from the depth of the union."""
    heads, root = replace(ONE, levels=3), Tree([5], [-1], [1.0], levels=1)
    for one, two, levels in ((heads, TWO, 3), (TWO, heads, 3), (root, TWO, 1), (TWO, root, 1)):
        assert together(one, two).levels == levels
    assert together(TWO, TWO).levels is None


@pytest.mark.parametrize("unknown", [0, 1])
def test_a_tree_of_unknown_probabilities_goes_first_if_first(unknown: int) -> None:
    one, two = (replace(tree, accept_probs=None) if index == unknown else tree for index, tree in enumerate((ONE, TWO)))
    tree = together(one, two, Request(6))
    assert tree.accept_probs is None
    assert tree.tokens == [5, 6, 7, 8, 9, 9]


@pytest.mark.parametrize("swapped", [False, True])
def test_drawn_nodes_keep_their_numbers_and_are_never_dropped(swapped: bool) -> None:
    drawn = Drawn(torch.full((10,), 0.1))
    draws = Fixed(Tree(ONE.tokens, ONE.parents, [1.0, 0.01, 0.01, 0.01], {2: drawn, 3: drawn}))
    parts = (Fixed(TWO), draws) if swapped else (draws, Fixed(TWO))
    (tree,) = CombinedDrafter(*parts).propose((None, None), ROOTS, Request(5, draws=True))
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9], [-1, 0, 0, 1, 2])
    assert list(tree.drawn) == [2, 3]
    assert [part.requests[0].draws for part in parts] == [True, swapped]
    chain = Tree([5, 6, 8], [-1, 0, 1], [1.0, 0.01, 0.01], {1: drawn})
    tree = together(chain, Tree([5, 7, 9], [-1, 0, 1], [1.0, 0.9, 0.9]), Request(9, chain=True))
    assert tree.tokens == [5, 6, 8], "a drawn chain is not given up for a better one"


def test_of_two_chains_the_more_promising_one_is_verified() -> None:
    one, two = Tree.chain_of([5, 6, 8], [1.0, 0.5, 0.2]), Tree.chain_of([5, 7, 9], [1.0, 0.9, 0.8])
    assert together(one, two, Request(9, chain=True)).tokens == [5, 7, 9]


def test_rows_are_merged_one_by_one() -> None:
    one = Fixed(Tree.chain_of([1, 2], [1.0, 0.5]), Tree([3], [-1], [1.0]))
    two = Fixed(Tree([1], [-1], [1.0]), Tree.chain_of([3, 4, 5], [1.0, 0.5, 0.4]))
    trees = CombinedDrafter(one, two).propose((None, None), TreeBatch.roots([1, 3]), Request(32))
    assert [tree.tokens for tree in trees] == [[1, 2], [3, 4, 5]]
    assert [tree.accept_probs for tree in trees] == [[1.0, 0.5], [1.0, 0.5, 0.4]]


def test_nothing_beside_a_tree_is_that_tree() -> None:
    for parts in ((Fixed(ONE), IdleDrafter()), (IdleDrafter(), Fixed(ONE))):
        assert CombinedDrafter(*parts).propose((None, None), ROOTS, Request(32)) == [ONE]


def pairs(target: Target, known: Sequence[Sequence[int]]) -> dict[str, tuple[Drafter, Drafter]]:
    return {
        "replay and n-gram": (ReplayDrafter(known, 61, 0.7), NgramDrafter()),
        "wrong and early exit": (ReplayDrafter(known, 61, 0.0), DraftModelDrafter(early_exit(target, 2), target)),
        "n-gram and lookahead": (NgramDrafter(), LookaheadDrafter()),
        "draft model and n-gram": (DraftModelDrafter(tiny(), target), NgramDrafter()),
        "n-gram and draft model": (NgramDrafter(), DraftModelDrafter(tiny(1), target)),
    }


@pytest.mark.parametrize("pair", pairs(tiny(), []))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_is_that_of_plain_decoding(pair: str, temperature: float) -> None:
    target = tiny()
    known = plain(target)
    options = replace(OPTIONS, temperature=temperature)
    drafter = CombinedDrafter(*pairs(target, known)[pair])
    rows = Engine(target, drafter).generate(texts(), options)
    assert all(row.drafter_error is None for row in rows)
    if temperature == 0:
        assert [row.tokens for row in rows] == known
        alone = CombinedDrafter(*pairs(target, known[2:])[pair])
        assert Engine(target, alone).generate(texts()[2:], options)[0].tokens == known[2]


@pytest.mark.parametrize("family", ["medusa", "hydra", "eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_beside_n_grams(family: str, temperature: float) -> None:
    """Drafts of one forward, and drafts that follow their paths, in dynamic trees that both have a part in."""
    target = tiny()
    heads = build(family, target)
    heads.bind(target)
    drafter = CombinedDrafter(HeadDrafter(heads, TreeShape.chain(2), "dynamic", max_nodes=9), NgramDrafter())
    sizes: list[tuple[int, int, int]] = []
    honest = drafter.propose

    def propose(session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        together = honest(session, roots, request)
        alone = drafter.first.propose(session[0], roots, replace(request, streams=[torch.Generator()] * 9))
        sizes.extend((one.size, both.size, both.depth) for one, both in zip(alone, together, strict=True))
        return together

    drafter.propose = propose
    rows = Engine(target, drafter).generate(texts(), replace(OPTIONS, temperature=temperature))
    assert all(row.drafter_error is None for row in rows)
    if temperature == 0:
        assert [row.tokens for row in rows] == plain(target)
        assert max(row.tokens_per_round for row in rows) > 1.5
    assert any(one == 9 and together > 9 for one, together, _ in sizes), "n-grams add to a full tree of the heads"
    assert any(depth > heads.draft_steps for _, _, depth in sizes), "and go on below it"


def test_both_learn_and_rows_leave_both() -> None:
    drafter = CombinedDrafter(NgramDrafter(), LookaheadDrafter())
    session = drafter.prefill([[1, 2, 1], [3, 4, 3]], {})
    trees = drafter.propose(session, TreeBatch.roots([2, 4]), Request(drafter.max_nodes))
    columns = [[list(column) for column in row.columns] for row in session[1]]
    drafter.commit(session, verified(trees, [[0, trees[0].index[0, 1]], [0]], [[9] * tree.size for tree in trees]))
    assert [[column[-1] for column in row.columns] for row in session[1]] == [[9] * 4] * 2
    assert [[column[:-1] for column in row.columns] for row in session[1]] == [
        [column[1:] for column in row] for row in columns
    ]
    drafter.reorder(session, [1])
    assert len(session[0]) == len(session[1]) == 1
    assert session[0][0].index.text == [3, 4, 3, 4]
