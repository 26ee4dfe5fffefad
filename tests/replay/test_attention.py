"""Attention against transformers and torch: sinks, which no tiny model has, and the keys it reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headstart.model.model import Target
from headstart.replay.attention import ScoreOptions, causal_attention
from headstart.tree.tree import Tree, TreeBatch
from tests.spies import spy
from tests.tiny import tiny_model


@pytest.mark.parametrize("new", [5, 11])
def test_sink_is_an_extra_key_without_a_value(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads share two key heads. Each has its own sink, which only joins the softmax."""
    monkeypatch.setattr("headstart.replay.attention.CHUNK", 4)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, new, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    allowed = torch.ones(new, 11, dtype=torch.bool).tril(11 - new)
    scores = (query @ keys.transpose(2, 3) * 0.5).masked_fill(~allowed, float("-inf"))
    shares = torch.cat([scores, sinks[:, None, None].expand(2, 4, new, 1)], dim=-1).softmax(-1)
    found = causal_attention(query, key, value, ScoreOptions(scaling=0.5, sink=sinks))
    torch.testing.assert_close(found, shares[..., :-1] @ values)
    without = F.scaled_dot_product_attention(query, keys, values, allowed, scale=0.5)
    assert not torch.allclose(found, without, atol=0.1), "sinks change the result"


@pytest.mark.parametrize(("kind", "slots"), [("mistral", {11}), ("gemma3", {11, 44}), ("llama", {44})])
def test_sliding_layers_read_only_their_window(kind: str, slots: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree of 4 nodes after 40 tokens; a window of 8 reaches from the root to 7 of them."""
    monkeypatch.setattr("headstart.kernels.cpu_attention.serves", lambda *_: False)
    target = Target(tiny_model(kind))
    texts = [[(7 * index + row) % 90 + 1 for index in range(40)] for row in range(2)]
    trees = [Tree([10, 11, 12, 13], [-1, 0, 0, 2]), Tree([20, 21, 22, 23], [-1, 0, 1, 2])]
    cache = target.new_cache(2, 64)
    target.prefill(cache, texts)
    with monkeypatch.context() as patch:
        read = spy(patch, F, "scaled_dot_product_attention", lambda _query, key, *_: key.shape[2])
        logits_BNV = target.forward_tree(cache, TreeBatch.of(trees)).logits_BTV
    assert set(read) == slots
    for text, tree, path, logits_NV in zip(texts, trees, ([0, 2, 3], [0, 1, 2, 3]), logits_BNV, strict=True):
        tokens = [*text, *(tree.tokens[node] for node in path)]
        with torch.inference_mode():
            wanted = target.model(torch.tensor([tokens])).logits[0, -len(path) :]
        # float32 rounding of two attention kernels
        torch.testing.assert_close(logits_NV[path], wanted, rtol=1e-4, atol=1e-5)
