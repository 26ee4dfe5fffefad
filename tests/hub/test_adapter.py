"""Heads for a target with an adapter: the folder includes it, and any other target is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headstart
from headstart.errors import UserError
from headstart.hub.engines.facts import facts_of_heads
from headstart.hub.format import FILES, check_folder, heads_target
from headstart.hub.push import _contents, push
from headstart.model.loading import load_target
from headstart.model.model import Target
from tests.hub.helpers import export
from tests.tiny import save_tiny_adapter

Load = Callable[..., Target]


@pytest.fixture(scope="module")
def load(tiny_target_folder: Path) -> Load:
    return lambda adapter=None: load_target(str(tiny_target_folder), "float32", "cpu", adapter=adapter and str(adapter))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path, load: Load) -> Any:
    """Heads, the adapted target and the moved adapter."""
    path = tmp_path_factory.mktemp("adapted")
    adapter = save_tiny_adapter(path / "lora", tiny_target_folder)
    target = load(adapter)
    export(path / "heads", target)
    adapter.rename(path / "moved")  # the heads' folder holds a copy
    return SimpleNamespace(heads=path / "heads", adapter=path / "moved", target=target)


def test_loading_finds_the_adapter_beside_the_heads(made: Any) -> None:
    check_folder(made.heads)
    decoder = headstart.load(made.heads, dtype="float32", device="cpu")
    assert decoder.target.adapter.hash == made.target.adapter.hash
    prompt = list(range(5, 30))
    tokens = decoder.generate(prompt, max_new_tokens=12, draft="on").tokens
    both = (decoder.target, made.target)
    ours, theirs = (target.prefill(target.new_cache(1, 64), [prompt]).logits_BTV for target in both)
    assert torch.equal(ours, theirs)
    assert tokens == decoder.generate(prompt, max_new_tokens=12, draft="off").tokens


def test_heads_keep_it_when_written_again(made: Any, tmp_path: Path) -> None:
    decoder = headstart.load(made.heads, dtype="float32", device="cpu")
    export(tmp_path / "again", decoder.target)
    assert heads_target(tmp_path / "again").adapter_spec(tmp_path / "again") == str(tmp_path / "again" / "adapter")
    check_folder(tmp_path / "again")


def test_other_targets_are_refused_by_name(made: Any, load: Load, tiny_target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it lacks the adapter") as caught:
        headstart.load(made.heads, target=load())
    assert f"adapter={str(made.heads / 'adapter')!r}" in caught.value.remedy
    other = save_tiny_adapter(tmp_path / "other", tiny_target_folder, seed=1)
    with pytest.raises(UserError, match="its adapter other is another one"):
        headstart.load(made.heads, target=load(other))
    headstart.load(made.heads, target=load(), any_target=True)


def test_heads_of_the_plain_target_are_refused(made: Any, load: Load, tmp_path: Path) -> None:
    export(tmp_path / "heads", load())
    with pytest.raises(UserError, match="it has the adapter"):
        headstart.load(tmp_path / "heads", target=made.target)


def test_folder_without_its_adapter_is_incomplete(made: Any, tmp_path: Path) -> None:
    shutil.copytree(made.heads, tmp_path / "heads")
    (tmp_path / "heads" / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no adapter/adapter_model\.safetensors"):
        check_folder(tmp_path / "heads")


def test_push_includes_it_without_local_paths(made: Any, tiny_target_folder: Path) -> None:
    files = dict(push(made.heads, "user/heads", dry_run=True).files)
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(files)
    contents = _contents(made.heads, FILES)
    assert str(tiny_target_folder).encode() not in contents["adapter/adapter_config.json"]
    assert json.loads(contents["adapter/adapter_config.json"])["r"] == 4


def test_engines_need_the_merged_model(made: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="adapter that engines cannot serve") as caught:
        facts_of_heads(made.heads)
    assert "target.save('merged')" in caught.value.remedy
    made.target.save(tmp_path / "merged")
    assert facts_of_heads(made.heads, str(tmp_path / "merged")).spec == str(tmp_path / "merged")
    merged = load_target(str(tmp_path / "merged"), "float32", "cpu")
    assert headstart.load(made.heads, target=merged).target is merged
