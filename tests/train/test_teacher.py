"""Training from the teacher that lies beside the states, without the target."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.recipes.recipe import Recipe, recipe_text
from headstart.target.fitting import FINAL
from headstart.target.loading import load_target
from headstart.target.model import Target
from headstart.target.teacher import TeacherModel, load_teacher, save_teacher
from headstart.train.loop import train
from headstart.train.setup import open_target
from tests.tiny import tiny_model
from tests.train.conftest import Train, conversations
from tests.train.results import assert_same, metrics
from tests.train.test_golden import HEADS
from tests.train.test_main import run_to_end


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


def test_decoding_while_training_wants_the_target(run: Train, taught: TeacherModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.decode_every runs the target itself") as refused:
        run(tmp_path, target=taught, decode_every=2)
    assert "train.decode_every=null" in refused.value.remedy


class Place:
    """A run whose states were written here, for a target that may then go away."""

    def __init__(self, folder: Path, target_folder: Path, recipe: Callable[..., Recipe]) -> None:
        self.target_folder = folder / "target"
        shutil.copytree(target_folder, self.target_folder)
        self.target = load_target(str(self.target_folder), "float32", "cpu")
        self.states, self._recipe = folder / "runs" / "run" / "data" / "states", recipe
        for split, seed in (("train", 0), ("calibration", 1)):
            made = conversations(8, seed, self.target.vocab_size)
            build_store(self.states / split, made, self.target, [FINAL], budget_bytes=10**8, shards=self.states)

    def teach(self) -> Path:
        folder = save_teacher(self.states, self.target)
        assert folder is not None
        return folder

    def recipe(self, dtype: str = "auto", spec: str = "", adapter: str | None = None, **settings: Any) -> Recipe:
        section = {"spec": spec or str(self.target_folder), "dtype": dtype, "device": "cpu", "adapter": adapter}
        values = self._recipe(**settings).model_dump(mode="json", exclude_defaults=True)
        return Recipe.model_validate({**values, "target": section})

    def open(self, **changes: Any) -> Any:
        return open_target(self.recipe(**changes), StateStore(self.states / "train"), "cpu")


@pytest.fixture
def place(tmp_path: Path, tiny_target_folder: Path, recipe: Callable[..., Recipe]) -> Place:
    return Place(tmp_path, tiny_target_folder, recipe)


def test_the_teacher_is_taken_where_it_is_enough(place: Place) -> None:
    assert isinstance(place.open(dtype="float32"), Target), "there is none"
    place.teach()
    assert isinstance(place.open(), TeacherModel) and isinstance(place.open(dtype="float32"), TeacherModel)
    assert place.open().dtype == torch.float32, "auto is the dtype of the states"
    assert isinstance(place.open(dtype="bfloat16"), Target), "asked for otherwise"
    assert isinstance(place.open(decode_every=2), Target)
    with pytest.raises(UserError, match="No adapter at /nowhere"):
        place.open(adapter="/nowhere")
    deep = {"family": "eagle3", "aux_layers": (1, 2), "num_layers": 2}
    assert isinstance(place.open(heads=deep), Target), "the teacher has one layer"


def test_a_target_that_is_not_there_says_what_heads_can_train_from(place: Place) -> None:
    shutil.rmtree(place.target_folder)
    with pytest.raises(UserError) as refused:
        place.open()
    assert "write a teacher where the target is" in refused.value.remedy
    place.teach()
    assert isinstance(place.open(), TeacherModel)
    with pytest.raises(UserError) as refused:
        place.open(decode_every=2)
    assert "set train.decode_every=null" in refused.value.remedy
    with pytest.raises(UserError) as refused:
        place.open(spec="/elsewhere")
    assert f"target.spec={place.target_folder} target.dtype=auto" in refused.value.remedy


def test_a_damaged_teacher_is_not_passed_over(place: Place) -> None:
    (place.teach() / "base.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"base\.safetensors is missing, cut short or damaged"):
        place.open()


def test_a_teacher_of_another_target_is_refused(place: Place, tmp_path: Path, taught: TeacherModel) -> None:
    other = save_teacher(tmp_path / "other", Target(tiny_model("llama", seed=9, vocab_size=taught.vocab_size)))
    assert other is not None
    store = StateStore(place.states / "train")
    with pytest.raises(UserError, match="are those of another model"):
        train(place.recipe(), load_teacher(other, torch.device("cpu")), store, store, tmp_path / "out")


def test_the_command_trains_where_the_target_is_not(place: Place, tmp_path: Path) -> None:
    recipe = place.recipe(steps=2)
    file, run = tmp_path / "tiny.yaml", place.states.parent.parent
    file.write_text(recipe_text(recipe))
    place.teach()
    stores = [StateStore(place.states / split) for split in ("train", "calibration")]
    expected = train(recipe, place.target, stores[0], stores[1], tmp_path / "expected").last_folder
    shutil.rmtree(place.target_folder)
    done = run_to_end(file, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    assert "The target itself is not loaded" in done.stderr
    assert_same(run / "train" / "last", expected)
