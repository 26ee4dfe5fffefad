"""Medusa and Hydra, the families of residual blocks: alignment, starts and costs."""

from __future__ import annotations

import pytest
import torch

from headstart.errors import UserError
from headstart.heads.base import HeadBatch, supervised_origins
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.heads.parts.residual import embed_normalized
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.heads.test_contract import batch_of, started

both = pytest.mark.parametrize("name", ["medusa", "hydra"])


def test_positions_stay_inside_one_answer() -> None:
    # prompt P, answer A, prompt P, answer A; the head must not look from one answer into the next
    supervised = torch.tensor([[False, True, True, True, False, True, True, False]])
    assert [supervised_origins(supervised, step).tolist() for step in range(3)] == [[0, 1, 4], [0], []]


def test_positions_of_short_rows() -> None:
    assert supervised_origins(torch.ones(2, 2, dtype=torch.bool), 0).tolist() == []
    assert supervised_origins(torch.ones(2, 3, dtype=torch.bool), 0).tolist() == [0, 3]


@both
def test_warm_started_heads_repeat_the_targets_own_distribution(name: str, target: Target) -> None:
    heads = started({"family": name, "num_heads": 2, "draft_vocab_size": 20}, target)
    batch = batch_of(target, heads, [list(range(1, 13))], prompt=3)
    for step in heads.unroll(batch):
        wanted = target.lm_head(batch.states[FINAL].flatten(0, 1)[step.origin_M])[:, heads.draft_to_target_D]
        torch.testing.assert_close(step.logits_MD, wanted)


@both
def test_linear_start_finds_a_linear_rule(name: str, target: Target) -> None:
    """States follow h' = h R, and for Hydra h' = .7 h R + e(token') S: head k must find the state k + 1 tokens on."""
    heads, follows_tokens = started({"family": name, "num_heads": 3}, target), name == "hydra"
    rotation, added = torch.linalg.qr(torch.randn(64, 64)).Q, torch.linalg.qr(torch.randn(64, 64)).Q
    tokens_BT = torch.randint(61, (8, 200))
    embedded_BTE = embed_normalized(tokens_BT, target.embedding_weight, torch.zeros(1))
    states = [torch.randn(8, 64)]
    for index in range(1, 200):
        turned = states[-1] @ rotation
        states.append(0.7 * turned + embedded_BTE[:, index] @ added if follows_tokens else turned)
    batch = HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), {FINAL: torch.stack(states, dim=1)})
    heads.fit([batch])
    final_XE = batch.states[FINAL].flatten(0, 1)
    for step in heads.unroll(batch):
        # The ridge shrinks the guess by a hundredth where the data is thinnest; states are about 1.4 in size.
        torch.testing.assert_close(step.hidden_MH, final_XE[step.teacher_M], rtol=0, atol=0.1)


@both
def test_text_shorter_than_the_heads_look(name: str, target: Target) -> None:
    heads = started({"family": name, "num_heads": 4}, target)
    start = [parameter.clone() for parameter in heads.parameters()]
    batch = batch_of(target, heads, [[1, 2, 3, 4]], prompt=0)
    heads.fit([batch])
    assert all(a.equal(b) for a, b in zip(start, heads.parameters(), strict=True)), "too short for the last head"
    assert [len(step.logits_MD) for step in heads.unroll(batch)] == [2, 1, 0, 0]


def test_without_input_maps_the_lm_heads_take_the_linear_start(target: Target) -> None:
    torch.manual_seed(0)
    tokens_BT = torch.randint(3, 61, (4, 40))
    batch = HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), {FINAL: torch.randn(4, 40, 64)})
    logits = []
    for input_map in (True, False):
        heads = started({"family": "medusa", "num_heads": 2, "input_map": input_map}, target)
        heads.fit([batch])
        logits.append(torch.stack([step.logits_MD[:5] for step in heads.unroll(batch)]))
    torch.testing.assert_close(*logits)
    with pytest.raises(UserError, match=r"heads\.input_map off"):
        MedusaHead(MedusaConfig(hidden_size=64, vocab_size=61, see_root=True, input_map=False))


def test_seeing_the_root_changes_the_draft(target: Target) -> None:
    heads = started({"family": "medusa", "num_heads": 1, "see_root": True}, target)
    torch.nn.init.normal_(heads.input_KEF)
    session = heads.prefill([[5]], {FINAL: torch.randn(1, 1, 64)})
    level = torch.zeros(1, 1, dtype=torch.long)
    drafted = {heads.draft_step(session, torch.tensor([[root]]), level, 0).argmax(-1).item() for root in range(9)}
    assert len(drafted) > 1


def test_operations_of_a_draft(target: Target) -> None:
    size, width, steps = 64, 61, 3
    block, lm_head = size * size, width * size
    medusa = 2 * size * size + block + lm_head  # one head: the input map reads the state and the root
    settings = {"family": "medusa", "num_heads": steps, "see_root": True}
    assert started(settings, target).flops_per_draft() == 2 * medusa
    inputs = sum(range(2, steps + 2)) * size * size  # head k of Hydra reads k + 2 vectors
    hydra = inputs + steps * (2 * block + lm_head)
    settings = {"family": "hydra", "num_heads": steps, "num_layers": 2}
    assert started(settings, target).flops_per_draft() == 2 * hydra // steps
