"""CUDA graphs on the stand-in device match forwards without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.tree.tree import Tree, TreeBatch
from tests.spies import raising, spy
from tests.standin import CUDA, Graph, StandIn
from tests.tiny import tiny_model

VOCAB = 61
KINDS = ("llama", "gemma3", "gpt_neox", "qwen3")
TEXTS = [list(range(2, 15)), [7, 7, 3], [30, 4, 4, 4, 9, 1]]
BUSHY = Tree([5, 9, 4, 8, 2, 3, 11], [-1, 0, 0, 1, 1, 2, 5])


def on_gpu(kind: str = "llama", max_length: int = 256) -> Target:
    return Target(tiny_model(kind, vocab_size=VOCAB, max_length=max_length).to(CUDA))


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    with StandIn():
        made = on_gpu(request.param)
        assert made.forwards == "CUDA graphs"
        return made


def outcome(target: Target, texts: list[list[int]], trees: list[Tree], graphs: bool) -> list[torch.Tensor]:
    """Return logits and states of two rounds, with a commit in between."""
    aux_layers = (1, target.num_layers)
    replay = target._recorded.replay
    assert replay is not None
    held, replay.cuda_graphs = replay.cuda_graphs, replay.cuda_graphs if graphs else None
    try:
        cache = target.new_cache(len(texts), 200)
        target.prefill(cache, texts)
        parts = []
        for _ in range(2):
            out = target.forward_tree(cache, TreeBatch.of(trees, CUDA), aux_layers)
            parts += [out.logits_BTV, *(out.aux_hidden_states[layer] for layer in aux_layers)]
            cache.commit([[0, *([2, 5] if tree.size > 5 else [])] for tree in trees])
    finally:
        replay.cuda_graphs = held
    sizes = [tree.size for tree in trees] * 6
    return [part.cpu()[row, : sizes[row]] for part in parts for row in range(len(texts))]


@pytest.mark.parametrize(
    "trees",
    [
        [Tree([5])],
        [BUSHY],
        [Tree([5]), Tree([9]), Tree([4])],
        [BUSHY, Tree([9]), Tree.chain_of([4, 8, 2])],
        [Tree.chain_of(range(3, 36)), Tree([1]), BUSHY],
    ],
    ids=["one token", "a tree", "plain rows", "ragged trees", "wide"],
)
def test_graph_matches_its_operators(target: Target, trees: list[Tree], device: StandIn) -> None:
    texts = TEXTS[: len(trees)]
    launched = device.launched["cudaGraphLaunch"]
    graphed = outcome(target, texts, trees, graphs=True)
    assert device.launched["cudaGraphLaunch"] == launched + 2
    # Masked slots between others change the order of sums.
    torch.testing.assert_close(graphed, outcome(target, texts, trees, graphs=False), atol=1e-5, rtol=1e-5)


def test_results_survive_later_forwards(target: Target, device: StandIn) -> None:
    cache = target.new_cache(1, 64)
    target.prefill(cache, TEXTS[:1])
    first = target.forward_tree(cache, TreeBatch.of([BUSHY], CUDA), (1,))
    logits, states = first.logits_BTV.cpu(), first.aux_hidden_states[1].cpu()
    target.forward_tree(cache, TreeBatch.of([Tree([3])], CUDA))
    target.forward_tree(cache, TreeBatch.of([BUSHY], CUDA))
    assert torch.equal(first.logits_BTV.cpu(), logits)
    assert torch.equal(first.aux_hidden_states[1].cpu(), states)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    return spy(monkeypatch, Graph, "__init__", lambda own: own)


def test_alternating_lengths_reuse_graphs(device: StandIn, captures: list[Graph]) -> None:
    target = on_gpu(max_length=4096)
    six = DecodeOptions(max_new_tokens=3000, stop_test=lambda _, tokens: len(tokens) == 6)
    calls = [(TEXTS, DecodeOptions(max_new_tokens=6, ignore_end=True)), (TEXTS[:1], replace(six, ignore_end=True))]
    texts = [DecodeLoop(target).generate(*call)[0].tokens for call in calls]
    count = len(captures)
    assert count and [DecodeLoop(target).generate(*call)[0].tokens for call in calls * 2] == texts * 2
    assert len(captures) == count and target.spare_bytes > 0


def test_alternating_requests_reuse_graphs(device: StandIn, captures: list[Graph]) -> None:
    target, counts = on_gpu(), list[int]()
    for _ in range(3):
        caches = [target.new_cache(1, 64) for _ in range(2)]
        assert caches[0].memory is not caches[1].memory, "live caches share nothing"
        for cache in caches * 2:
            target.forward_tree(cache, TreeBatch.of([BUSHY], CUDA))
        del cache, caches
        counts.append(len(captures))
    assert counts[0] == counts[1] == counts[2] > 0


def test_graph_memory_is_bounded(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    target = on_gpu(max_length=4096)
    memory = target.new_cache(1, 20).memory
    assert memory is not None
    assert target.new_cache(1, 30).memory is memory, "large enough for both"
    larger = target.new_cache(2, 2000)
    assert larger.memory is not memory and larger.capacity >= 2000
    del larger
    assert target.new_cache(1, 20).memory is memory, "the best fit, not the large one"
    for rows in range(1, 20):
        target.new_cache(rows, 100 * rows)
    graphs = target._graphs
    assert graphs is not None and len(graphs._spares) == 4, "the oldest are freed"
    monkeypatch.setattr("headstart.replay.cuda_graphs.free_bytes", lambda _: 3 * memory.bytes)
    kept = target.spare_bytes
    cache = target.new_cache(1, 20)
    assert cache.memory is not None
    assert target.spare_bytes + cache.memory.bytes <= (3 * memory.bytes + kept) / 10, "little memory frees most"
    large = target.new_cache(4, 400)
    assert large.memory is not None and not target.spare_bytes, "a large text frees all others"


def test_memory_returned_during_garbage_collection(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    target = on_gpu()
    caches = [target.new_cache(1, 20)]

    def collecting(_: object) -> int:
        caches.clear()
        return 1 << 40

    monkeypatch.setattr("headstart.replay.cuda_graphs.free_bytes", collecting)
    lent = target.new_cache(1, 20)
    assert lent.memory is not None and target.spare_bytes == lent.memory.bytes, "the collected cache's memory"


def halved_in_other_memory(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = 0.5 * weight.data


def other_weight_of_the_lm_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(0.5 * model.lm_head.weight.detach(), requires_grad=False)


def other_lm_head(model: Any) -> None:
    model.set_output_embeddings(nn.Linear(64, VOCAB, bias=False).to(CUDA))


@pytest.mark.parametrize("change", [halved_in_other_memory, other_weight_of_the_lm_head, other_lm_head])
def test_moved_weights_drop_graphs(change: Callable[[Any], None], device: StandIn) -> None:
    target = on_gpu()
    assert target.forwards == "CUDA graphs"
    before = outcome(target, TEXTS[:1], [BUSHY], graphs=True)
    change(target.model)
    after = outcome(target, TEXTS[:1], [BUSHY], graphs=True)
    assert not torch.allclose(before[0], after[0], atol=1e-3)
    torch.testing.assert_close(after, outcome(target, TEXTS[:1], [BUSHY], graphs=False), atol=1e-5, rtol=1e-5)


def test_nan_keys_do_not_outlive_a_text(device: StandIn) -> None:
    target = on_gpu()
    expected = DecodeLoop(target).generate(TEXTS, DecodeOptions(max_new_tokens=6))[0].tokens
    cache = target.new_cache(3, 60)
    for store in cache.stores:
        store.fill_(float("nan"))
    del cache, store
    assert DecodeLoop(target).generate(TEXTS, DecodeOptions(max_new_tokens=6))[0].tokens == expected


def test_failed_capture_falls_back_to_replay(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", vocab_size=VOCAB)
    expected = DecodeLoop(Target(model)).generate(TEXTS, DecodeOptions(max_new_tokens=6))[0].tokens

    monkeypatch.setattr(
        Graph, "note", raising(RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    )
    target = Target(model.to(CUDA))
    assert target.forwards.startswith("replayed, no CUDA graphs: a forward could not be captured")
    assert target.new_cache(1, 20).memory is None and not target.spare_bytes, "no memory is held for graphs"
    assert DecodeLoop(target).generate(TEXTS, DecodeOptions(max_new_tokens=6))[0].tokens == expected


def test_missing_layer_is_refused(target: Target, device: StandIn) -> None:
    cache = target.new_cache(1, 64)
    with pytest.raises(UserError, match="Layer 99 does not exist"):
        target.forward_tree(cache, TreeBatch.of([Tree([3])], CUDA), (99,))


def test_ragged_lengths_stay_on_the_device(target: Target, device: StandIn) -> None:
    """Uploaded once, then advanced on the device at each commit."""
    cache = target.new_cache(3, 64)
    target.prefill(cache, TEXTS)
    for number, counts in enumerate(([1, 2, 1], [2, 2, 1], [1, 1, 4])):
        batch = TreeBatch.of([Tree.chain_of([5, 4, 3, 2])] * 3, CUDA)
        paths, before = [list(range(count)) for count in counts], device.counts
        target.forward_tree(cache, batch)
        assert (device.counts - before).uploads == (number == 0)
        cache.commit(paths, counts_B=torch.tensor(counts, device=CUDA))
        assert cache.lengths_B1(CUDA).tolist() == [[length] for length in cache.lengths]


def test_launches_of_a_plain_round(target: Target, device: StandIn) -> None:
    """One graph for any model, plus copies of the token in and the result out."""
    cache = target.new_cache(1, 64)
    target.prefill(cache, TEXTS[:1])
    roots = TreeBatch.roots([5], CUDA)
    target.forward_tree(cache, roots)
    before, uploads = dict(device.launched), device.counts
    target.forward_tree(cache, roots)
    counts = device.counts - uploads
    launched = {name: count - before.get(name, 0) for name, count in device.launched.items()}
    assert launched.pop("cudaGraphLaunch") == 1
    assert sum(launched.values()) <= 3, launched
    assert (counts.uploads, counts.waits) == (0, 0)
