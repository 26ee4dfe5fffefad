"""Training from the teacher that lies beside the states, without the target."""

from __future__ import annotations

import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from headstart.pipeline.together import train_together
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.target.loading import load_target
from headstart.target.model import Target
from headstart.target.teacher import TeacherModel, load_teacher, save_teacher
from headstart.train.trainer import train
from tests.test_pipeline import quiet, tiny_recipe
from tests.tiny import tiny_model
from tests.train.conftest import Train
from tests.train.results import assert_same, metrics
from tests.train.test_golden import HEADS


@pytest.fixture(scope="module")
def taught(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> TeacherModel:
    folder = save_teacher(tmp_path_factory.mktemp("teacher"), tiny_target)
    assert folder is not None
    return load_teacher(folder, tiny_target.device)


@pytest.mark.parametrize("name", HEADS)
def test_heads_of_a_teacher_are_those_of_its_target_bit_for_bit(
    name: str, run: Train, taught: TeacherModel, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"heads": {"family": name, **HEADS[name]}, "steps": 2, "eval_every": 1, "lr": 1e-3}
    written = StringIO()
    run(tmp_path / "target", **settings)
    run(tmp_path / "teacher", console=Console(file=written, width=500), target=taught, **settings)
    for which in ("best", "last"):
        assert_same(tmp_path / "target" / which, tmp_path / "teacher" / which)
    one, other = (
        [{key: value for key, value in row.items() if key != "elapsed_seconds"} for row in metrics(tmp_path / who)]
        for who in ("target", "teacher")
    )
    assert one == other, "validation too"
    assert "the teacher of tiny is beside the states" in written.getvalue()


class Place:
    """A run whose data was written here, with a target that may then go away."""

    def __init__(self, folder: Path, target_folder: Path) -> None:
        self.target_folder, self.run = folder / "target", folder / "runs" / "run"
        shutil.copytree(target_folder, self.target_folder)
        self._recipe = tiny_recipe(folder, self.target_folder)
        execute(quiet(self.run, self._recipe), stages_until("states"))

    def recipe(self, **sections: dict[str, Any]) -> Recipe:
        values = self._recipe.model_dump(mode="json")
        return parse_recipe({**values, **{name: {**values[name], **change} for name, change in sections.items()}})

    def train(self, **sections: dict[str, Any]) -> str:
        """What `headstart train` says."""
        console = Console(file=StringIO(), width=500)
        train_together(Run(self.recipe(**sections), self.run, console))
        return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def place(tmp_path: Path, tiny_target_folder: Path) -> Place:
    return Place(tmp_path, tiny_target_folder)


NOT_LOADED = "The target itself is not loaded"


def test_the_teacher_is_taken_where_it_is_enough(place: Place) -> None:
    assert NOT_LOADED in place.train()
    assert NOT_LOADED in place.train(heads={"num_heads": 1})
    assert NOT_LOADED not in place.train(train={"joint": {"rank": 2}, "lr": 1e-4})


def test_heads_train_where_the_target_is_not(place: Place, tmp_path: Path) -> None:
    target = load_target(str(place.target_folder), "float32", "cpu")
    stores = [StateStore(place.run / "data" / "states" / split) for split in ("train", "validation")]
    expected = train(place.recipe(), target, *stores, tmp_path / "expected").last_folder
    shutil.rmtree(place.target_folder)
    (tmp_path / "prompts.jsonl").unlink()
    with pytest.raises(UserError) as refused:
        place.train(train={"joint": {"rank": 2}})
    assert "set train.joint.rank=0" in refused.value.remedy
    assert NOT_LOADED in place.train()
    assert_same(place.run / "train" / "last", expected)


def test_a_damaged_teacher_is_written_again(place: Place) -> None:
    (teacher,) = (place.run.parent / "artifacts" / "states").glob("*/teacher-*")
    (teacher / "base.safetensors").write_bytes(b"")
    assert NOT_LOADED not in place.train()
    assert NOT_LOADED in place.train(heads={"num_heads": 1})


def test_a_teacher_of_another_target_is_refused(place: Place, tmp_path: Path, taught: TeacherModel) -> None:
    other = save_teacher(tmp_path / "other", Target(tiny_model("llama", seed=9, vocab_size=taught.vocab_size)))
    assert other is not None
    store = StateStore(place.run / "data" / "states" / "train")
    with pytest.raises(UserError, match="are those of another model"):
        train(place.recipe(), load_teacher(other, torch.device("cpu")), store, store, tmp_path / "out")
