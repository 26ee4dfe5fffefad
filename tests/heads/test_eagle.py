"""What each step of the recurrent families reads, by changing one thing at a time; their starts and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headstart.errors import UserError
from headstart.heads import DraftHead, HeadBatch, family, make_config
from headstart.heads.layer import DraftLayer, LayerConfig, Rotary, cached_attention, chain_attention
from headstart.target import FINAL, Target
from tests.tiny import KINDS, tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "eagle": {"family": "eagle", "steps": 3},
    "eagle3": {"family": "eagle3", "steps": 3, "tap_layers": (1, 3), "num_layers": 2},
}
TEXT = [3, 9, 14, 27, 33, 8, 40, 12, 55, 6]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


def build(settings: dict[str, Any], target: Target) -> DraftHead:
    torch.manual_seed(0)
    heads = family(settings["family"])(make_config(settings, target))
    heads.warm_start(target)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # little, so that attention looks everywhere
    return heads


def logits_of(heads: DraftHead, batch: HeadBatch) -> dict[tuple[int, int], torch.Tensor]:
    """Logits by (step, origin) of a single text."""
    return {
        (step, int(origin)): prediction.logits_MD[place]
        for step, prediction in enumerate(heads.unroll(batch))
        for place, origin in enumerate(prediction.origin_M)
    }


def batch_of(heads: DraftHead, seed: int = 0) -> HeadBatch:
    random = torch.Generator().manual_seed(seed)
    states = {tap: torch.randn(1, len(TEXT), 64, generator=random) for tap in heads.taps}
    return HeadBatch(torch.tensor([TEXT]), torch.tensor([[place > 1 for place in range(len(TEXT))]]), states)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_what_each_step_reads(name: str, target: Target) -> None:
    """Step k of origin t reads the states up to t and the tokens up to t + k + 1, and nothing behind them."""
    heads = build(FAMILIES[name], target)
    before = logits_of(heads, batch_of(heads))
    assert {step for step, _ in before} == {0, 1, 2}
    assert min(origin for _, origin in before) == 1, "the first draft starts before the first supervised token"
    for place in range(2, len(TEXT)):
        changed = batch_of(heads)
        changed.tokens_BT[0, place] = 60
        for (step, origin), logits in logits_of(heads, changed).items():
            same = torch.equal(logits, before[step, origin])
            assert same == (place > origin + step + 1), f"token {place}, step {step} of origin {origin}"
    for place in range(len(TEXT)):
        changed = batch_of(heads)
        for state in changed.states.values():
            state[0, place] += 1.0
        for (step, origin), logits in logits_of(heads, changed).items():
            same = torch.equal(logits, before[step, origin])
            assert same == (place > origin), f"state {place}, step {step} of origin {origin}"


@torch.no_grad()
def test_eagle_starts_from_the_best_linear_guess(target: Target) -> None:
    """States that follow linearly from the state and the token before: the start drafts them at once."""
    torch.manual_seed(0)
    heads = family("eagle")(make_config({"family": "eagle", "steps": 2}, target))
    heads.warm_start(target)
    rotation = torch.linalg.qr(torch.randn(64, 64)).Q
    states = [torch.randn(40, 64)]
    for _ in range(9):
        states.append(states[-1] @ rotation)
    batch = HeadBatch(torch.randint(3, 61, (40, 10)), torch.ones(40, 10, dtype=torch.bool), {})
    batch.states[FINAL] = torch.stack(states, 1)
    heads.fit([batch])
    final_XE = batch.states[FINAL].flatten(0, 1)
    for prediction in heads.unroll(batch):
        assert prediction.feature_ME is not None
        # The ridge shrinks the map by about a thousandth; the second step does so twice.
        torch.testing.assert_close(prediction.feature_ME, final_XE[prediction.source_M], rtol=0, atol=0.05)


def test_layers_to_tap_must_differ(target: Target) -> None:
    with pytest.raises(UserError, match=r"would read layers \[2, 1, 0\].*heads\.tap_layers=\[1,2,3\]"):
        family("eagle3")(make_config({"family": "eagle3"}, target))
    with pytest.raises(UserError, match=r"layers \[1, 1\]"):
        family("eagle3")(make_config({"family": "eagle3", "tap_layers": (1, 1)}, target))


def test_settings_follow_from_the_target(target: Target) -> None:
    config = make_config({"family": "eagle", "intermediate_size": 32}, target)
    assert isinstance(config, LayerConfig)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.intermediate_size == 32, "what a recipe sets stays"
    assert config.rope_parameters["rope_theta"] == target.config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_warm_started_layer_is_the_targets_own_where_it_is_built_alike(kind: str) -> None:
    """On llama, mistral and mixtral's attention the draft layer computes what the target's layer does."""
    target = Target(tiny_model(kind, vocab_size=61))
    heads = family("eagle3")(make_config({"family": "eagle3", "tap_layers": (1, 2)}, target))
    heads.warm_start(target)
    if kind not in ("llama", "mistral"):
        drafted = logits_of(heads, batch_of(heads))
        assert all(logits.isfinite().all() for logits in drafted.values()), "other layers start without harm"
        return
    config = heads.config
    assert isinstance(config, LayerConfig)
    layer = DraftLayer(config, config.hidden_size)
    layer.warm_start(target)
    states = target.hidden_states([TEXT[:6]], (2, 3))[0]  # within mistral's window
    x_BTE, places_BT = states[2][None], torch.arange(6)[None]
    queries, keys, values = layer.read(x_BTE, Rotary(config).at(places_BT, x_BTE.dtype))
    later = (places_BT > places_BT.T)[None]
    ours = layer.write(x_BTE, chain_attention(queries, keys, values, later))
    torch.testing.assert_close(ours[0], states[3], rtol=1e-4, atol=1e-5)  # float32 sums in another order


@torch.no_grad()
def test_both_attentions_agree() -> None:
    random = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 2, 3, 5, 16, generator=random)
    keys, values = (torch.randn(2, 2, 5, 16, generator=random) for _ in range(2))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)[None]
    one = chain_attention(queries, keys, values, later)
    other = cached_attention(queries, (keys, values), 5, ~later.expand(2, 5, 5))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32 sums in another order
