"""The exported folder: round trips, identity of the target, and refusal of incomplete folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.errors import UserError
from headstart.heads.io import WEIGHTS, load_heads, save_heads, version_of
from headstart.hub.format import check_folder, export_heads, heads_target, read_heads
from headstart.model.model import Target
from headstart.tuning.tune import Tuning
from tests.hub.helpers import TUNING, export, make_heads
from tests.tiny import packed_model, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path, tiny_target: Target) -> Path:
    export(tmp_path / "heads", tiny_target, draft_vocab_size=50)
    return tmp_path / "heads"


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("settings", [{}, {"draft_vocab_size": 50}, {"shared_lm_head": True, "draft_vocab_size": 50}])
def test_round_trip(tmp_path: Path, tiny_target: Target, settings: dict[str, Any]) -> None:
    heads = export(tmp_path / "heads", tiny_target, **settings)
    again, shape, calibration = read_heads(tmp_path / "heads", tiny_target)
    assert again.config == heads.config
    stored = {**again.state_dict(), **dict(again.named_buffers())}  # the borrowed LM head is a non-persistent buffer
    for name, tensor in {**heads.state_dict(), **dict(heads.named_buffers())}.items():
        assert torch.equal(tensor, stored[name]), name
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert shape.paths == ((0,), (1,), (0, 0))
    assert Tuning.from_json(calibration).to_json() == Tuning.from_json(TUNING).to_json()
    known = heads_target(tmp_path / "heads")
    assert (known.spec, known.name, known.fingerprint) == ("tiny", "tiny", tiny_target.identity().fingerprint)
    check_folder(tmp_path / "heads")


def test_heads_take_the_dtype_of_the_target(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).to(torch.bfloat16)
    target = Target(model, tokenizer, "tiny")
    heads, _, _ = read_heads(folder, target)
    assert {parameter.dtype for parameter in heads.parameters()} == {torch.bfloat16}
    assert heads.draft_to_target_D.dtype == torch.int64


def test_training_heads_round_trip(tmp_path: Path, tiny_target: Target) -> None:
    heads = make_heads(tiny_target)
    save_heads(heads, tmp_path / "a")
    save_heads(heads, tmp_path / "a")  # replaces
    again = load_heads(tmp_path / "a")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in heads.state_dict().items())
    assert all(parameter.requires_grad for parameter in again.parameters())
    save_heads(heads.to(torch.bfloat16), tmp_path / "b")
    assert {p.dtype for p in load_heads(tmp_path / "b", tiny_target).parameters()} == {torch.bfloat16}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_training_starts_from_exported_heads_and_from_runs(tmp_path: Path, tiny_target: Target) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine\nheads: {}\n")
    with pytest.raises(UserError, match="has no heads yet") as caught:
        load_heads(tmp_path)
    assert f"headstart run {tmp_path / 'recipe.yaml'} --run-dir {tmp_path}" in caught.value.remedy
    heads = export(tmp_path / "heads", tiny_target)
    for path in (tmp_path, tmp_path / "heads"):
        again = load_heads(path, tiny_target)
        assert again.config == heads.config
        assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in heads.state_dict().items())


def test_failed_export_leaves_the_folder_unchanged(folder: Path, tiny_target: Target) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(KeyError, match="results"):  # the card is written last
        export_heads(folder, make_heads(tiny_target), tiny_target, TUNING, {"measurements": [{"name": "nothing"}]})
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_weights_carry_their_version(folder: Path, tmp_path: Path, tiny_target: Target) -> None:
    heads = read_heads(folder, tiny_target)[0]
    assert len(heads.version) == 12 and heads.version == version_of(folder)
    export_heads(tmp_path / "again", heads, tiny_target, TUNING, {})
    assert version_of(tmp_path / "again") == heads.version, "it depends on the weights alone"
    next(heads.parameters()).view(-1)[0] += 1
    export_heads(tmp_path / "other", heads, tiny_target, TUNING, {})
    assert version_of(tmp_path / "other") != heads.version
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS)
    assert read_heads(folder, tiny_target)[0].version == "", "foreign weights have none"


def test_another_target_is_refused_by_both_names(folder: Path, tiny_target: Target) -> None:
    other = Target(tiny_model("llama", seed=1, vocab_size=tiny_target.vocab_size), None, "other-model")
    with pytest.raises(UserError, match=r"trained on tiny .*other-model .* is another model"):
        read_heads(folder, other)


@pytest.mark.parametrize("rounding", ["bfloat16", "float16", "8 bits", "4 bits"])
def test_every_rounding_of_the_target_is_accepted(folder: Path, tiny_target: Target, rounding: str) -> None:
    def rounded(seed: int) -> Target:
        model = tiny_model("llama", seed=seed, vocab_size=tiny_target.vocab_size, max_length=1024)
        if rounding.endswith("bits"):
            model = packed_model(model.bfloat16(), int(rounding[0]))
        else:
            model.to(getattr(torch, rounding))
        return Target(model, tiny_tokenizer(), "copy")

    heads, _, _ = read_heads(folder, rounded(0))
    assert {parameter.dtype for parameter in heads.parameters()} <= {torch.bfloat16, torch.float16}
    with pytest.raises(UserError, match="is another model: it has other weights"):
        read_heads(folder, rounded(1))


def test_other_norms_or_tokens_make_another_model(folder: Path, tiny_target: Target) -> None:
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024)
    renamed = Target(model, tiny_tokenizer(special=("<a>", "<b>", "<c>")), "renamed")
    assert read_heads(folder, renamed)[0].family == "medusa", "the same weights are the same model"
    model = tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024).half()
    with pytest.raises(UserError, match="its tokenizer has other tokens"):
        read_heads(folder, Target(model, tiny_tokenizer(special=("<a>", "<b>", "<c>")), "renamed"))
    for name, parameter in model.named_parameters():
        if "norm" in name or "embed" in name:
            parameter.data *= 1.1  # a fine-tuned model with equal packed layers
    with pytest.raises(UserError, match="it has other weights"):
        read_heads(folder, Target(packed_model(model, 4), tiny_tokenizer(), "tuned"))


def test_any_target_takes_what_fits(folder: Path, tiny_target: Target) -> None:
    other = Target(tiny_model("llama", seed=1, vocab_size=tiny_target.vocab_size), None, "other-model")
    with pytest.raises(UserError, match=r"any_target=True \(--any-target\)"):
        read_heads(folder, other)
    assert read_heads(folder, other, any_target=True)[0].family == "medusa"
    narrow = Target(tiny_model("llama", vocab_size=61), None, "narrow")
    with pytest.raises(UserError, match="over 61"):
        read_heads(folder, narrow, any_target=True)


def test_raw_heads_of_another_size_are_refused(tmp_path: Path, tiny_target: Target) -> None:
    save_heads(make_heads(tiny_target), tmp_path / "a")
    other = Target(tiny_model("llama", vocab_size=101), None, "other-model")
    with pytest.raises(UserError, match=r"other-model has 64 over 101"):
        load_heads(tmp_path / "a", other)


@pytest.mark.parametrize("name", ["config.json", "heads.safetensors", "tree.json", "calibration.json"])
@pytest.mark.parametrize("keep", [None, 0.0, 0.5], ids=["missing", "empty", "half"])
def test_missing_or_truncated_file_is_named(folder: Path, tiny_target: Target, name: str, keep: float | None) -> None:
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if keep is not None:
        (folder / name).write_bytes(content[: int(len(content) * keep)])
    for read in (check_folder, lambda where: read_heads(where, tiny_target)):
        with pytest.raises(UserError, match=name) as caught:
            read(folder)
        assert caught.value.remedy


def test_a_newer_format_is_refused(folder: Path, tiny_target: Target) -> None:
    edit(folder / "config.json", lambda values: values.update(format_version=2, headstart_version="9.9"))
    with pytest.raises(UserError, match=r"version 2, written by headstart 9\.9.*reads up to version 1.*Upgrade"):
        read_heads(folder, tiny_target)


def test_unknown_setting_or_family_is_named_with_the_nearest(folder: Path, tiny_target: Target) -> None:
    edit(folder / "config.json", lambda values: values["heads"].update(num_layerz=1))
    with pytest.raises(UserError, match="setting 'num_layerz'") as caught:
        read_heads(folder, tiny_target)
    assert "Did you mean 'num_layers'" in caught.value.remedy and "upgrade" in caught.value.remedy
    edit(folder / "config.json", lambda values: values["heads"].update(family="medussa"))
    with pytest.raises(UserError, match="Did you mean 'medusa'"):
        read_heads(folder, tiny_target)


@pytest.mark.parametrize("change", [{"num_heads": 3}, {"shared_lm_head": True}, {"num_layers": 2}])
def test_weights_of_another_config_are_refused(folder: Path, tiny_target: Target, change: dict[str, Any]) -> None:
    edit(folder / "config.json", lambda values: values["heads"].update(change))
    with pytest.raises(UserError, match=r"heads\.safetensors does not belong to the config\.json"):
        read_heads(folder, tiny_target)


@pytest.mark.parametrize(
    ("paths", "message"),
    [([[0, 0, 0]], "3 deep and the heads draft 2"), ([[50]], "51 drafts"), ([[-1]], "no rank paths"), (7, "no rank")],
)
def test_unfit_tree_is_refused(folder: Path, tiny_target: Target, paths: Any, message: str) -> None:
    (folder / "tree.json").write_text(json.dumps({"paths": paths}))
    with pytest.raises(UserError, match=message):
        read_heads(folder, tiny_target)


def test_deeper_tree_is_not_exported(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match="3 deep"):
        export_heads(tmp_path / "x", make_heads(tiny_target), tiny_target, {**TUNING, "paths": ((0, 0, 0),)}, {})
    assert not (tmp_path / "x").exists()


def test_missing_and_foreign_folders_are_refused(tmp_path: Path, tiny_target_folder: Path) -> None:
    with pytest.raises(UserError, match="No folder"):
        heads_target(tmp_path / "none")
    with pytest.raises(UserError, match="holds no heads in headstart's own format"):
        heads_target(tiny_target_folder)


def test_local_target_is_found_from_anywhere(
    tmp_path: Path, tiny_target_folder: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_target_folder.parent)
    local = Target(tiny_target.model, tiny_target.tokenizer, tiny_target_folder.name)
    export(tmp_path / "heads", local)
    known = heads_target(tmp_path / "heads")
    assert (known.spec, known.name) == (str(tiny_target_folder), "target")
    assert str(tiny_target_folder.parent) not in (tmp_path / "heads" / "README.md").read_text()
