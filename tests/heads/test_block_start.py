"""Linear starts of blocks: heads that attend to the right place, and maps that draft untrained."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from headstart.heads.base import HeadBatch, family, make_config
from headstart.heads.parts.block import BlockHead
from headstart.heads.parts.block_start import Pattern, find_pattern
from headstart.heads.parts.layer import rms_norm
from headstart.model.model import Target
from headstart.replay.patch import FINAL
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


def started(name: str, target: Target, batches: list[HeadBatch], **settings: Any) -> BlockHead:
    torch.manual_seed(0)
    config = make_config({"family": name, **LINEAR, **settings}, target)
    heads = cast(BlockHead, family(name)(config))
    heads.warm_start(target)
    heads.fit(batches)
    return heads


def scores(one: Pattern, angles_R: Tensor, distances_P: Tensor) -> Tensor:
    turned = torch.polar(torch.ones(()), distances_P[:, None] * angles_R)
    found: Tensor = (torch.complex(one.real_R, one.imaginary_R) * turned).real.sum(-1)
    return found


def test_a_pattern_is_highest_at_the_newest_token_from_every_slot() -> None:
    angles_R = 10000 ** (-torch.arange(16) / 32)
    one = find_pattern(angles_R, BLOCK, at_root=False)
    for slot in range(BLOCK):
        context = scores(one, angles_R, torch.arange(slot + 1, 1500.0))
        block = -scores(one, angles_R, torch.arange(slot - BLOCK + 1, slot + 1.0))
        assert context[0] - torch.cat([context[1:], block]).max() > 0.9 * one.margin > 0


def test_a_pattern_is_highest_at_the_root_from_every_slot() -> None:
    angles_R = 10000 ** (-torch.arange(16) / 32)
    one = find_pattern(angles_R, BLOCK, at_root=True)
    for slot in range(BLOCK):
        block = scores(one, angles_R, torch.arange(slot - BLOCK + 1, slot + 1.0))
        context = -scores(one, angles_R, torch.arange(slot + 1, 1500.0))
        assert block[-1] - torch.cat([block[:-1], context]).max() > 0.9 * one.margin > 0


def test_heads_look_at_the_newest_state_and_at_the_root(target: Target, batches: list[HeadBatch]) -> None:
    """The first head of each kind attends to that place from every slot, whatever token is there."""
    heads = started("dflash", target, batches, head_dim=32)
    layer, batch = heads.layers[0], batches[0]
    for origin in (4, 20, 33):
        states = {number: state[:, : origin + 1] for number, state in batch.states.items()}
        context_1TE = heads.fuse_states(states)
        keys, values = layer.context(context_1TE, heads._rotary.at(torch.arange(origin + 1)[None], torch.float32, 50))
        block_1KE = heads.block(batch.tokens_BT[:, origin + 1], context_1TE)
        at = origin + 1 + torch.arange(BLOCK)[None]
        queries, own_keys, own_values = layer.read(block_1KE, heads._rotary.at(at, torch.float32, 50))
        size = heads.config.head_dim
        for kind, place in ((0, origin), (1, origin + 1)):
            every = torch.cat([keys, own_keys], dim=2)[0, kind]
            shares_KS = (queries[0, kind, 0] @ every.T / size**0.5).softmax(-1)
            assert float(shares_KS[:, place].min()) > 0.9
        assert torch.cat([values, own_values], dim=2).isfinite().all()


@pytest.mark.parametrize(("name", "layers"), [("dflash", 1), ("dspark", 1), ("dspark", 2)])
def test_the_solution_predicts_coming_states(name: str, layers: int, target: Target, batches: list[HeadBatch]) -> None:
    """On the texts it was solved from; the mean state alone would leave an error of 1."""
    heads = started(name, target, batches, num_layers=layers)
    missed, spread = 0.0, 0.0
    for batch in batches:
        for step, prediction in enumerate(heads.unroll(batch)):
            logits_MD = prediction.logits_MD
            wanted_MD = target.lm_head(batch.states[FINAL].flatten(0, 1)[prediction.teacher_M])
            centred = [x - x.mean(-1, keepdim=True) for x in (logits_MD, wanted_MD)]
            missed += float((1 - torch.cosine_similarity(*centred, dim=-1)).sum())
            spread += len(logits_MD)
            assert logits_MD.isfinite().all() and step < heads.draft_steps
    start = started(name, target, [], num_layers=layers)  # nothing to solve from
    unsolved = 0.0
    for batch in batches:
        for prediction in start.unroll(batch):
            wanted_MD = target.lm_head(batch.states[FINAL].flatten(0, 1)[prediction.teacher_M])
            centred = [x - x.mean(-1, keepdim=True) for x in (prediction.logits_MD, wanted_MD)]
            unsolved += float((1 - torch.cosine_similarity(*centred, dim=-1)).sum())
    assert missed < 0.8 * unsolved
    assert rms_norm(heads.norm, torch.ones(1, 64)).isfinite().all()


def test_all_other_heads_are_the_targets(target: Target) -> None:
    """They are one per key head of the target, each with the first of its queries."""
    config = make_config({"family": "dflash", **LINEAR}, target)
    heads = cast(BlockHead, family("dflash")(config))
    heads.warm_start(target)
    layer, size = target.layers[-1].self_attn, heads.config.head_dim
    kv_heads = target.kv_shapes[-1][0][0]
    first = layer.q_proj.weight.view(kv_heads, -1, size, 64)[:, 0].flatten(0, 1)
    looking = heads.config.num_attention_heads - kv_heads
    assert heads.config.num_key_value_heads == heads.config.num_attention_heads
    queries, keys, values = heads.layers[0].qkv.weight.chunk(3)
    for own, given in ((queries, first), (keys, layer.k_proj.weight), (values, layer.v_proj.weight)):
        assert torch.equal(own[looking * size :], given)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_blocks_start_alike_for_a_target_on_a_device(name: str, target: Target, batches: list[HeadBatch]) -> None:
    """Heads are started on the CPU, wherever the target is; these heads are large enough for patterns."""
    expected = started(name, target, batches, head_dim=32).state_dict()
    with StandIn():
        found = started(name, Target(tiny_model("llama", vocab_size=61).to(CUDA)), batches, head_dim=32).state_dict()
        for key, tensor in found.items():
            torch.testing.assert_close(tensor.cpu(), expected[key], msg=key)
