"""Linear starts of blocks: positional heads, and output maps that draft untrained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads.base import DraftHead, HeadBatch
from headstart.heads.parts.block_start import Pattern, find_pattern
from headstart.heads.parts.layer import rms_norm
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.heads.test_contract import started
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model

BLOCK = 4
LINEAR = {"block_size": BLOCK, "aux_layers": (1, 2), "mask_token_id": 60, "init": "linear"}


@pytest.fixture(scope="module")
def batches(target: Target) -> list[HeadBatch]:
    random = torch.Generator().manual_seed(0)
    texts = torch.randint(3, 60, (24, 40), generator=random)
    states = target.hidden_states(texts.tolist(), [1, 2, FINAL])
    supervised_T = torch.arange(40) >= 2
    return [
        HeadBatch(text_T[None], supervised_T[None], {layer: state[None] for layer, state in own.items()})
        for text_T, own in zip(texts, states, strict=True)
    ]


def fitted(name: str, target: Target, batches: list[HeadBatch], **settings: Any) -> Any:
    heads = started({"family": name, **LINEAR, **settings}, target)
    heads.fit(batches)
    return heads


def scores(one: Pattern, angles_R: Tensor, distances_P: Tensor) -> Tensor:
    turned = torch.polar(torch.ones(()), distances_P[:, None] * angles_R)
    found: Tensor = (torch.complex(one.real_R, one.imaginary_R) * turned).real.sum(-1)
    return found


@pytest.mark.parametrize("at_root", [False, True], ids=["newest token", "root"])
def test_a_pattern_is_highest_at_its_position_from_every_slot(at_root: bool) -> None:
    angles_R = 10000 ** (-torch.arange(16) / 32)
    one = find_pattern(angles_R, BLOCK, at_root)
    for slot in range(BLOCK):
        context = scores(one, angles_R, torch.arange(slot + 1, 1500.0))
        block = -scores(one, angles_R, torch.arange(slot - BLOCK + 1, slot + 1.0))
        best, others = (-block[-1], [-block[:-1], -context]) if at_root else (context[0], [context[1:], block])
        assert best - torch.cat(others).max() > 0.9 * one.margin > 0


def test_positional_heads_attend_to_the_newest_state_and_the_root(target: Target, batches: list[HeadBatch]) -> None:
    """The first head of each kind, from every slot, for any token."""
    heads = fitted("dflash", target, batches, head_dim=32)
    layer, batch = heads.layers[0], batches[0]
    for origin in (4, 20, 33):
        states = {number: state[:, : origin + 1] for number, state in batch.states.items()}
        context_1TE = heads.fuse_states(states)
        keys, values = layer.context(context_1TE, heads._rotary.at(torch.arange(origin + 1)[None], torch.float32, 50))
        block_1KE = heads.block(batch.tokens_BT[:, origin + 1], context_1TE)
        at = origin + 1 + torch.arange(BLOCK)[None]
        queries, own_keys, own_values = layer.read(block_1KE, heads._rotary.at(at, torch.float32, 50))
        size = heads.config.head_dim
        for head, position in ((0, origin), (1, origin + 1)):
            every = torch.cat([keys, own_keys], dim=2)[0, head]
            weights_KS = (queries[0, head, 0] @ every.T / size**0.5).softmax(-1)
            assert float(weights_KS[:, position].min()) > 0.9
        assert torch.cat([values, own_values], dim=2).isfinite().all()


@pytest.mark.parametrize(("name", "layers"), [("dflash", 1), ("dspark", 1), ("dspark", 2)])
def test_the_solution_predicts_coming_states(name: str, layers: int, target: Target, batches: list[HeadBatch]) -> None:
    """On the texts it was solved from; the mean state alone would leave an error of 1."""

    def error(heads: DraftHead) -> float:
        total = 0.0
        for batch in batches:
            for prediction in heads.unroll(batch):
                assert prediction.logits_MD.isfinite().all()
                wanted_MD = target.lm_head(batch.states[FINAL].flatten(0, 1)[prediction.teacher_M])
                centred = [x - x.mean(-1, keepdim=True) for x in (prediction.logits_MD, wanted_MD)]
                total += float((1 - torch.cosine_similarity(*centred, dim=-1)).sum())
        return total

    heads = fitted(name, target, batches, num_layers=layers)
    assert error(heads) < 0.8 * error(fitted(name, target, [], num_layers=layers)), "solved, and without data"
    assert rms_norm(heads.norm, torch.ones(1, 64)).isfinite().all()


def test_all_other_heads_are_the_targets(target: Target) -> None:
    """One per key head of the target, each with its first query head."""
    heads = started({"family": "dflash", **LINEAR}, target)
    layer, size = target.layers[-1].self_attn, heads.config.head_dim
    kv_heads = target.kv_shapes[-1][0][0]
    first = layer.q_proj.weight.view(kv_heads, -1, size, 64)[:, 0].flatten(0, 1)
    added = heads.config.num_attention_heads - kv_heads
    assert heads.config.num_key_value_heads == heads.config.num_attention_heads
    queries, keys, values = heads.layers[0].qkv.weight.chunk(3)
    for own, given in ((queries, first), (keys, layer.k_proj.weight), (values, layer.v_proj.weight)):
        assert torch.equal(own[added * size :], given)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_blocks_start_alike_for_a_target_on_a_device(name: str, target: Target, batches: list[HeadBatch]) -> None:
    """Heads are started on the CPU, wherever the target is; these heads are large enough for patterns."""
    expected = fitted(name, target, batches, head_dim=32).state_dict()
    with StandIn():
        on_device = Target(tiny_model("llama", vocab_size=61).to(CUDA))
        found = fitted(name, on_device, batches, head_dim=32).state_dict()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor.cpu(), expected[key], msg=key)
