"""Medusa's alignment by hand on tiny sequences, and its warm start."""

from __future__ import annotations

import torch

from headstart.heads.medusa import MedusaConfig, MedusaHead, head_logits, positions
from headstart.target import Target
from tests.tiny import tiny_model


def test_positions_stay_inside_one_answer() -> None:
    # prompt P, answer A, prompt P, answer A; the head must not look from one answer into the next
    supervised = torch.tensor([[False, True, True, True, False, True, True, False]])
    assert positions(supervised, 0).tolist() == [0, 1, 4]
    assert positions(supervised, 1).tolist() == [0]
    assert positions(supervised, 2).tolist() == []


def test_positions_of_short_rows() -> None:
    assert positions(torch.ones(2, 2, dtype=torch.bool), 0).tolist() == []
    assert positions(torch.ones(2, 3, dtype=torch.bool), 0).tolist() == [0, 3]


def test_warm_started_heads_repeat_the_targets_own_distribution() -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    heads = MedusaHead(MedusaConfig(hidden_size=64, vocab_size=61, num_heads=2, draft_vocab_size=20))
    vocabulary = torch.arange(0, 60, 3)
    heads.set_draft_vocabulary(vocabulary)
    heads.warm_start(target)
    state = torch.randn(5, 64)
    for step in range(2):
        torch.testing.assert_close(head_logits(state, *heads.parts()[step]), target.lm_head(state)[:, vocabulary])
