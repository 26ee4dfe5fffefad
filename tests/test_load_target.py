"""`headstart.load` with a model of transformers, with code that comes along with a target, and with a token."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, AutoTokenizer

import headstart
from headstart.data.conversations.records import Conversation, write_conversations
from headstart.doctor.subject import find_subject
from headstart.errors import UserError
from headstart.hub.engines.export import check_export
from headstart.hub.engines.facts import facts_of_spec
from headstart.model.loading import load_sharded_target, load_target, read_embeddings
from headstart.model.model import Target
from headstart.recipes.recipe import load_recipe
from headstart.replay.patch import FINAL
from tests.hub.helpers import export
from tests.standin import CUDA, StandIn
from tests.test_cli import call, refused, works
from tests.test_pipeline import recipe_text, tiny_recipe
from tests.tiny import save_tiny_adapter, save_tiny_target

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OursConfig(LlamaConfig):
    model_type = "ours"


class OursForCausalLM(LlamaForCausalLM):
    config_class = OursConfig
"""


@pytest.fixture
def with_code(tmp_path: Path) -> Path:
    """The folder of a target with its classes in a file beside the weights."""
    folder = tmp_path / "target_with_code"
    save_tiny_target(folder)
    (folder / "ours.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "ours",
        "architectures": ["OursForCausalLM"],
        "auto_map": {"AutoConfig": "ours.OursConfig", "AutoModelForCausalLM": "ours.OursForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_that_transformers_loaded(tmp_path: Path, tiny_target: Target, tiny_target_folder: Path) -> None:
    export(tmp_path / "heads", tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target_folder)
    decoder = headstart.load(tmp_path / "heads", target=model, tokenizer=tokenizer)
    wanted = headstart.load(tmp_path / "heads", target=tiny_target).generate("Hello", max_new_tokens=8)
    assert decoder.target.model is model
    assert decoder.generate("Hello", max_new_tokens=8).text == wanted.text
    assert headstart.load(tmp_path / "heads", target=model).generate([5, 6], max_new_tokens=4).tokens
    assert headstart.load(target=model, tokenizer=tokenizer).generate("Hello", max_new_tokens=8).text == wanted.text
    with pytest.raises(UserError, match="already loaded"):
        headstart.load(tmp_path / "heads", target=model, dtype="bfloat16")
    with pytest.raises(UserError, match="tokenizer belongs to a target that transformers loaded"):
        headstart.load(tmp_path / "heads", target=str(tiny_target_folder), tokenizer=tokenizer)


def test_code_that_comes_with_a_target_runs_only_when_asked(tmp_path: Path, with_code: Path) -> None:
    asked_for = r"needs Python code of its own.*trust_remote_code=True \(--trust-remote-code; in a recipe"
    with pytest.raises(UserError, match=asked_for):
        headstart.load(target=str(with_code))
    target = load_target(str(with_code), "float32", trust_remote_code=True)
    export(tmp_path / "heads", target)
    assert type(headstart.load(tmp_path / "heads", trust_remote_code=True).target.model).__name__ == "OursForCausalLM"
    asked = ("generate", tmp_path / "heads", "--prompt", "hi", "--max-new-tokens", 4)
    assert "--trust-remote-code" in refused(*asked)
    works(*asked, "--trust-remote-code")


def test_commands_run_code_that_comes_with_a_target_only_when_asked(tmp_path: Path, with_code: Path) -> None:
    heads, served, trust = tmp_path / "heads", tmp_path / "served", "--trust-remote-code"
    target = load_target(str(with_code), "float32", trust_remote_code=True)
    export(heads, target, input_map=False, shared_lm_head=True)  # exporting these reads the target
    texts = tmp_path / "texts.jsonl"
    write_conversations(texts, [Conversation("0", [5, 6, 7, 8], [False, False, True, True], [])])
    commands: list[tuple[object, ...]] = [
        ("export", heads, "--format", "vllm", "--out", served),
        ("import", served, "--target", with_code, "--out", tmp_path / "imported"),
        ("export", "--check", served, "--against", heads),
        ("doctor", heads, "--quick"),
        ("data", "show", texts, "--target", with_code),
    ]
    for command in commands:
        assert trust in refused(*command)
        assert call(*command, trust).exit_code < 2, command  # 1 for findings: these heads learned nothing
    assert f"vllm serve {with_code} {trust} " in call(*commands[0], trust).stdout
    assert (tmp_path / "imported" / "config.json").is_file()


def test_a_recipe_says_whether_such_code_runs(tmp_path: Path, with_code: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe_text(tiny_recipe(tmp_path, with_code)))
    bare = tmp_path / "bare"
    shutil.copytree(with_code, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    for target in (with_code, bare):  # weights and all, or a config alone
        asked = ("plan", file, f"target.spec={target}", "--prompt-tokens", 8)
        assert "target.trust_remote_code=true" in refused(*asked)
        works(*asked, "target.trust_remote_code=true")
    trusting = load_recipe(str(file), ["target.trust_remote_code=true"])
    file.write_text(recipe_text(trusting))
    assert type(find_subject(str(file)).target.model).__name__ == "OursForCausalLM"


def test_a_token_reaches_the_hub(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []

    def snapshot(repo_id: str, **options: Any) -> str:
        seen.append((repo_id, options["token"]))
        return str(tmp_path / "heads")

    def metadata(url: str, **options: Any) -> None:
        seen.append((url.split("/resolve")[0].rpartition("co/")[2], options["token"]))

    def read(cls: Any, folder: str, **options: Any) -> Any:
        seen.append((folder, options["token"]))
        return original(str(tiny_target_folder))

    def weights(cls: Any, folder: str, **options: Any) -> Any:
        seen.append((folder, options["token"]))
        raise OSError("none here")

    original = AutoTokenizer.from_pretrained
    export(tmp_path / "heads", load_target(str(tiny_target_folder), "float32"))
    monkeypatch.setattr("headstart.hub.pull.snapshot_download", snapshot)
    monkeypatch.setattr("headstart.support.hub_errors.get_hf_file_metadata", metadata)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", classmethod(read))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(weights))
    with pytest.raises(UserError, match="none here"):
        headstart.load("us/heads", target="us/target", token="hf_x")
    assert seen == [("us/heads", "hf_x"), *[("us/target", "hf_x")] * 3]  # config, tokenizer, weights


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("adapted", [False, True])
def test_weights_are_read_straight_to_a_gpu(
    dtype: str, adapted: bool, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(cls: Any, *args: Any, **options: Any) -> Any:
        model = original(*args, **options)
        devices.update(tensor.device.type for tensor in (*model.parameters(), *model.buffers()))
        return model

    adapter = None
    if adapted:
        adapter = str(tmp_path / "adapter")
        save_tiny_adapter(tmp_path / "adapter", tiny_target_folder)
    devices: set[str] = set()
    host = load_target(str(tiny_target_folder), dtype, "cpu", adapter=adapter)
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(read))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the stand-in is of this thread alone
    with StandIn():
        target = load_target(str(tiny_target_folder), dtype, "cuda", adapter=adapter)
        assert devices == {"cpu" if adapted else "cuda"}
        assert target.device == CUDA
        for ours, theirs in zip(target.model.state_dict().values(), host.model.state_dict().values(), strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)
    assert target.identity() == host.identity()


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Spread models that are loaded with a `device_map` as accelerate does: first layer, embeddings and LM head on the
    stand-in GPU, all other layers on the CPU. Lists the requested maps."""

    def read(cls: Any, folder: str, **options: Any) -> Any:
        asked.append(options.pop("device_map", None))
        model = original(folder, **options)
        if asked[-1] == "balanced":
            inner, cpu = model.model, torch.device("cpu")
            first = [inner.embed_tokens, inner.rotary_emb, inner.layers[0], inner.norm, model.lm_head]
            for module in (*first, *inner.layers[1:]):
                module.to(CUDA if module in first else cpu)
                add_hook_to_module(module, AlignDevicesHook(CUDA if module in first else cpu))
            add_hook_to_module(model, AlignDevicesHook(CUDA, io_same_device=True, place_submodules=False))
            model.hf_device_map = {"model.embed_tokens": 0, "model.layers.1": 1}
        return model

    asked: list[Any] = []
    original = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", classmethod(read))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a stand-in")
    return asked


def test_a_target_is_spread_over_devices(tmp_path: Path, tiny_target_folder: Path, two_devices: list[Any]) -> None:
    host = load_target(str(tiny_target_folder), "float32", "cpu")
    export(tmp_path / "heads", host)
    expected = headstart.load(tmp_path / "heads", target=host).generate("Hello", max_new_tokens=12)
    rows = [[5, 6, 7, 8], [9, 10]]
    layers = [0, 1, 2, FINAL]
    wanted, _ = host.hidden_states(rows, layers)
    with StandIn():
        decoder = headstart.load(tmp_path / "heads", target=str(tiny_target_folder), dtype="float32", device="all")
        target = decoder.target
        assert two_devices == [None, "balanced"]
        assert target.device == CUDA and [layer.device.type for layer in target.kv_layers] == ["cuda", "cpu", "cpu"]
        assert {device.type for device in target.kv_bytes_by_device} == {"cuda", "cpu"}
        assert decoder.generate("Hello", max_new_tokens=12).tokens == expected.tokens
        states, _ = target.hidden_states(rows, layers)
        for layer in layers:
            assert states[layer].device == CUDA
            torch.testing.assert_close(states[layer].cpu(), wanted[layer])


def test_refuses_to_spread(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_adapter(tmp_path / "adapter", tiny_target_folder)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("headstart.model.loading._fast_bfloat16", lambda _: True)
    with pytest.raises(UserError, match="adapter can only be merged into a target on one device"):
        load_target(str(tiny_target_folder), "float32", "all", adapter=str(tmp_path / "adapter"))
    monkeypatch.setattr(
        "headstart.model.loading._read", lambda *_, **__: (SimpleNamespace(hf_device_map={"": "disk"}), None)
    )
    with pytest.raises(UserError, match="The 2 GPUs here have no room for all layers"):
        load_target(str(tiny_target_folder), "float32", "all")


@pytest.fixture(params=["empty", "the mark alone", "half", "something else"])
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A damaged GGUF file."""
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    whole = file.read_bytes()
    kept = {"empty": b"", "the mark alone": whole[:4], "half": whole[: len(whole) // 2], "something else": b"hi" * 99}
    file.write_bytes(kept[request.param])
    return file


def test_a_gguf_file_that_is_not_whole_is_named(broken: Path, tmp_path: Path) -> None:
    for read in (load_target, read_embeddings, facts_of_spec, lambda spec: check_export(tmp_path, target=spec)):
        with pytest.raises(UserError, match=re.escape(f"{broken} is cut short or damaged")) as caught:
            read(str(broken))
        assert "Fetch it again" in caught.value.remedy
    said = refused("generate", broken, "--prompt", "hi", "--drafter", "ngram")
    assert f"{broken} is cut short or damaged" in said
    assert not list(Path.home().rglob("model-*")), "nothing half converted"


def test_a_target_given_as_heads_is_recognised(tmp_path: Path, tiny_target_folder: Path) -> None:
    (tmp_path / "model.gguf").touch()
    for target in (tmp_path / "model.gguf", tiny_target_folder, "smollm2-135m"):
        for command in (["generate", target, "--prompt", "hi"], ["tune", target], ["audit", target]):
            said = refused(*command)
            assert f"{target} holds no heads in headstart's own format" in said and "--drafter ngram" in said, command


def test_uneven_sharding(tiny_target: Target, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.model.loading._read", lambda *_, **__: (tiny_target.model, tiny_target.tokenizer))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.raises(UserError, match=r"3 processes cannot share the 2 key heads of .*divides 2"):
        load_sharded_target(str(tiny_target_folder), "float32")
