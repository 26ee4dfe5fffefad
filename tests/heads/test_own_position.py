"""EAGLE-3 layers that start as a transition: heads that attend to their own position, and the map they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, family, make_config
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.parts.layer import DraftLayer, LayerConfig, Rotary
from headstart.heads.parts.own_position import fit_constant_probe, pair_weights, self_weights, set_own_heads, store_map
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.heads.test_contract import CASES, started
from tests.tiny import tiny_model

SIZE, TOKENS = 64, 3000
START = CASES["eagle3-transition"]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model("llama", vocab_size=61)
    with torch.no_grad():
        weight = model.get_decoder().norm.weight
        weight.copy_(torch.linspace(0.5, 2.0, len(weight)))
    return Target(model)


def layer_of(width: int, theta: float, longest: int = 4096, qk_norm: bool = False) -> tuple[DraftLayer, Rotary]:
    torch.manual_seed(0)
    config = LayerConfig(
        family="any",
        hidden_size=SIZE,
        vocab_size=TOKENS,
        intermediate_size=8,
        num_attention_heads=SIZE // width + 1,
        num_key_value_heads=SIZE // width + 1,
        head_dim=width,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        max_position_embeddings=longest,
    )
    return DraftLayer(config, 2 * SIZE, input_norm=False, qk_norm=qk_norm), Rotary(config)


def table_of(spread: float) -> Tensor:
    """Return normed embeddings that share a direction; `spread` is the size of the rest relative to it."""
    random = torch.Generator().manual_seed(1)
    table_VE = torch.randn(TOKENS, SIZE, generator=random) * spread + torch.randn(SIZE, generator=random)
    return torch.nn.functional.rms_norm(table_VE, (SIZE,))


def own_share(layer: DraftLayer, rotary: Rotary, embedded_TE: Tensor, heads: int) -> Tensor:
    """Return the attention that each position gives to itself, [heads, T]."""
    length = len(embedded_TE)
    read_1TI = torch.cat([embedded_TE, torch.randn(length, SIZE)], dim=-1)[None]
    turn = rotary.at(torch.arange(length)[None], torch.float32, length)
    queries, keys, _ = layer.read(read_1TI, turn)
    return self_weights(queries[:, :heads], keys[:, :heads])[0, :, 0]


def cosines(rotary: Rotary, width: int, far: int) -> Tensor:
    return rotary.at(torch.arange(far + 1)[None], torch.float32, far + 1)[0][0, 1:, : width // 2]


@pytest.mark.parametrize(("width", "theta"), [(64, 1e5), (128, 5e5), (64, 1e4)])
def test_fast_rotary_pairs_distinguish_the_own_position(width: int, theta: float) -> None:
    angles_R = theta ** (-torch.arange(0, width, 2) / width)
    cos_PR = torch.cos(torch.arange(1, 4097)[:, None] * angles_R)
    shares_R, worst = pair_weights(cos_PR)
    assert float(shares_R.sum()) == pytest.approx(1)
    assert worst == pytest.approx(float((cos_PR @ shares_R).max()))
    assert worst < 0.77
    assert min(float(cos_PR[:, :count].mean(1).max()) for count in range(1, 12)) > worst + 0.05, "no better than equal"


@pytest.mark.parametrize(("repeats", "qk_norm"), [(1, False), (2, False), (40, False), (40, True)])
@torch.no_grad()
def test_own_heads_see_nothing_else(repeats: int, qk_norm: bool) -> None:
    """In texts of 2048 tokens, without repeats and with tokens repeated up to forty times in a row."""
    layer, rotary = layer_of(32, 1e5, qk_norm=qk_norm)
    table_VE = table_of(spread=0.5)
    probe_E, mean_E = fit_constant_probe(table_VE.split(1000))
    set_own_heads(layer, 2, cosines(rotary, 32, 4095), probe_E, mean_E)
    random = torch.Generator().manual_seed(repeats)
    text_T = torch.randint(0, TOKENS, (2048 // repeats,), generator=random).repeat_interleave(repeats)
    assert own_share(layer, rotary, table_VE[text_T], 2).min() > 1 - 1e-4


def stored(layer: DraftLayer, rotary: Rotary, heads: int, map_EI: Tensor, gram_II: Tensor, read_1TI: Tensor) -> Tensor:
    """Store a map in an otherwise empty layer; return what its own-position heads then add, [T, E]."""
    layer.zero_init()
    store_map(layer, heads, map_EI, gram_II)
    length = read_1TI.shape[1]
    _, _, values = layer.read(read_1TI, rotary.at(torch.arange(length)[None], torch.float32, length))
    return layer.write(torch.zeros(1, length, SIZE), values[:, :, None])[0]


@torch.no_grad()
def test_a_layer_holds_any_map() -> None:
    layer, rotary = layer_of(32, 1e5)
    table_VE = table_of(spread=0.5)
    set_own_heads(layer, 2, cosines(rotary, 32, 4095), *fit_constant_probe([table_VE]))
    map_EI, root_II = torch.randn(SIZE, 2 * SIZE), torch.randn(2 * SIZE, 2 * SIZE)
    read_1TI = torch.cat([table_VE[:50], torch.randn(50, SIZE)], dim=-1)[None]
    added_TE = stored(layer, rotary, 2, map_EI, root_II @ root_II.T, read_1TI)
    torch.testing.assert_close(added_TE, read_1TI[0] @ map_EI.T, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_fewer_heads_hold_the_part_that_adds_most() -> None:
    layer, rotary = layer_of(32, 1e5)
    lead_EE = torch.linalg.qr(torch.randn(SIZE, SIZE)).Q
    sizes_E = torch.cat([torch.ones(32), torch.full((32,), 0.01)])
    map_EI = lead_EE @ torch.diag(sizes_E) @ torch.randn(SIZE, 2 * SIZE)
    read_1TI = torch.randn(1, 50, 2 * SIZE)
    added_TE = stored(layer, rotary, 1, map_EI, torch.eye(2 * SIZE), read_1TI)
    wanted_TE = read_1TI[0] @ map_EI.T
    assert (added_TE - wanted_TE).norm() < 0.05 * wanted_TE.norm()


def batch_of(target: Target, texts: Sequence[Sequence[int]], aux_layers: Sequence[int]) -> HeadBatch:
    rows = target.hidden_states(texts, aux_layers)
    tokens_BT = torch.tensor(texts)
    states = {aux_layer: torch.stack([row[aux_layer] for row in rows]) for aux_layer in aux_layers}
    return HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), states)


def texts_of(count: int, length: int = 24) -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(3, 61, (count, length), generator=random).tolist()


def guesses(heads: DraftHead, batch: HeadBatch) -> list[Tensor]:
    return [prediction.hidden_MH for prediction in heads.unroll(batch)]


def test_training_freezes_queries_and_keys_of_own_heads(target: Target) -> None:
    """Without changing the gradients of other weights."""
    batch = batch_of(target, texts_of(40), (1, 3, FINAL))
    heads = cast(Eagle3Head, started(START, target))
    heads.fit([batch])
    layer, own, width = heads.layers[0], heads.config.own_heads, heads.config.head_dim
    with torch.no_grad():  # all other heads attend to the text
        layer.qkv.weight.view(3, -1, width, 128)[:, own:].normal_(std=0.1)
        layer.o.weight.normal_(std=0.1)
    gradients = []
    for _ in range(2):
        heads.train().zero_grad()
        torch.stack([guess.square().sum() for guess in guesses(heads, batch)]).sum().backward()
        gradients.append({name: weight.grad for name, weight in heads.named_parameters() if weight.grad is not None})
        heads.before_training([batch])
    assert layer.own_heads == own == 4
    complete, ours = gradients
    for name, wanted in complete.items():
        # Norms also move scores of about 50, and with them the last 1e-4 of the attention of own heads.
        share = 0.05 if "norm" in name else 1e-3
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=share * float(wanted.abs().max()), msg=name)
    rows_HdI = ours["layers.0.qkv.weight"].view(3, -1, width, 128)
    assert not rows_HdI[:2, :own].any() and rows_HdI[:2, own:].any() and rows_HdI[2].any(dim=-1).all()
    assert heads.trainable_rows()["layers.0.qkv.weight"] == [slice(64, 128), slice(192, 256), slice(256, 384)]


def test_own_heads_that_attend_elsewhere_are_trained(target: Target) -> None:
    batch = batch_of(target, texts_of(40), (1, 3, FINAL))
    heads = cast(Eagle3Head, started(START, target))
    heads.before_training([batch])
    assert heads.layers[0].own_heads == 4
    with torch.no_grad():
        heads.layers[0].qkv.weight[:16] = torch.randn(16, 128)
    heads.before_training([batch])
    assert heads.layers[0].own_heads == 0
    assert heads.trainable_rows()["layers.0.qkv.weight"] == [slice(0, 128), slice(128, 256), slice(256, 384)]


@torch.no_grad()
def test_the_fusion_maps_a_shallower_state_to_the_last_one(target: Target) -> None:
    heads = cast(Eagle3Head, started({**START, "aux_layers": (1, 2)}, target))
    batch = batch_of(target, texts_of(60), (1, 2, FINAL))
    map_EE = torch.eye(64) + 0.5 * torch.randn(64, 64) / 8
    last_BTE = batch.states[2] @ map_EE.T
    batch.states[FINAL] = torch.nn.functional.rms_norm(last_BTE, (64,), heads.norm.weight)
    heads.fit([batch])
    fused_BTE = heads.project(heads.select_states(batch.states))
    assert torch.nn.functional.cosine_similarity(fused_BTE, last_BTE, dim=-1).mean() > 0.99
    direct = torch.nn.functional.cosine_similarity(batch.states[2], last_BTE, dim=-1).mean()
    assert direct < 0.95, "else this shows nothing"


def test_without_data_the_state_passes_through(target: Target) -> None:
    heads = started({**START, "aux_layers": (3,)}, target)
    batch = batch_of(target, texts_of(2), (3, FINAL))
    heads.fit([])
    for prediction in heads.unroll(batch):
        own_ME = batch.states[FINAL].flatten(0, 1)[prediction.origin_M]
        torch.testing.assert_close(prediction.hidden_MH, own_ME, rtol=1e-3, atol=1e-3)


def test_norm_before_residual_moves_the_residual_stream(target: Target) -> None:
    for before in (True, False):
        settings = {"family": "eagle3", "draft_steps": 2, "aux_layers": (1, 2), "norm_before_residual": before}
        heads = cast(Eagle3Head, started(settings, target))
        feedback, embedded = 5 * torch.randn(1, 3, 64), torch.randn(1, 3, 64)
        attention_input, stream = heads.layer_input(feedback, embedded)
        assert torch.equal(stream, attention_input[..., 64:] if before else feedback)


def test_own_heads_need_enough_key_heads(target: Target) -> None:
    config = make_config(START, target)
    assert isinstance(config, Eagle3Config)
    assert (config.own_heads, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 8, 8, 16)
    wide = make_config({**START, "head_dim": 32}, target)
    assert isinstance(wide, Eagle3Config)
    assert (wide.own_heads, wide.num_key_value_heads) == (2, 4)
    with pytest.raises(UserError, match=r"num_key_value_heads is 2, and 4 heads of 16 are needed"):
        family("eagle3")(make_config({**START, "num_attention_heads": 4, "num_key_value_heads": 2}, target))
    with pytest.raises(UserError, match=r"heads\.num_layers is 2, and heads\.init=transition solves for one"):
        family("eagle3")(make_config({**START, "num_layers": 2}, target))
