"""Block families: inputs of a slot, attention in parts, the mask token, warm start, and DSpark's two heads."""

from __future__ import annotations

import math
import re
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.heads.dflash import DFlashHead
from headstart.heads.dspark import DSparkHead
from headstart.heads.int8_weights import linear
from headstart.heads.parts import text_attention
from headstart.heads.parts.block import BlockHead
from headstart.heads.parts.text_attention import VisibleRange, attend_blocks
from headstart.model.model import Target
from tests.heads.test_contract import batch_of, build, prefilled, shake
from tests.heads.test_text_attention import GROUPS, KV_HEADS, LENGTH, ROWS, SINGLE, STARTS, WIDTH
from tests.tiny import tiny_model, tiny_tokenizer

SLOTS = 4


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def rotated(x_HKd: Tensor, positions_K: Tensor) -> Tensor:
    half = x_HKd.shape[-1] // 2
    angles = positions_K[:, None] / 10000 ** (torch.arange(half) / half)
    left, right = x_HKd[..., :half], x_HKd[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)


def convolved(layer: Any, name: str, side: int, normed_KE: Tensor, x_KE: Tensor) -> Tensor:
    """Convolve over the slots of one block, number by number; a layer without convolutions changes nothing."""
    if not hasattr(layer, name):
        return x_KE
    taps, size = layer.config.conv_kernel_size, layer.config.conv_group_size
    convolution, output_KE = getattr(layer, name), torch.zeros_like(x_KE)
    groups = x_KE.shape[1] // size
    projected = (normed_KE @ convolution.kernel_projection.weight.T).view(-1, 2, taps, groups)
    for slot in range(len(x_KE)):
        for tap in range(min(taps, slot + 1)):
            for group in range(groups):
                channels = slice(group * size, (group + 1) * size)
                kernel = convolution.base_kernel[side, tap, channels] + projected[slot, side, tap, group]
                output_KE[slot, channels] += kernel * x_KE[slot - tap, channels]
    return output_KE


@torch.no_grad()
def by_hand(heads: BlockHead, states: dict[int, Tensor], embedded_KE: Tensor) -> Tensor:
    """Compute all slots of the block after a text, [K, E], written out for one block."""
    text = len(next(iter(states.values())))
    context_TE = rms(
        torch.cat([states[layer] for layer in heads.aux_layers], -1) @ heads.fc.weight.T, heads.hidden_norm.weight
    )
    stream_KE = embedded_KE
    config = heads.config
    places_S, places_K = torch.arange(text + len(embedded_KE)), text + torch.arange(len(embedded_KE))
    behind_KS = places_K[:, None] - places_S
    for number, layer in enumerate(heads.layers):
        slides = config.sliding_window > 0 and number not in config.full_layers
        hidden_KS = torch.zeros_like(behind_KS, dtype=torch.bool)
        if slides:
            hidden_KS |= behind_KS >= config.sliding_window
        if config.causal and slides == (config.sliding_window > 0):
            hidden_KS |= behind_KS < 0
        sizes = [config.num_attention_heads * 16, config.num_key_value_heads * 16, config.num_key_value_heads * 16]
        query, key, value = torch.split(layer.qkv.weight, sizes)
        assert layer.input_norm is not None
        normed_KE = rms(stream_KE, layer.input_norm.weight)
        read_KE = convolved(layer, "attention_conv", 0, normed_KE, normed_KE)
        both_SE = torch.cat([context_TE, read_KE])
        queries = rms((read_KE @ query.T).view(len(read_KE), -1, 16).transpose(0, 1), layer.q_norm.weight)
        keys = rms((both_SE @ key.T).view(len(both_SE), -1, 16).transpose(0, 1), layer.k_norm.weight)
        values = (both_SE @ value.T).view(len(both_SE), -1, 16).transpose(0, 1)
        queries, keys = rotated(queries, places_K), rotated(keys, places_S)
        groups = config.num_attention_heads // config.num_key_value_heads
        found = []
        for head, query_Kd in enumerate(queries):
            shares = (query_Kd @ keys[head // groups].T / 4).masked_fill(hidden_KS, -math.inf).softmax(-1)
            found.append(shares @ values[head // groups])
        attended_KE = torch.cat(found, -1) @ layer.o.weight.T
        stream_KE = stream_KE + convolved(layer, "attention_conv", 1, normed_KE, attended_KE)
        normed_KE = rms(stream_KE, layer.mlp_norm.weight)
        gate, up = (convolved(layer, "mlp_conv", 0, normed_KE, normed_KE) @ layer.gate_up.weight.T).chunk(2, -1)
        inner_KE = (F.silu(gate) * up) @ layer.down.weight.T
        stream_KE = stream_KE + convolved(layer, "mlp_conv", 1, normed_KE, inner_KE)
    return rms(stream_KE, heads.norm.weight)


@pytest.mark.parametrize("name", ["dflash-deep", "dflash-cold", "dflash-sliding", "dspark-deep", "dflash2-deep"])
def test_blocks_equal_a_version_by_hand(name: str, target: Target) -> None:
    """Every slot reads the visible part of the text before its root and of the block, and nothing else."""
    heads = cast(BlockHead, shake(build(name, target)))
    text = [3, 9, 14, 27, 33, 8, 40, 12, 5, 22, 31, 50]
    batch = batch_of(target, heads, [text], prompt=2)
    hidden_MSE = heads.blocks(batch, torch.tensor([1, 4, 7]))
    for number, origin in enumerate((1, 4, 7)):
        states = {layer: batch.states[layer][0, : origin + 1] for layer in heads.aux_layers}
        block = torch.tensor([text[origin + 1], *[60] * (heads.config.block_size - 1)])
        wanted_KE = by_hand(heads, states, target.embedding_weight[block])
        torch.testing.assert_close(hidden_MSE[number], wanted_KE[heads.first_slot :], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("packed", "window", "causal"), [(False, 0, False), (True, 0, True), (True, 7, False)])
@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.usefixtures("flex_on_cpu")
def test_attention_equals_one_table(
    monkeypatch: pytest.MonkeyPatch, flex: bool, packed: bool, window: int, causal: bool
) -> None:
    index_BA = torch.stack([torch.arange(3, 49, 2), torch.tensor([*range(10, 30), 0, 0, 0])])
    visible = VisibleRange(index_BA, LENGTH, STARTS.gather(1, index_BA) if packed else None, (window, SLOTS))
    torch.manual_seed(0)
    count = index_BA.shape[1]
    shapes = [
        (ROWS, KV_HEADS, GROUPS, count, SLOTS),
        *[(ROWS, KV_HEADS, LENGTH)] * 2,
        *[(ROWS, KV_HEADS, count, SLOTS)] * 2,
    ]
    every = [torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True) for shape in shapes]
    queries, keys, values, *own = every
    wanted = attend_blocks(queries, keys, values, visible, (own[0], own[1]), causal)
    weights = torch.randn(wanted.shape, dtype=wanted.dtype)
    gradients = torch.autograd.grad((wanted * weights).sum(), every)
    monkeypatch.setattr(text_attention, "_MAX_SCORES", 0)
    monkeypatch.setattr(text_attention, "_MAX_ROWS", 5 * GROUPS * SLOTS)
    assert len(visible.parts(KV_HEADS, GROUPS * SLOTS)) == 5
    visible.flex = flex
    found = attend_blocks(queries, keys, values, visible, (own[0], own[1]), causal)
    torch.testing.assert_close(found, wanted, **SINGLE)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), every), gradients, strict=True):
        torch.testing.assert_close(one, other, **SINGLE)


def test_blocks_without_gradients_run_a_few_at_a_time(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shake(build("dflash", target))
    batch = batch_of(target, heads, [list(range(1, 30)), list(range(20, 32))], prompt=3)
    wanted = [step.hidden_MH for step in heads.unroll(batch)]
    monkeypatch.setattr("headstart.heads.parts.block._ORIGINS", 5)
    with torch.no_grad():
        for step, hidden_MH in zip(heads.unroll(batch), wanted, strict=True):
            torch.testing.assert_close(step.hidden_MH, hidden_MH)


def test_layers_of_a_target_with_head_norms_start_with_them() -> None:
    target = Target(tiny_model("qwen3", vocab_size=61))
    with torch.no_grad():
        for layer in target.layers:
            layer.self_attn.q_norm.weight.copy_(torch.linspace(0.5, 1.5, 16))
            layer.self_attn.k_norm.weight.copy_(torch.linspace(1.5, 0.5, 16))
    heads = cast(BlockHead, build("dflash-deep", target))
    for own, layer in zip(heads.layers, list(target.layers)[-2:], strict=True):
        torch.testing.assert_close(own.q_norm.weight.data, layer.self_attn.q_norm.weight)
        torch.testing.assert_close(own.k_norm.weight.data, layer.self_attn.k_norm.weight)
        assert torch.equal(own.o.weight, layer.self_attn.o_proj.weight)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, "no token that is known to be free.*heads.mask_token_id"),
        ({"mask_token_id": 61}, "mask_token_id is 61, and the target has 61 tokens"),
        ({"mask_token_id": 60, "aux_layers": (2, 1)}, r"layers \[2, 1\] of the target, which must be"),
        ({"mask_token_id": 60, "aux_layers": (1, 3)}, r"layers \[1, 3\] of the target, which must be"),
        ({"mask_token_id": 60, "aux_layers": (1, -1)}, r"layers \[1, -1\] of the target, which must be"),
        ({"mask_token_id": 60, "num_layers": 4}, "num_layers is 4 and the target has 3 layers"),
        ({"mask_token_id": 60, "sliding_window": 8}, "sliding_window is 8 and a block has 8 slots"),
        ({"mask_token_id": 60, "full_layers": (0,)}, r"full_layers is \[0\]"),
        (
            {"mask_token_id": 60, "sliding_window": 9, "full_layers": (0,)},
            r"full_layers is \[0\]: .* some, not all, of the 1",
        ),
        (
            {"family": "dflash2", "mask_token_id": 60, "block_size": 4, "conv_kernel_size": 5},
            "conv_kernel_size is 5, and a block has 4 slots",
        ),
    ],
    ids=str,
)
def test_impossible_blocks_are_refused(settings: dict[str, Any], told: str, target: Target) -> None:
    with pytest.raises(UserError) as refused:
        config = make_config({"family": "dflash", **settings}, target)
        heads = cast(BlockHead, family(config.family)(config))
        heads.warm_start(target)
    assert re.search(told, f"{refused.value.problem} {refused.value.remedy}")


def test_the_mask_token_occurs_in_no_text() -> None:
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)

    def spare(vocab_size: int, *added: str, **roles: str) -> Any:
        made = tiny_tokenizer()
        made.add_tokens(list(added), special_tokens=True)
        for role, token in roles.items():
            setattr(made, role, token)
        return Target(tiny_model("llama", vocab_size=vocab_size), made).spare_token

    assert spare(rows + 8) == rows, "the first row without a token"
    assert spare(rows) == 0, "padding, which ends nothing"
    assert spare(rows + 2, "<|reserved_0|>", "<|other|>") == rows
    assert spare(rows + 2, "<|some|>", "<|other|>") == rows + 1
    assert spare(rows + 2, "<|some|>", "<|other|>", mask_token="<|some|>") == rows
    assert spare(rows, pad_token=tokenizer.eos_token, unk_token="<|endoftext|>") is None
    assert Target(tiny_model("llama", vocab_size=rows)).spare_token is None


@pytest.mark.parametrize("name", ["dflash", "peagle"])
def test_a_mask_token_that_texts_contain_is_refused(name: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|free|>", "<|turn|>"], special_tokens=True)
    tokenizer.chat_template = str(tokenizer.chat_template) + "<|turn|>"
    target = Target(tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    free, turn = len(tokenizer) - 2, len(tokenizer) - 1
    layers = {"family": name, "aux_layers": (1, 2)}
    for token in (tokenizer.eos_token_id, turn):
        with pytest.raises(UserError, match=f"heads.mask_token_id is {token}, which is in the target's texts"):
            make_config({**layers, "mask_token_id": token}, target)
    make_config({**layers, "mask_token_id": free}, target)


@pytest.mark.parametrize("filled", [0.0, math.nan, math.inf])
def test_a_mask_token_without_an_embedding_is_passed_over_and_refused(filled: float) -> None:
    """Slots that read zeros would all be equal. Rows that pad the vocabulary may be zeros, or uninitialised."""
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    target = Target(tiny_model("llama", vocab_size=rows + 8), tokenizer)
    with torch.no_grad():
        target.embedding_weight[rows] = filled
    assert target.spare_token == 0, "padding, which ends nothing"
    heads = DFlashHead(cast(Any, make_config({"family": "dflash", "mask_token_id": rows}, target)))
    with pytest.raises(UserError, match=f"Token {rows}, heads.mask_token_id, has .* zeros or not finite") as refused:
        heads.bind(target)
    assert "heads.mask_token_id=<id>" in refused.value.remedy


def test_the_markov_head_reads_the_nodes_token_alone(target: Target) -> None:
    """The block runs once; siblings differ only by the contribution of their own tokens."""
    heads = cast(DSparkHead, shake(build("dspark-deep", target)))
    session = prefilled(heads, target, [[3, 9, 14, 27, 33]])
    zero = torch.zeros(1, 2, dtype=torch.long)
    heads.draft_step(session, torch.tensor([[8]]), zero[:, :1], 0)
    for depth, tokens in ((1, [7, 30]), (2, [12, 7])):
        logits_WD = heads.draft_step(session, torch.tensor([tokens]), zero, depth)[0]
        added_WD = heads.parents_VR[tokens] @ heads.drafts_DR.T
        alone_D = linear(session.hidden_BSE[0, depth], heads.lm_head_DE)
        torch.testing.assert_close(logits_WD, alone_D + added_WD, rtol=1e-4, atol=1e-4)


def test_confidence_does_not_change_the_drafts(target: Target) -> None:
    heads = cast(DSparkHead, shake(build("dspark-deep", target)))
    for prediction in heads.unroll(batch_of(target, heads, [list(range(1, 20))], prompt=3)):
        assert prediction.confidence_M is not None
        prediction.confidence_M.sum().backward(retain_graph=True)
    learning = {name for name, weight in heads.named_parameters() if weight.grad is not None}
    assert learning == {"confidence_head.weight", "confidence_head.bias"}
