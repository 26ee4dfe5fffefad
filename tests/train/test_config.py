"""Recipes: overrides, variants, and mistakes answered with what to write instead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headstart.errors import UserError
from headstart.train.config import load_recipe, packaged_recipes


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_are_valid(name: str) -> None:
    assert load_recipe(name).name


def test_overrides_reach_every_section_and_keep_their_type() -> None:
    overrides = ["train.lr=1e-4", "heads.num_heads=2", "target.dtype=float32", "train.minutes=null", "name=mine"]
    recipe = load_recipe("quickstart", overrides)
    assert (recipe.train.lr, recipe.heads["num_heads"], recipe.target.dtype) == (1e-4, 2, "float32")
    assert (recipe.train.minutes, recipe.name, recipe.target.spec) == (None, "mine", "smollm2-135m")


def test_a_variant_extends_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extends: quickstart\ntrain: {lr: 0.5}\n")
    recipe, base = load_recipe(str(file)), load_recipe("quickstart")
    assert recipe.name == "mine"
    assert recipe.train.lr == 0.5
    assert recipe.train.model_copy(update={"lr": base.train.lr}) == base.train
    assert recipe.heads == base.heads


def test_another_family_leaves_the_settings_of_the_first_behind(tmp_path: Path) -> None:
    wanted = {"family": "eagle", "steps": 2, "draft_vocab_size": 8192}  # the last is common to all
    assert load_recipe("medusa", ["heads.steps=2", "heads.family=eagle"]).heads == wanted
    file = tmp_path / "other.yaml"
    file.write_text("extends: medusa\nheads: {family: eagle, steps: 2}\n")
    assert load_recipe(str(file)).heads == wanted
    assert load_recipe("medusa", ["heads.family=medusa"]).heads["num_heads"] == 4, "the same family keeps them"


def test_a_path_in_extends_starts_at_the_file_it_stands_in(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("extends: quickstart\ntrain: {lr: 0.5}\n")
    (tmp_path / "variant.yaml").write_text("extends: base.yaml\ntrain: {clip: 0.25}\n")
    train = load_recipe(str(tmp_path / "variant.yaml")).train
    assert (train.lr, train.clip) == (0.5, 0.25)
    (tmp_path / "lost.yaml").write_text("extends: bse.yaml\n")
    with pytest.raises(UserError, match=r"No recipe 'bse\.yaml' \(extended by .*lost\.yaml\)"):
        load_recipe(str(tmp_path / "lost.yaml"))


def test_a_recipe_says_what_it_trains(tmp_path: Path) -> None:
    (tmp_path / "bare.yaml").write_text("train: {lr: 0.5}\n")
    with pytest.raises(UserError, match=r"The recipe has no 'heads'\..*extends: quickstart"):
        load_recipe(str(tmp_path / "bare.yaml"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lrr=1", r"Unknown recipe key 'train\.lrr'\. Did you mean 'lr'"),
        ("trian.lr=1", r"Unknown recipe key 'trian'\. Did you mean 'train'"),
        ("train.lr=-1", r"Recipe key 'train\.lr': .*greater than 0"),
        ("train.lr", r"'train\.lr' is not an override"),
        ("name.sub=1", "has no settings inside"),
    ],
)
def test_mistakes_are_answered(override: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_recipe("quickstart", [override])


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: [1", "not valid YAML"), ("- 1", "holds no settings"), ("extends: SELF", "extends itself")],
)
def test_files_that_are_no_recipes_are_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text.replace("SELF", str(file)))
    with pytest.raises(UserError, match=said):
        load_recipe(str(file))


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"No recipe 'quickstrat'\. Did you mean 'quickstart'"):
        load_recipe("quickstrat")


def test_reading_recipes_loads_no_model_library() -> None:
    """`headstart recipes` answers at once; only a recipe that changes another's family asks the heads."""
    code = "import sys; from headstart.train.config import load_recipe; load_recipe('eagle3'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "headstart.train.config" in loaded
    assert not {"torch", "transformers"} & set(loaded)
