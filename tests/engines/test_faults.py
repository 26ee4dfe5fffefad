"""Planted faults: the check refuses each, and faults that an engine would load change the logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import make_config
from headstart.heads.parts.layer import LayerConfig
from headstart.hub.engines import gguf_file as gguf_format
from headstart.hub.engines.export import check_export, export_for
from headstart.hub.engines.importing import untuned
from headstart.hub.format import export_heads
from headstart.model.model import Target
from tests.engines.conftest import CASES, Made, edited, heads_for
from tests.engines.test_formats import CHAIN, off, ours, read

Config, Tensors = dict[str, Any], dict[str, Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"


def shift(config: Config, by: int) -> None:
    config[IDS] = [one + by for one in config[IDS]]


def shift_all(config: Config, by: int) -> None:
    shift(config, by)
    shift(config["eagle_config"], by)


def map_to_ids(config: Config, tensors: Tensors) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def without(name: str) -> Callable[[Config, Tensors], None]:
    def take(config: Config, tensors: Tensors) -> None:
        del tensors[name]

    return take


def bases(*places: str) -> Callable[[Config, Tensors], None]:
    def change(config: Config, tensors: Tensors) -> None:
        if "new" in places:
            config["rope_parameters"]["rope_theta"] = 500.0
        if "old" in places:
            config["rope_theta"] = 500.0

    return change


FAULTS: dict[str, tuple[Callable[[Config, Tensors], None], str, str, bool]] = {
    # change, engine, message, whether the reader loads it and drafts other tokens
    "no norm": (without("midlayer.hidden_norm.weight"), "vllm", "hidden_norm.weight is missing", False),
    "no final norm": (without("norm.weight"), "sglang", "norm.weight is missing, and sglang leaves it random", False),
    "no o_proj": (without("midlayer.self_attn.o_proj.weight"), "vllm", "leaves it random", False),
    "no d2t": (without("d2t"), "vllm", "lm_head.weight is [40, 64], and the config requires [292, 64]", True),
    "no lm_head": (without("lm_head.weight"), "vllm", "lm_head.weight is missing", False),
    "ids one deeper": (lambda c, _: shift(c, 1), "vllm", "layer ids disagree", True),
    "ids one higher": (lambda c, _: shift(c, -1), "vllm", "layer ids disagree", True),
    "nested ids as the others": (lambda c, _: shift(c["eagle_config"], 1), "sglang", "layer ids disagree", False),
    "all ids one higher": (lambda c, _: shift_all(c, -1), "vllm", "headstart wrote", True),
    "all ids one deeper": (lambda c, _: shift_all(c, 1), "vllm", "headstart wrote", True),
    "the last layer": (lambda c, _: shift_all(c, 1), "sglang", "7 is the deepest", False),
    "no nested ids": (lambda c, _: c.pop("eagle_config"), "sglang", "reads layer ids only from eagle_config", False),
    "no top ids": (lambda c, _: c.pop(IDS), "vllm", "vLLM uses the nested layer ids", False),
    "ids in d2t": (map_to_ids, "vllm", "d2t holds token ids", False),
    "one rotary base": (bases("old"), "vllm", "rope_theta 500.0 at the top and 10000.0", True),
    "the other rotary base": (bases("new"), "vllm", "rope_theta 10000.0 at the top and 500.0", False),
    "both rotary bases": (bases("old", "new"), "vllm", "headstart wrote", True),
    "no rotary base": (
        lambda c, _: (c.pop("rope_theta"), c.pop("rope_parameters")), "vllm", "has no rope_theta", False,
    ),
    "residual": (lambda c, _: c.update(norm_before_residual=True), "vllm", "headstart wrote", True),
    "residual there": (lambda c, _: c.update(norm_before_residual=True), "sglang", "does not know norm_before", True),
    "feedback": (lambda c, _: c.update(norm_output=True), "sglang", "does not know norm_output", True),
    "tied": (lambda c, _: c.update(tie_word_embeddings=True), "sglang", "uses the embeddings as the LM head", False),
    "bias": (
        lambda c, t: (c.update(attention_bias=True), t.update({"midlayer.self_attn.q_proj.bias": torch.ones(64)})),
        "sglang", "ignores attention biases", False,
    ),
    "unknown tensor": (lambda _, t: t.update(extra=torch.ones(3)), "vllm", "has no tensor extra", False),
    "architecture": (lambda c, _: c.update(architectures=["Qwen3Model"]), "sglang", "LlamaForCausalLMEagle3", False),
    "a Qwen3 layer": (
        lambda c, _: c.update(architectures=["Eagle3Qwen3ForCausalLM"]), "vllm", "and the file lacks such norms", False,
    ),
    "activation": (lambda c, _: c.update(hidden_act="gelu"), "vllm", "only silu", False),
    "one number": (lambda _, t: t["fc.weight"].view(-1)[:1].add_(9), "vllm", "headstart wrote", True),
}  # fmt: skip


@pytest.fixture(scope="module")
def exported(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "whole"
    export_for(made("eagle3-reduced")[1], folder, "vllm", dtype="float32")
    return folder


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_refused_and_visible(name: str, exported: Path, made: Made, target: Target, tmp_path: Path) -> None:
    plant, engine, said, drafts_otherwise = FAULTS[name]
    shutil.copyfile(exported / "config.json", tmp_path / "config.json")
    tensors = load_file(exported / "model.safetensors")
    with edited(tmp_path) as config:
        plant(config, tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    found = check_export(tmp_path, [engine])
    assert any(said in one.problem for one in found), found
    if drafts_otherwise:
        ours_KV, theirs_KV = ours(made("eagle3-reduced")[0], target, CHAIN), read("vllm", tmp_path, target)
        same = torch.equal(ours_KV.isfinite(), theirs_KV.isfinite()) and off(ours_KV, theirs_KV) < 1e-3
        assert not same, "the fault changes what is drafted"


def test_query_and_key_norms_need_a_qwen3_layer(made: Made, tmp_path: Path) -> None:
    export_for(made("eagle3-qk-norm")[1], tmp_path / "out", "speculators", dtype="float32")
    with edited(tmp_path / "out") as config:
        config["transformer_layer_config"]["model_type"] = "llama"
    problems = [finding.problem for finding in check_export(tmp_path / "out", ["vllm"])]
    assert any("does not norm queries and keys" in problem for problem in problems), problems


PARALLEL_FAULTS: dict[str, tuple[Callable[[Config, Tensors], None], str, str]] = {
    "no mask_hidden": (without("mask_hidden"), "vllm", "lacks mask_hidden"),
    "no mask token": (lambda c, _: (c.pop("mask_token_id"), c.pop("pard_token")), "vllm", "mask_token_id is None"),
    "another mask token": (lambda c, _: c.update(mask_token_id=8), "vllm", "headstart wrote"),
    "a narrow mask_hidden": (
        lambda _, t: t.update(mask_hidden=t["mask_hidden"][..., :-1].contiguous()), "vllm", "requires [1, 1, 192]",
    ),
    "for SGLang": (lambda c, _: None, "sglang", "sglang does not serve peagle heads"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARALLEL_FAULTS)
def test_fault_of_parallel_heads_is_refused(name: str, made: Made, tmp_path: Path) -> None:
    plant, engine, said = PARALLEL_FAULTS[name]
    export_for(made("peagle")[1], tmp_path / "out", "vllm", dtype="float32")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    with edited(tmp_path / "out") as config:
        plant(config, tensors)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    found = check_export(tmp_path / "out", [engine])
    assert any(said in one.problem for one in found), found


def test_speculators_config_with_fc_norm_is_refused_for_vllm(target: Target, tmp_path: Path) -> None:
    heads = heads_for(target, {**CASES["peagle"], "aux_norms": True})
    export_heads(tmp_path / "heads", heads, target, untuned(heads), {})
    with pytest.raises(UserError, match="vLLM does not read fc_norm in P-EAGLE configs of speculators"):
        export_for(tmp_path / "heads", tmp_path / "out", "speculators")
    export_for(tmp_path / "heads", tmp_path / "out", "vllm")


def rewrite(
    file: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], architecture: str = "eagle3"
) -> None:
    """Copy a GGUF file with changed keys and tensors."""
    reader = gguf.GGUFReader(file)
    fields = {name: [field.contents(), field.types] for name, field in reader.fields.items() if "GGUF." not in name}
    tensors = {one.name: [one.data.copy(), one.tensor_type] for one in reader.tensors}
    change(fields, tensors)
    writer = gguf.GGUFWriter(out, architecture)
    for name, (value, types) in fields.items():
        if name != "general.architecture":
            array = types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, value, types[0], sub_type=types[-1] if array else None)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def unpermute(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name, heads in (("blk.0.attn_q.weight", 4), ("blk.0.attn_k.weight", 2)):
        plain = gguf_format.unpermuted(torch.from_numpy(tensors[name][0]), heads)
        tensors[name][0] = plain.numpy()


def to_offsets(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    ids = tensors["d2t"][0]
    tensors["d2t"][0] = ids - torch.arange(len(ids)).numpy()


def set_key(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def put(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        fields[f"eagle3.{name}"][0] = change(fields[f"eagle3.{name}"][0])

    return put


def drop_note(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    fields.pop("headstart.note")


GGUF_FAULTS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str, bool]] = {
    "not permuted": (unpermute, "headstart wrote", True),
    "offsets in d2t": (to_offsets, "d2t does not name distinct tokens", False),
    "ids one deeper": (set_key("target_layers", lambda ids: [one + 1 for one in ids]), "7 is the deepest", False),
    "ids one higher": (set_key("target_layers", lambda ids: [one - 1 for one in ids]), "headstart wrote", True),
    "rotary base": (set_key("rope.freq_base", lambda _: 500.0), "headstart wrote", True),
    "residual": (set_key("norm_before_residual", lambda _: True), "headstart wrote", True),
    "no norm": (lambda _, tensors: tensors.pop("blk.0.attn_norm_2.weight"), "llama.cpp stops without it", False),
    "no tokens": (lambda fields, _: fields.pop("tokenizer.ggml.tokens"), "no tokenizer", False),
}


@pytest.mark.parametrize("name", GGUF_FAULTS)
def test_gguf_fault_is_refused(name: str, made: Made, target: Target, tmp_path: Path) -> None:
    plant, said, drafts_otherwise = GGUF_FAULTS[name]
    heads, folder = made("eagle3-reduced")
    export_for(folder, tmp_path / "whole", "gguf", dtype="float32")
    (tmp_path / "out").mkdir()
    rewrite(tmp_path / "whole" / "heads.gguf", tmp_path / "out" / "heads.gguf", plant)
    assert any(said in one.problem for one in check_export(tmp_path / "out"))
    if drafts_otherwise:
        ours_KV, theirs_KV = ours(heads, target, CHAIN), read("gguf", tmp_path / "out", target)
        assert off(ours_KV, theirs_KV) > 1e-3, "the fault changes what is drafted"


def test_comparison_with_the_heads_finds_more(made: Made, tmp_path: Path) -> None:
    """Without headstart's note in the file, only the heads reveal a missing permutation."""
    folder = made("eagle3-reduced")[1]
    export_for(folder, tmp_path / "whole", "gguf", dtype="float32")
    (tmp_path / "plain").mkdir()
    (tmp_path / "out").mkdir()
    rewrite(tmp_path / "whole" / "heads.gguf", tmp_path / "plain" / "heads.gguf", drop_note)
    rewrite(tmp_path / "plain" / "heads.gguf", tmp_path / "out" / "heads.gguf", unpermute)
    assert check_export(tmp_path / "plain", against=folder) == []
    assert check_export(tmp_path / "out") == []
    problems = [one.problem for one in check_export(tmp_path / "out", against=folder)]
    assert [problem.split(" differs from the heads")[0].split(".")[-2] for problem in problems] == ["q_proj", "k_proj"]


def test_other_heads_are_told_apart(made: Made, tmp_path: Path) -> None:
    export_for(made("eagle3")[1], tmp_path / "out", "vllm")
    assert any("d2t" in one.problem for one in check_export(tmp_path / "out", against=made("eagle3-reduced")[1]))


def test_indivisible_number_of_attention_heads(made: Made, target: Target, tmp_path: Path) -> None:
    """Our own format may have it; a solved start chooses a divisor of the width."""
    heads = made("eagle3-six-heads")[1]
    with pytest.raises(UserError, match="64 is not a multiple of the 6 attention heads"):
        export_for(heads, tmp_path / "out", "vllm")
    export_for(heads, tmp_path / "gguf", "gguf")
    solved = make_config({"family": "eagle3", "init": "transition", "norm_before_residual": True}, target)
    assert isinstance(solved, LayerConfig) and (solved.num_attention_heads, solved.num_key_value_heads) == (8, 8)
