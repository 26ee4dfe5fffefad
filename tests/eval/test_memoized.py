"""A target with memoised logits matches the target itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.eval import memoized
from headstart.eval.memoized import MemoizedTarget
from headstart.model.model import Target
from headstart.tree.tree import Tree, TreeBatch, TreeShape
from tests.eval.sources import warm_heads
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=40))


@pytest.fixture(scope="module")
def drafter(target: Target) -> HeadDrafter:
    return HeadDrafter(warm_heads(target), TreeShape.from_paths([(0, 0), (1,)]))


def test_view_has_the_targets_attributes(target: Target) -> None:
    view = MemoizedTarget(target)
    for name in ("name", "dtype", "vocab_size", "end_tokens"):
        assert getattr(view, name) == getattr(target, name)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = view.nothing_like_it


@torch.inference_mode()
def test_remembered_logits_match(target: Target) -> None:
    view, prompt = MemoizedTarget(target), [3, 1, 4, 1]
    aux_layers = (1, 3)
    caches = [one.new_cache(2, 40) for one in (target, view)]
    outs = [one.prefill(cache, [prompt] * 2, aux_layers) for one, cache in zip((target, view), caches, strict=True)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        torch.testing.assert_close(outs[1].logits_BTV, outs[0].logits_BTV, atol=1e-5, rtol=1e-4)
        for layer in aux_layers:
            own, memoized = (out.aux_hidden_states[layer] for out in outs)
            torch.testing.assert_close(memoized, own, atol=1e-5, rtol=1e-4)
        tokens = torch.randint(40, (2, 5), generator=generator).tolist()
        batch = TreeBatch.of([Tree(tokens[0], [-1, 0, 0, 1, 3]), Tree.chain_of(tokens[1][:4])])
        outs = [one.forward_tree(cache, batch, aux_layers) for one, cache in zip((target, view), caches, strict=True)]
        outs[0].logits_BTV[1, 4] = outs[1].logits_BTV[1, 4]  # padding is garbage
        for layer in aux_layers:
            outs[0].aux_hidden_states[layer][1, 4] = outs[1].aux_hidden_states[layer][1, 4]
        for cache in caches:
            cache.commit([[0, 1, 3], [0]])
        assert caches[1].lengths == caches[0].lengths
    for cache in caches:
        cache.reorder([1])
    batch = TreeBatch.of([Tree.chain_of([7, 8])])
    outs = [one.forward_tree(cache, batch) for one, cache in zip((target, view), caches, strict=True)]
    torch.testing.assert_close(outs[1].logits_BTV, outs[0].logits_BTV, atol=1e-5, rtol=1e-4)
    assert (caches[1].rows, caches[0].rows) == (1, 1)


def test_samples_match_without_memory(target: Target, drafter: HeadDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    options = DecodeOptions(max_new_tokens=5, temperature=1.0, ignore_end=True, draft="on", seed=0)
    monkeypatch.setattr(memoized, "_MAX_NODES", 16)
    monkeypatch.setattr(memoized, "MAX_TEXTS", 100)
    for prompt in ([3, 1, 4, 1], [2, 7]):
        expected = [row.tokens for row in DecodeLoop(target, drafter).generate([prompt] * 16, options)]
        view = MemoizedTarget(target)
        for _ in range(2):
            assert [row.tokens for row in DecodeLoop(view, drafter).generate([prompt] * 16, options)] == expected


def test_horizon_keeps_the_first_tokens(target: Target, drafter: HeadDrafter) -> None:
    options = DecodeOptions(max_new_tokens=3, temperature=1.0, ignore_end=True, draft="on", seed=0)
    for verifier in ("top_k", "greedy_draft"):  # decided from the root down: the same draws
        asked = replace(options, verifier=verifier)
        expected = [row.tokens for row in DecodeLoop(target, drafter).generate([[3, 1, 4]] * 32, asked)]
        memoized = DecodeLoop(MemoizedTarget(target, horizon=2), drafter).generate([[3, 1, 4]] * 32, asked)
        assert [row.tokens for row in memoized] == expected


def test_text_is_read_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    honest = Target.forward_tree

    def counted(self: Target, cache: Any, batch: TreeBatch, aux_layers: tuple[int, ...] = ()) -> object:
        if type(self) is Target:
            read.append(batch.size)
        return honest(self, cache, batch, aux_layers)

    monkeypatch.setattr(Target, "forward_tree", counted)
    view = MemoizedTarget(target)
    for _ in range(3):
        DecodeLoop(view).generate([[3, 1, 4]] * 8, DecodeOptions(max_new_tokens=4, ignore_end=True))
    assert read == [2, 3, 4], "equal greedy rows: one new text per round, after the prompt's last token"
