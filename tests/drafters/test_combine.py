"""Two trees as one, by hand, and the output of drafters that draft together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.decode.drafting import Drafter, Learner, NoDrafter
from headstart.decode.loop import Engine
from headstart.drafters.combine import CombinedDrafter
from headstart.drafters.draft_model import DraftModelDrafter, early_exit
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.target.model import Target
from headstart.tree.proposal import Children, Committed, Proposal, Request, Root, SampledChildren
from headstart.tree.tree import TreeShape
from tests.decode.drafters import ReplayDrafter
from tests.drafters.test_draft_model import OPTIONS, plain, texts, tiny
from tests.heads.test_contract import build

ROOTS = Root.of([5])


class Fixed(NoDrafter):
    """Always the same tree."""

    def __init__(
        self,
        tokens: list[int],
        parents: list[int],
        accept_probs: list[float] | None = None,
        sampled: dict[int, SampledChildren] | None = None,
        aux_layers: tuple[int, ...] = (),
    ) -> None:
        self.max_nodes = len(tokens)
        self.aux_layers = aux_layers
        self.requests: list[Request] = []
        self._tree = Proposal(
            [tokens],
            [parents],
            None if accept_probs is None else [accept_probs],
            None if sampled is None else [sampled],
        )

    def propose(self, session: None, root: Root, request: Request) -> Proposal:
        self.requests.append(request)
        return self._tree


def together(one: Drafter, two: Drafter, request: Request | None = None) -> Proposal:
    return CombinedDrafter(one, two).propose((None, None), ROOTS, request or Request(32))


ONE = ([5, 6, 7, 8], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.2])
TWO = ([5, 7, 9, 9, 8], [-1, 0, 1, 0, 3], [1.0, 0.5, 0.4, 0.1, 0.05])


def test_the_union_by_hand() -> None:
    drafter = CombinedDrafter(Fixed(*ONE, aux_layers=(-1, 3)), Fixed(*TWO, aux_layers=(3, 1)))
    assert (drafter.name, drafter.aux_layers, drafter.max_nodes) == ("none+none", (-1, 3, 1), 8)
    assert not isinstance(drafter, Learner)
    tree = drafter.propose((None, None), ROOTS, Request(8))
    #     5 - 6 - 8, 5 - 7 - 9, 5 - 9 - 8
    assert tree.tokens == [[5, 6, 7, 8, 9, 9, 8]]
    assert tree.parents[0] == [-1, 0, 0, 1, 2, 0, 5]
    assert tree.accept_probs == [[1.0, 0.6, 0.5, 0.2, 0.4, 0.1, 0.05]]
    assert tree.sampled is None


def test_the_best_nodes_stay_when_room_is_short() -> None:
    tree = together(Fixed(*ONE), Fixed(*TWO), Request(5))
    assert tree.tokens == [[5, 6, 7, 8, 9]]
    assert tree.parents[0] == [-1, 0, 0, 1, 2]
    tree = together(Fixed(*ONE), Fixed(*TWO), Request(4))
    assert tree.tokens == [[5, 6, 7, 9]]
    assert tree.parents[0] == [-1, 0, 0, 2]


def test_levels_of_the_heads_are_remembered() -> None:
    """What drafting cost does not follow from the depth of the union."""
    heads, other, root = Fixed(*ONE), Fixed(*TWO), Fixed([5], [-1], [1.0])
    heads._tree.levels, root._tree.levels = 3, 1
    for one, two, levels in ((heads, other, 3), (other, heads, 3), (root, other, 1), (other, root, 1)):
        assert together(one, two).levels == levels
    assert together(other, other).levels is None


@pytest.mark.parametrize("unknown", [0, 1])
def test_a_tree_of_unknown_probabilities_goes_first_if_first(unknown: int) -> None:
    parts = [(*ONE[:2], None), TWO] if unknown == 0 else [ONE, (*TWO[:2], None)]
    tree = together(Fixed(*parts[0]), Fixed(*parts[1]), Request(6))
    assert tree.accept_probs is None
    assert tree.tokens == [[5, 6, 7, 8, 9, 9]]


@pytest.mark.parametrize("swapped", [False, True])
def test_sampled_children_keep_their_numbers_and_are_never_dropped(swapped: bool) -> None:
    q_draft_D = torch.full((10,), 0.1)
    sampled = {0: SampledChildren([2], q_draft_D), 1: SampledChildren([3], q_draft_D)}
    draws = Fixed(ONE[0], ONE[1], [1.0, 0.01, 0.01, 0.01], sampled)
    parts = (Fixed(*TWO), draws) if swapped else (draws, Fixed(*TWO))
    tree = together(*parts, Request(5, children=Children.SAMPLED))
    assert tree.tokens == [[5, 6, 7, 8, 9]]
    assert tree.parents[0] == [-1, 0, 0, 1, 2]
    assert tree.sampled == [sampled]
    asked = [part.requests[0].children for part in parts]
    assert asked == ([Children.SAMPLED, Children.SAMPLED] if swapped else [Children.SAMPLED, Children.TOP_K])
    chain = Fixed([5, 6, 8], [-1, 0, 1], [1.0, 0.01, 0.01], {0: SampledChildren([1], q_draft_D)})
    tree = together(chain, Fixed([5, 7, 9], [-1, 0, 1], [1.0, 0.9, 0.9]), Request(9, chain=True))
    assert tree.tokens == [[5, 6, 8]], "a drawn chain is not given up for a better one"


def test_of_two_chains_the_more_promising_one_is_verified() -> None:
    one = Fixed([5, 6, 8], [-1, 0, 1], [1.0, 0.5, 0.2])
    two = Fixed([5, 7, 9], [-1, 0, 1], [1.0, 0.9, 0.8])
    assert together(one, two, Request(9, chain=True)).tokens == [[5, 7, 9]]


def test_rows_are_merged_one_by_one() -> None:
    one = Proposal([[1, 2], [3]], [[-1, 0], [-1]], accept_probs=[[1.0, 0.5], [1.0]])
    two = Proposal([[1], [3, 4, 5]], [[-1], [-1, 0, 1]], accept_probs=[[1.0], [1.0, 0.5, 0.4]])
    parts = Fixed([1], [-1]), Fixed([1], [-1])
    parts[0]._tree, parts[1]._tree = one, two
    tree = together(*parts)
    assert tree.tokens == [[1, 2], [3, 4, 5]]
    assert tree.accept_probs == [[1.0, 0.5], [1.0, 0.5, 0.4]]


def test_nothing_beside_a_tree_is_that_tree() -> None:
    one = Fixed(*ONE)
    assert together(one, NoDrafter()) == one._tree
    assert together(NoDrafter(), one) == one._tree


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
    assert isinstance(drafter, Learner) == ("lookahead" in pair)
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

    def propose(session: Any, root: Root, request: Request) -> Proposal:
        together = honest(session, root, request)
        one = drafter.first.propose(session[0], root, replace(request, streams=[torch.Generator()] * len(root.tokens)))
        sizes.append((one.size, together.size, together.depth))
        return together

    drafter.propose = propose
    rows = Engine(target, drafter).generate(texts(), replace(OPTIONS, temperature=temperature))
    assert all(row.drafter_error is None for row in rows)
    if temperature == 0:
        assert [row.tokens for row in rows] == plain(target)
        assert max(row.tokens_per_round for row in rows) > 1.5
    assert any(one == 9 and together > 9 for one, together, _ in sizes), "n-grams add to a full tree of the heads"
    assert any(depth > heads.draft_steps for _, _, depth in sizes), "and go on below it"


def test_both_learn_and_rows_leave_both(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = NgramDrafter(), LookaheadDrafter()
    drafter = CombinedDrafter(one, two)
    session = drafter.prefill([[1, 2, 1], [3, 4, 3]], {})
    tree = drafter.propose(session, Root.of([2, 4]), Request(drafter.max_nodes))
    columns = [[list(column) for column in row.columns] for row in session[1]]
    choices = [[9] * tree.size] * 2
    assert isinstance(drafter, Learner)
    drafter.learn(session, tree.on("cpu"), choices)
    assert [[column[-1] for column in row.columns] for row in session[1]] == [[9] * 4] * 2
    assert [[column[:-1] for column in row.columns] for row in session[1]] == [
        [column[1:] for column in row] for row in columns
    ]
    drafter.commit(session, Committed.of([[2, 1], [4]], {}))
    drafter.reorder(session, [1])
    assert len(session[0]) == len(session[1]) == 1
    assert session[0][0].index.text == [3, 4, 3, 4]
