"""Training from the teacher saved with the states, without the target."""

from __future__ import annotations

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import headstart
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.model.teacher import TeacherModel, load_teacher, save_teacher
from headstart.pipeline.plan import make_plan
from headstart.pipeline.report_stages import keep_untuned
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from headstart.pipeline.together import train_together
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.support.files import read_json
from headstart.train.trainer import train
from tests.test_cli import refused, works
from tests.test_pipeline import quiet, tiny_recipe
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.conftest import Train
from tests.train.results import assert_same, metrics
from tests.train.test_golden import HEADS


@pytest.fixture(scope="module")
def taught(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> TeacherModel:
    folder = save_teacher(tmp_path_factory.mktemp("teacher"), tiny_target)
    assert folder is not None
    return load_teacher(folder, tiny_target.device)


@pytest.mark.parametrize("name", HEADS)
def test_teacher_and_target_train_the_same_heads(name: str, run: Train, taught: TeacherModel, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"heads": HEADS[name], "steps": 2, "eval_every": 1, "lr": 1e-3}
    run(tmp_path / "target", **settings)
    run(tmp_path / "teacher", target=taught, **settings)
    for which in ("best", "last"):
        assert_same(tmp_path / "target" / which, tmp_path / "teacher" / which)
    one, other = (
        [{key: value for key, value in row.items() if key != "elapsed_seconds"} for row in metrics(tmp_path / who)]
        for who in ("target", "teacher")
    )
    assert one == other, "validation too"
    assert "tiny is not loaded: training only reads" in (tmp_path / "teacher" / "log.txt").read_text()


class Place:
    """A run after its data was built, with a copy of the target that a test may delete."""

    def __init__(self, folder: Path, target_folder: Path, heads: dict[str, Any] | None = None) -> None:
        self.target_folder, self.run = folder / "target", folder / "runs" / "run"
        shutil.copytree(target_folder, self.target_folder)
        values = tiny_recipe(folder, self.target_folder, data={"max_new_tokens": 8}).model_dump(mode="json")
        self._recipe = parse_recipe({**values, "heads": heads or values["heads"]})
        execute(quiet(self.run, self._recipe), stages_until("states"))

    def recipe(self, **sections: dict[str, Any]) -> Recipe:
        values = self._recipe.model_dump(mode="json")
        return parse_recipe({**values, **{name: {**values[name], **change} for name, change in sections.items()}})

    def train(self, **sections: dict[str, Any]) -> str:
        """Run `headstart train` and return its console text."""
        console = Console(file=StringIO(), width=500)
        train_together(Run(self.recipe(**sections), self.run, console))
        return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def place(tmp_path: Path, tiny_target_folder: Path) -> Place:
    return Place(tmp_path, tiny_target_folder)


NOT_LOADED = " is not loaded: training only reads"


def test_teacher_is_used_when_it_suffices(place: Place) -> None:
    assert NOT_LOADED in place.train()
    assert NOT_LOADED in place.train(heads={"num_heads": 1})


def test_heads_that_start_from_more_layers_than_the_teacher_has_need_the_target(
    tmp_path: Path, tiny_target_folder: Path
) -> None:
    place = Place(tmp_path, tiny_target_folder, HEADS["eagle3"])
    assert NOT_LOADED in place.train()
    assert NOT_LOADED not in place.train(heads={"num_layers": 2})
    shutil.rmtree(place.target_folder)
    with pytest.raises(UserError) as refused:
        place.train(heads={"num_layers": 3})
    assert "add the layers that these heads start from" in refused.value.remedy


def test_heads_train_without_the_target(place: Place, tmp_path: Path) -> None:
    target = load_target(str(place.target_folder), "float32", "cpu")
    stores = [StateStore(place.run / "data" / "states" / split) for split in ("train", "validation")]
    expected = train(place.recipe(), target, *stores, tmp_path / "expected").last_folder
    shutil.rmtree(place.target_folder)
    (tmp_path / "prompts.jsonl").unlink()
    assert NOT_LOADED in place.train()
    assert_same(place.run / "train" / "last", expected)


def test_new_heads_replace_tuned_ones_without_the_target(place: Place, tmp_path: Path) -> None:
    """Neither `tune` nor `export` overwrites them, and the remedy in the message works."""
    execute(quiet(place.run, place.recipe()), stages_until("export"))
    shutil.rmtree(place.target_folder)
    assert NOT_LOADED in place.train(heads={"num_heads": 1})
    run = quiet(place.run, place.recipe(heads={"num_heads": 1}))
    with pytest.raises(UserError, match="from an earlier training") as stale:
        keep_untuned(run)
    assert "Or move that folder away" in stale.value.remedy
    (place.run / "heads").rename(tmp_path / "elsewhere")
    assert keep_untuned(run)
    for folder, heads in ((tmp_path / "elsewhere", 2), (place.run / "heads", 1)):
        assert read_json(folder / "config.json")["heads"]["num_heads"] == heads


def test_damaged_teacher_is_written_again(place: Place) -> None:
    (teacher,) = (place.run.parent / "artifacts" / "states").glob("*/teacher-*")
    (teacher / "base.safetensors").write_bytes(b"")
    assert NOT_LOADED not in place.train()
    assert NOT_LOADED in place.train(heads={"num_heads": 1})


def test_teacher_of_another_target_is_refused(place: Place, tmp_path: Path, taught: TeacherModel) -> None:
    other = save_teacher(tmp_path / "other", Target(tiny_model("llama", seed=9, vocab_size=taught.vocab_size)))
    assert other is not None
    store = StateStore(place.run / "data" / "states" / "train")
    with pytest.raises(UserError, match="were written by another model"):
        train(place.recipe(), load_teacher(other, torch.device("cpu")), store, store, tmp_path / "out")


def test_heads_of_a_70b_shape_reach_an_engine_without_its_weights(tmp_path: Path) -> None:
    """With the grouped heads and rotary scaling of Llama-3.3-70B, but small: only the layers read depend on depth."""
    paper = json.loads((Path(__file__).parents[2] / "docs/plans/llama-3.3-70b/config.json").read_text())
    tokenizer, there = tiny_tokenizer(), tmp_path / "there"
    width = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 1}
    width["num_hidden_layers"] = 8
    config = LlamaConfig(**{**paper, **width, "head_dim": 8, "vocab_size": len(tokenizer), "dtype": "float32"})
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(there)
    tokenizer.save_pretrained(there)
    place = Place(tmp_path, there, {"family": "eagle3", "draft_steps": 3, "draft_vocab_size": 64})
    for file in place.target_folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    plan = make_plan(quiet(tmp_path / "planned", place.recipe()), prompt_tokens=20)
    assert plan.problems == [] and "are not on this machine" in plan.notes[0]
    assert NOT_LOADED in place.train()

    served, again = tmp_path / "served", tmp_path / "again"
    said = " ".join(works("export", place.run, "--format", "speculators", "--out", served).stdout.split())
    assert "is not tuned yet" in said and "The number of drafts is untuned" in said and "vllm serve" in said
    said = works("export", "--check", served, "--engine", "speculators,vllm", "--against", place.run).stdout
    assert "is complete" in said
    assert "finds the best number" in (served / "README.md").read_text()
    assert "a chain of 3 drafts, untuned" in (place.run / "heads" / "README.md").read_text()
    assert "headstart export" in refused("tune", place.run), "export works without the target"

    works("export", place.run, "--format", "speculators", "--out", again, "--target", there)
    one, other = (load_file(folder / "model.safetensors") for folder in (served, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert NOT_LOADED in place.train(heads={"draft_vocab_size": 48})
    works("export", place.run, "--format", "speculators", "--out", tmp_path / "newest")
    newest = load_file(tmp_path / "newest" / "model.safetensors")
    assert (len(one["d2t"]), len(newest["d2t"])) == (64, 48), "exports the newest training"
    decoder = headstart.load(place.run, target=there, dtype="float32")
    assert len(decoder.generate("who are you", max_new_tokens=4).tokens) == 4
