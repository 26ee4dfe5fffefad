"""Attention beside what transformers and torch compute: sinks, which no tiny model has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from headstart.target.attention import Scores, causal_attention


@pytest.mark.parametrize("new", [5, 11])
def test_a_sink_is_one_more_key_without_a_value(new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads share two key heads; each has a sink of its own, and its score joins the softmax alone."""
    monkeypatch.setattr("headstart.target.attention.PIECE", 4)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, new, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    sinks = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    keys, values = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    allowed = torch.ones(new, 11, dtype=torch.bool).tril(11 - new)
    scores = (query @ keys.transpose(2, 3) * 0.5).masked_fill(~allowed, float("-inf"))
    shares = torch.cat([scores, sinks[:, None, None].expand(2, 4, new, 1)], dim=-1).softmax(-1)
    found = causal_attention(query, key, value, Scores(scaling=0.5, sink=sinks))
    torch.testing.assert_close(found, shares[..., :-1] @ values)
    without = F.scaled_dot_product_attention(query, keys, values, allowed, scale=0.5)
    assert not torch.allclose(found, without, atol=0.1), "the sinks take their share"
