"""Two processes write the data of one run; the planner is killed, and nothing is lost or made twice."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from headstart.cli.app import data_build
from headstart.data.states.shards import StateKind
from headstart.data.states.store import StateStore
from headstart.model.loading import pick_device
from headstart.pipeline.data_stages import aux_layers, both_stores, conversations, help_with_data
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from headstart.pipeline.together import execute_together
from headstart.recipes.values import recipe_text
from headstart.support.lock import locked
from tests.data.test_store import poison
from tests.forks import Forks
from tests.test_pipeline import logged, quiet, tiny_recipe
from tests.test_stages import said

DIES = """
import os, pathlib, signal, sys, time
part, log = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1))
real = os.replace
def replace(source, path):
    real(source, path)
    if str(path).endswith(part):
        while "Helping it" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = replace
from headstart.cli.app import main
main()
"""
"""The command, killed right after it has written one file, once the other process helps."""


def test_the_planner_is_killed(tmp_path: Path, tiny_target_folder: Path, forks: Forks) -> None:
    recipe = tiny_recipe(tmp_path, tiny_target_folder)
    alone, folder = tmp_path / "runs" / "alone", tmp_path / "shared" / "run"
    execute(quiet(alone, recipe), stages_until("states"))
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    command = ["data", "build", str(tmp_path / "recipe.yaml"), "--run-dir", str(folder)]
    log = tmp_path / "log"
    log.write_text("")
    first = forks.start("-c", DIES, "00002-train.jsonl", log, *command)
    while "2/3" not in first.out.read_text():
        assert first.poll() is None, "it ended by itself"
        time.sleep(0.02)
    second = forks.start("-m", "headstart", *command, out=log)
    assert first.wait() == -9
    assert second.wait() == 0
    for split in ("train", "validation", "heldout"):
        ours, theirs = (path / "data" / "conversations" / f"{split}.jsonl" for path in (folder, alone))
        assert ours.read_text() == theirs.read_text()
    stores = [StateStore(path / "data" / "states" / "train") for path in (folder, alone)]
    for index in range(len(stores[1])):
        ours_T, theirs_T = (store.get(index).states for store in stores)
        assert all(torch.equal(ours_T[layer], theirs_T[layer]) for layer in theirs_T)
    shared = tmp_path / "shared" / "artifacts"
    numbers = [file.name[:5] for file in shared.glob("conversations/*/batches/*.jsonl")]
    assert len(set(numbers)) == len(numbers) == 5
    keys = [key for file in shared.glob("states/*/shard-*.safetensors") for key in _keys(file)]
    assert len(set(keys)) == len(keys) == 16
    assert not list(shared.rglob("*.claim"))


def test_left_out_texts_count_in_the_byte_budget_of_all_processes(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A helper cannot know that a validation text has no finite states, and must plan the same training shards."""
    execute(quiet(tmp_path / "run", tiny_recipe(tmp_path, tiny_target_folder)), stages_until("conversations"))
    (states,) = tmp_path.glob("artifacts/states/*")
    for shard in states.glob("shard-*"):  # captured while writing
        shard.unlink()
    written = quiet(tmp_path / "run", tiny_recipe(tmp_path, tiny_target_folder))
    validation, train = (conversations(written, split) for split in ("validation", "train"))
    kind = StateKind(written.target, tuple(aux_layers(written)))
    held = kind.bytes(sum(len(item.tokens) for item in [*validation, *train[:-2]]))
    run = quiet(tmp_path / "run", tiny_recipe(tmp_path, tiny_target_folder, data={"cache_gigabytes": held / 1e9}))
    poison(run.target, monkeypatch, *(item.tokens for item in validation[:2]))
    help_with_data(run, {"conversations"})
    helped = set(states.glob("shard-*"))
    stores = both_stores(run)
    assert (stores["validation"].left_out, stores["train"].dropped) == ({0: validation[0].id, 1: validation[1].id}, 2)
    assert {file.name for store in stores.values() for file in store.files} == {file.name for file in helped}


def _keys(shard: Path) -> list[str]:
    with safe_open(shard, framework="pt") as handle:
        return list(json.loads(handle.metadata()["keys"]))


def test_a_second_process_leaves_when_no_data_is_left_to_write(tmp_path: Path, tiny_target_folder: Path) -> None:
    """The first one may be training by then."""
    recipe, stages = tiny_recipe(tmp_path, tiny_target_folder), stages_until("states")
    execute(quiet(tmp_path / "run", recipe), stages)
    second = logged(tmp_path / "run", recipe)
    with locked(tmp_path / "run"):
        execute_together(second, stages)
    assert "no data left to write" in said(second)


LAUNCHERS = {
    "torchrun": {"LOCAL_RANK": "3"},
    "torchrun on chosen GPUs": {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "2,3,4,5"},
    "accelerate": {"LOCAL_RANK": "3", "ACCELERATE_MIXED_PRECISION": "no"},
    "srun": {"SLURM_LOCALID": "3"},
    "srun, a GPU per task": {"SLURM_LOCALID": "3", "CUDA_VISIBLE_DEVICES": "3"},
    "mpirun": {"OMPI_COMM_WORLD_LOCAL_RANK": "3"},
    "torchrun in a job": {"LOCAL_RANK": "3", "SLURM_LOCALID": "0"},
    "no launcher": {},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_process_of_a_launcher_builds_data_on_its_own_gpu(
    launcher: str, tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the environment a launcher leaves to the device that `headstart data build` loads the target on."""
    environment, devices = LAUNCHERS[launcher], list[str]()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "torch.cuda.device_count", lambda: len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(","))
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    def build(run: Run, _: object) -> None:
        devices.append(str(pick_device(run.recipe.target.device)))

    monkeypatch.setattr("headstart.pipeline.together.execute_together", build)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_text(tiny_recipe(tmp_path, tiny_target_folder)))
    data_build(str(recipe), ["target.device=auto"], tmp_path / "run")
    own = {"srun, a GPU per task": "cuda", "no launcher": "cuda"}
    assert devices == [own.get(launcher, "cuda:3")]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == environment.get("CUDA_VISIBLE_DEVICES")
