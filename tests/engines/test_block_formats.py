"""Block drafters in every format that holds them: contents of the files, round trips and planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import LayerSizes, Layout, Published, digest
from headstart.hub.engines.base import rounded
from headstart.hub.engines.export import FORMATS, check_export, check_heads
from headstart.hub.engines.known_engines import drafts_to_try, serve_commands
from headstart.hub.target_facts import TargetFacts
from headstart.model.model import Target
from tests.engines.block_readers import drafted
from tests.engines.conftest import edited
from tests.engines.test_faults import rewrite
from tests.test_cli import works

SIZES = LayerSizes(96, 4, 2, 16, "silu", 1e-5, {"rope_type": "default", "rope_theta": 5000.0}, 256)
TEXT, CHAIN = [3, 9, 14, 27, 33, 8, 40, 12], [5, 51, 22]
KINDS = {
    **dict.fromkeys((Layout.DFLASH, Layout.DFLASH2), ("vllm", "sglang", "speculators", "gguf")),
    Layout.DSPARK: ("vllm", "speculators", "gguf"),
}
HELD = [(layout, form) for layout, forms in KINDS.items() for form in forms]
DSPARK = {"markov_rank": 8, "confidence": True}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 7}


def random(layout: Layout, target: Target, **settings: Any) -> Published:
    """Random heads in a published layout."""
    given = {"block_size": 4, "mask_token_id": 7, "num_layers": 2, "aux_layers": (2, 4, 7), "layer": SIZES, **settings}
    if layout is Layout.DSPARK:
        given = {**DSPARK, **given}
    if layout is Layout.DFLASH2:
        given = {**DFLASH2, **given}
    steps = given["block_size"] - (layout is not Layout.DSPARK)
    made = Published(layout, target.hidden_size, target.vocab_size, steps, {}, **given)
    numbers = torch.Generator().manual_seed(5)
    tensors = {name: 0.3 * torch.randn(shape, generator=numbers) for name, shape in made.expected().items()}
    return made.with_tensors({name: one + one.dim() % 2 for name, one in tensors.items()})


@pytest.fixture(scope="session")
def facts(target: Target) -> TargetFacts:
    return TargetFacts(
        target.spec, "größe", "123", "llama", 8, 64, target.vocab_size, target.spec, None, ("LlamaForCausalLM",), {}
    )


def written(published: Published, form: str, facts: TargetFacts, folder: Path, dtype: str = "float32") -> Path:
    folder.mkdir()
    FORMATS[form].write(published, facts, folder, dtype)
    return folder


@pytest.mark.parametrize(("layout", "form"), HELD)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_heads_round_trip(
    layout: Layout, form: str, dtype: str, target: Target, facts: TargetFacts, tmp_path: Path
) -> None:
    published = random(layout, target)
    folder = written(published, form, facts, tmp_path / "out", dtype)
    for engine in FORMATS[form].readers:
        if (layout, engine) != (Layout.DSPARK, "sglang"):
            assert check_export(folder, [engine]) == []
    back, held = FORMATS[form].read(folder, facts), rounded(published, dtype)
    assert {**back.settings, "layer": 0} == {**published.settings, "layer": 0} and back.steps == published.steps
    assert back.tensors.keys() == held.tensors.keys()
    if form != "gguf":
        assert digest(back) == digest(held)
    for name, tensor in held.tensors.items():
        # GGUF files keep norms and kernels in float32.
        given = published.tensors[name] if form == "gguf" and tensor.dim() != 2 else tensor
        assert torch.equal(back.tensors[name].float(), given.float()), name


@pytest.mark.parametrize("layout", KINDS)
def test_all_formats_draft_the_same(layout: Layout, target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    published = random(layout, target)
    folders = {form: written(published, form, facts, tmp_path / form) for form in KINDS[layout]}
    logits = {form: drafted(folder, target, TEXT, CHAIN) for form, folder in folders.items()}
    first = logits["vllm"]
    drafted_KV = first.isfinite()
    assert len(first) == len(CHAIN) and (drafted_KV.sum(1) == (7 if layout is Layout.DFLASH2 else first.shape[1])).all()
    for form, one in logits.items():
        assert torch.equal(one.isfinite(), drafted_KV), form
        assert (one - first)[drafted_KV].abs().max() < 1e-5 * first[drafted_KV].abs().max(), form


def test_names_and_keys_match_the_engines(target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    folder = written(random(Layout.DFLASH, target), "vllm", facts, tmp_path / "dflash")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"] == {"mask_token_id": 7, "target_layer_ids": [1, 3, 6]}
    assert config["block_size"] == 4 and config["num_target_layers"] == 8 and config["rope_theta"] == 5000.0
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["sliding_window"] is None and "is_causal" not in config
    names = set(load_file(folder / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"} <= names
    assert not any("embed" in name or "lm_head" in name or "d2t" in name for name in names)

    folder = written(random(Layout.DSPARK, target), "vllm", facts, tmp_path / "dspark")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["sample_from_anchor"] is True
    assert config["target_layer_ids"] == [1, 3, 6] and config["markov_rank"] == 8
    shapes = {name: list(one.shape) for name, one in load_file(folder / "model.safetensors").items()}
    assert shapes["confidence_head.proj.weight"] == [1, 64 + 8] and shapes["confidence_head.proj.bias"] == [1]
    assert shapes["markov_head.markov_w1.weight"] == [target.vocab_size, 8]

    folder = written(random(Layout.DSPARK, target), "speculators", facts, tmp_path / "speculators")
    config = json.loads((folder / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4, 7] and config["sample_from_anchor"] is True
    assert config["sliding_window_non_causal"] is True, "vLLM takes false for all layers"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4

    sliding = random(Layout.DSPARK, target, sliding_window=6, full_layers=(0,))
    folder = written(sliding, "vllm", facts, tmp_path / "sliding")
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"] and config["sliding_window"] == 6
    assert config["use_sliding_window"] is True and config["is_causal"] is False
    folder = written(replace(sliding, causal=True), "vllm", facts, tmp_path / "mixed")
    assert "is_causal" not in json.loads((folder / "config.json").read_text()), "it would be for all layers"
    fields = gguf.GGUFReader(written(sliding, "gguf", facts, tmp_path / "g") / "heads.gguf").fields
    values = {name: field.contents() for name, field in fields.items()}
    assert values["dflash.target_layers"] == [2, 4, 7] and values["dflash.block_size"] == 4
    assert values["dflash.attention.sliding_window"] == 6 and "dflash.attention.causal" not in values
    assert values["dflash.attention.sliding_window_pattern"] == [False, True]
    assert values["dflash.sample_from_anchor"] is True and values["tokenizer.ggml.mask_token_id"] == 7


def test_commands_request_the_whole_block(target: Target, facts: TargetFacts) -> None:
    dflash, dspark = random(Layout.DFLASH, target), random(Layout.DSPARK, target)
    engines = ("vllm", "sglang", "llama.cpp", "speculators")
    commands = serve_commands(engines, "served", dflash, facts, {})
    assert '"method": "dflash"' in commands["vllm"][-1] and '"num_speculative_tokens": 3' in commands["vllm"][-1]
    assert commands["sglang"][-1] == "4" and "DFLASH" in commands["sglang"]
    assert commands["llama.cpp"][-4:] == ["--spec-type", "draft-dflash", "--spec-draft-n-max", "3"]
    second = serve_commands(engines, "served", random(Layout.DFLASH2, target), facts, {})
    assert second == commands, "engines tell DFlash 2 by its files"
    adaptive = {"draft_sample_method": "probabilistic", "enable_adaptive_verification": True}
    for heads, added in ((dspark, adaptive), (replace(dspark, confidence=False), {})):
        config = json.loads(serve_commands(engines, "served", heads, facts, {})["vllm"][-1])
        assert config == {"method": "dspark", "model": "served", "num_speculative_tokens": 4, **added}
    tuned = json.loads(serve_commands(engines, "served", dspark, facts, {"vllm": {1: 4, 8: 2}})["vllm"][-1])
    assert tuned["num_speculative_tokens"] == 4 and "num_speculative_tokens_per_batch_size" not in tuned
    words = serve_commands(engines, "served", dspark, facts, {"llama.cpp": {1: 2}})["llama.cpp"]
    assert words[-4:] == ["--spec-type", "draft-dspark", "--spec-draft-n-max", "2"]
    assert "speculators" not in commands
    assert drafts_to_try(dspark, [1, 2, 3, 5]) == [1, 2, 3, 4]
    assert drafts_to_try(replace(dspark, layout=Layout.EAGLE3), [1, 2, 3, 5]) == [1, 2, 3]


def test_unsupported_heads_are_refused(target: Target, facts: TargetFacts) -> None:
    dflash, dspark = random(Layout.DFLASH, target), random(Layout.DSPARK, target)
    with pytest.raises(UserError, match="sglang does not serve dspark"):
        check_heads("sglang", dspark, facts)
    for change, said in (
        ({"aux_layers": (2, 4, 8)}, "7 is the deepest"),
        ({"aux_layers": (4, 2, 7)}, "not ascending"),
        ({"mask_token_id": target.vocab_size}, "outside the vocabulary"),
    ):
        with pytest.raises(UserError, match=said):
            check_heads("gguf", replace(dflash, **change), facts)
    with pytest.raises(UserError, match="no hooks in qwen2 targets"):
        check_heads("gguf", dflash, replace(facts, model_type="qwen2"))
    for form in ("vllm", "gguf"):
        with pytest.raises(UserError, match="by a Markov head"):
            check_heads(form, replace(dspark, markov_rank=0), facts)
    mixed = replace(dflash, sliding_window=6, full_layers=(1,))
    assert any("only in its newer model runner" in said for said in check_heads("vllm", mixed, facts))
    dflash2 = random(Layout.DFLASH2, target)
    assert any("without pairwise scores" in said for said in check_heads("vllm", dflash2, facts))
    assert any("after 0.5.18" in said for said in check_heads("vllm", dflash2, facts))
    with pytest.raises(UserError, match="a hidden size of at least 72 for 8 candidates"):
        check_heads("gguf", replace(dflash2, selector_top_k=8), facts)
    remarks = " ".join(check_heads("vllm", dspark, facts))
    assert "only on GPUs" in remarks and "draft their own positions" in remarks
    assert "--attention-backend TRITON_ATTN" in remarks
    plain = random(Layout.DSPARK, target, confidence=False)
    assert "enable_adaptive" not in " ".join(check_heads("vllm", plain, facts))


def test_unequal_k_norms_are_reported(target: Target, facts: TargetFacts) -> None:
    published = random(Layout.DFLASH, target)
    for form in ("vllm", "speculators"):
        assert any("with the k_norm of the first" in said for said in check_heads(form, published, facts))
    first, second = (f"layers.{number}.self_attn.k_norm.weight" for number in range(2))
    same = {**published.tensors, second: published.tensors[first]}
    for one in (published.with_tensors(same), random(Layout.DFLASH, target, num_layers=1)):
        assert check_heads("vllm", one, facts) == []


def test_check_reports_limits_of_an_engine(target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    folder = written(random(Layout.DSPARK, target), "vllm", facts, tmp_path / "out")
    said = " ".join(works("export", "--check", folder).stdout.split())
    assert "is complete" in said and "only on GPUs" in said and "heads.num_layers=1" in said
    said = works("export", "--check", written(random(Layout.DSPARK, target), "gguf", facts, tmp_path / "gguf")).stdout
    assert "is complete" in said and "GPU" not in said


# -- planted faults ----------------------------------------------------------------------------------------------------

Config, Tensors = dict[str, Any], dict[str, Tensor]


def nested(**settings: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, _: config["dflash_config"].update(settings)


def top(**settings: Any) -> Callable[[Config, Tensors], None]:
    return lambda config, _: config.update(settings)


def no(*names: str) -> Callable[[Config, Tensors], None]:
    def take(config: Config, tensors: Tensors) -> None:
        for name in names:
            for where in (config, config.get("dflash_config", {}), tensors):
                where.pop(name, None)

    return take


def rotary(config: Config, _: Tensors) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 9.0


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}
KINDS_OF_TWO = ["sliding_attention", "full_attention"]
DFLASH, FLASH2, SPARK = Layout.DFLASH, Layout.DFLASH2, Layout.DSPARK
FAULTS: dict[str, tuple[Layout, str, Callable[[Config, Tensors], None], str, str]] = {
    # layout, format, change, engine, message
    "ids as EAGLE counts them": (DFLASH, "vllm", nested(target_layer_ids=[2, 4, 7]), "vllm", "headstart wrote"),
    "ids past the last layer": (DFLASH, "vllm", nested(target_layer_ids=[2, 4, 8]), "vllm", "8 is the deepest"),
    "ids that fall": (DFLASH, "vllm", nested(target_layer_ids=[3, 1, 6]), "vllm", "not ascending"),
    "ids twice": (DFLASH, "vllm", top(eagle_aux_hidden_state_layer_ids=[1, 3, 6]), "vllm", "The layer ids disagree"),
    "no ids": (DFLASH, "vllm", no("target_layer_ids"), "vllm", "target_layer_ids is None"),
    "words for ids": (DFLASH, "vllm", nested(target_layer_ids="all"), "sglang", "target_layer_ids is 'all'"),
    "no mask": (DFLASH, "vllm", no("mask_token_id"), "sglang", "mask_token_id is None"),
    "mask outside": (DFLASH, "vllm", nested(mask_token_id=5000), "vllm", "mask_token_id is 5000"),
    "another mask": (DFLASH, "vllm", nested(mask_token_id=8), "vllm", "headstart wrote"),
    "no block size": (DFLASH, "vllm", no("block_size"), "sglang", "block_size is None"),
    "d2t": (DFLASH, "vllm", lambda _, t: t.update(d2t=torch.zeros(40).long()), "vllm", "has a d2t"),
    "t2d": (DFLASH, "vllm", lambda _, t: t.update(t2d=torch.ones(9)), "vllm", "converter stops at it"),
    "a window that is dropped": (
        DFLASH, "vllm", top(layer_types=["sliding_attention"] * 2, sliding_window=9), "vllm",
        "unless use_sliding_window is true",
    ),
    "another window": (DFLASH, "vllm", top(**SLIDING), "vllm", "headstart wrote"),
    "causal for vLLM": (DFLASH, "vllm", nested(causal=True), "sglang", "which should be true here"),
    "sliding for vLLM": (DFLASH, "vllm", nested(use_swa=True, swa_window_size=9), "sglang", "only from layer_types"),
    "causal full layers": (
        DFLASH, "vllm", top(**{**SLIDING, "layer_types": KINDS_OF_TWO, "is_causal": True}), "vllm",
        "beside sliding layers",
    ),
    "causal by the way": (
        DFLASH, "speculators", top(sliding_window_non_causal=False), "vllm", "then runs all layers",
    ),
    "causal full layers by the way": (
        DFLASH, "speculators",
        top(**{**SLIDING, "layer_types": KINDS_OF_TWO}, sliding_window_non_causal=False), "vllm",
        "then runs all layers",
    ),
    "later slots left open": (
        DFLASH, "speculators",
        lambda c, t: (top(**SLIDING)(c, t), c.pop("sliding_window_non_causal"), None)[-1], "vllm",
        "does not say sliding_window_non_causal",
    ),
    "later slots of DSpark": (
        SPARK, "speculators", top(**SLIDING, sliding_window_non_causal=True), "vllm",
        "unless is_causal is false",
    ),
    "more drafts than the block": (
        DFLASH, "speculators",
        lambda c, _: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=4), "vllm",
        "proposes 4 draft tokens, and a block of 4 has 3",
    ),
    "slots one off": (DFLASH, "speculators", top(sample_from_anchor=True), "vllm", "off by one"),
    "slots left open": (SPARK, "speculators", no("sample_from_anchor"), "vllm", "does not say sample_from_anchor"),
    "slots of DFlash": (SPARK, "vllm", top(sample_from_anchor=False), "vllm", "draft their own position"),
    "DFlash 2 named DFlash": (FLASH2, "vllm", top(architectures=["DFlashDraftModel"]), "vllm", "'DFlash2DraftModel'"),
    "groups": (FLASH2, "vllm", nested(conv_group_size=24), "vllm", "does not divide 64 channels"),
    "no rank": (FLASH2, "vllm", no("selector_rank"), "sglang", "selector_rank is None"),
    "other candidates": (FLASH2, "vllm", nested(selector_top_k=6), "vllm", "headstart wrote"),
    "no switch of the confidence head": (
        SPARK, "vllm", no("enable_confidence_head"), "vllm", "reads enable_confidence_head only at the top",
    ),
    "confidence without the token": (
        SPARK, "speculators", no("confidence_head_with_markov"), "vllm", "confidence_head_with_markov only at the top",
    ),
    "two block sizes": (FLASH2, "vllm", nested(block_size=5), "vllm", "block_size 5 in dflash_config and 4"),
    "no successors": (FLASH2, "vllm", no("candidate_selector.successor_codebook"), "vllm", "leaves it random"),
    "no kernel": (FLASH2, "speculators", no("layers.1.mlp_conv.base_kernel"), "vllm", "leaves it random"),
    "DSpark in SGLang": (SPARK, "vllm", top(), "sglang", "sglang does not serve dspark"),
    "no k_norm": (DFLASH, "vllm", no("layers.1.self_attn.k_norm.weight"), "vllm", "leaves it random"),
    "no Markov head": (SPARK, "vllm", no("markov_head.markov_w2.weight"), "vllm", "w2.weight is missing"),
    "another rank": (SPARK, "vllm", top(markov_rank=4), "vllm", "the config requires"),
    "no rotary base": (DFLASH, "vllm", no("rope_theta", "rope_parameters"), "vllm", "has no rope_theta"),
    "another rotary base": (DFLASH, "vllm", rotary, "vllm", "headstart wrote"),
    "architecture": (DFLASH, "vllm", top(architectures=["Qwen3Model"]), "vllm", "DFlashDraftModel"),
    "type": (DFLASH, "vllm", top(model_type="llama"), "vllm", "have Qwen3 layers"),
    "activation": (DFLASH, "vllm", top(hidden_act="gelu"), "vllm", "only silu"),
    "no epsilon": (DFLASH, "vllm", top(rms_norm_eps=None), "vllm", "rms_norm_eps is None"),
    "one number": (SPARK, "vllm", lambda _, t: t["fc.weight"].view(-1)[:1].add_(9), "vllm", "headstart wrote"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_refused(name: str, target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    layout, form, plant, engine, said = FAULTS[name]
    folder = written(random(layout, target), form, facts, tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    with edited(folder) as config:
        plant(config, tensors)
    save_file(tensors, folder / "model.safetensors")
    found = check_export(folder, [engine])
    assert any(said in one.problem for one in found), found
    assert all(one.problem and one.remedy for one in found)


def set_key(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def put(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        fields[name][0] = value

    return put


def new_key(name: str, value: Any, kind: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda fields, _: fields.update({name: [value, [kind]]})


GGUF_FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "ids one deeper": (set_key("dflash.target_layers", [3, 5, 8]), "7 is the deepest"),
    "ids one higher": (set_key("dflash.target_layers", [1, 3, 6]), "headstart wrote"),
    "ids that fall": (set_key("dflash.target_layers", [4, 2, 7]), "not ascending"),
    "no block size": (lambda fields, _: fields.pop("dflash.block_size"), "does not say dflash.block_size"),
    "another block size": (set_key("dflash.block_size", 9), "headstart wrote"),
    "no mask": (lambda fields, _: fields.pop("tokenizer.ggml.mask_token_id"), "does not say tokenizer.ggml.mask"),
    "mask outside": (set_key("tokenizer.ggml.mask_token_id", 5000), "outside the vocabulary"),
    "in place": (set_key("dflash.sample_from_anchor", False), "dflash.sample_from_anchor = False"),
    "a selector": (new_key("dflash.selector_rank", 256, gguf.GGUFValueType.UINT32), "does not say dflash.conv_kernel"),
    "convolutions": (new_key("dflash.conv_taps", 2, gguf.GGUFValueType.UINT32), "dflash.conv_taps = 2"),
    "scaled logits": (new_key("dflash.logit_scale", 0.5, gguf.GGUFValueType.FLOAT32), "dflash.logit_scale = 0.5"),
    "yarn": (new_key("dflash.rope.scaling.type", "yarn", gguf.GGUFValueType.STRING), "scaling.type = 'yarn'"),
    "half of a head": (set_key("dflash.rope.dimension_count", 8), "rope.dimension_count = 8"),
    "a window": (set_key("dflash.attention.sliding_window", 7), "headstart wrote"),
    "all causal": (
        lambda fields, _: fields.update({"dflash.attention.causal": [True, [gguf.GGUFValueType.BOOL]]}),
        "beside sliding layers",
    ),
    "which layers": (
        lambda fields, _: fields.pop("dflash.attention.sliding_window_pattern"),
        "does not say dflash.attention.sliding",
    ),
    "no norm": (lambda _, tensors: tensors.pop("enc.output_norm.weight"), "llama.cpp stops without it"),
    "half a Markov head": (lambda _, tensors: tensors.pop("markov_w2.weight"), "llama.cpp stops without it"),
}


@pytest.mark.parametrize("name", GGUF_FAULTS)
def test_gguf_fault_is_refused(name: str, target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    plant, said = GGUF_FAULTS[name]
    heads = random(Layout.DSPARK, target, sliding_window=6, full_layers=(0,))
    folder = written(heads, "gguf", facts, tmp_path / "whole")
    (tmp_path / "out").mkdir()
    rewrite(folder / "heads.gguf", tmp_path / "out" / "heads.gguf", plant, "dflash")
    found = check_export(tmp_path / "out")
    assert any(said in one.problem for one in found), found


DFLASH2_GGUF_FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "groups": (set_key("dflash.conv_group_size", 24), "requires [8, 64]"),
    "no candidates": (lambda fields, _: fields.pop("dflash.selector_top_k"), "does not say dflash.selector_top_k"),
    "more candidates": (set_key("dflash.selector_top_k", 8), "at least 72 for 8 candidates; these heads have 64"),
    "other candidates": (set_key("dflash.selector_top_k", 6), "headstart wrote"),
    "no selector": (lambda _, tensors: tensors.pop("selector_hidden.weight"), "llama.cpp stops without it"),
    "no kernel": (lambda _, tensors: tensors.pop("blk.1.ffn_conv_base"), "llama.cpp stops without it"),
}


@pytest.mark.parametrize("name", DFLASH2_GGUF_FAULTS)
def test_dflash2_gguf_fault_is_refused(name: str, target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    plant, said = DFLASH2_GGUF_FAULTS[name]
    folder = written(random(Layout.DFLASH2, target), "gguf", facts, tmp_path / "whole")
    (tmp_path / "out").mkdir()
    rewrite(folder / "heads.gguf", tmp_path / "out" / "heads.gguf", plant, "dflash")
    found = check_export(tmp_path / "out")
    assert any(said in one.problem for one in found), found


def test_scale_and_cap_of_the_target_are_written(target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    heads = random(Layout.DFLASH2, target, output_multiplier=0.25, final_logit_softcapping=30.0)
    for form in ("vllm", "gguf"):
        back = FORMATS[form].read(written(heads, form, facts, tmp_path / form))
        assert (back.output_multiplier, back.final_logit_softcapping) == (0.25, 30.0)
    nested = json.loads((tmp_path / "vllm" / "config.json").read_text())["dflash_config"]
    assert (nested["output_multiplier"], nested["final_logit_softcapping"]) == (0.25, 30.0)
    fields = gguf.GGUFReader(tmp_path / "gguf" / "heads.gguf").fields
    keys = [fields[f"dflash.{name}"].contents() for name in ("logit_scale", "final_logit_softcapping")]
    assert keys == [0.25, 30.0]
    with pytest.raises(UserError, match="no fields for the target's logit scale"):
        check_heads("speculators", heads, facts)


def test_mask_token_of_the_target_is_replaced(target: Target, facts: TargetFacts, tmp_path: Path) -> None:
    """All other fields of the tokenizer are the target's; there must be exactly one mask token."""
    first = written(random(Layout.DFLASH, target), "gguf", facts, tmp_path / "first")
    again = random(Layout.DFLASH, target, mask_token_id=11)
    folder = written(again, "gguf", replace(facts, gguf=first / "heads.gguf"), tmp_path / "again")
    assert FORMATS["gguf"].read(folder).mask_token_id == 11 and check_export(folder) == []
