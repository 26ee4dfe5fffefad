"""Recurrent families and Hydra: the inputs of each step, found by changing one; starts, settings and MTP's formula."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, make_config
from headstart.heads.mtp import MtpHead
from headstart.heads.parts.cache import cached_attention
from headstart.heads.parts.layer import DraftLayer, LayerConfig, Rotary
from headstart.heads.parts.text_attention import chain_attention
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.train.starting_heads import copy_matching
from tests.heads import test_contract as contract
from tests.heads.test_contract import CASES, started
from tests.tiny import KINDS, tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "eagle": {"family": "eagle", "draft_steps": 3},
    "eagle3": {"family": "eagle3", "draft_steps": 3, "aux_layers": (1, 3), "num_layers": 2},
    "mtp": {"family": "mtp", "draft_steps": 3},
}
READERS = {**FAMILIES, "hydra": {"family": "hydra", "num_heads": 3}, "peagle": {**CASES["peagle"], "num_layers": 2}}
LAYERS = (1, 2, 3, FINAL)
TEXT = [3, 9, 14, 27, 33, 8, 40, 12, 55, 6]


def build(settings: dict[str, Any], target: Target) -> DraftHead:
    heads: DraftHead = started(settings, target)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # little, so that attention looks everywhere
    return heads


def logits_of(heads: DraftHead, batch: HeadBatch) -> dict[tuple[int, int], torch.Tensor]:
    """Logits by (step, origin) of a single text."""
    return {
        (step, int(origin)): prediction.logits_MD[index]
        for step, prediction in enumerate(heads.unroll(batch))
        for index, origin in enumerate(prediction.origin_M)
    }


def batch_of(heads: DraftHead, seed: int = 0) -> HeadBatch:
    random = torch.Generator().manual_seed(seed)
    states = {aux_layer: torch.randn(1, len(TEXT), 64, generator=random) for aux_layer in heads.aux_layers}
    return HeadBatch(torch.tensor([TEXT]), torch.tensor([[index > 1 for index in range(len(TEXT))]]), states)


@pytest.mark.parametrize("name", READERS)
@torch.no_grad()
def test_each_step_reads_only_its_inputs(name: str, target: Target) -> None:
    """Step k of origin t reads the states up to t and the tokens up to t + k + 1; Hydra reads none before them, P-EAGLE
    none after t + 1."""
    heads, recurrent = build(READERS[name], target), name != "hydra"
    before = logits_of(heads, batch_of(heads))
    assert {step for step, _ in before} == {0, 1, 2}
    assert min(origin for _, origin in before) == 1, "the first draft starts before the first supervised token"
    for index in range(2, len(TEXT)):
        changed = batch_of(heads)
        changed.tokens_BT[0, index] = 60
        for (step, origin), logits in logits_of(heads, changed).items():
            same = torch.equal(logits, before[step, origin])
            read = index <= origin + 1 + (0 if name == "peagle" else step) and (recurrent or index > origin)
            assert same != read, f"token {index}, step {step} of origin {origin}"
    for index in range(len(TEXT)):
        changed = batch_of(heads)
        for state in changed.states.values():
            state[0, index] += 1.0
        for (step, origin), logits in logits_of(heads, changed).items():
            same = torch.equal(logits, before[step, origin])
            read = index <= origin if recurrent else index == origin
            assert same != read, f"state {index}, step {step} of origin {origin}"


PUBLISHED = {**CASES["eagle3-transition"], "draft_steps": 2, "aux_layers": (3,)}


@pytest.mark.parametrize("settings", [PUBLISHED, *({"family": name, "draft_steps": 2} for name in ("eagle", "mtp"))])
@torch.no_grad()
def test_the_start_is_the_best_linear_guess(settings: dict[str, Any], target: Target) -> None:
    """For states that rotate at each token, the start drafts them correctly, in the second step as in the first."""
    heads = started(settings, target)
    rotation = torch.linalg.qr(torch.randn(64, 64)).Q
    states = [torch.nn.functional.rms_norm(torch.randn(40, 64), (64,))]
    for _ in range(9):
        states.append(states[-1] @ rotation)
    batch = HeadBatch(torch.randint(3, 61, (40, 10)), torch.ones(40, 10, dtype=torch.bool), {})
    batch.states[FINAL] = torch.stack(states, 1)
    batch.states[3] = batch.states[FINAL] * torch.rand(40, 10, 1).add(1)  # before the final norm sizes differ
    heads.fit([batch])
    final_XE = batch.states[FINAL].flatten(0, 1)
    for prediction in heads.unroll(batch):
        # The ridge shrinks the map by about a thousandth; the second step does so twice.
        torch.testing.assert_close(prediction.hidden_MH, final_XE[prediction.teacher_M], rtol=0, atol=0.05)


@pytest.mark.parametrize(
    "settings",
    [{"aux_layers": (1, 2, 3), "num_layers": 2}, {"aux_layers": (1, 3), "init": "transition"}],
    ids=["target", "transition"],
)
@torch.no_grad()
def test_qk_norm_barely_changes_the_warm_start(settings: dict[str, Any]) -> None:
    """Attention stays about as sharp: drafts change far less than without attention."""
    model = tiny_model("llama", vocab_size=61)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.15 * torch.randn_like(parameter))
    target, drafted = Target(model), list[torch.Tensor]()
    texts = torch.randint(3, 61, (16, 64), generator=torch.Generator().manual_seed(2)).tolist()
    for qk_norm, blind in ((False, False), (True, False), (True, True)):
        heads = started({"family": "eagle3", "draft_steps": 2, "qk_norm": qk_norm, **settings}, target)
        rows = target.hidden_states(texts, LAYERS)
        states = {layer: torch.stack([row[layer] for row in rows]) for layer in LAYERS}
        heads.fit([batch := HeadBatch(torch.tensor(texts), torch.ones(16, 64, dtype=torch.bool), states)])
        if blind:
            for name, weight in heads.named_parameters():
                weight.mul_(0 if name.endswith(".o.weight") else 1)
        drafted.append(torch.cat([prediction.logits_MD for prediction in heads.unroll(batch)]))
    plain, normed, without = drafted
    assert (normed - plain).norm() < 0.1 * plain.norm() < 0.3 * (without - plain).norm()


@torch.no_grad()
def test_a_qwen3_layer_is_taken_over_with_its_norms() -> None:
    target = Target(tiny_model("qwen3", vocab_size=61))
    attention = target.layers[-1].self_attn
    attention.q_norm.weight.copy_(torch.linspace(0.5, 1.5, 16))
    heads = started({"family": "eagle3", "aux_layers": (1, 3), "qk_norm": True}, target)
    states = {layer: torch.randn(4, 32, 64) for layer in (1, 3, FINAL)}
    heads.fit([HeadBatch(torch.randint(3, 61, (4, 32)), torch.ones(4, 32, dtype=torch.bool), states)])
    layer = heads.layers[0]
    torch.testing.assert_close(layer.q_norm.weight, attention.q_norm.weight)  # not as large as queries are without
    assert torch.equal(layer.o.weight, attention.o_proj.weight)


def test_settings_follow_from_the_target(target: Target) -> None:
    config = make_config({"family": "eagle", "intermediate_size": 32}, target)
    assert isinstance(config, LayerConfig)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.intermediate_size == 32, "an explicit setting stays"
    assert config.rope_parameters["rope_theta"] == target.config.rope_parameters["rope_theta"]


def other_model(kind: str) -> Any:
    """Return a random 3-layer model with layers unlike Llama's; neither scales nor biases are trivial."""
    base: dict[str, Any] = {
        "vocab_size": 61, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    multipliers = {"residual_multiplier": 0.22, "attention_multiplier": 1 / 64, "embedding_multiplier": 12.0}
    config, cls = {
        "granite": (tf.GraniteConfig(**base, **multipliers), tf.GraniteForCausalLM),
        "cohere": (tf.CohereConfig(**base), tf.CohereForCausalLM),
        "phi": (tf.PhiConfig(**base), tf.PhiForCausalLM),
        "qwen2": (tf.Qwen2Config(**base), tf.Qwen2ForCausalLM),
        "olmo2": (tf.Olmo2Config(**base), tf.Olmo2ForCausalLM),
        "stablelm": (tf.StableLmConfig(**base), tf.StableLmForCausalLM),
        "glm4": (tf.Glm4Config(head_dim=16, **base), tf.Glm4ForCausalLM),
        "helium": (tf.HeliumConfig(head_dim=16, **base), tf.HeliumForCausalLM),
    }[kind]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = cls(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            elif "norm" in name:
                parameter.add_(0.3 * torch.rand_like(parameter))
    return model.float().eval()


ALIKE = {
    "llama": (True, True), "mistral": (True, True), "granite": (True, True),
    "mixtral": (True, False),  # experts
    "qwen2": (False, True),  # biases
    "helium": (False, True),  # turns neighbouring numbers, not halves
    "qwen3": (False, True), "phi3": (False, False), "gemma2": (False, False), "gemma3": (False, False),
    "gpt2": (False, False), "gpt_neox": (False, False), "cohere": (False, False), "phi": (False, False),
    "olmo2": (False, False), "stablelm": (False, False), "glm4": (False, False),
}  # fmt: skip
"""Whether a draft layer can take over these targets' attention and MLP."""


@pytest.mark.parametrize("kind", ALIKE)
@torch.no_grad()
def test_warm_start_copies_attention_and_mlp_only_if_built_alike(kind: str) -> None:
    """A part that is built alike computes what the target's does; any other starts without effect."""
    target = Target(tiny_model(kind, vocab_size=61) if kind in KINDS else other_model(kind))
    heads = started({"family": "eagle3", "aux_layers": (1, 2)}, target)
    drafted = logits_of(heads, batch_of(heads))
    assert {step for step, _ in drafted} == set(range(heads.draft_steps))
    assert all(logits.isfinite().all() for logits in drafted.values())
    config = heads.config
    layer = DraftLayer(config, config.hidden_size)
    layer.warm_start(target)
    assert (bool(layer.o.weight.any()), bool(layer.down.weight.any())) == ALIKE[kind]
    if all(ALIKE[kind]):
        states = target.hidden_states([TEXT[:6]], (2, 3))[0]  # within mistral's window
        x_BTE, index_BT = states[2][None], torch.arange(6)[None]
        queries, keys, values = layer.read(x_BTE, Rotary(config).at(index_BT, x_BTE.dtype, 6))
        later = (index_BT > index_BT.T)[None]
        ours = layer.write(x_BTE, chain_attention(queries, keys, values, later))
        torch.testing.assert_close(ours[0], states[3], rtol=1e-4, atol=1e-5)  # float32 sums in another order


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@torch.no_grad()
def test_settings_unlike_the_targets_start_without_effect(name: str, target: Target) -> None:
    for settings, attends, has_mlp in (
        ({"hidden_act": "relu"}, True, False),
        ({"rope_parameters": {"rope_theta": 500.0}}, False, True),
        ({"num_key_value_heads": 4}, False, True),
        ({"intermediate_size": 32}, True, False),
    ):
        config = make_config({**FAMILIES[name], **settings}, target)
        assert isinstance(config, LayerConfig)
        layer = DraftLayer(config, config.hidden_size)
        layer.warm_start(target)
        assert (bool(layer.o.weight.any()), bool(layer.down.weight.any())) == (attends, has_mlp), settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key heads"),
        ({"head_dim": 15}, r"heads\.head_dim.*multiple of 2"),
        ({"hidden_act": "sillu"}, r"heads\.hidden_act' is 'sillu': transformers has no such activation"),
        ({"rope_parameters": {}}, "default positions need a positive number as rope_theta"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type is one of default, linear"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "positions need a positive number as factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "factor can only be 1"),
        ({"family": "eagle3", "aux_layers": (1, 2), "num_layers": 4}, r"num_layers is 4 and the target has 3 layers"),
        ({"family": "eagle3"}, r"would read layers \[2, 1, 0\].*heads\.aux_layers=\[1,2,3\]"),
        ({"family": "eagle3", "aux_layers": (1, 1)}, r"layers \[1, 1\]"),
        ({"family": "eagle3", "aux_layers": ()}, r"layers \[\]"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str, target: Target) -> None:
    with pytest.raises(UserError, match=message):
        started({"family": "eagle", **settings}, target)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_every_accepted_rope_type_is_computed(kind: str, target: Target) -> None:
    settings = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    config = make_config({"family": "eagle", "rope_parameters": settings}, target)
    assert isinstance(config, LayerConfig)
    cos, _ = Rotary(config).at(torch.tensor([[200]]), torch.float32, 201)
    # Of 8 frequencies the first turns by 1 a position and the last by 1e4 ** (-7 / 8). All kinds stretch slow turns by
    # the factor, linear the fast ones too; yarn scales everything up a little.
    fast, slow = (100 if kind == "linear" else 200), 100 * 1e4 ** (-7 / 8)
    scale = 1 + 0.1 * math.log(2) if kind == "yarn" else 1.0
    found = cos[0, 0, [0, 7, 8, 15]].tolist()
    assert found == pytest.approx([scale * math.cos(turn) for turn in (fast, slow, fast, slow)], abs=1e-5)


@pytest.mark.parametrize("settings", [*FAMILIES.values(), {"family": "hydra", "num_heads": 1}])
def test_a_linear_start_stops_reading_once_it_has_enough(settings: dict[str, Any], target: Target) -> None:
    heads = started(settings, target)
    looked = []

    def batches() -> Iterator[HeadBatch]:
        for number in range(99):
            looked.append(number)
            states = {aux_layer: torch.randn(8, 32, 64) for aux_layer in {*heads.aux_layers, FINAL}}
            yield HeadBatch(torch.randint(3, 61, (8, 32)), torch.ones(8, 32, dtype=torch.bool), states)

    heads.fit(batches())
    assert len(looked) == 7, "12 positions for each of 128 numbers, of 240 in a batch"


@pytest.mark.parametrize(
    "settings", [*FAMILIES.values(), {"family": "hydra"}, {"family": "hydra", "shared_lm_head": True}]
)
def test_a_random_start_takes_nothing_from_the_target(settings: dict[str, Any], target: Target) -> None:
    targets = target, Target(tiny_model("llama", seed=1, vocab_size=61))
    heads, other = (started({**settings, "init": "random"}, model) for model in targets)
    heads.fit(pytest.fail(f"batch {number} is read") for number in range(2))
    assert all(torch.equal(one, two) for one, two in zip(heads.parameters(), other.parameters(), strict=True))
    matrices = [weight for name, weight in heads.named_parameters() if weight.dim() == 2 and "bias" not in name]
    assert all(weight.std() > 0.01 for weight in matrices), "no matrix is mostly 0"
    own = [weight for weight in matrices if weight.shape == target.lm_head_weight.shape]
    assert not any(torch.equal(weight, target.lm_head_weight) for weight in own)


@pytest.mark.parametrize("name", ["eagle", "hydra", "medusa"])
def test_a_frozen_lm_head_is_not_copied(name: str, target: Target) -> None:
    settings = {"family": name} if name == "eagle" else {"family": name, "shared_lm_head": True}
    heads = started(settings, target)
    assert heads.lm_head_DE.data_ptr() == target.lm_head_weight.data_ptr()


@torch.no_grad()
def test_both_attentions_agree() -> None:
    random = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 2, 3, 5, 16, generator=random)
    keys, values = (torch.randn(2, 2, 5, 16, generator=random) for _ in range(2))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)[None]
    one = chain_attention(queries, keys, values, later)
    other = cached_attention(queries, (keys, values), 5, ~later.expand(2, 5, 5))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32 sums in another order


def test_default_aux_layers(target: Target) -> None:
    starts = ("target", "transition")
    read = [make_config({"family": "eagle3", "init": start}, target).model_dump()["aux_layers"] for start in starts]
    middle, last = target.num_layers // 2, target.num_layers
    assert read == [(2, middle, last - 3), (2, middle, last - 1)]


@torch.no_grad()
def test_mtp_computes_the_published_formula(target: Target) -> None:
    """h' = M [RMSNorm(Emb(t_i+1)); RMSNorm(h_i)], then a decoder layer and the LM head, with transformers' own layer
    and rotary positions (DeepSeek-V3, equations 21 to 23; the embedding comes first in the released weights)."""
    heads = contract.shake(contract.build("mtp", target)).eval()
    assert isinstance(heads, MtpHead)
    config = tf.LlamaConfig(**target.config.to_dict())
    config._attn_implementation = "sdpa"
    layer, module = LlamaDecoderLayer(config, 0), heads.module
    layer.load_state_dict({name.removeprefix("layers.0."): x for name, x in module.by_published_name(0).items()})

    def rms(x: torch.Tensor, norm: torch.nn.RMSNorm) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * norm.weight

    length = len(TEXT) - 1
    state_1TE = target.hidden_states([TEXT], [FINAL])[0][FINAL][None, :length]
    embedded_1TE = target.embedding_weight[torch.tensor([TEXT[1:]])]
    joined = torch.cat([rms(embedded_1TE, module.enorm), rms(state_1TE, module.hnorm)], -1) @ module.eh_proj.weight.T
    positions_1T = torch.arange(length)[None]
    rotary = LlamaRotaryEmbedding(config)(joined, positions_1T)
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    out = layer(joined, attention_mask=mask, position_ids=positions_1T, position_embeddings=rotary)
    wanted_TV = target.lm_head(rms(out[0] if isinstance(out, tuple) else out, module.norm))[0]
    step = next(iter(heads.unroll(contract.batch_of(target, heads, [TEXT], prompt=1))))
    assert step.origin_M.tolist() == list(range(length - 1))
    wanted_MV = wanted_TV[step.origin_M]
    torch.testing.assert_close(step.logits_MD, wanted_MV, rtol=1e-5, atol=1e-5 * float(wanted_MV.abs().max()))


def test_parallel_heads_start_from_trained_eagle3_heads(target: Target) -> None:
    """Their first draft is the earlier heads', and only the state of the masks is new."""
    earlier, heads = build({**FAMILIES["eagle3"], "num_layers": 1}, target), started(CASES["peagle"], target)
    assert copy_matching(heads, earlier) == "copied 10 of 11 tensors from the earlier eagle3 heads"
    (first, *masks), (theirs, *_) = (list(each.unroll(batch_of(heads))) for each in (heads, earlier))
    assert torch.equal(first.logits_MD, theirs.logits_MD) and len(masks) == 2
