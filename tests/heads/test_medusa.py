"""Medusa's alignment by hand on tiny sequences, and its warm start."""

from __future__ import annotations

import pytest
import torch

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, supervised_origins
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.heads.parts.residual import head_hidden
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.tiny import tiny_model


def test_positions_stay_inside_one_answer() -> None:
    # prompt P, answer A, prompt P, answer A; the head must not look from one answer into the next
    supervised = torch.tensor([[False, True, True, True, False, True, True, False]])
    assert supervised_origins(supervised, 0).tolist() == [0, 1, 4]
    assert supervised_origins(supervised, 1).tolist() == [0]
    assert supervised_origins(supervised, 2).tolist() == []


def test_positions_of_short_rows() -> None:
    assert supervised_origins(torch.ones(2, 2, dtype=torch.bool), 0).tolist() == []
    assert supervised_origins(torch.ones(2, 3, dtype=torch.bool), 0).tolist() == [0, 3]


def test_warm_started_heads_repeat_the_targets_own_distribution() -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    heads = MedusaHead(MedusaConfig(hidden_size=64, vocab_size=61, num_heads=2, draft_vocab_size=20))
    vocabulary = torch.arange(0, 60, 3)
    heads.set_draft_vocabulary(vocabulary)
    heads.warm_start(target)
    state = torch.randn(5, 64)
    for step in range(2):
        *body, lm_head = heads.parts()[step]
        logits = head_hidden(state, *body) @ lm_head.T
        torch.testing.assert_close(logits, target.lm_head(state)[:, vocabulary])


def test_linear_start_finds_a_linear_rule() -> None:
    """States that rotate by a fixed matrix at each token: head k must find its power k + 1."""
    torch.manual_seed(0)
    size, length = 8, 60
    rotation = torch.linalg.qr(torch.randn(size, size)).Q
    states = [torch.randn(4, size)]
    for _ in range(length - 1):
        states.append(states[-1] @ rotation)
    final_BTE = torch.stack(states, dim=1)
    tokens_BT = torch.zeros(4, length, dtype=torch.long)
    batch = HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), {FINAL: final_BTE})
    heads = MedusaHead(MedusaConfig(hidden_size=size, vocab_size=20, num_heads=2))
    heads.fit([batch])
    for step in range(2):
        power = torch.linalg.matrix_power(rotation, step + 1)
        # The ridge shrinks the map by about a thousandth of its size where the data is thinnest.
        torch.testing.assert_close(heads.input_KEF[step].T, power, rtol=0, atol=0.02)


def test_without_input_maps_the_lm_heads_take_the_linear_start() -> None:
    torch.manual_seed(0)
    target = Target(tiny_model("llama", vocab_size=61))
    tokens_BT = torch.randint(3, 61, (4, 40))
    states = {FINAL: torch.randn(4, 40, 64)}
    batch = HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), states)
    logits = []
    for input_map in (True, False):
        heads = MedusaHead(MedusaConfig(hidden_size=64, vocab_size=61, num_heads=2, input_map=input_map))
        heads.warm_start(target)
        heads.fit([batch])
        logits.append(torch.stack([step.logits_MD[:5] for step in heads.unroll(batch)]))
    torch.testing.assert_close(*logits)
    with pytest.raises(UserError, match=r"heads\.input_map off"):
        MedusaHead(MedusaConfig(hidden_size=64, vocab_size=61, see_root=True, input_map=False))


def test_linear_start_needs_data() -> None:
    heads = MedusaHead(MedusaConfig(hidden_size=8, vocab_size=20, num_heads=2))
    short = torch.ones(1, 3, dtype=torch.bool)
    heads.fit([HeadBatch(torch.zeros(1, 3, dtype=torch.long), short, {FINAL: torch.randn(1, 3, 8)})])
    assert heads.input_KEF.abs().sum() == 0, "too short for the last head: the start stays as it was"


def test_seeing_the_root_changes_the_draft() -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    heads = MedusaHead(MedusaConfig(hidden_size=64, vocab_size=61, num_heads=1, see_root=True))
    heads.warm_start(target)
    torch.manual_seed(0)
    torch.nn.init.normal_(heads.input_KEF)
    session = heads.prefill([[5]], {FINAL: torch.randn(1, 1, 64)})
    level = torch.zeros(1, 1, dtype=torch.long)
    drafted = {heads.draft_step(session, torch.tensor([[root]]), level, 0).argmax(-1).item() for root in range(9)}
    assert len(drafted) > 1


def test_operations_of_a_draft() -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    heads = MedusaHead(MedusaConfig(hidden_size=64, vocab_size=61, num_heads=3, see_root=True))
    heads.warm_start(target)
    assert heads.flops_per_draft() == 2 * (2 * 64 * 64 + 64 * 64 + 61 * 64), "one head: input map, block, LM head"
