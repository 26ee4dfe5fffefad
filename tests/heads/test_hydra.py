"""Hydra's alignment by hand on tiny sequences, its trees, its starts and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.heads.base import HeadBatch, make_config
from headstart.heads.hydra import HydraConfig, HydraHead
from headstart.heads.parts.residual import embed
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.heads.test_contract import batch_of, shake
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


def hydra(target: Target, **settings: Any) -> HydraHead:
    torch.manual_seed(0)
    config = make_config({"family": "hydra", **settings}, target)
    assert isinstance(config, HydraConfig)
    heads = HydraHead(config)
    heads.warm_start(target)
    return heads


def test_each_head_reads_the_state_and_the_tokens_before_the_one_it_predicts(target: Target) -> None:
    """Change one thing at a time: only what head k may read changes what it drafts from position t."""
    heads = shake(hydra(target, num_heads=3))
    tokens_BT = torch.arange(1, 9)[None]
    final_BTE = torch.randn(1, 8, 64)
    supervised_BT = torch.ones(1, 8, dtype=torch.bool)
    origin = 2

    def drafts(tokens_BT: torch.Tensor, final_BTE: torch.Tensor) -> list[torch.Tensor]:
        steps = heads.unroll(HeadBatch(tokens_BT, supervised_BT, {FINAL: final_BTE}))
        return [step.logits_MD[step.origin_M.tolist().index(origin)] for step in steps]

    with torch.no_grad():
        before = drafts(tokens_BT, final_BTE)
        for position in range(8):
            other = tokens_BT.clone()
            other[0, position] = 50
            moved = [step for step, logits in enumerate(drafts(other, final_BTE)) if not logits.equal(before[step])]
            # token t + 1 is read by all heads, t + 2 from head 1 on, t + 3 by head 2 alone
            assert moved == [step for step in range(3) if origin < position <= origin + step + 1]
            other_BTE = final_BTE.clone()
            other_BTE[0, position] += 1
            moved = [step for step, logits in enumerate(drafts(tokens_BT, other_BTE)) if not logits.equal(before[step])]
            assert moved == ([0, 1, 2] if position == origin else [])


def test_every_node_of_a_tree_is_drafted_as_the_chain_that_leads_to_it(target: Target) -> None:
    heads = shake(hydra(target, num_heads=3))
    states = {FINAL: torch.randn(2, 2, 64)}
    prompts = [[3, 4], [5, 6]]
    levels = [
        (torch.tensor([[7], [8]]), torch.tensor([[0], [0]])),
        (torch.tensor([[9, 10, 11], [12, 13, 14]]), torch.zeros(2, 3, dtype=torch.long)),
        (torch.tensor([[15, 16, 17], [18, 19, 20]]), torch.tensor([[2, 0, 2], [1, 1, 0]])),
    ]
    tree, chain = heads.prefill(prompts, states), heads.prefill(prompts, states)
    with torch.no_grad():
        grown = [heads.draft_step(tree, *level, depth) for depth, level in enumerate(levels)]
        rows_B = torch.arange(2)
        for leaf in range(3):
            middle_B = levels[2][1][:, leaf]
            path = (levels[0][0][:, 0], levels[1][0][rows_B, middle_B], levels[2][0][:, leaf])
            alone = [
                heads.draft_step(chain, token_B[:, None], torch.zeros(2, 1, dtype=torch.long), depth)[:, 0]
                for depth, token_B in enumerate(path)
            ]
            # float32 sums of 256 products in another order
            torch.testing.assert_close(alone[1], grown[1][rows_B, middle_B], rtol=0, atol=1e-4)
            torch.testing.assert_close(alone[2], grown[2][:, leaf], rtol=0, atol=1e-4)


def test_warm_started_heads_repeat_the_targets_own_distribution(target: Target) -> None:
    heads = hydra(target, num_heads=2, draft_vocab_size=20)
    vocabulary = torch.arange(0, 60, 3)
    heads.set_draft_vocabulary(vocabulary)
    heads.warm_start(target)
    batch = batch_of(target, heads, [list(range(1, 13))], prompt=3)
    for step in heads.unroll(batch):
        wanted = target.lm_head(batch.states[FINAL].flatten(0, 1)[step.origin_M])[:, vocabulary]
        torch.testing.assert_close(step.logits_MD, wanted)


def test_a_cold_start_owes_nothing_to_the_target(target: Target) -> None:
    batch = batch_of(target, hydra(target), [list(range(1, 13))], prompt=3)
    other = Target(tiny_model("llama", seed=1, vocab_size=61))
    one, two = (hydra(model, init="random") for model in (target, other))
    one.fit([batch])
    assert all(a.equal(b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(weight.std() > 0 for name, weight in one.heads.named_parameters() if "block" not in name)


def test_linear_start_finds_a_linear_rule(target: Target) -> None:
    """States that follow h' = h R + e(token') S: head k must find R^(k+1) and what each token adds."""
    heads = hydra(target, num_heads=3)
    rotation, added = torch.linalg.qr(torch.randn(64, 64)).Q, torch.linalg.qr(torch.randn(64, 64)).Q
    tokens_BT = torch.randint(61, (8, 200))
    embedded_BTE = embed(tokens_BT, heads.target_embeddings, torch.zeros(1))
    states = [torch.randn(8, 64)]
    for index in range(1, 200):
        states.append(0.7 * states[-1] @ rotation + embedded_BTE[:, index] @ added)
    batch = HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), {FINAL: torch.stack(states, dim=1)})
    heads.fit([batch])
    final_XE = batch.states[FINAL].flatten(0, 1)
    for step in heads.unroll(batch):
        # The ridge shrinks the guess by a hundredth where the data is thinnest; states are about 1.4 in size.
        torch.testing.assert_close(step.hidden_MH, final_XE[step.teacher_M], rtol=0, atol=0.1)


def test_linear_start_stops_when_it_has_seen_enough(target: Target) -> None:
    heads = hydra(target, num_heads=1)
    taken = []

    def batches() -> Any:
        for number in range(100):
            taken.append(number)
            tokens_BT = torch.randint(61, (1, 402))
            yield HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), {FINAL: torch.randn(1, 402, 64)})

    heads.fit(batches())
    assert len(taken) == 4, "400 positions each, 12 for each of 2 * 64 numbers"


def test_text_shorter_than_the_heads_look(target: Target) -> None:
    heads = hydra(target, num_heads=4)
    start = [parameter.clone() for parameter in heads.parameters()]
    batch = batch_of(target, heads, [[1, 2, 3, 4]], prompt=0)
    heads.fit([batch])
    assert all(a.equal(b) for a, b in zip(start, heads.parameters(), strict=True)), "too short for the last head"
    assert [len(step.logits_MD) for step in heads.unroll(batch)] == [2, 1, 0, 0]


def test_operations_of_a_draft(target: Target) -> None:
    size, width, steps = 64, 61, 3
    inputs = sum(range(2, steps + 2)) * size * size  # head k reads k + 2 vectors
    one = 2 * size * size + width * size  # two blocks and the LM head
    assert hydra(target, num_heads=3, num_layers=2).flops_per_draft() == 2 * (inputs + steps * one) // steps
