"""Folders for engines on the Hub: two formats in one repository, pushed and fetched with the real client."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart.errors import UserError
from headstart.hub.engines.export import check_export, export_for, formats_of
from headstart.hub.push import push
from headstart.model.model import Target
from tests.engines.conftest import Made
from tests.hub.client import Client
from tests.hub.fake_hub import FakeHub
from tests.test_cli import refused, works


def test_two_formats_one_repository(hub: FakeHub, client: Client, made: Made, target: Target, tmp_path: Path) -> None:
    """The files of each format equal its export alone; fetched again they are complete and import as the same heads."""
    heads, both = made("eagle3-reduced")[1], tmp_path / "both"
    works("export", heads, "--format", "speculators", "--format", "gguf", "--dtype", "float32", "--out", both)
    for name in ("speculators", "gguf"):
        export_for(heads, tmp_path / name, name, dtype="float32")
    assert target.spec in (both / "config.json").read_text()
    (both / "notes.txt").write_text("not for the Hub")

    done = client.call("push", folder=str(both), repo_id="user/served")
    assert done["left_out"] == ["notes.txt"]
    files = hub.repos["user/served"].commits[done["commit"]]
    assert sorted(files) == ["README.md", "config.json", "heads.gguf", "model.safetensors"]
    assert files["heads.gguf"] == (tmp_path / "gguf" / "heads.gguf").read_bytes()
    assert files["model.safetensors"] == (tmp_path / "speculators" / "model.safetensors").read_bytes()
    assert all(str(Path(target.spec).parent).encode() not in content for content in files.values())
    assert "größe" in files["config.json"].decode() and "größe" in target.spec
    card = files["README.md"].decode()
    assert "vllm serve" in card and "llama-server" in card

    got = tmp_path / "got"
    got.mkdir()
    for name, content in files.items():
        (got / name).write_bytes(content)
    assert check_export(got, against=heads) == []
    assert [one.name for one in formats_of(got)] == ["speculators", "gguf"]
    # Pushing one format alone removes the other.
    works("export", heads, "--format", "gguf", "--out", tmp_path / "alone")
    again = client.call("push", folder=str(tmp_path / "alone"), repo_id="user/served")
    assert sorted(hub.repos["user/served"].commits[again["commit"]]) == ["README.md", "heads.gguf"]
    client.call("push", folder=str(both), repo_id="user/served")
    back = tmp_path / "back"
    assert client.call("import", source="user/served", target=target.spec, out=str(back)) == {"family": "eagle3"}
    ours, theirs = (load_file(folder / "heads.safetensors") for folder in (heads, back))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_incomplete_folder_is_not_pushed(made: Made, tmp_path: Path) -> None:
    export_for(made("eagle3")[1], tmp_path / "served", "vllm")
    push(tmp_path / "served", "user/served", dry_run=True)
    weights = tmp_path / "served" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(UserError):
        push(tmp_path / "served", "user/served", dry_run=True)


def test_clashing_formats_are_refused(made: Made, tmp_path: Path) -> None:
    heads, out = made("eagle3")[1], tmp_path / "served"
    both = ("export", heads, "--out", out, "--format", "vllm", "--format")
    assert "config.json" in refused(*both, "speculators") and "config.json" in refused(*both, "headstart")
    assert "q8_0" in refused(*both, "gguf", "--dtype", "q8_0")
    assert not out.exists()
