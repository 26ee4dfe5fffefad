"""Trees grown from heads hold the right tokens in the right places, in every mode."""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.decode.options import SamplingOptions
from headstart.decode.sampling import warp
from headstart.drafters import heads as heads_module
from headstart.drafters.heads import HeadDrafter, grow
from headstart.heads.base import DraftHead, HeadConfig, OneForwardHead
from headstart.tree.calibration import Calibration
from headstart.tree.tree import Request, Tree, TreeBatch, TreeShape
from tests.standin import CUDA, StandIn

VOCAB = 12
GROWING = heads_module.__file__
CALLS = {False: 32, True: 48}
"""Limits of Python calls per node, greedy and sampled."""
SAMPLED = partial(warp, SamplingOptions(temperature=1.0))


def streams_of(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(row) for row in range(count)]


def sampling_request(nodes: int, seeds: list[int], **settings: Any) -> Request:
    """Return a request for trees with sampled children, with one random stream per row."""
    streams = [torch.Generator().manual_seed(seed) for seed in seeds]
    return Request(nodes, sample_drafts=True, warp=SAMPLED, generators=streams, **settings)


class TableHead(DraftHead):
    """Drafts from a table indexed by the path."""

    family = "table"
    Config = HeadConfig
    draft_steps = 3

    def __init__(self, shared: bool = False, size: int = VOCAB) -> None:
        super().__init__(HeadConfig(family="table", vocab_size=VOCAB, draft_vocab_size=size))
        self.shared = shared
        self.levels: list[list[list[tuple[int, ...]]]] = []

    def table(self, path: tuple[int, ...]) -> Tensor:
        seed = hash(path if not self.shared else len(path)) % (1 << 31)
        return 2 * torch.randn(self.config.draft_width, generator=torch.Generator().manual_seed(seed))

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        if depth == 0:
            self.levels = [[[()] for _ in tokens_BW]]
        else:
            self.levels.append(
                [
                    [(*self.levels[-1][row][above], token) for token, above in zip(tokens, parents, strict=True)]
                    for row, (tokens, parents) in enumerate(zip(tokens_BW.tolist(), parents_BW.tolist(), strict=True))
                ]
            )
        columns = slice(0, 1) if self.shared else slice(None)
        return torch.stack([torch.stack([self.table(path) for path in row[columns]]) for row in self.levels[-1]])

    def warm_start(self, target: Any) -> None: ...
    def unroll(self, batch: Any) -> Any: ...
    def prefill(self, prompts: Any, states: Any) -> None: ...
    def commit(self, *_: Any) -> None: ...
    def reorder(self, *_: Any) -> None: ...
    def join(self, *_: Any) -> None: ...


def grown(
    heads: DraftHead,
    roots: list[int],
    request: Request,
    calibration: Calibration,
    shape: TreeShape | None = None,
    max_rank: int = 8,
) -> list[Tree]:
    request = replace(request, calibration=calibration, shape=shape)
    return grow(heads, None, TreeBatch.roots(roots), request, max_rank)


def probs_of(tree: Tree) -> list[float]:
    assert tree.accept_probs is not None
    return tree.accept_probs


@pytest.mark.parametrize("shared", [False, True])
def test_static_trees_hold_the_named_ranks(shared: bool) -> None:
    heads = TableHead(shared)
    shape = TreeShape.from_paths([(0, 0, 1), (0, 2), (2,), (1, 0)])
    for tree in grown(heads, [3, 4], Request(shape.size), Calibration(), shape):
        expected = []
        for ranks in shape.paths:
            path: tuple[int, ...] = ()
            for rank in ranks:
                path = (*path, int(heads.table(path).argsort(descending=True)[rank]))
            expected.append(path)
        assert sorted(tree.paths) == sorted(expected)


def test_dynamic_trees_hold_every_path_that_is_worth_it() -> None:
    heads = TableHead()
    request = Request(64, threshold=0.05)
    (tree,) = grown(heads, [3], request, Calibration(), max_rank=VOCAB)
    expected: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(heads.draft_steps):
        level = {
            (*path, token): accept_prob * prob
            for path, accept_prob in level.items()
            for token, prob in enumerate(heads.table(path).softmax(-1).tolist())
            if accept_prob * prob >= 0.05
        }
        expected |= level
    assert sorted(tree.paths) == sorted(expected)
    for path, accept_prob in zip(tree.paths, probs_of(tree)[1:], strict=True):
        assert accept_prob == pytest.approx(expected[path], rel=1e-5)


def best_first(heads: TableHead, calibration: Calibration, nodes: int) -> dict[tuple[int, ...], float]:
    """Return the paths of a best-first search: repeatedly the likeliest path not taken yet."""

    def children(path: tuple[int, ...], accept_prob: float, left: bool) -> list[tuple[float, tuple[int, ...], bool]]:
        if len(path) == heads.draft_steps:
            return []
        log_probs_D, tokens_D = heads.table(path).log_softmax(-1).sort(descending=True)
        probs = calibration.after(left).probs(len(path), log_probs_D.numpy()).tolist()
        return [
            (-accept_prob * prob, (*path, token), left or rank > 0)
            for rank, (prob, token) in enumerate(zip(probs, tokens_D.tolist(), strict=True))
        ]

    heap, found = children((), 1.0, False), {}
    while len(found) < nodes:
        heapq.heapify(heap)
        less, path, left = heapq.heappop(heap)
        found[path] = -less
        heap += children(path, -less, left)
    return found


LEFT = Calibration(
    log_probs=((-9.0, 0.0),) * 3,
    accepted=((0.01, 0.8),) * 3,
    any_child_accepted=(0.9,) * 3,
    off_best=Calibration(((-9.0, 0.0),) * 3, ((0.0, 0.2),) * 3, (0.3,) * 3),
)
"""Drafts off the best path are a quarter as likely to be accepted."""


@pytest.mark.parametrize("calibration", [Calibration(), LEFT])
@pytest.mark.parametrize("nodes", [3, 6, 12, 25])
@pytest.mark.parametrize("shared", [False, True])
def test_a_full_tree_equals_a_best_first_search(shared: bool, nodes: int, calibration: Calibration) -> None:
    """Nodes of deeper levels push out worse ones above."""
    heads = TableHead(shared)
    (tree,) = grown(heads, [3], Request(nodes + 1), calibration, max_rank=VOCAB)
    expected = best_first(heads, calibration, nodes)
    assert sorted(tree.paths) == sorted(expected)
    for path, accept_prob in zip(tree.paths, probs_of(tree)[1:], strict=True):
        assert accept_prob == pytest.approx(expected[path], rel=1e-5)


def test_paths_that_leave_the_best_one_are_believed_less() -> None:
    heads, request = TableHead(), Request(999, threshold=0.1)
    tree, one_curve = (grown(heads, [3], request, one)[0] for one in (LEFT, replace(LEFT, off_best=None)))
    assert len(tree.paths) < len(one_curve.paths) / 2
    # A level pays by what its nodes reach: 0.9 below the best path, 0.3 below others.
    (first,) = grown(heads, [3], replace(request, level_threshold=100.0), LEFT)
    promised = sum(max(0.0, prob * (0.3 if rank else 0.9) - 0.1) for rank, prob in enumerate(probs_of(first)[1:]))
    for level_threshold, further in ((promised * 0.99, True), (promised * 1.01, False)):
        levels = grown(heads, [3], replace(request, level_threshold=level_threshold), LEFT)[0].levels or 0
        assert (levels > 1) == further


def test_a_sampled_first_child_may_have_left_the_best_path() -> None:
    """With the probability that the heads draw another token than their best one, whichever token is sampled."""
    heads = TableHead()
    request = sampling_request(3, [2], chain=True)
    (tree,) = grown(heads, [3], request, LEFT)
    assert LEFT.off_best is not None
    best = [heads.table(path).log_softmax(-1).max() for path in ((), (tree.tokens[1],))]
    stays = float(best[0].exp())
    first = LEFT.probs(0, best[0].numpy())
    second = [one.probs(1, best[1].numpy()) for one in (LEFT, LEFT.off_best)]
    expected = [1.0, first, first * (stays * second[0] + (1 - stays) * second[1])]
    assert tree.accept_probs == pytest.approx(expected, rel=1e-5)


def test_a_sampled_node_is_never_pushed_out_and_leaves_room_below() -> None:
    """The root has the same children whatever is sampled, and nodes expected below them keep their room."""
    heads = TableHead()
    counts = set()
    for seed in range(20):
        (tree,) = grown(heads, [3], sampling_request(9, [seed]), LEFT)
        assert tree.size <= 9 and tree.depth == 3
        counts.add(tree.parents.count(0))
    assert len(counts) == 1


def test_rows_of_different_size_are_padded_and_room_is_kept() -> None:
    heads = TableHead()
    trees = grown(heads, [3, 4], Request(5, threshold=0.01), Calibration())
    assert max(tree.size for tree in trees) == 5
    (chain,) = grown(heads, [3], Request(9, threshold=0.0, chain=True), Calibration())
    assert chain.parents == [-1, 0, 1, 2]
    assert grown(heads, [3], Request(9, threshold=2.0), Calibration())[0].size == 1


@pytest.mark.parametrize("shape", [None, TreeShape.from_paths([(0, 0), (0, 1), (1, 0), (2,)])])
def test_sampled_children_are_described_and_distinct(shape: TreeShape | None) -> None:
    heads = TableHead(size=8)
    heads.set_draft_vocabulary(torch.arange(4, 12))
    counts = []
    for seed in range(20):
        (tree,) = grown(heads, [3], sampling_request(12, [seed], threshold=0.04), Calibration(), shape)
        with_children = [own for own in tree.children if own]
        assert sorted(tree.sampled) == sorted(own[-1] for own in with_children), "every parent has a sampled child"
        for *fixed, sampled in with_children:
            assert len({tree.tokens[child] for child in (*fixed, sampled)}) == len(fixed) + 1
            q_draft_V = tree.sampled[sampled].q_draft_V(VOCAB)
            assert q_draft_V.sum().item() == pytest.approx(1.0, abs=1e-6)
            assert all(q_draft_V[tree.tokens[child]] == 0 for child in fixed)
            assert q_draft_V[tree.tokens[sampled]] > 0
        counts.append(tree.parents.count(0))
    assert len(set(counts)) == 1, "the number of the root's children is independent of the draws"


def test_children_are_added_for_what_they_bring_together() -> None:
    """A draft is right with probability .2, a child sampled in its place with .5: each further child adds .2."""
    flat = ((-100.0, 0.0),) * 3
    calibration = Calibration(flat, ((0.2, 0.2),) * 3, (0.0,) * 3, Calibration(flat, ((0.5, 0.5),) * 3))

    def accept_probs(threshold: float, sampling: bool) -> list[float]:
        request = Request(5, threshold, 0.1, sample_drafts=sampling, warp=SAMPLED, generators=streams_of(1))
        (tree,) = grown(TableHead(), [3], request, calibration)
        return [round(accept_prob, 6) for accept_prob in probs_of(tree)[1:]]

    assert accept_probs(0.3, True) == [0.5], "one child is sampled"
    assert accept_probs(0.19, True) == [0.2, 0.2, 0.2, 0.5], "room ends"
    assert accept_probs(0.3, False) == []


def test_a_row_draws_with_its_own_numbers_whatever_rows_are_beside_it() -> None:
    together = grown(TableHead(), [3, 4, 5], sampling_request(9, [0, 1, 2], threshold=0.03), Calibration())
    assert len({tuple(tree.tokens) for tree in together}) == 3
    for row, tree in enumerate(together):
        (alone,) = grown(TableHead(), [3 + row], sampling_request(9, [row], threshold=0.03), Calibration())
        assert (alone.tokens, alone.parents) == (tree.tokens, tree.parents)


class OnceHead(TableHead, OneForwardHead):
    """Drafts all depths in one forward."""

    def depth_logits(self, session: Any, root_B: Tensor, depths: range) -> Tensor:
        level = torch.stack([self.table((0,) * depth) for depth in depths])
        return level.expand(len(root_B), -1, -1).to(root_B.device)


BUSHY = TreeShape.from_paths([(0, 0, 0), (1, 0), (2, 0), (2, 1), (0, 1)])


def assert_same_samples(tree: Tree, other: Tree) -> None:
    assert (tree.parents, list(tree.sampled)) == (other.parents, list(other.sampled))
    for node, sampled in tree.sampled.items():
        torch.testing.assert_close(sampled.q_draft_D.cpu(), other.sampled[node].q_draft_D)


@pytest.mark.parametrize("top_k", [0, 2])
def test_sampling_all_levels_at_once_gives_the_same_trees(top_k: int) -> None:
    """On a device one read serves all levels; nodes that turn out to be empty go, with their subtrees."""
    warper = partial(warp, SamplingOptions(temperature=1.0, top_k=top_k))

    def trees(roots: TreeBatch) -> list[Tree]:
        request = Request(BUSHY.size, sample_drafts=True, warp=warper, generators=streams_of(3), shape=BUSHY)
        return grow(heads, None, roots, request)

    heads = OnceHead(shared=True)
    expected = trees(TreeBatch.roots([3, 4, 5]))
    assert all((tree.size < BUSHY.size) == (top_k == 2) for tree in expected)
    with StandIn() as device:
        heads.to(CUDA)
        roots, before = TreeBatch.roots([3, 4, 5], CUDA), device.counts
        found = trees(roots)
        assert (device.counts - before).waits == 2, "the best drafts, and the sampled ones"
    for tree, other in zip(found, expected, strict=True):
        if not top_k:  # else nodes that went took random numbers here, and had none there
            assert tree.tokens == other.tokens
        assert_same_samples(tree, other)


class PlacedHead(TableHead):
    """Drafts on the device of its nodes."""

    def draft_step(self, session: Any, tokens_BW: Tensor, parents_BW: Tensor, depth: int) -> Tensor:
        return super().draft_step(session, tokens_BW, parents_BW, depth).to(tokens_BW.device)


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("static", [False, True])
def test_levels_drafted_on_a_device_are_the_same(static: bool, shared: bool, top_k: int) -> None:
    """On a device draws are read with the drafts of the next level; empty nodes go then."""
    warper = partial(warp, SamplingOptions(temperature=1.0, top_k=top_k))

    def trees(device: torch.device | str) -> list[Tree]:
        shape = BUSHY if static else None
        request = Request(9, 0.01, sample_drafts=True, warp=warper, generators=streams_of(3), shape=shape)
        return grow(heads, None, TreeBatch.roots([3, 4, 5], device), request)

    heads = PlacedHead(shared)
    expected = trees("cpu")
    assert any(tree.depth == 3 for tree in expected) and sum(len(tree.sampled) for tree in expected) >= 6
    with StandIn() as device:
        heads.to(CUDA)
        found = trees(CUDA)
        uploads = [e for e in device.events if e.where.startswith("support/uploads") and e.kind == "upload"]
        # The roots, which the loop has there; nodes of two levels with the numbers for drawing them; the last draw.
        assert len(uploads) == 1 + 2 + 1
    for tree, other in zip(found, expected, strict=True):
        assert tree.tokens == other.tokens
        assert tree.accept_probs == (other.accept_probs and pytest.approx(other.accept_probs))
        assert_same_samples(tree, other)


@pytest.mark.parametrize("sampling", [False, True])
def test_work_of_the_host_grows_with_nodes_alone(sampling: bool) -> None:
    """Python calls per node are no more for 32 rows than for 4, and stay below a limit that may go down."""

    def calls(rows: int) -> tuple[int, int]:
        streams = [torch.Generator().manual_seed(0) for _ in range(rows)]
        request = Request(16, 0.01, sample_drafts=sampling, warp=SAMPLED, generators=streams)
        heads, roots, count = OnceHead(shared=True), TreeBatch.roots([3] * rows), Counter[str]()
        sys.setprofile(lambda frame, event, _: count.update([event] if frame.f_code.co_filename == GROWING else []))
        try:
            trees = grow(heads, None, roots, request)
        finally:
            sys.setprofile(None)
        return count["call"] + count["c_call"], sum(tree.size for tree in trees)

    few, many = calls(4), calls(32)
    if not sampling:
        assert many[1] == 8 * few[1], "the same trees"
    assert many[0] / many[1] <= few[0] / few[1], "nothing is done for pairs of rows"
    assert many[0] / many[1] <= CALLS[sampling], many


@pytest.mark.parametrize("shared", [False, True])
def test_each_row_draws_from_its_own_nodes(shared: bool) -> None:
    """With several rows, and with nodes that share their drafts, q is the node's own without the guesses."""
    heads = TableHead(shared)
    request = sampling_request(9, [0, 1, 2], threshold=0.05)
    for tree in grown(heads, [3, 4, 5], request, Calibration()):
        paths = [(), *tree.paths]
        assert len(tree.sampled) > 1
        for node, sampled in tree.sampled.items():
            parent = tree.parents[node]
            expected_V = heads.table(paths[parent]).softmax(-1)
            expected_V[[tree.tokens[child] for child in tree.children[parent] if child != node]] = 0
            torch.testing.assert_close(sampled.q_draft_V(VOCAB), expected_V / expected_V.sum())
    (chain,) = grown(heads, [3], replace(request, chain=True, threshold=0.0), Calibration())
    assert chain.parents == [-1, 0, 1, 2] and list(chain.sampled) == [1, 2, 3], "a chain is sampled"


def test_tokens_cut_by_top_k_are_not_sampled() -> None:
    heads = TableHead()
    narrow = SamplingOptions(temperature=1.0, top_k=2)
    request = Request(9, sample_drafts=True, warp=partial(warp, narrow), generators=[torch.Generator().manual_seed(0)])
    (tree,) = grown(heads, [3], request, Calibration(), TreeShape.from_paths([(0,), (1,), (2,)]))
    assert tree.size == 3, "after the two likeliest tokens there is nothing to draw"


def test_levels_end_where_they_promise_too_little() -> None:
    """A level promises the probability of a right draft minus the cost of a node, over the nodes of all rows."""
    heads, threshold = TableHead(), 0.01

    def levels(level_threshold: float, reached: tuple[float, ...] = (), rows: int = 1) -> int:
        request = Request(64, threshold, level_threshold)
        trees = grown(heads, [3] * rows, request, Calibration(any_child_accepted=reached), max_rank=VOCAB)
        assert trees[0].levels == len(heads.levels)
        return len(heads.levels)

    probs = [prob for prob in heads.table(()).softmax(-1).tolist() if prob >= threshold]
    for reach in (1.0, 0.5):
        promised = sum(max(0.0, prob * reach - threshold) for prob in probs)
        assert levels(promised * 0.99, (1.0, reach)) > 1
        assert levels(promised * 1.01, (1.0, reach)) == 1, "the first level is always drafted"
        assert levels(promised * 1.99, (1.0, reach), rows=2) > 1
        assert levels(promised * 2.01, (1.0, reach), rows=2) == 1
    assert levels(0.0) == levels(1e-9) == 3, "unknown reach counts as certain"
    assert levels(1e-9, (1.0, 1.0, 0.0)) == 2
    # Chains with acceptance .5 throughout: level 1 promises .5 * .4 - .1, level 2 .25 * .4 - .1.
    calibration = Calibration(((-100.0, 0.0),) * 3, ((0.5, 0.5),) * 3, (0.5, 0.4, 0.4))
    for level_threshold, size in ((0.0, 4), (0.09, 3), (0.11, 2)):
        request = Request(8, threshold=0.1, level_threshold=level_threshold, chain=True)
        assert grown(heads, [3], request, calibration)[0].size == size


def test_a_level_is_copied_to_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy waits for the device, so probabilities and tokens go together."""
    copies = []
    honest = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: copies.append(self.shape) or honest(self))
    (tree,) = grown(TableHead(), [3], Request(64, threshold=0.05), Calibration(), max_rank=VOCAB)
    assert len(copies) == tree.levels == 3


def test_heads_respect_their_own_max_nodes() -> None:
    drafter = HeadDrafter(TableHead(), TreeShape.chain(2), "dynamic", max_nodes=4)
    for nodes, size in ((64, 4), (3, 3)):
        assert drafter.propose(None, TreeBatch.roots([3]), Request(nodes, threshold=0.01))[0].size == size
