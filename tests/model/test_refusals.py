"""Refusals of targets and of loading them, with their messages, and fallbacks for missing parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError, out_of_memory
from headstart.kernels.memory import cgroup_free_bytes, free_bytes
from headstart.model.loading import PACKAGED, load_target, pick_dtype
from headstart.model.model import Target
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model, tiny_tokenizer


def test_exact_is_bits_or_tokens() -> None:
    with pytest.raises(UserError, match=r"exact is 'bit'\. Did you mean 'bits'"):
        Target(tiny_model("llama"), exact="bit")  # type: ignore[arg-type]  # a typo
    target = Target(tiny_model("llama"))
    assert target.exact == "tokens", "the default, auto, in float32"
    with pytest.raises(UserError, match="exact is 'token'"):
        target.exact = "token"  # type: ignore[assignment]  # a typo
    assert target.exact == "tokens"


def _without_layers(model: Any) -> None:
    model.config.num_hidden_layers = 7


def _without_cache_in_the_last_layer(model: Any) -> None:
    """As in Gemma 3n: the last layers reuse keys of earlier layers."""
    attention = model.model.layers[-1].self_attn
    own = attention.forward
    attention.forward = lambda **given: own(**{**given, "past_key_values": None})


def _with_a_mask_of_its_own(model: Any) -> None:
    def cut(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        return args, {**kwargs, "attention_mask": None if mask is None else mask[:, :, :, 1:]}

    model.model.layers[1].register_forward_pre_hook(cut, with_kwargs=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_layers, "LlamaModel has no list of 7 layers to read"),
        (_without_cache_in_the_last_layer, "cannot verify a token tree: only 2 of its 3 layers keep a KV cache"),
        (_with_a_mask_of_its_own, "RuntimeError: this model changes the attention mask before its layers"),
    ],
)
def test_models_that_cannot_verify_a_tree(change: Callable[[Any], None], message: str) -> None:
    model = tiny_model("llama")
    change(model)
    with pytest.raises(UserError, match=message):
        Target(model)


def test_end_tokens_of_model_and_tokenizer() -> None:
    model = tiny_model("llama")
    model.config.eos_token_id, model.generation_config.eos_token_id = 4, [7, 9]
    assert Target(model, tiny_tokenizer()).end_tokens == {7, 9, 2}
    model.generation_config.eos_token_id = None
    assert Target(model, tiny_tokenizer()).end_tokens == {4, 2}
    model.config.eos_token_id = None
    assert Target(model).end_tokens == set()


def test_name_of_a_target() -> None:
    model = tiny_model("llama")
    assert Target(model).name == "LlamaForCausalLM"
    model.config._name_or_path = "user/name"
    assert Target(model).name == "user/name"
    assert Target(model, spec="./folder").name == "./folder"


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(UserError, match="Stop strings need a tokenizer"):
        DecodeLoop(Target(tiny_model("llama"))).generate([[1, 2]], DecodeOptions(stop=("the",)))


def test_unwritable_cache_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tmp_path / "cache").write_text("a file instead of a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(UserError, match="cannot be kept in") as caught:
        load_target(str(tmp_path / "model.gguf"), device="cpu")
    assert "set XDG_CACHE_HOME" in caught.value.remedy and "--run-dir" not in caught.value.remedy


def test_gguf_files_need_their_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)  # its import fails
    monkeypatch.delitem(sys.modules, "gguf.quants", raising=False)
    with pytest.raises(UserError, match="need the package gguf") as caught:
        load_target(str(tmp_path / "model.gguf"), device="cpu")
    assert "pip install gguf" in caught.value.remedy


def test_a_package_without_its_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("headstart.model.loading.importlib.util.find_spec", lambda name: found)
    with pytest.raises(UserError, match="No GGUF file in") as caught:
        load_target("smollm2-135m", device="cpu")
    assert PACKAGED["smollm2-135m"].package in caught.value.remedy


def test_auto_dtype_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda fast=fast: fast)
        assert pick_dtype("auto", CUDA) == dtype


def test_free_device_memory_includes_torchs_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 50)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 20)
    with StandIn():
        assert free_bytes(CUDA) == (1 << 40) + 30


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), True),
        (torch.cuda.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_errors(error: Exception, memory: bool) -> None:
    assert out_of_memory(error) is memory


def test_bits_on_a_gpu_are_refused() -> None:
    with StandIn():
        target = Target(tiny_model("llama").to(CUDA))
        with pytest.raises(UserError, match="it is on a GPU"):
            target.exact = "bits"
    assert target.exact == "tokens"


@pytest.mark.parametrize(
    ("line", "names", "prefix"),
    [
        ("0::/job/step\n", ("sys/fs/cgroup", "memory.max", "memory.current"), ""),
        (
            "0::/\n4:cpu,memory:/job/step\n",
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
            "total_",
        ),
    ],
)
def test_free_memory_respects_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, names: tuple[str, str, str], prefix: str
) -> None:
    """The step has no limit but its job has; a container sees the limit at the mount point, under the host's path."""

    def write(folder: str, limit: object, used: int) -> None:
        place = tmp_path / names[0] / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / names[1]).write_text(f"{limit}\n")
        (place / names[2]).write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 7\n{prefix}active_file 20\n{prefix}inactive_file 10\n")

    unlimited = free_bytes(torch.device("cpu"))
    assert cgroup_free_bytes(tmp_path) == sys.maxsize, "no cgroups at all"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"1:name=systemd:/\n{line}")
    write("job/step", "max" if not prefix else sys.maxsize, 400)
    assert cgroup_free_bytes(tmp_path) > unlimited
    write("job", 1000, 600)
    assert cgroup_free_bytes(tmp_path) == 430, "the page cache counts as free"
    write("", 300, 290)
    assert cgroup_free_bytes(tmp_path) == 40
    write("", 300, 400)
    assert cgroup_free_bytes(tmp_path) == 0
    monkeypatch.setattr("headstart.kernels.memory.cgroup_free_bytes", lambda: 430)
    assert free_bytes(torch.device("cpu")) == 430
