"""`python -m headstart.train`: in a process of its own, killed and run again, and on two processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from headstart.data.store import StateStore
from headstart.heads.io import load_heads
from headstart.lock import locked
from headstart.target import load_target
from headstart.train.config import Recipe, load_recipe
from headstart.train.loop import train


@pytest.fixture
def workplace(
    tmp_path: Path, states: Path, tiny_target_folder: Path, recipe: Callable[..., Recipe]
) -> Callable[..., tuple[Path, Path]]:
    """(recipe file, run folder with the data stage's outputs) for these train settings."""

    def make(**settings: object) -> tuple[Path, Path]:
        values = recipe(**settings).model_dump(mode="json", exclude_defaults=True)
        values["target"] = {"spec": str(tiny_target_folder), "dtype": "float32", "device": "cpu"}
        file = tmp_path / "tiny.yaml"
        file.write_text(yaml.safe_dump(values))
        run = tmp_path / "runs" / "run"
        (run / "data").mkdir(parents=True)
        (run / "data" / "states").symlink_to(states)
        return file, run

    return make


def command(*arguments: str | Path, launcher: tuple[str, ...] = ()) -> tuple[list[str], dict[str, str]]:
    inherited = {key: value for key, value in os.environ.items() if key not in ("MASTER_ADDR", "WORLD_SIZE", "RANK")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    return [sys.executable, *launcher, "-m", "headstart.train", *map(str, arguments)], environment


def run_to_end(*arguments: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    words, environment = command(*arguments)
    return subprocess.run(words, env={**environment, **extra}, capture_output=True, text=True, timeout=120)


def here(file: Path, folder: Path, *overrides: str) -> Path:
    """The same training in this process; returns its last heads."""
    recipe = load_recipe(str(file), overrides)
    target = load_target(recipe.target.spec, recipe.target.dtype, recipe.target.device)
    states = file.parent / "runs" / "run" / "data" / "states"
    stores = StateStore(states / "train"), StateStore(states / "calibration")
    return train(recipe, target, *stores, folder).last_folder


def test_killed_by_the_system_it_goes_on_to_bitwise_the_same_weights(
    workplace: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    file, run = workplace(steps=400, save_every=5, eval_every=100)
    words, environment = command(file, "--run-dir", run)
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True)
    checkpoints = run / "train" / "checkpoints"
    deadline = time.monotonic() + 100
    while not list(checkpoints.glob("step-*[05]")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"it ended before it could be killed: {errors}"
    assert not (run / "train" / "result.json").exists()
    resumed = load_heads(here(file, run / "train")).state_dict()
    whole = load_heads(here(file, tmp_path / "whole")).state_dict()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_two_processes_do_what_one_does_with_twice_the_accumulation(
    workplace: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    file, run = workplace(steps=6, save_every=3, eval_every=3, lr=1e-3, noise=0.1, position_weight="dpace")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    words, environment = command(file, "--run-dir", run, launcher=launcher)
    environment["ACCELERATE_USE_CPU"] = "true"
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    # What was written counts, not the exit code: the process group now and then aborts while it is torn down.
    assert (run / "train" / "result.json").is_file(), done.stderr
    assert "Training on 2 processes" in done.stderr
    assert done.stderr.count("Training on") == 1, "only the main process speaks"
    both = load_heads(run / "train" / "last").state_dict()
    alone_folder = tmp_path / "alone"
    alone = load_heads(here(file, alone_folder, "train.accumulate=2")).state_dict()
    for name, tensor in alone.items():
        # The same sums in another order; Adam turns a tiny gradient's sign into a whole step of the learning rate.
        torch.testing.assert_close(both[name], tensor, rtol=1e-3, atol=3e-4)
    # Validation is counted over both processes' shares.
    rows = [(folder / "metrics.jsonl").read_text().splitlines()[0] for folder in (run / "train", alone_folder)]
    first, second = (yaml.safe_load(row) for row in rows)
    assert first["predictions"] == second["predictions"] and first["tau"] == second["tau"]


def test_missing_states_say_how_to_make_them(tmp_path: Path) -> None:
    done = run_to_end("quickstart", "train.lr=1e-4", "--run-dir", tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert f"no stored states at {tmp_path}/data/states/train" in done.stderr
    assert f"headstart data quickstart train.lr=1e-4 --run-dir {tmp_path}" in done.stderr


def test_a_folder_takes_one_training_at_a_time(workplace: Callable[..., tuple[Path, Path]]) -> None:
    file, run = workplace(steps=1)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    words, environment = command(file, "--run-dir", run, launcher=launcher)
    environment["ACCELERATE_USE_CPU"] = "true"
    with locked(run):
        alone = run_to_end(file, "--run-dir", run)
        both = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert alone.returncode == 2 and "Traceback" not in alone.stderr
    for done in (alone, both):
        assert done.stderr.count(f"Another run (process {os.getpid()}) is working in {run}") == 1
        assert done.stderr.count("choose another --run-dir") == 1
    assert not (run / "train").exists()


def test_it_says_so_when_the_launcher_starts_fewer_processes_than_asked(
    workplace: Callable[..., tuple[Path, Path]],
) -> None:
    file, run = workplace(steps=1)
    done = run_to_end(file, "--run-dir", run, MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="True")
    assert done.returncode == 0, done.stderr
    assert "Training on 1 process (cpu, float32, 1 CPU threads each)" in done.stderr
    assert "asked for more processes, but only this one runs" in done.stderr
    assert "best heads (step" in done.stderr
