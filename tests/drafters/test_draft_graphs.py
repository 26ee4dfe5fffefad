"""Drafts as CUDA graphs on the stand-in device: the same drafts as the operators give, with few launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.eval.environment import environment
from headstart.kernels import draft_kernels
from headstart.kernels.memory import Memory
from headstart.model.model import Target
from headstart.replay.cache import TreeCache
from headstart.replay.cuda_graphs import Graph, GraphPool
from headstart.tree.tree import Committed, Request, Tree, TreeBatch
from tests.drafters.helpers import SHAPE, drafted, heads_drafter
from tests.heads.test_contract import CASES, build
from tests.spies import spy
from tests.standin import CUDA, Counts, StandIn
from tests.standin import Graph as StandInGraph
from tests.tiny import tiny_model

TEXTS = [[3, 9, 14, 3, 9, 14, 3, 9], [8, 40, 12], [7, 7, 3]]
OPTIONS = DecodeOptions(max_new_tokens=5, ignore_end=True, seed=0)


@pytest.fixture(scope="module")
def host() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


@pytest.fixture(scope="module")
def target() -> Target:
    with StandIn():
        return Target(tiny_model("llama", vocab_size=61).to(CUDA))


@contextmanager
def uncaptured() -> Iterator[None]:
    """Make each replay run the operators anew."""

    def capture(captures: Any, memory: Any, bucket: Any, inputs: Any, forward: Callable[[], Any]) -> Any:
        made = Graph(None, inputs, forward())

        def replay() -> None:
            made.outputs = forward()

        made.graph = type("Operators", (), {"replay": staticmethod(replay)})
        memory.graphs[bucket] = made
        return made

    with patch.object(GraphPool, "capture", capture):
        yield


def drafts(
    target: Target, drafter: HeadDrafter, options: DecodeOptions = OPTIONS, texts: list[list[int]] = TEXTS
) -> tuple[list[list[int]], list[Tree]]:
    return drafted(target, drafter, texts, options)


def probabilities(tree: Tree) -> dict[tuple[int, ...], float]:
    """The probabilities of a tree's paths by their tokens, without the root."""
    assert tree.accept_probs is not None
    return dict(zip([(), *tree.paths], tree.accept_probs, strict=True))


def eagerly(target: Target, drafter: HeadDrafter, **settings: Any) -> tuple[list[list[int]], list[Tree]]:
    drafter._graphs = None
    return drafts(target, drafter, **settings)


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        *((name, "dynamic") for name in CASES),
        ("medusa", "static"),
        ("eagle3", "chain"),
        ("dspark", "static"),
        ("dflash2", "static"),
    ],
)
def test_captured_drafts_equal_eager_ones(name: str, tree: Any, host: Target, target: Target, device: StandIn) -> None:
    drafter = heads_drafter(target, name, host, tree=tree)
    texts, trees = drafts(target, drafter)
    assert drafter.forwards == "CUDA graphs"
    graphs = drafter._graphs
    assert graphs is not None
    graphs._spares = []
    with uncaptured():
        assert (texts, trees) == drafts(target, drafter), "probabilities included"
    eager_texts, eager_trees = eagerly(target, drafter)
    assert texts == eager_texts
    # A bucket's padding changes the order of the sums.
    for tree_, eager in zip(trees, eager_trees, strict=True):
        assert (tree_.tokens, tree_.parents) == (eager.tokens, eager.parents)
        assert tree_.accept_probs == (eager.accept_probs and pytest.approx(eager.accept_probs, rel=1e-4))


@pytest.mark.parametrize("name", ["medusa", "hydra-draft-vocabulary", "eagle3"])
def test_sampled_drafts_equal_eager_ones(name: str, host: Target, target: Target, device: StandIn) -> None:
    drafter = heads_drafter(target, name, host)
    options = DecodeOptions(max_new_tokens=5, ignore_end=True, temperature=1.0, seed=0)
    assert drafts(target, drafter, options)[0] == eagerly(target, drafter, options=options)[0]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[StandInGraph]:
    """All captured graphs."""
    return spy(monkeypatch, StandInGraph, "__init__", lambda own: own)


@pytest.mark.parametrize("name", ["medusa", "eagle3", "dspark"])
def test_captures_once(name: str, host: Target, target: Target, device: StandIn, captures: list[StandInGraph]) -> None:
    drafter = heads_drafter(target, name, host)
    first, count = drafts(target, drafter), len(captures)
    assert count and drafts(target, drafter) == first and len(captures) == count


def test_early_exit_keeps_its_graphs_when_its_cache_grows(
    target: Target, device: StandIn, captures: list[StandInGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.drafters.early_exit._SPARE", 0)
    monkeypatch.setattr("headstart.replay.cuda_graphs._MIN_SLOTS", 16)
    drafter = EarlyExitDrafter(target, 1)
    loop, options = DecodeLoop(target, drafter), replace(OPTIONS, max_new_tokens=80)
    caches: list[TreeCache] = []
    forward = drafter.first_layers.forward_tree
    monkeypatch.setattr(drafter.first_layers, "forward_tree", lambda *args: (caches.append(args[0]), forward(*args))[1])
    texts = [list(range(3, 59))]  # it just fits at first
    (first,) = loop.generate(texts, options)
    assert len({cache.capacity for cache in caches}) > 1, "it has grown"
    assert all(cache.memory is not None for cache in caches)
    count = len(captures)
    caches.clear()  # they hold memory
    assert loop.generate(texts, options)[0].tokens == first.tokens and len(captures) == count


@pytest.mark.parametrize(("name", "length"), [("eagle3", 40), ("dflash", 99)])
def test_memory_grows_with_a_text_and_stays_for_the_next(
    name: str, length: int, host: Target, target: Target, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.drafters.draft_graphs._SPARE", 0)
    monkeypatch.setattr("headstart.replay.cuda_graphs._ROUND_UP_SHARE", 0.0)
    drafter = heads_drafter(target, name, host)
    memories: list[Memory] = []
    new_memory = drafter.heads.new_memory  # type: ignore[operator]  # these heads have it

    def recording(*args: Any) -> Memory:
        memories.append(new_memory(*args))
        return memories[-1]

    monkeypatch.setattr(drafter.heads, "new_memory", recording)
    texts = [[(5 * index + 2) % 60 for index in range(length)]]
    captured, trees = drafts(target, drafter, texts=texts)
    assert [memory.capacity for memory in memories] == [128, 256], "it has grown"
    assert drafts(target, drafter, texts=texts) == (captured, trees) and len(memories) == 2
    assert eagerly(target, drafter, texts=texts)[0] == captured


@pytest.mark.parametrize("lengths", [(150,), (150, 2), (70, 200, 129)])
def test_graphs_read_texts_in_parts(lengths: tuple[int, ...], host: Target, target: Target, device: StandIn) -> None:
    texts = [[(7 * index + 3 + row) % 60 for index in range(length)] for row, length in enumerate(lengths)]
    drafter = heads_drafter(target, "eagle3", host)
    steps = patch.object(drafter.heads, "draft_step", side_effect=AssertionError("no level is drafted without a graph"))
    with steps:
        captured, trees = drafts(target, drafter, texts=texts)
    eager, eager_trees = eagerly(target, drafter, texts=texts)
    assert captured == eager
    for tree, eager_tree in zip(trees, eager_trees, strict=True):
        assert probabilities(tree) == pytest.approx(probabilities(eager_tree), rel=1e-3)


def test_memory_after_a_pause(host: Target, target: Target, device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding of the last part lies beyond the text's end."""
    monkeypatch.setattr("headstart.drafters.draft_graphs._SPARE", 0)
    monkeypatch.setattr("headstart.replay.cuda_graphs._ROUND_UP_SHARE", 0.0)

    @torch.inference_mode()
    def after_a_pause(drafter: HeadDrafter) -> Tree:
        text, roots, request = [5 + index % 40 for index in range(116)], TreeBatch.roots([5], target.device), Request(4)
        (states,) = target.hidden_states([text], drafter.aux_layers)
        session = drafter.prefill([text[:33]], {layer: state[None, :33] for layer, state in states.items()})
        drafter.propose(session, roots, request)
        for start, stop in ((33, 34), (34, 116)):
            new = {layer: state[None, start:stop] for layer, state in states.items()}
            drafter.commit(session, Committed.of([text[start:stop]], new, target.device))
        (tree,) = drafter.propose(session, roots, request)
        return tree

    drafter = heads_drafter(target, "eagle3", host)
    captured = after_a_pause(drafter)
    drafter._graphs = None
    assert probabilities(captured) == pytest.approx(probabilities(after_a_pause(drafter)), rel=1e-3)


def test_mixed_levels(host: Target, target: Target, device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A very long prompt is read at the first level, and no graph is that wide."""
    monkeypatch.setattr("headstart.heads.parts.recurrent._MOST_READ", 64)
    drafter = heads_drafter(target, "eagle3", host)
    texts = [[(7 * index + 3) % 60 for index in range(90)], [5, 9]]
    before = device.launched["cudaGraphLaunch"]
    captured, trees = drafts(target, drafter, texts=texts)
    assert device.launched["cudaGraphLaunch"] > before
    eager, eager_trees = eagerly(target, drafter, texts=texts)
    assert captured == eager and [tree.tokens for tree in trees] == [tree.tokens for tree in eager_trees]


def test_weights_elsewhere_are_captured_anew(host: Target, target: Target, device: StandIn) -> None:
    drafter = heads_drafter(target, "eagle3", host)
    drafts(target, drafter)
    with torch.no_grad():
        for module in drafter.heads.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    module._parameters[name] = torch.nn.Parameter(-weight.data, requires_grad=False)
    captured, eager = drafts(target, drafter)[1], eagerly(target, drafter)[1]
    assert [tree.tokens for tree in captured] == [tree.tokens for tree in eager]


@pytest.mark.parametrize("name", ["medusa", "eagle3", "dspark"])
def test_drafts_fall_back_to_operators_if_capture_fails(
    name: str, host: Target, target: Target, device: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    drafter = heads_drafter(target, name, host)
    texts, trees = drafts(target, drafter)
    assert drafter.forwards == "CUDA graphs"
    drafter = heads_drafter(target, name, host)
    with monkeypatch.context() as patched:
        patched.setattr(StandInGraph, "note", refuse)
        eager_texts, eager_trees = drafts(target, drafter)
    assert drafter.forwards.startswith("eager, no CUDA graphs: a forward could not be captured")
    assert texts == eager_texts and [tree.tokens for tree in trees] == [tree.tokens for tree in eager_trees]


def test_reports_say_how_drafts_run(host: Target, target: Target, device: StandIn) -> None:
    assert heads_drafter(target, "eagle3", host).forwards == "CUDA graphs"
    assert environment(host, [NgramDrafter()])["drafts"] is None
    here = "compiled" if draft_kernels.compiled(torch.float32) else "eager"
    assert environment(host, [HeadDrafter(build("eagle3", host), SHAPE)])["drafts"] == here


@pytest.mark.parametrize(("name", "launches"), [("medusa", 3), ("eagle3", 9), ("dspark", 6)])
def test_launches_of_a_draft(name: str, launches: int, host: Target, target: Target, device: StandIn) -> None:
    """One graph per level, and copies into their inputs: root and states once, feedback before each further level."""
    drafter = heads_drafter(target, name, host, tree="chain")
    drafts(target, drafter)
    counts: list[Counts] = []
    propose = drafter.propose

    def counting(*args: Any) -> list[Tree]:
        before = device.counts
        proposed = propose(*args)
        counts.append(device.counts - before)
        return proposed

    with patch.object(drafter, "propose", counting):
        drafts(target, drafter)
    levels = 1 if name == "medusa" else drafter.max_nodes - 1
    assert max(count.launches for count in counts[1:]) <= launches
    assert all((count.waits, count.slow_uploads) == (levels, 0) for count in counts)
    assert max(count.uploads for count in counts[1:]) <= (0 if name == "medusa" else levels)
