"""Heads that read logits through the target's LM head get the target's own logits: bias, scales and cap included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from headstart.heads.base import DraftHead, HeadBatch
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.train.fused_loss import Teacher, logits_by_block, sum_losses
from headstart.train.losses import LOSSES
from tests.heads.test_contract import started
from tests.train.plain_loss import sum_losses_plain

BASE: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TARGETS = ("phi", "granite", "cohere", "gemma2")
FROZEN = ({"family": "eagle"}, *({"family": name, "shared_lm_head": True} for name in ("medusa", "hydra")))
TRAINED = ({"family": "eagle3", "aux_layers": (1, 2)}, {"family": "medusa"}, {"family": "hydra"})


def tiny(kind: str) -> Target:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        match kind:
            case "phi":
                model: Any = tf.PhiForCausalLM(tf.PhiConfig(**BASE))
                nn.init.normal_(model.lm_head.bias)
            case "granite":
                model = tf.GraniteForCausalLM(tf.GraniteConfig(logits_scaling=0.125, **BASE))
            case "cohere":
                model = tf.CohereForCausalLM(tf.CohereConfig(logit_scale=7.0, pad_token_id=0, **BASE))
            case _:
                cap = tf.Gemma2Config(head_dim=16, sliding_window=8, final_logit_softcapping=0.1, **BASE)
                model = tf.Gemma2ForCausalLM(cap)
    return Target(model.float().eval(), None, kind)


def started_on_text(kind: str, settings: dict[str, Any], draft_vocab_size: int) -> tuple[Target, DraftHead, HeadBatch]:
    """Return a target, heads started from it, and a text with its states."""
    target = tiny(kind)
    heads = started({**settings, "draft_vocab_size": draft_vocab_size}, target)
    text = [(11 * index * index + 5) % 71 for index in range(14)]
    states = target.hidden_states([text], sorted({*heads.aux_layers, FINAL}))[0]
    rows = {layer: state[None] for layer, state in states.items()}
    return target, heads, HeadBatch(torch.tensor([text]), torch.ones(1, len(text), dtype=torch.bool), rows)


@pytest.mark.parametrize("draft_vocab_size", [0, 24])
@pytest.mark.parametrize("settings", FROZEN, ids=[str(settings["family"]) for settings in FROZEN])
@pytest.mark.parametrize("kind", TARGETS)
def test_frozen_lm_heads_give_the_targets_logits(kind: str, settings: dict[str, Any], draft_vocab_size: int) -> None:
    target, heads, batch = started_on_text(kind, settings, draft_vocab_size)
    teacher_logits = Teacher(target, heads.draft_to_target_D).logits(batch)
    with torch.no_grad():
        steps = list(heads.unroll(batch))
    for step in steps:
        wanted_MD = target.lm_head(step.hidden_MH)[:, heads.draft_to_target_D]
        plain_MD = step.hidden_MH @ target.lm_head_weight[heads.draft_to_target_D].T
        assert (wanted_MD - plain_MD).abs().max() > 0.01, "bias, scale or cap matter here"
        torch.testing.assert_close(step.logits_MD, wanted_MD)
        torch.testing.assert_close(torch.cat([part for _, part in logits_by_block(step)]), wanted_MD)
    first, index = steps[0], 4
    assert int(first.origin_M[index]) == index
    opened = heads.prefill(
        [batch.tokens_BT[0, : index + 1].tolist()], {t: s[:, : index + 1] for t, s in batch.states.items()}
    )
    node_11 = batch.tokens_BT[:, index + 1 : index + 2]
    with torch.no_grad():
        drafted_D = heads.draft_step(opened, node_11, torch.zeros_like(node_11), 0)[0, 0]
    torch.testing.assert_close(drafted_D, first.logits_MD[index], rtol=1e-4, atol=1e-5)
    assert len(teacher_logits.logits_SD)


@pytest.mark.parametrize("kind", TARGETS)
def test_losses_differentiate_through_bias_scale_and_cap(kind: str) -> None:
    target, heads, batch = started_on_text(kind, FROZEN[0], 24)
    teacher_logits = Teacher(target, heads.draft_to_target_D).logits(batch)
    gradients: list[Tensor] = []
    for total in (sum_losses, sum_losses_plain):
        step = next(iter(heads.unroll(batch)))
        hidden_MH = step.hidden_MH.detach().requires_grad_()
        weight_M = torch.ones(len(hidden_MH))
        loss = total(LOSSES["soft_ce"], replace(step, hidden_MH=hidden_MH), teacher_logits, weight_M)
        loss.backward()
        assert hidden_MH.grad is not None
        gradients += [loss.detach(), hidden_MH.grad]
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], gradients[3], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", TRAINED, ids=[str(settings["family"]) for settings in TRAINED])
@pytest.mark.parametrize("kind", ["granite", "cohere"])
def test_trained_lm_heads_start_with_the_targets_scale(kind: str, settings: dict[str, Any]) -> None:
    target, heads, batch = started_on_text(kind, settings, 24)
    with torch.no_grad():
        step = next(iter(heads.unroll(batch)))
    wanted_MD = target.lm_head(step.hidden_MH)[:, heads.draft_to_target_D]
    torch.testing.assert_close(step.logits_MD, wanted_MD, rtol=1e-4, atol=1e-5)
