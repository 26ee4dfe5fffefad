"""Small stores of hidden states over the tiny target, and recipes for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console

from headstart.data.conversations.records import Conversation
from headstart.data.states.online import OnlineStates
from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.heads.base import HeadBatch
from headstart.model.model import Target
from headstart.pipeline.run import execute
from headstart.pipeline.stages import stages_until
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.replay.patch import FINAL
from headstart.train import trainer
from headstart.train.trainer import TrainResult, train
from tests.test_pipeline import quiet, tiny_recipe
from tests.train.results import Killed

MakeRecipe = Callable[..., Recipe]
Train = Callable[..., TrainResult]
Workplace = Callable[..., tuple[Path, Path]]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Fix the order of sums on every machine: these tests compare runs bit by bit."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide an outer launcher: trainings in this process are single-process."""
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables of multi-process launchers."""
    theirs = ("MASTER_", "ACCELERATE_", "TORCHELASTIC_", "FSDP_", "GROUP_", "ROLE_")
    ours = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    kept = {key: value for key, value in os.environ.items() if key not in ours and not key.startswith(theirs)}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "500"}


def conversations(count: int, seed: int, vocab_size: int) -> list[Conversation]:
    """Random tokens; the last two thirds of each conversation are supervised."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        length = int(torch.randint(12, 40, (1,), generator=random))
        tokens = torch.randint(3, vocab_size, (length - 1,), generator=random).tolist()
        supervised = [index > length // 3 for index in range(length)]
        made.append(Conversation(f"c{number}", [*tokens, 2], supervised, []))
    return made


def online_states(folder: Path, target: Target) -> list[OnlineStates]:
    """Compute the states of the fixture `states` online, from the same texts."""
    texts = (conversations(24, 0, target.vocab_size), conversations(7, 1, target.vocab_size))
    return [OnlineStates(folder, one, target, [1, 2, 3, FINAL]) for one in texts]


@pytest.fixture(scope="session")
def states(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of two stores: `train` (24 conversations) and `validation` (7)."""
    folder = tmp_path_factory.mktemp("run") / "data" / "states"
    for name, count, seed in (("train", 24, 0), ("validation", 7, 1)):
        made = conversations(count, seed, tiny_target.vocab_size)
        build_store(folder / name, made, tiny_target, [1, 2, 3, FINAL], budget_bytes=10**8)
    return folder


@pytest.fixture
def train_store(states: Path) -> StateStore:
    return StateStore(states / "train")


@pytest.fixture
def valid_store(states: Path) -> StateStore:
    return StateStore(states / "validation")


@pytest.fixture
def recipe() -> MakeRecipe:
    """A recipe of two small heads, changed by `heads`; keyword arguments go to its train section."""

    def make(heads: dict[str, Any] | None = None, **train: Any) -> Recipe:
        common = {"family": "medusa", "num_heads": 2} if "family" not in (heads or {}) else {}
        heads = {"draft_vocab_size": 40, **common, **(heads or {})}
        settings = {"steps": 12, "batch_tokens": 128, "lr": 3e-3, "eval_every": 6, "save_every": 4, **train}
        return parse_recipe({"name": "tiny", "target": "tiny", "heads": heads, "train": settings})

    return make


@pytest.fixture
def run(recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, valid_store: StateStore) -> Train:
    """Train in a folder with these settings; `train_on` and `validate_on` replace the stores."""

    def go(folder: Path, console: Console | None = None, target: Target = tiny_target, **settings: Any) -> TrainResult:
        stores = settings.pop("train_on", train_store), settings.pop("validate_on", valid_store)
        return train(recipe(**settings), target, *stores, folder, console)

    return go


def before_step(patch: pytest.MonkeyPatch, act: Callable[[Any], None]) -> None:
    """Call `act` with the trainer before every optimiser step."""
    take = trainer._Trainer._step

    def step(self: Any, *args: Any) -> float:
        act(self)
        return take(self, *args)

    patch.setattr(trainer._Trainer, "_step", step)


def on_read(patch: pytest.MonkeyPatch, split: str, act: Callable[[list[int], HeadBatch], None]) -> None:
    """Call `act` with every batch that a training reads from this store, and the numbers of its conversations."""
    read = trainer.read_batch

    def reading(store: Any, batch: list[int], *args: Any) -> Any:
        made = read(store, batch, *args)
        if store.folder.name == split:
            act(batch, made.batch)
        return made

    patch.setattr(trainer, "read_batch", reading)


@contextmanager
def killed_after(steps: int) -> Iterator[None]:
    """End the training inside with `Killed` after a number of optimiser steps; no handler or clean-up runs."""
    left = [steps]

    def kill(_: Any) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        before_step(patch, kill)
        yield


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a folder of runs with `run` after `headstart data build`, and two sections of its recipe."""
    folder = tmp_path_factory.mktemp("written")
    data = {"conversations": 24, "validation": 7}
    values = tiny_recipe(folder, tiny_target_folder, data=data).model_dump(mode="json")
    sections = {key: values[key] for key in ("target", "data")}
    recipe = parse_recipe({"name": "tiny", "heads": {"family": "medusa"}, **sections})
    execute(quiet(folder / "runs" / "run", recipe), stages_until("states"))
    return folder / "runs", sections


@pytest.fixture
def workplace(tmp_path: Path, written: tuple[Path, dict[str, Any]], recipe: MakeRecipe) -> Workplace:
    """Make (recipe file, run folder after `headstart data build`) for these train settings."""

    def make(folder: Path = tmp_path, **settings: object) -> tuple[Path, Path]:
        values = recipe(**settings).model_dump(mode="json", exclude_defaults=True)
        folder.mkdir(exist_ok=True)
        file = folder / "tiny.yaml"
        file.write_text(yaml.safe_dump({**values, **written[1]}))
        shutil.copytree(written[0], folder / "runs", symlinks=True)
        return file, folder / "runs" / "run"

    return make
