"""Importing published checkpoints: exports round-trip bit-exactly, and every published layout is understood."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import headstart
from headstart.errors import UserError
from headstart.heads.io import load_heads
from headstart.heads.parts.layer import LayerConfig, Rotary
from headstart.hub.engines.export import check_export, check_heads, export_for, export_remarks
from headstart.hub.engines.facts import facts_of_target
from headstart.hub.engines.importing import import_heads
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.engines.conftest import Made, change, edited, problem
from tests.engines.test_formats import CHAIN, HELD, off, ours, read
from tests.test_cli import works


@pytest.mark.parametrize(("case", "form"), HELD)
def test_export_round_trips_bit_exactly(case: str, form: str, made: Made, target: Target, tmp_path: Path) -> None:
    heads, folder = made(case)
    export_for(folder, tmp_path / "there", form, dtype="float32")
    back = import_heads(tmp_path / "there", target, tmp_path / "back")
    # A shared LM head becomes one per head, and vLLM folds the bias of the fusion map into embeddings.
    if not case.startswith("eagle-") and case not in ("eagle", "medusa-shared"):
        assert {**vars(back.config), "rms_norm_eps": 0} == {**vars(heads.config), "rms_norm_eps": 0}
        for name, tensor in heads.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor), name
    kept = load_heads(tmp_path / "back", target)
    assert off(ours(heads, target, CHAIN), ours(kept, target, CHAIN)) < 1e-6


def test_imported_heads_decode(made: Made, target: Target, tmp_path: Path) -> None:
    export_for(made("eagle3-reduced")[1], tmp_path / "there", "vllm", dtype="float32")
    place = headstart.import_heads(tmp_path / "there", target, tmp_path / "back")
    decoder = headstart.load(place, target)
    options: dict[str, Any] = {"max_new_tokens": 12, "drafter": "heads", "draft": "on"}
    answer = decoder.generate("hello", **options)
    assert answer.tokens == decoder.generate("hello", max_new_tokens=12, drafter="none").tokens


def test_published_heads_are_audited_and_decode_without_an_import(made: Made, target: Target, tmp_path: Path) -> None:
    """In one command, without a run, with only the target beside them."""
    there = tmp_path / "there"
    export_for(made("eagle3-reduced")[1], there, "vllm", dtype="float32")
    with edited(there) as config:
        del config["headstart"]
    (there / "README.md").unlink()
    before = sorted(tmp_path.rglob("*"))
    asked = ("--target", target.spec, "--dtype", "float32", "--limit", 1, "--max-new-tokens", 4, "--drafters", "static")
    shown = works("audit", there, *asked, "--temperature", 0).stdout
    assert "Clean: " in shown and sorted(tmp_path.rglob("*")) == before
    decoder = headstart.load(there, target)
    answer = decoder.generate("hello", max_new_tokens=12, drafter="heads", draft="on")
    assert answer.rounds and answer.tokens == decoder.generate("hello", max_new_tokens=12, drafter="none").tokens


# -- foreign checkpoints -----------------------------------------------------------------------------------------------


def layer_of(inputs: int, rng: Callable[..., Tensor]) -> dict[str, Tensor]:
    return {
        "self_attn.q_proj.weight": rng(64, inputs),
        "self_attn.k_proj.weight": rng(32, inputs),
        "self_attn.v_proj.weight": rng(32, inputs),
        "self_attn.o_proj.weight": rng(64, 64),
        "mlp.gate_proj.weight": rng(96, 64),
        "mlp.up_proj.weight": rng(96, 64),
        "mlp.down_proj.weight": rng(64, 96),
        "post_attention_layernorm.weight": 1 + rng(64),
    }


def foreign(layout: str, target: Target, folder: Path) -> Path:
    """Write a random checkpoint in another project's layout, with its names, keys and d2t."""
    folder.mkdir()
    random = torch.Generator().manual_seed(7)

    def rng(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=random)

    vocab = target.vocab_size
    ids = torch.randperm(vocab, generator=random)[:50].sort().values
    drafted = torch.zeros(vocab, dtype=torch.bool)
    drafted[ids] = True
    config: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "vocab_size": vocab, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
        "max_position_embeddings": 256, "model_type": "llama", "torch_dtype": "float32",
    }  # fmt: skip
    of_input = {"input_layernorm.weight": 1 + rng(64), "hidden_norm.weight": 1 + rng(64)}
    fused = {"fc.weight": rng(64, 192), "norm.weight": 1 + rng(64), "lm_head.weight": rng(50, 64)}
    fused |= {"d2t": ids - torch.arange(50), "t2d": drafted}
    if layout == "safeailab":  # layer ids are implicit
        config |= {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 50}
        tensors = fused | {f"midlayer.{name}": one for name, one in (layer_of(128, rng) | of_input).items()}
    elif layout == "specforge":  # nested ids, counted from 0
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50, "tie_word_embeddings": False}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
        tensors = fused | {f"midlayer.{name}": one for name, one in (layer_of(128, rng) | of_input).items()}
        tensors["embed_tokens.weight"] = target.embedding_weight.detach().clone()
    elif layout.startswith("speculators"):
        nested = {key: config.pop(key) for key in list(config) if key != "torch_dtype"}
        nested |= {"rope_parameters": {"rope_type": "default", "rope_theta": nested.pop("rope_theta")}, "head_dim": 16}
        config |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": 50}
        config |= {"transformer_layer_config": nested, "norm_before_residual": False}
        config |= {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "speculators_config": {"proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 4}]}}  # fmt: skip
        tensors = fused | {f"layers.0.{name}": one for name, one in (layer_of(128, rng) | of_input).items()}
        if layout == "speculators-peagle":  # several layers and trained embeddings are usual
            config |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 9}
            del config["norm_before_residual"]
            nested["num_hidden_layers"] = 2
            second = {"input_layernorm.weight": 1 + rng(64), **layer_of(64, rng)}
            tensors |= {f"layers.1.{name}": one for name, one in second.items()}
            tensors |= {"mask_hidden": rng(1, 1, 192), "embed_tokens.weight": rng(vocab, 64)}
    elif layout == "nemo":  # P-EAGLE heads of NeMo Automodel
        config |= {"architectures": ["LlamaEagle3DraftModel"], "draft_vocab_size": 50, "parallel_drafting": True}
        config |= {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "mask_token_id": 9, "num_depths": 3}
        inner = {name: fused.pop(name) for name in ("fc.weight", "norm.weight")}
        inner |= {f"layers.0.{name}": one for name, one in (layer_of(128, rng) | of_input).items()}
        inner["embed_tokens.weight"] = target.embedding_weight.detach().clone()
        tensors = fused | {f"model.{name}": one for name, one in inner.items()} | {"mask_hidden": rng(1, 1, 192)}
    elif layout == "ptd":  # P-EAGLE heads for vLLM, with its flat mask_hidden and its other name of the mask token
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50, "ptd_token_id": 9}
        config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 5]
        tensors = fused | {f"midlayer.{name}": one for name, one in (layer_of(128, rng) | of_input).items()}
        tensors["mask_hidden"] = rng(1, 192)
    elif layout == "eagle":
        config |= {"architectures": ["LlamaForCausalLM"], "head_dim": 16}
        tensors = {"fc.weight": rng(64, 128), "embed_tokens.weight": target.embedding_weight.detach().clone()}
        tensors |= {f"layers.0.{name}": one for name, one in layer_of(64, rng).items()}
    else:
        config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "user/model"}
        tensors = {f"{head}.0.linear.weight": rng(64, 64) for head in range(2)}
        tensors |= {f"{head}.0.linear.bias": rng(64) for head in range(2)}
        tensors |= {f"{head}.1.weight": rng(vocab, 64) for head in range(2)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


PEAGLE = ("speculators-peagle", "nemo", "ptd")
LAYOUTS = ("safeailab", "specforge", "speculators", "eagle", "medusa", *PEAGLE)
IDS = {"safeailab": [2, 4, 5], **{layout: [2, 3, 5] for layout in ("specforge", "speculators", *PEAGLE)}}
"""The aux layers of each layout, as indices into transformers' hidden_states."""


def in_other_words(layout: str, folder: Path, out: Path, vocab: int) -> Path:
    """Rewrite a checkpoint by hand for the reference readers, without headstart."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    if layout == "medusa":
        said = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "vocab_size": vocab}
        said |= {"medusa_fc_bias": True, "original_lm_head": False}
        names = {f"{head}.0.linear": f"blocks.{head}.layers.0" for head in range(2)}
        names |= {f"{head}.1": f"lm_heads.{head}" for head in range(2)}
        tensors = {f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": one for name, one in tensors.items()}
    else:
        said = {**config.get("transformer_layer_config", {}), **config, "head_dim": 16, "rope_theta": 5000.0}
        said |= {"fc_norm": False, "norm_output": False, "norm_before_residual": False}
        if layout in IDS:
            said["eagle_aux_hidden_state_layer_ids"] = IDS[layout]
        if layout in PEAGLE:
            said["mask_token_id"] = 9
        tensors = {name.removeprefix("model."): one for name, one in tensors.items()}
    out.mkdir()
    (out / "config.json").write_text(json.dumps(said))
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_published_layout_drafts_as_its_reader_does(layout: str, target: Target, tmp_path: Path) -> None:
    folder = foreign(layout, target, tmp_path / "theirs")
    heads = import_heads(folder, target, tmp_path / "ours")
    chain = CHAIN[: heads.draft_steps]
    drafted_KV = ours(heads, target, chain)
    theirs_KV = read("vllm", in_other_words(layout, folder, tmp_path / "said", target.vocab_size), target, chain)
    assert off(drafted_KV, theirs_KV) < 1e-5
    export_for(tmp_path / "ours", tmp_path / "again", "vllm", dtype="float32")
    assert off(drafted_KV, read("vllm", tmp_path / "again", target, chain)) < 1e-5
    again = load_file(tmp_path / "again" / "model.safetensors")
    theirs = load_file(folder / "model.safetensors")
    names = {f"{head}.0.linear": f"blocks.{head}.layers.0" for head in range(2)}
    names |= {f"{head}.1": f"lm_heads.{head}" for head in range(2)}
    for name, tensor in theirs.items():
        if not name.endswith("embed_tokens.weight") or layout == "speculators-peagle":
            own = name if layout == "eagle" else name.removeprefix("model.").replace("layers.0.", "midlayer.")
            base, _, kind = own.rpartition(".")
            found = again[f"{names[base]}.{kind}" if layout == "medusa" else own]
            assert torch.equal(found, tensor.view_as(found)), name
    if layout in PEAGLE:
        assert ("embed_tokens.weight" in again) is (layout == "speculators-peagle"), "trained ones are kept"
    assert list(heads.aux_layers) == IDS.get(layout, [FINAL])
    assert heads.draft_steps == {"speculators": 4, "speculators-peagle": 4, "nemo": 3, "medusa": 2}.get(layout, 5)


# -- hostile and broken checkpoints ------------------------------------------------------------------------------------


def header(file: Path, entries: dict[str, Any], data: bytes = b"") -> None:
    text = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def theirs(target: Target, tmp_path: Path) -> Path:
    return foreign("specforge", target, tmp_path / "theirs")


def test_pickled_weights_are_refused(theirs: Path, target: Target) -> None:
    (theirs / "model.safetensors").rename(theirs / "pytorch_model.bin")
    assert "pickled file, which can run arbitrary code" in problem(theirs, target)


def test_foreign_folder_is_not_replaced(theirs: Path, target: Target, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years")
    with pytest.raises(UserError, match=r"holds other files, which would be lost: thesis\.txt"):
        headstart.import_heads(theirs, target, tmp_path / "work")
    assert (tmp_path / "work" / "thesis.txt").read_text() == "years"


def test_index_with_outside_paths_is_refused(theirs: Path, target: Target) -> None:
    for name in ("../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin"):
        (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
        assert "not a safetensors file beside it" in problem(theirs, target)


def test_impossible_tensor_sizes_are_refused(theirs: Path, target: Target) -> None:
    whole, huge = (theirs / "model.safetensors").read_bytes(), 1 << 40
    (theirs / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cut short or damaged" in problem(theirs, target)
    for entry in (
        {"dtype": "F32", "shape": [huge], "data_offsets": [0, 4 * huge]},
        {"dtype": "F32", "shape": [-1, 4], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "XX", "shape": [1], "data_offsets": [0, 4]},
        ["no", "table"],
    ):
        header(theirs / "model.safetensors", {"fc.weight": entry}, b"0000")
        assert "cut short or damaged" in problem(theirs, target)
    (theirs / "model.safetensors").write_bytes(struct.pack("<Q", huge) + b"{}")
    assert "cut short or damaged" in problem(theirs, target)


def test_huge_layers_are_refused(theirs: Path, target: Target) -> None:
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "num_hidden_layers"):
        before = (theirs / "config.json").read_text()
        for value in (1 << 40, -1, "64", True, None):
            with edited(theirs) as config:
                config[name] = value
            assert problem(theirs, target)
        (theirs / "config.json").write_text(before)
    change(theirs, intermediate_size=1 << 20)
    assert "and the config requires" in problem(theirs, target)


def test_target_completes_the_check(target: Target, tiny_target_folder: Path, tmp_path: Path) -> None:
    folder = foreign("safeailab", target, tmp_path / "theirs")
    (finding,) = check_export(folder, ["vllm"])
    assert "Name the target with --target" in finding.remedy
    for named in (target, str(tiny_target_folder)):
        found = check_export(folder, ["vllm"], target=named)
        assert "--target" not in " ".join(finding.remedy for finding in found)
    assert check_export(folder, ["vllm"], target=target) == []
    assert isinstance(export_remarks(folder, ["vllm"], target=target), list)


def test_other_targets_and_variants_are_refused(theirs: Path, target: Target, tiny_target: Target) -> None:
    assert "layers" in problem(theirs, tiny_target)
    change(theirs, norm_before_fc=True)
    assert "input_norm.weight" in problem(theirs, target)
    change(theirs, norm_before_fc=False, target_hidden_size=128)
    assert "64 wide and their target 128" in problem(theirs, target)
    change(theirs, target_hidden_size=64, attention_bias=True)
    tensors = load_file(theirs / "model.safetensors")
    save_file({**tensors, "midlayer.self_attn.q_proj.bias": torch.ones(64)}, theirs / "model.safetensors")
    assert "headstart has no tensor layers.0.self_attn.q_proj.bias" in problem(theirs, target)
    save_file({**tensors, "embed_tokens.weight": tensors["embed_tokens.weight"] * 2}, theirs / "model.safetensors")
    assert "token embeddings of its own" in problem(theirs, target)
    save_file({**tensors, "d2t": tensors["d2t"] + 400}, theirs / "model.safetensors")
    assert "d2t holds neither" in problem(theirs, target)


def test_speculators_config_without_the_residual_is_refused(target: Target, tmp_path: Path) -> None:
    folder = foreign("speculators", target, tmp_path / "theirs")
    with edited(folder) as config:
        del config["norm_before_residual"]
    assert "does not say norm_before_residual" in problem(folder, target)


def test_maps_of_ids_and_of_offsets_are_told_apart(theirs: Path, target: Target, tmp_path: Path) -> None:
    tensors = load_file(theirs / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(50)
    for without_t2d in (False, True):
        kept = {name: one for name, one in tensors.items() if name != "t2d" or not without_t2d}
        for d2t in (tensors["d2t"], ids):
            save_file({**kept, "d2t": d2t}, theirs / "model.safetensors")
            heads = import_heads(theirs, target, tmp_path / f"{without_t2d}{int(d2t[-1])}")
            assert torch.equal(heads.draft_to_target_D, ids)


def test_order_of_the_draft_vocabulary_is_irrelevant(theirs: Path, target: Target, tmp_path: Path) -> None:
    heads = import_heads(theirs, target, tmp_path / "ours")
    tensors, order = load_file(theirs / "model.safetensors"), torch.arange(49, -1, -1)
    ids = (tensors["d2t"] + torch.arange(50))[order]
    changed = {"d2t": ids - torch.arange(50), "lm_head.weight": tensors["lm_head.weight"][order].contiguous()}
    save_file({**tensors, **changed}, theirs / "model.safetensors")
    turned = import_heads(theirs, target, tmp_path / "turned")
    for name, tensor in heads.state_dict().items():
        assert torch.equal(turned.state_dict()[name], tensor), name


# -- rotary positions and context --------------------------------------------------------------------------------------

LINEAR = {"rope_type": "linear", "factor": 4.0}
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # settings of the config, and their meaning besides the base 5000
    "in rope_scaling alone": ({"rope_scaling": {**LINEAR, "rope_theta": 5000.0}}, LINEAR),
    "old words": ({"rope_theta": 5000, "rope_scaling": {"type": "linear", "factor": 4.0}}, LINEAR),
    "nested by kind of layer": ({"rope_parameters": {"full_attention": {"rope_theta": 5000.0}}}, {}),
    "nested and scaled": ({"rope_parameters": {"full_attention": {**LINEAR, "rope_theta": 5000.0}}}, LINEAR),
    "nested beside layers that are not there": (
        {"rope_parameters": {"full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 9.0}}}, {},
    ),
    "base and scaling apart": ({"rope_parameters": {"rope_theta": 5000.0}, "rope_scaling": LINEAR}, LINEAR),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_rotary_settings_are_read_from_every_place(name: str, theirs: Path, target: Target) -> None:
    said, means = PLACES[name]
    change(theirs, **{"rope_theta": None, **said})
    assert import_heads(theirs, target, theirs.parent / "ours").config.rope_parameters == {
        "rope_type": "default", "rope_theta": 5000.0, **means,
    }  # fmt: skip
    assert "rope_theta" not in " ".join(finding.problem for finding in check_export(theirs, ["sglang"]))


def test_rotary_base_is_never_guessed(theirs: Path, target: Target) -> None:
    for said, problem_is in (
        ({"rope_theta": None}, "has no rope_theta"),
        ({"rope_theta": None, "rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}}, "has no rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 9.0}}}, "5000.0 at the top and 9.0 in rope_parameters."),
        ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 2.0}}, "factor 2.0 in rope_parameters and 4"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor can only be 1"),
        ({"rope_parameters": 7}, "rope_parameters is 7"),
    ):
        before = (theirs / "config.json").read_text()
        change(theirs, **said)
        assert problem_is in problem(theirs, target), said
        (theirs / "config.json").write_text(before)


@pytest.mark.parametrize("scaling", [{}, {"rope_type": "yarn", "factor": 2.0}], ids=["plain", "yarn"])
def test_shorter_context_is_raised(scaling: dict[str, Any], theirs: Path, target: Target, tmp_path: Path) -> None:
    context = target.max_length
    change(theirs, max_position_embeddings=128, **({"rope_scaling": scaling} if scaling else {}))
    found = check_export(theirs, ["sglang"], target=target)
    assert any("context is 128 tokens" in one.problem and f" is {context}: " in one.problem for one in found), found
    with pytest.warns(UserWarning, match=f"128 tokens is raised to the {context}"):
        heads = import_heads(theirs, target, tmp_path / "ours")
    assert heads.config.max_position_embeddings == context
    # Positions seen in training keep their angles.
    before = LayerConfig(**{**heads.config.model_dump(include=set(LayerConfig.model_fields)), "family": "",
        "max_position_embeddings": 128, "rope_parameters": {**scaling, "rope_theta": 5000.0}})  # fmt: skip
    for kept, angles in zip(*(Rotary(config).table(128, torch.device("cpu"), torch.float32)
                              for config in (heads.config, before)), strict=True):  # fmt: skip
        assert torch.equal(kept[:128], angles[:128])
    short = heads.publish()
    assert short.layer is not None
    short = replace(short, layer=replace(short.layer, max_position_embeddings=128))
    assert isinstance(check_heads("vllm", short, facts_of_target(target)), list), "an export raises it"
    export_for(tmp_path / "ours", tmp_path / "again", "vllm", dtype="float32")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["max_position_embeddings"] == context
    assert check_export(tmp_path / "again", ["vllm"], target=target) == []


def test_unsupported_settings_are_named(theirs: Path, target: Target, tmp_path: Path) -> None:
    eagle = json.loads((theirs / "config.json").read_text())["eagle_config"]
    for settings, said in (
        ({"model_type": "gemma3_text"}, "has gemma3_text layers"),
        ({"architectures": ["DFlash3DraftModel"]}, "DFlash3DraftModel"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 16}, "sliding window"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style = False"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation = 'gelu_pytorch_tanh'"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5"),
        ({"residual_multiplier": 0.2}, "residual_multiplier = 0.2"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"rope_interleave": True}, "rope_interleave = True"),
        ({"parallel_drafting": True}, "parallel_drafting = True"),
        ({"use_sliding_window": True, "sliding_window": 64}, "a sliding window"),
        ({"eagle_config": {**eagle, "use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state = False"),
        ({"eagle_config": {**eagle, "use_last_layernorm": False}}, "eagle_config.use_last_layernorm = False"),
        ({"eagle_config": {**eagle, "new_gate": "on"}}, "eagle_config.new_gate = 'on', which headstart does not know"),
    ):
        before = (theirs / "config.json").read_text()
        change(theirs, **settings)
        assert said in problem(theirs, target), settings
        assert any(said in finding.problem for finding in check_export(theirs, ["vllm"]))
        (theirs / "config.json").write_text(before)
