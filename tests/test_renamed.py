"""What earlier versions wrote under other names is read; a person who writes them is told the new ones."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.errors import UserError
from headstart.heads.base import families, family, make_config
from headstart.heads.io import CONFIG, load_heads, save_heads
from headstart.pipeline.run import Record, Run, Stage, left_to_do
from headstart.recipes.recipe import Recipe, load_recipe, parse_heads
from headstart.support import old_records, renamed
from headstart.support.artifacts import artifact, held, relatives
from headstart.support.files import read_json, write_json
from headstart.target.fitting import FINAL
from headstart.target.model import Target
from tests.tiny import tiny_model

JOINED = {"family": "eagle3", "num_layers": 2, "feedback": "post_norm", "join": True}
"""Heads as recipes of earlier versions named them."""
NOW = {"family": "transition", "num_layers": 2}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


def earlier(folder: Path, **heads: Any) -> Path:
    """The recipe of a run that an earlier version made."""
    (folder / "stages").mkdir(parents=True)
    file = folder / "recipe.yaml"
    file.write_text(json.dumps({"name": "old", "heads": heads}))
    return file


def test_the_recipe_of_an_earlier_run_is_understood(tmp_path: Path) -> None:
    assert load_recipe(str(earlier(tmp_path / "old", **JOINED))).heads == parse_heads(NOW)
    published = {"family": "eagle3", "num_layers": 2, "feedback": "post_norm"}
    assert load_recipe(str(earlier(tmp_path / "other", **published, join=False))).heads == parse_heads(published)


def test_a_recipe_of_ones_own_is_answered_with_the_new_words(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps({"heads": JOINED}))
    with pytest.raises(UserError, match=r"heads\.family=transition \(without join and feedback\)"):
        load_recipe(str(file))


def test_earlier_heads_load_with_every_weight(tmp_path: Path, target: Target) -> None:
    heads = family("transition")(make_config({**NOW, "aux_layers": (1, FINAL)}, target))
    save_heads(heads, tmp_path / "heads")
    config = read_json(tmp_path / "heads" / CONFIG)
    write_json(tmp_path / "heads" / CONFIG, {**config, "family": "eagle3", "feedback": "post_norm", "join": True})
    found = load_heads(tmp_path / "heads", target)
    assert found.family == "transition"
    assert found.config == heads.config
    assert all(torch.equal(found.state_dict()[name], tensor) for name, tensor in heads.state_dict().items())


def test_earlier_heads_that_are_eagle3_stay_so(tmp_path: Path, target: Target) -> None:
    heads = family("eagle3")(make_config({"family": "eagle3", "aux_layers": (1, 2)}, target))
    save_heads(heads, tmp_path / "heads")
    config = read_json(tmp_path / "heads" / CONFIG)
    write_json(tmp_path / "heads" / CONFIG, {**config, "join": False})
    assert load_heads(tmp_path / "heads", target).config == heads.config


def test_the_artifact_of_an_earlier_training_is_found_and_gone_on_from(tmp_path: Path) -> None:
    train = {"lr": 0.001}
    amounts = [{"steps": 3}, {"steps": 6}]
    for amount in amounts:
        with held(artifact(tmp_path / "run", "heads", "eagle3", {"heads": JOINED, "train": train, "amount": amount})):
            pass
    now = parse_heads(NOW).to_recipe()
    first, second = (
        artifact(tmp_path / "run", "heads", "transition", {"heads": now, "train": train, "amount": amount})
        for amount in amounts
    )
    assert first.folder.is_dir() and second.folder.is_dir() and first.folder != second.folder
    assert [other.folder for other in relatives(first)] == [second.folder]
    other = artifact(
        tmp_path / "run", "heads", "transition", {"heads": now, "train": {"lr": 1.0}, "amount": amounts[0]}
    )
    assert not other.folder.exists()


def test_a_stage_of_an_earlier_run_stays_done(tmp_path: Path) -> None:
    def settings(run: Run) -> dict[str, Any]:
        return {f"heads.{key}": value for key, value in run.recipe.heads.to_recipe().items()}

    stage = Stage("train", "training", 1, (), (), settings, lambda run: pytest.fail("it is done"))
    run = Run(Recipe(name="old", heads=parse_heads(NOW)), tmp_path, Console(file=io.StringIO()))
    record = Record("of other words", 1, {f"heads.{key}": value for key, value in JOINED.items()}, {}, whole=True)
    write_json(run.record_file("train"), asdict(record))
    assert left_to_do(run, [stage]) == {}
    deeper = Run(Recipe(name="old", heads=parse_heads({**NOW, "num_layers": 3})), tmp_path, run.console)
    assert left_to_do(deeper, [stage]) == {"train": "heads.num_layers changed from 2 to 3"}


def test_renamed_keys_and_values_are_read_and_hinted_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "KEYS", {"train.one": "train.two", "data.three": "data.four"})
    monkeypatch.setattr(renamed, "VALUES", {"data.four": {"narrow": "wide"}})
    monkeypatch.setattr(renamed, "TENSORS", {"old_norms.": "norms."})
    assert renamed.tensors_now({"old_norms.0.weight": 1, "fc.weight": 2}) == {"norms.0.weight": 1, "fc.weight": 2}
    recipe = {"name": "old", "train": {"one": 1.0, "lr": 2.0}, "data": {"three": "narrow"}}
    now = {"name": "old", "train": {"two": 1.0, "lr": 2.0}, "data": {"four": "wide"}}
    assert renamed.recipe_now(recipe) == now
    assert renamed.recipe_now(now) == now
    assert old_records.settings_now({"train.one": 1.0, "other": 3}) == {"train.two": 1.0, "other": 3}
    assert old_records.identity_now("conversations", {"three": "narrow"}) == {"four": "wide"}
    assert old_records.identity_now("heads", {"train": {"one": 1.0}}) == {"train": {"two": 1.0}}
    assert renamed.hint("train.one") == "It is called train.two now."
    assert renamed.value_hint("data.four", "narrow") == "narrow is called wide now."
    assert renamed.hint("train.lr") is None and renamed.value_hint("data.four", "wide") is None


def test_every_new_name_is_one_of_this_version() -> None:
    known = {f"{name}.{key}" for name, part in Recipe.model_fields.items() for key in fields_of(part.annotation)}
    known |= {f"heads.{key}" for head in families().values() for key in fields_of(head.Config)}
    assert set(renamed.KEYS.values()) | set(renamed.VALUES) <= known
    assert not set(renamed.KEYS) & known


def fields_of(section: Any) -> set[str]:
    return set(getattr(section, "model_fields", ()))
