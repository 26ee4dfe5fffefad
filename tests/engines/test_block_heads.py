"""Our block drafters: reference readers draft with our logits, and exports round-trip."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import headstart
from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch
from headstart.heads.exchange.published import Layout
from headstart.hub.engines.export import check_export, export_for, publish
from headstart.hub.engines.facts import facts_of_target
from headstart.hub.engines.importing import import_heads, read_checked
from headstart.model.lm_head import LogitTransform
from headstart.model.model import Target
from tests.engines.block_readers import drafted
from tests.engines.conftest import CASES, Made, change, problem

TEXT, CHAIN = [3, 9, 14, 27, 33, 8, 40, 12], [5, 51, 22, 17]
BLOCKS = [name for name in CASES if CASES[name]["family"] in ("dflash", "dflash2", "dspark") and "reduced" not in name]
FORMS = {
    **dict.fromkeys(("dflash", "dflash2"), ("vllm", "sglang", "speculators", "gguf")),
    "dspark": ("vllm", "speculators", "gguf"),
}
NOT_HELD = {("dflash-causal", "speculators"), ("dflash-mixed", "speculators"), ("dflash-mixed", "gguf")}
HELD = [(case, form) for case in BLOCKS for form in FORMS[CASES[case]["family"]] if (case, form) not in NOT_HELD]


@torch.no_grad()
def ours(heads: DraftHead, target: Target) -> Tensor:
    """Return draft logits after each token of a chain, with confidences as a last column if the heads have them."""
    states = target.prefill(target.new_cache(1, len(TEXT)), [TEXT], heads.aux_layers).aux_hidden_states
    session, level = heads.prefill([TEXT], states), torch.zeros(1, 1, dtype=torch.long)
    chain = CHAIN[: heads.draft_steps]
    logits_KV = torch.stack(
        [heads.draft_step(session, torch.tensor([[token]]), level, depth)[0, 0] for depth, token in enumerate(chain)]
    )
    sure_K = trained_to_say(heads, target)[: len(chain)]
    return torch.cat([logits_KV, sure_K[:, None]], dim=1) if len(sure_K) else logits_KV


def trained_to_say(heads: DraftHead, target: Target) -> Tensor:
    """Return the confidences of training for each draft of the chain; empty without a confidence head."""
    text, origin = [*TEXT, *CHAIN, 1], len(TEXT) - 1
    states = target.hidden_states([text], heads.aux_layers)[0]
    supervised_BT = torch.arange(len(text))[None] > origin
    batch = HeadBatch(torch.tensor([text]), supervised_BT, {layer: state[None] for layer, state in states.items()})
    steps = [step for step in heads.unroll(batch) if step.confidence_M is not None]
    return torch.cat([torch.empty(0), *(step.confidence_M[step.origin_M == origin].sigmoid() for step in steps)])


def read(folder: Path, target: Target) -> Tensor:
    """Return the same from the reference reader of a folder."""
    return drafted(folder, target, TEXT, CHAIN)


def off(ours_KV: Tensor, theirs_KV: Tensor) -> float:
    """Return the largest difference, relative to the largest logit; tokens that are not drafted have to be the same."""
    assert ours_KV.shape == theirs_KV.shape
    drafted_KV = ours_KV.isfinite()
    assert torch.equal(drafted_KV, theirs_KV.isfinite())
    return float((ours_KV - theirs_KV)[drafted_KV].abs().max() / ours_KV[drafted_KV].abs().max())


@pytest.mark.parametrize(("case", "form"), HELD)
def test_readers_draft_with_our_logits(case: str, form: str, made: Made, target: Target, tmp_path: Path) -> None:
    heads, folder = made(case)
    done = export_for(folder, tmp_path / "out", form, dtype="float32")
    assert off(ours(heads, target), read(tmp_path / "out", target)) < 1e-5
    for engine in done.commands:
        assert check_export(tmp_path / "out", [engine]) == []
    assert check_export(tmp_path / "out", against=folder) == []


@pytest.mark.parametrize(("case", "form"), HELD)
def test_export_round_trips_bit_exactly(case: str, form: str, made: Made, target: Target, tmp_path: Path) -> None:
    heads, folder = made(case)
    export_for(folder, tmp_path / "there", form, dtype="float32")
    back = import_heads(tmp_path / "there", target, tmp_path / "back")
    assert {**vars(back.config), "rms_norm_eps": 0} == {**vars(heads.config), "rms_norm_eps": 0}
    for name, tensor in heads.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    decoder = headstart.load(tmp_path / "back", target)
    options: dict[str, Any] = {"max_new_tokens": 10, "draft": "on"}
    with_heads = decoder.generate("hello", drafter="heads", **options)
    assert with_heads.tokens == decoder.generate("hello", max_new_tokens=10, drafter="none").tokens


CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], None]] = {
    "ids as EAGLE counts them": lambda config, _: config["dflash_config"].update(target_layer_ids=[2, 4, 7]),
    "another mask token": lambda config, _: config["dflash_config"].update(mask_token_id=8),
    "a shorter block": lambda config, _: config.update(block_size=3),
    "another rotary base": lambda config, _: config.update(rope_theta=77.0),
    "the whole text": lambda config, _: config.update(layer_types=["full_attention"] * 2),
    "a window that is one longer": lambda config, _: config.update(sliding_window=7),
    "windows without a word on later slots": lambda config, _: config.pop("is_causal"),
    "no context norm": lambda _, tensors: tensors["hidden_norm.weight"].fill_(1.0),
    "one k_norm for all layers": lambda _, tensors: tensors["layers.1.self_attn.k_norm.weight"].copy_(
        tensors["layers.0.self_attn.k_norm.weight"]
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_silent_faults_change_the_logits(name: str, made: Made, target: Target, tmp_path: Path) -> None:
    """Faults that an engine loads without an error must be visible to the comparisons above."""
    heads, folder = made("dflash-deep")
    export_for(folder, tmp_path / "out", "vllm", dtype="float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    CHANGES[name](config, tensors)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    ours_KV, theirs_KV = ours(heads, target), read(tmp_path / "out", target)
    assert off(ours_KV[: len(theirs_KV)], theirs_KV) > 1e-3


@pytest.mark.parametrize("case", ["dflash-reduced", "dflash2-reduced", "dspark-reduced"])
def test_reduced_vocabulary_is_left_out(case: str, made: Made, target: Target, tmp_path: Path) -> None:
    """Engines draft from all tokens through the target's LM head; our heads keep their vocabulary."""
    heads, folder = made(case)
    done = export_for(folder, tmp_path / "out", "vllm", dtype="float32")
    missing = target.vocab_size - len(heads.draft_to_target_D)
    told = [f"and {missing} of them were outside the draft vocabulary" in said for said in done.remarks]
    assert any(told) == (case != "dflash-reduced"), "tokens without a correction"
    assert any("set heads.draft_vocab_size=0." in said for said in done.remarks) == any(told)
    ours_KV, theirs_KV = ours(heads, target), read(tmp_path / "out", target)[:, heads.draft_to_target_D]
    both_KV = ours_KV.isfinite() & theirs_KV.isfinite()  # candidates of either vocabulary
    assert both_KV.any()
    assert off(*(one.masked_fill(~both_KV, torch.inf) for one in (ours_KV, theirs_KV))) < 1e-5


# -- foreign checkpoints -----------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(made: Made, tmp_path: Path) -> Path:
    """A folder without headstart's own note."""
    export_for(made("dflash")[1], tmp_path / "theirs", "vllm", dtype="float32")
    change(tmp_path / "theirs", headstart=None)
    return tmp_path / "theirs"


def test_embeddings_and_lm_head_of_the_target_may_be_included(theirs: Path, target: Target, tmp_path: Path) -> None:
    tensors = {f"model.{name}": one for name, one in load_file(theirs / "model.safetensors").items()}
    beside = {"model.embed_tokens.weight": target.embedding_weight, "lm_head.weight": target.lm_head_weight}
    save_file({**tensors, **{name: one.detach().clone() for name, one in beside.items()}}, theirs / "model.safetensors")
    heads = import_heads(theirs, target, tmp_path / "ours")
    assert torch.equal(heads.state_dict()["fc.weight"], tensors["model.fc.weight"])
    for name in beside:
        other = {**tensors, name: 2 * beside[name].detach()}
        save_file(other, theirs / "model.safetensors")
        with pytest.raises(UserError, match="of its own"):
            import_heads(theirs, target, tmp_path / "others")


@pytest.mark.parametrize(("case", "form"), sorted(NOT_HELD))
def test_misread_attention_is_refused(case: str, form: str, made: Made, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="causally"):
        export_for(made(case)[1], tmp_path / "out", form)


SIGHTS = {
    "as vLLM takes sliding layers": (
        {"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": True}, (9, True),
    ),
    "as engines since mid-2026": (
        {"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": True, "is_causal": False},
        (9, False),
    ),
    "as MiMo writes them": (
        {"layer_types": None, "dflash_config": {"use_swa": True, "swa_window_size": 9, "causal": False}}, (9, False),
    ),
    "causal alone": ({"dflash_config": {"causal": True}}, (0, True)),
    "is_causal first": ({"is_causal": False, "dflash_config": {"causal": True}}, (0, False)),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGHTS)
def test_windows_and_causality_are_read_from_every_place(name: str, theirs: Path, target: Target) -> None:
    settings, wanted = SIGHTS[name]
    nested = json.loads((theirs / "config.json").read_text())["dflash_config"]
    change(theirs, **{**settings, "dflash_config": {**nested, **settings.get("dflash_config", {})}})
    read = read_checked(theirs, target)
    assert (read.sliding_window, read.causal) == wanted and read.full_layers == ()


def test_unsupported_variants_are_refused(theirs: Path, target: Target) -> None:
    config = json.loads((theirs / "config.json").read_text())
    nested = config["dflash_config"]
    for settings, said in (
        ({"layer_types": ["chunked_attention"]}, "layer_types is ['chunked_attention']"),
        ({"layer_types": ["full_attention"] * 2}, "each of the 1 layers"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is None"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, "not more than the 4 slots"),
        ({"dflash_config": {**nested, "sample_from_anchor": True}}, "the position after their own"),
        ({"dflash_config": {**nested, "target_layer_ids": [1, 3, 9]}}, "has 8 layers"),
        ({"dflash_config": {**nested, "target_layer_ids": [1, 3, 7]}}, "from 1 to the last but one"),
        ({"dflash_config": {**nested, "target_layer_ids": None}}, "not a list of the target's layers"),
        ({"dflash_config": {**nested, "mask_token_id": 100000}}, "mask_token_id is 100000"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 6]}}, "mask_token_id is None"),
        ({"block_size": None}, "block_size is None"),
        ({"block_size": 1}, "block_size is 1"),
        ({"draft_vocab_size": 40}, "its own LM head"),
        ({"rope_theta": None, "rope_parameters": None}, "has no rope_theta"),
        ({"hidden_size": 32}, "the config requires"),
        ({"architectures": ["DFlash3DraftModel"]}, "architectures is ['DFlash3DraftModel']"),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size is None"),
        ({"dflash_config": {**nested, "conv_taps": 2}}, "dflash_config.conv_taps = 2, which headstart does not know"),
        ({"dflash_config": {**nested, "selector_rank": 256}}, "conv_kernel_size is None"),
        ({"selector_rank": 256}, "conv_kernel_size is None"),
        ({"dflash_config": {**nested, "output_multiplier": 2.0}}, "dflash_config.output_multiplier = 2.0"),
        ({"dflash_config": {**nested, "block_size": 5}}, "block_size 5 in dflash_config and 4 at the top"),
        ({"model_type": "gemma3_text"}, "has gemma3_text layers"),
    ):
        change(theirs, **settings)
        assert said in problem(theirs, target), settings
        if settings.get("architectures") == ["DFlash3DraftModel"]:
            (finding,) = check_export(theirs)
            assert said in finding.problem and "Correct" not in finding.remedy, "renaming would not help"
        (theirs / "config.json").write_text(json.dumps(config))
    (theirs / "mask_embedding.pt").touch()
    assert "a separate embedding for the mask token" in problem(theirs, target)


def test_settings_of_dspark_may_be_nested(made: Made, target: Target, tmp_path: Path) -> None:
    """As SpecForge writes them."""
    heads, folder = made("dspark")
    export_for(folder, tmp_path / "theirs", "vllm", dtype="float32")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    names = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "confidence_head_with_markov")
    nested = {name: config[name] for name in (*names, "enable_confidence_head")}
    taken_out = dict.fromkeys((*nested, "sample_from_anchor", "headstart"))
    change(tmp_path / "theirs", **{**taken_out, "architectures": ["DSparkDraftModel"], "dflash_config": nested})
    (found,) = check_export(tmp_path / "theirs")
    assert "markov_rank and enable_confidence_head and confidence_head_with_markov only at the top" in found.problem
    back = import_heads(tmp_path / "theirs", target, tmp_path / "back")
    assert off(ours(heads, target), ours(back, target)) < 1e-6
    change(tmp_path / "theirs", dflash_config={**nested, "markov_head_type": "rnn"})
    with pytest.raises(UserError, match="Markov head is 'rnn'"):
        import_heads(tmp_path / "theirs", target, tmp_path / "others")


def dflash2_checkpoint(target: Target, folder: Path, speculators: bool) -> dict[str, Tensor]:
    """Write a checkpoint with the names, shapes and settings of z-lab's classes, or of speculators'."""
    size, inner, heads, keys, d, taps, group, rank = 64, 96, 4, 2, 16, 2, 16, 8
    numbers = torch.Generator().manual_seed(7)
    shapes = {"fc.weight": (size, 3 * size), "hidden_norm.weight": (size,), "norm.weight": (size,)}
    for layer in ("layers.0.", "layers.1."):
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (d,) for name in "qk"}
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (keys * d, size) for name in "kv"}
        shapes[f"{layer}self_attn.q_proj.weight"] = (heads * d, size)
        shapes |= {f"{layer}{name}_layernorm.weight": (size,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, size) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (size, inner), f"{layer}self_attn.o_proj.weight": (size, heads * d)}
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"{layer}{conv}.base_kernel"] = (2, taps, size)
            shapes[f"{layer}{conv}.kernel_projection.weight"] = (2 * taps * (size // group), size)
    for codebook in ("predecessor", "successor"):
        shapes[f"candidate_selector.{codebook}_codebook"] = (target.vocab_size, rank)
    shapes["candidate_selector.hidden_projection.weight"] = (rank, size)
    tensors = {name: 0.3 * torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    layers = {
        "model_type": "qwen3", "hidden_size": size, "intermediate_size": inner, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": d, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "vocab_size": target.vocab_size, "max_position_embeddings": 256,
        "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    sizes = {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": rank, "selector_top_k": 7}
    own = {"block_size": 5, "mask_token_id": 7}
    if speculators:
        config = {
            "architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", **sizes, **own,
            "aux_hidden_state_layer_ids": [2, 4, 7], "transformer_layer_config": layers,
            "draft_vocab_size": target.vocab_size, "sample_from_anchor": False, "sliding_window_non_causal": True,
        }  # fmt: skip
    else:
        nested = {**sizes, **own, "target_layer_ids": [1, 3, 6], "input_embedding_scale": 1.0}
        config = {"architectures": ["DFlash2DraftModel"], **layers, "dflash_config": nested}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("speculators", [False, True], ids=["z-lab", "speculators"])
def test_dflash2_of_others_is_imported_bit_for_bit(speculators: bool, target: Target, tmp_path: Path) -> None:
    tensors = dflash2_checkpoint(target, tmp_path / "theirs", speculators)
    heads = import_heads(tmp_path / "theirs", target, tmp_path / "ours")
    assert heads.family == "dflash2" and heads.draft_steps == 4 and heads.aux_layers == (2, 4, 7)
    named = heads.by_published_name()
    assert named.keys() == tensors.keys() and all(torch.equal(named[name], one) for name, one in tensors.items())
    assert off(ours(heads, target), read_block(tmp_path / "theirs", target, speculators)) < 1e-5
    change(tmp_path / "theirs", architectures=["DFlashDraftModel"])
    assert read_checked(tmp_path / "theirs", target).layout is Layout.DFLASH2, "never half as DFlash"
    if not speculators:
        assert "expects architectures" in check_export(tmp_path / "theirs")[0].problem


def read_block(folder: Path, target: Target, speculators: bool) -> Tensor:
    """Read with the block size where our own files have it."""
    if not speculators:
        nested = json.loads((folder / "config.json").read_text())["dflash_config"]
        change(folder, block_size=nested["block_size"])
    return read(folder, target)


def test_logits_of_dflash2_are_scaled_as_the_targets(
    made: Made, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores add to logits, so their scale and cap matter, unlike for DFlash's best draft."""
    dflash2_checkpoint(target, tmp_path / "theirs", speculators=False)
    nested = json.loads((tmp_path / "theirs" / "config.json").read_text())["dflash_config"]
    for added in ({"output_multiplier": 0.5}, {"final_logit_softcapping": 30.0}):
        change(tmp_path / "theirs", dflash_config={**nested, **added})
        assert "and größe has [1.0, 0.0]" in problem(tmp_path / "theirs", target)
    monkeypatch.setattr(LogitTransform, "of", lambda _: LogitTransform(cap=30.0))
    assert read_checked(tmp_path / "theirs", target).final_logit_softcapping == 30
    change(tmp_path / "theirs", dflash_config=nested, final_logit_softcapping=30.0)
    assert read_checked(tmp_path / "theirs", target).final_logit_softcapping == 30
    (ignored,) = check_export(tmp_path / "theirs", ["vllm"])
    assert "vLLM reads final_logit_softcapping in dflash_config alone" in ignored.problem
    change(tmp_path / "theirs", final_logit_softcapping="30")
    assert "final_logit_softcapping is '30', not a number from 0" in problem(tmp_path / "theirs", target)
    change(tmp_path / "theirs", final_logit_softcapping=None)
    assert publish(made("dflash2")[1])[0].final_logit_softcapping == 30
    for scale in ({"dflash_config": {**nested, "input_embedding_scale": 8.0}}, {"input_embedding_scale": 8.0}):
        change(tmp_path / "theirs", **{"dflash_config": nested, **scale})
        assert "input_embedding_scale = 8.0" in problem(tmp_path / "theirs", target)


def test_heads_are_checked_against_the_target(theirs: Path, tiny_target: Target, target: Target) -> None:
    assert read_checked(theirs, target).aux_layers == (2, 4, 7)
    assert facts_of_target(tiny_target).num_layers < 7
    assert "layers" in problem(theirs, tiny_target)
