"""Quantised targets: heads of the unquantised target fit them, and their states have an identity of their own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import headstart
from headstart.decode.costs import Conditions
from headstart.errors import UserError
from headstart.hub.format import heads_target
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.model.quantized import check_quantization, quantize
from headstart.replay.patch import FINAL
from tests.hub.helpers import export
from tests.spies import raising
from tests.standin import CUDA
from tests.tiny import PackedLinear, packed_model, save_tiny_adapter, tiny_model, tiny_tokenizer

TEXT = [5, 9, 2, 7, 7, 30, 12]


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torchao by the tests' own quantiser, and log the requested kinds."""
    asked: list[str] = []

    def quantize_(model: nn.Module, config: Any, filter_fn: Any) -> None:
        asked.append(config.kind)
        for path, module in list(model.named_modules()):
            if filter_fn(module, path):
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, PackedLinear(module, config.bits))

    made = ModuleType("torchao.quantization")
    made.__dict__.update(
        quantize_=quantize_,
        PerGroup=lambda size: size,
        Int8WeightOnlyConfig=lambda: SimpleNamespace(kind="int8", bits=8),
        IntxWeightOnlyConfig=lambda weight_dtype, granularity: SimpleNamespace(kind=f"int4/{granularity}", bits=4),
    )
    package = ModuleType("torchao")
    package.__dict__["quantization"] = made
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", made)
    monkeypatch.setattr("headstart.model.quantized.find_spec", lambda name: object())
    return asked


def load(folder: Path, bits: str = "none", **how: Any) -> Target:
    return load_target(str(folder), "float32", "cpu", quantization=bits, **how)


@pytest.mark.parametrize(("bits", "asked"), [("int8", "int8"), ("int4", "int4/32")])
def test_linear_layers_are_packed(torchao: list[str], bits: str, asked: str, tiny_target_folder: Path) -> None:
    plain, packed = load(tiny_target_folder), load(tiny_target_folder, bits)
    assert torchao == [asked]
    assert isinstance(packed.layers[0].mlp.down_proj, PackedLinear)
    assert torch.equal(packed.lm_head_weight, plain.lm_head_weight)
    assert packed.name == f"{plain.name} in {bits}"
    ours, theirs = (target.hidden_states([TEXT], [FINAL])[0][FINAL] for target in (packed, plain))
    assert not torch.equal(ours, theirs)
    assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.95


def test_identity_differs_from_the_unquantised_target(torchao: list[str], tiny_target_folder: Path) -> None:
    every = [load(tiny_target_folder, bits) for bits in ("none", "int8", "int4")]
    assert len({target.identity().fingerprint for target in every}) == 3
    assert every[1].identity() == load(tiny_target_folder, "int8").identity()


def test_heads_of_the_plain_target_fit(torchao: list[str], tiny_target_folder: Path, tmp_path: Path) -> None:
    export(tmp_path / "heads", load(tiny_target_folder))
    decoder = headstart.load(tmp_path / "heads", dtype="float32", device="cpu", quantization="int8")
    assert decoder.target.quantization == "int8"
    answers = [decoder.generate(TEXT, max_new_tokens=12, draft=draft).tokens for draft in ("on", "off")]
    assert answers[0] == answers[1]
    assert Conditions.of(decoder.target) != Conditions.of(load(tiny_target_folder)), "its costs differ"


def test_heads_remember_their_bits(torchao: list[str], tiny_target_folder: Path, tmp_path: Path) -> None:
    export(tmp_path / "heads", load(tiny_target_folder, "int4"))
    assert heads_target(tmp_path / "heads").quantization == "int4"
    again = headstart.load(tmp_path / "heads", dtype="float32", device="cpu")
    assert again.target.quantization == "int4"
    plain = headstart.load(tmp_path / "heads", dtype="float32", device="cpu", quantization="none")
    assert plain.target.quantization == "none"


def test_another_model_in_few_bits_is_refused(torchao: list[str], tiny_target_folder: Path, tmp_path: Path) -> None:
    """The models hardly differ: their quantised weights could not tell, but the check precedes packing."""
    export(tmp_path / "heads", load(tiny_target_folder))
    other = tiny_model("llama", vocab_size=len(tiny_tokenizer()), max_length=1024)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="it has other weights"):
        headstart.load(tmp_path / "heads", target=load(tmp_path / "other", "int8"))


def test_adapter_is_merged_first(
    torchao: list[str], tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft.tuners.lora.torchao.is_torchao_available", lambda: False)  # it asks which version
    adapter = save_tiny_adapter(tmp_path / "lora", tiny_target_folder)
    export(tmp_path / "heads", load(tiny_target_folder, adapter=str(adapter)))
    both = load(tiny_target_folder, "int8", adapter=str(adapter))
    assert both.name.endswith("with the adapter lora in int8")
    assert headstart.load(tmp_path / "heads", target=both).target is both
    with pytest.raises(UserError, match="it lacks the adapter"):
        headstart.load(tmp_path / "heads", target=load(tiny_target_folder, "int8"))


def test_rounded_gguf_weights_are_compared_as_a_whole(tmp_path: Path, tiny_target: Target) -> None:
    """Unpacked 4-bit weights match no single number, yet other weights are still recognised."""

    def unpacked(seed: int) -> Target:
        vocabulary = len(tiny_target.tokenizer)
        model = packed_model(tiny_model("llama", seed, vocabulary, 1024), bits=4)
        for layer in model.get_decoder().layers:
            for module in list(layer.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, PackedLinear):
                        linear = nn.Linear(child.in_features, child.out_features, bias=False)
                        linear.weight.data = child.whole().detach()
                        setattr(module, name, linear)
        return Target(model, tiny_target.tokenizer, "file.gguf")

    export(tmp_path / "heads", tiny_target)
    same, other = unpacked(0), unpacked(1)
    with pytest.raises(UserError, match="other weights"):
        headstart.load(tmp_path / "heads", target=same)
    same.rounded = other.rounded = True
    assert headstart.load(tmp_path / "heads", target=same).target is same
    with pytest.raises(UserError, match="other weights"):
        headstart.load(tmp_path / "heads", target=other)
    export(tmp_path / "of-file", same)
    assert headstart.load(tmp_path / "of-file", target=tiny_target).target is tiny_target, "and vice versa"


def test_missing_package_and_unknown_bits(monkeypatch: pytest.MonkeyPatch, tiny_target_folder: Path) -> None:
    monkeypatch.setattr("headstart.model.quantized.find_spec", lambda name: None)
    with pytest.raises(UserError, match="torchao") as caught:
        load(tiny_target_folder, "int8")
    assert caught.value.remedy == "Run: pip install torchao"
    with pytest.raises(UserError, match="Unknown quantization 'int7'"):
        check_quantization("int7", torch.device("cpu"))


def test_unpackable_models_are_refused(torchao: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    model.is_quantized = True
    with pytest.raises(UserError, match="quantised already"):
        quantize(model, "int8")

    monkeypatch.setattr("torchao.quantization.quantize_", raising(RuntimeError("shape is not divisible by 32")))
    with pytest.raises(UserError, match="not divisible"):
        quantize(tiny_model("llama"), "int4")


def test_four_bits_on_a_gpu_are_refused(torchao: list[str]) -> None:
    with pytest.raises(UserError, match="save no memory"):
        check_quantization("int4", CUDA)
    check_quantization("int8", CUDA)
