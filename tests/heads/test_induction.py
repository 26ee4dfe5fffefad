"""Closed-form induction heads: an untrained layer copies the successor of a token's earlier occurrence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headstart.heads.base import HeadBatch
from headstart.heads.parts.induction import slow_pairs, solve
from headstart.heads.parts.layer import DraftLayer, LayerConfig, Rotary
from headstart.heads.parts.text_attention import causal_attention
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.heads.test_contract import started
from tests.tiny import tiny_model

SIZE, WIDTH, HEADS, KV_HEADS, TOKENS = 64, 32, 4, 2, 300
LAST_EX = torch.eye(2 * SIZE)[SIZE:]
"""A fusion that keeps the second of two aux hidden states."""
CONFIG = LayerConfig(
    family="any",
    hidden_size=SIZE,
    vocab_size=TOKENS,
    intermediate_size=8,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=WIDTH,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)


def turns(length: int) -> tuple[Tensor, Tensor]:
    return Rotary(CONFIG).at(torch.arange(length)[None], torch.float32, length)


def test_pairs_that_turn_quickly_are_left_out() -> None:
    pairs = slow_pairs(CONFIG, turns(513)[0][0])
    angles = [512 * 1e6 ** (-2 * pair / WIDTH) for pair in range(WIDTH // 2)]
    assert pairs == [pair for pair, angle in enumerate(angles) if angle < 0.515]  # a cosine above .87
    assert 0 < len(pairs) < WIDTH // 2


@pytest.mark.parametrize("seed", range(3))
def test_attends_to_the_successor_of_the_same_token(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    table_VE = torch.randn(TOKENS, SIZE, generator=random)
    table_VE = table_VE / table_VE.square().mean(-1, keepdim=True).sqrt()
    # An early layer knows the token, a final state something else, mostly in half of its components.
    mix_EE, loud_E = torch.randn(SIZE, SIZE, generator=random) / 8, torch.ones(SIZE)
    loud_E[SIZE // 2 :] = 0.05

    def states(tokens_M: Tensor) -> tuple[Tensor, Tensor]:
        early_ME = table_VE[tokens_M] @ mix_EE + 0.1 * torch.randn(len(tokens_M), SIZE, generator=random)
        final_ME = 5 * loud_E * torch.randn(len(tokens_M), SIZE, generator=random)
        return torch.cat([early_ME, final_ME], dim=-1), final_ME

    torch.manual_seed(seed)
    layer = DraftLayer(CONFIG, 2 * SIZE, input_norm=False)
    learnt_M = torch.randint(TOKENS, (3000,), generator=random)
    aux_MX, final_ME = states(learnt_M)
    found = solve(layer, slow_pairs(CONFIG, turns(513)[0][0]), aux_MX, final_ME, table_VE[learnt_M])
    assert found is not None

    # 60 different tokens, then 40 of them once more in another order: entry t should look at where token t + 1 was.
    once_M = torch.randperm(TOKENS, generator=random)[:60]
    again_M = once_M[:-1][torch.randperm(59, generator=random)[:40]]
    text_M = torch.cat([once_M, again_M])
    fused_ME = states(text_M)[0] @ found.add_to(LAST_EX).T
    fused_ME = fused_ME / fused_ME.square().mean(-1, keepdim=True).sqrt()
    read_1TI = torch.cat([table_VE[text_M[1:]], fused_ME[:-1]], dim=-1)[None]
    queries, keys, values = layer.read(read_1TI, turns(len(text_M) - 1))
    attention_output_BNGTd = causal_attention(queries, keys, values)

    right = 0
    for entry in range(59, len(text_M) - 1):
        stood = int((once_M == text_M[entry + 1]).nonzero())  # the entry after it has the token that followed
        distance_P = (values[0, :, : entry + 1] - attention_output_BNGTd[0, :, -1, entry][:, None]).square().sum((0, 2))
        right += int(distance_P.argmin()) == stood
    assert right >= 32, "eight of ten; by chance one of a hundred"


def test_heads_too_small_for_codes_are_left_alone() -> None:
    layer = DraftLayer(CONFIG, 2 * SIZE, input_norm=False)
    before = layer.qkv.weight.clone()
    states_ME = torch.randn(100, SIZE)
    assert solve(layer, [15], states_ME, states_ME, states_ME) is None
    assert torch.equal(layer.qkv.weight, before)


def test_components_outside_the_code_keep_the_final_state() -> None:
    torch.manual_seed(0)
    layer = DraftLayer(CONFIG, 2 * SIZE, input_norm=False)
    aux_MX = torch.randn(500, 2 * SIZE)
    found = solve(layer, list(range(8, 16)), aux_MX, aux_MX[:, SIZE:], torch.randn(500, SIZE))
    assert found is not None
    fused_ME = aux_MX @ found.add_to(LAST_EX).T
    elsewhere_EE = torch.eye(SIZE) - found.axes_EC @ found.axes_EC.T
    torch.testing.assert_close(fused_ME @ elsewhere_EE, aux_MX[:, SIZE:] @ elsewhere_EE, rtol=1e-4, atol=1e-4)


def test_every_query_can_still_learn_something_else() -> None:
    """Where queries and keys are both zero, neither has a gradient."""
    torch.manual_seed(0)
    layer = DraftLayer(CONFIG, 2 * SIZE, input_norm=False)
    assert solve(layer, list(range(8, 16)), torch.randn(500, 2 * SIZE), torch.randn(500, SIZE), torch.randn(500, SIZE))
    queries, keys, values = layer.read(torch.randn(1, 20, 2 * SIZE), turns(20))
    (causal_attention(queries, keys, values) * torch.randn(1, KV_HEADS, 1, 20, WIDTH)).sum().backward()
    assert layer.qkv.weight.grad is not None
    assert (layer.qkv.weight.grad[: HEADS * WIDTH].abs().sum(1) > 0).all()


def test_nan_states_are_skipped() -> None:
    torch.manual_seed(0)
    first, second = DraftLayer(CONFIG, 2 * SIZE, input_norm=False), DraftLayer(CONFIG, 2 * SIZE, input_norm=False)
    second.load_state_dict(first.state_dict())
    aux_MX, own_ME = torch.randn(400, 2 * SIZE), torch.randn(400, SIZE)
    broken_MX = torch.cat([torch.full((1, 2 * SIZE), float("nan")), torch.zeros(1, 2 * SIZE), aux_MX])
    pairs = list(range(8, 16))
    assert solve(first, pairs, aux_MX, aux_MX[:, SIZE:], own_ME)
    assert solve(second, pairs, broken_MX, broken_MX[:, SIZE:], torch.cat([own_ME[:2], own_ME]))
    assert torch.equal(first.qkv.weight, second.qkv.weight)


def test_heads_copy_before_they_are_trained() -> None:
    """Final states reveal the next token only, in random texts that come twice: in the repetition, copying finds the
    state after it."""
    target = Target(tiny_model("llama", vocab_size=TOKENS, layers=2))
    settings = {
        "family": "eagle3", "draft_steps": 1, "aux_layers": (1, 2), "init": "transition", "norm_before_residual": True,
        "head_dim": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    heads = started(settings, target)
    random = torch.Generator().manual_seed(0)
    known_VE = torch.nn.functional.rms_norm(target.embedding_weight, (SIZE,))
    early_VE, final_VE = (known_VE @ torch.randn(SIZE, SIZE, generator=random) / 8 for _ in range(2))
    final_VE[:, SIZE // 2 :] *= 0.05

    def batch() -> HeadBatch:
        once_BT = torch.stack([torch.randperm(TOKENS, generator=random)[:30] for _ in range(16)])
        tokens_BT = torch.cat([once_BT, once_BT], dim=1)
        last_BTE = final_VE[tokens_BT.roll(-1, 1)]
        states = {1: early_VE[tokens_BT], 2: last_BTE, FINAL: torch.nn.functional.rms_norm(last_BTE, (SIZE,))}
        return HeadBatch(tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool), states)

    heads.fit(batch() for _ in range(4))
    held_out = batch()
    (prediction,) = heads.unroll(held_out)
    true_ME = held_out.states[FINAL].flatten(0, 1)[prediction.teacher_M]
    near_M = torch.cosine_similarity(prediction.hidden_MH.detach(), true_ME, dim=-1)
    again_M = prediction.origin_M % 60 >= 29  # the token after it stood before
    assert near_M[~again_M].mean() < 0.2
    assert near_M[again_M].mean() > 0.7
