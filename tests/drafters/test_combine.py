"""Two trees as one, by hand, and the output of drafters that draft together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.decode.drafting import Drafter
from headstart.decode.loop import DecodeLoop
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.model.model import Target
from headstart.tree.tree import Committed, DraftDistribution, Request, Tree, TreeBatch, TreeShape, union
from tests.decode.drafters import IdleDrafter, ReplayDrafter
from tests.drafters.helpers import OPTIONS, TEXTS, plain, tiny
from tests.heads.test_contract import build

ONE = Tree([5, 6, 7, 8], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.2])
TWO = Tree([5, 7, 9, 9, 8], [-1, 0, 1, 0, 3], [1.0, 0.5, 0.4, 0.1, 0.05])

STOPS = replace(OPTIONS, stop_test=lambda row, text: row == len(text))


def together(first: Tree, second: Tree, request: Request | None = None) -> Tree:
    return union(copy.deepcopy(first), copy.deepcopy(second), request or Request(32))


def test_the_union_by_hand() -> None:
    tree = together(ONE, TWO, Request(8))
    #     5 - 6 - 8, 5 - 7 - 9, 5 - 9 - 8
    assert tree.tokens == [5, 6, 7, 8, 9, 9, 8]
    assert tree.parents == [-1, 0, 0, 1, 2, 0, 5]
    assert tree.accept_probs == [1.0, 0.6, 0.5, 0.2, 0.4, 0.1, 0.05]
    assert not tree.sampled


def test_the_best_nodes_stay_when_room_is_short() -> None:
    tree = together(ONE, TWO, Request(5))
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9], [-1, 0, 0, 1, 2])
    tree = together(ONE, TWO, Request(4))
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 9], [-1, 0, 0, 2])


def test_levels_of_the_heads_are_remembered() -> None:
    """The cost of drafting does not follow from the depth of the union."""
    heads, root = replace(ONE, levels=3), Tree([5], [-1], [1.0], levels=1)
    for first, second, levels in ((heads, TWO, 3), (TWO, heads, 3), (root, TWO, 1), (TWO, root, 1)):
        assert together(first, second).levels == levels
    assert together(TWO, TWO).levels is None


@pytest.mark.parametrize("unknown", [0, 1])
def test_a_tree_of_unknown_probabilities_goes_first_if_first(unknown: int) -> None:
    first, second = (replace(tree, accept_probs=None) if at == unknown else tree for at, tree in enumerate((ONE, TWO)))
    tree = together(first, second, Request(6))
    assert tree.accept_probs is None
    assert tree.tokens == [5, 6, 7, 8, 9, 9]


@pytest.mark.parametrize("swapped", [False, True])
def test_sampled_nodes_keep_their_numbers_and_are_never_dropped(swapped: bool) -> None:
    one = DraftDistribution(torch.full((10,), 0.1))
    sampled = Tree(ONE.tokens, ONE.parents, [1.0, 0.01, 0.01, 0.01], {2: one, 3: one})
    tree = together(*((TWO, sampled) if swapped else (sampled, TWO)), Request(5, sample_drafts=True))
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8, 9], [-1, 0, 0, 1, 2])
    assert list(tree.sampled) == [2, 3]
    chain = Tree([5, 6, 8], [-1, 0, 1], [1.0, 0.01, 0.01], {1: one})
    tree = together(chain, Tree([5, 7, 9], [-1, 0, 1], [1.0, 0.9, 0.9]), Request(9, chain=True))
    assert tree.tokens == [5, 6, 8], "a sampled chain is not given up for a better one"


def test_of_two_chains_the_more_promising_one_is_verified() -> None:
    first, second = Tree.chain_of([5, 6, 8], [1.0, 0.5, 0.2]), Tree.chain_of([5, 7, 9], [1.0, 0.9, 0.8])
    assert together(first, second, Request(9, chain=True)).tokens == [5, 7, 9]


def test_nothing_beside_a_tree_is_that_tree() -> None:
    root = Tree([5])
    assert together(ONE, root) == together(root, ONE) == ONE


class Recorder(IdleDrafter):
    """Proposes one draft per row, sampled if `sampling`, and records its calls."""

    max_nodes = 3

    def __init__(self, aux_layers: tuple[int, ...] = (), sampling: bool = False) -> None:
        self.aux_layers, self.sampling = aux_layers, sampling
        self.calls: list[tuple[str, Any]] = []

    def prefill(self, prompts: Sequence[Sequence[int]], states: dict[int, torch.Tensor]) -> None:
        self.calls.append(("prefill", sorted(states)))

    def propose(self, session: None, roots: TreeBatch, request: Request) -> list[Tree]:
        self.calls.append(("propose", request.sample_drafts))
        seven = DraftDistribution(torch.nn.functional.one_hot(torch.tensor(7), 61).float())
        return [Tree([root, 7], [-1, 0], sampled={1: seven} if self.sampling else {}) for root in roots.root_tokens]

    def commit(self, session: None, committed: Committed) -> None:
        self.calls.append(("commit", committed.tokens))

    def reorder(self, session: None, rows: Sequence[int]) -> None:
        self.calls.append(("reorder", list(rows)))


def test_every_drafter_gets_every_call() -> None:
    target, drafters = tiny(), (Recorder((-1, 1)), Recorder((1, 2)))
    expected = plain(target)
    rows = DecodeLoop(target, *drafters).generate(TEXTS, STOPS)
    assert [row.tokens for row in rows] == [text[: row or None] for row, text in enumerate(expected)]
    assert drafters[0].calls == drafters[1].calls
    assert drafters[0].calls[0] == ("prefill", [-1, 1, 2])
    assert {"propose", "commit", "reorder"} <= {name for name, _ in drafters[0].calls}


@pytest.mark.parametrize("first_samples", [False, True])
def test_only_one_drafter_samples(first_samples: bool) -> None:
    """One random stream, and one distribution, is enough."""
    target, drafters = tiny(), (Recorder(sampling=first_samples), Recorder())
    DecodeLoop(target, *drafters).generate(TEXTS, replace(OPTIONS, temperature=1.0, seed=0))
    requests = [{asked for name, asked in drafter.calls if name == "propose"} for drafter in drafters]
    assert requests == [{True}, {not first_samples}]


@pytest.mark.drafter_fails
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("where", ["prefill", "propose", "commit", "reorder", "too few trees"])
def test_a_failing_drafter_is_dropped_alone(failing: int, where: str) -> None:
    target, drafters = tiny(), [Recorder(), Recorder()]
    expected = plain(target)

    def fail(*arguments: Any) -> None:
        raise ValueError("no drafts today")

    if where == "too few trees":
        drafters[failing].propose = lambda *_: []
    else:
        setattr(drafters[failing], where, fail)
    rows = DecodeLoop(target, *drafters).generate(TEXTS, STOPS)
    assert [row.tokens for row in rows] == [text[: row or None] for row, text in enumerate(expected)]
    errors = {row.drafter_error for row in rows} - {None}
    assert len(errors) == 1 and str(errors.pop()).startswith("ValueError: ")
    other = drafters[1 - failing].calls
    assert other[-1][0] == "commit" and len(other) > 4, "it drafts to the end"
    assert len(drafters[failing].calls) < len(other)


def pairs(target: Target, known: Sequence[Sequence[int]]) -> dict[str, tuple[Drafter, Drafter]]:
    return {
        "replay and n-gram": (ReplayDrafter(known, 61, 0.7), NgramDrafter()),
        "wrong and early exit": (ReplayDrafter(known, 61, 0.0), EarlyExitDrafter(target, 2)),
        "n-gram and lookahead": (NgramDrafter(), LookaheadDrafter()),
        "early exit and n-gram": (EarlyExitDrafter(target, 3), NgramDrafter()),
        "n-gram and early exit": (NgramDrafter(), EarlyExitDrafter(target, 1)),
    }


@pytest.mark.parametrize("pair", pairs(tiny(), []))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_output_equals_plain_decoding(pair: str, temperature: float) -> None:
    target = tiny()
    known = plain(target)
    options = replace(OPTIONS, temperature=temperature, seed=0)
    rows = DecodeLoop(target, *pairs(target, known)[pair]).generate(TEXTS, options)
    assert all(row.drafter_error is None for row in rows)
    if temperature == 0:
        assert [row.tokens for row in rows] == known
        assert DecodeLoop(target, *pairs(target, known[2:])[pair]).generate(TEXTS[2:], options)[0].tokens == known[2]


@pytest.mark.parametrize("family", ["medusa", "hydra", "eagle3", "dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_heads_beside_n_grams(family: str, temperature: float) -> None:
    """Heads with one forward, and path-dependent heads, in dynamic trees shared with n-grams."""
    target = tiny()
    heads = build(family, target)
    heads.bind(target)
    drafter = HeadDrafter(heads, TreeShape.chain(2), "dynamic", max_nodes=9)
    alone: list[int] = []
    honest = drafter.propose

    def propose(session: Any, roots: TreeBatch, request: Request) -> list[Tree]:
        (tree,) = trees = honest(session, roots, request)
        alone.append(tree.size)
        return trees

    drafter.propose = propose
    loop = DecodeLoop(target, drafter, NgramDrafter())
    rows = [loop.generate([text], replace(OPTIONS, temperature=temperature, seed=0))[0] for text in TEXTS]
    assert all(row.drafter_error is None for row in rows)
    if temperature == 0:
        assert [row.tokens for row in rows] == plain(target)
        assert max(row.tokens_per_round for row in rows) > 1.5
    rounds = [done for row in rows for done in row.rounds]
    pairs = zip(alone, rounds, strict=True)
    assert any(size == 9 and done.nodes > 9 for size, done in pairs), "n-grams add to a full tree of the heads"
    assert any(done.depth > heads.draft_steps for done in rounds), "and go on below it"
