"""`python -m headstart.train` equals `headstart train`: as a process, after a kill, and on two processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch

from headstart.data.states.store import StateStore
from headstart.model.loading import load_target
from headstart.recipes.recipe import load_recipe
from headstart.support.artifacts import referred
from headstart.support.lock import locked
from headstart.train.trainer import train
from tests.forks import Forks
from tests.train.conftest import Workplace, clean_environment
from tests.train.results import assert_same, metrics, weights


def here(file: Path, folder: Path, *overrides: str) -> Path:
    """Run the same training in this process and return its last heads."""
    recipe = load_recipe(str(file), overrides)
    target = load_target(recipe.target.spec, recipe.target.dtype, recipe.target.device)
    states = file.parent / "runs" / "run" / "data" / "states"
    stores = StateStore(states / "train"), StateStore(states / "validation")
    return train(recipe, target, *stores, folder).last_folder


KILLED = """
import os, signal, sys
from headstart.cli.app import main
from headstart.train import trainer
take = trainer._Trainer._step
def step(run, *rest):
    return take(run, *rest) if run.trainer_state.step < 7 else os.kill(os.getpid(), signal.SIGKILL)
trainer._Trainer._step = step
sys.argv.insert(1, 'train')
main()
"""
"""A training that kills itself in step 8."""


def test_killed_process_resumes_bitwise(workplace: Workplace, forks: Forks, tmp_path: Path) -> None:
    file, run = workplace(steps=12, save_every=5, eval_every=100)
    done = forks.run("-c", KILLED, file, "--run-dir", run, env=clean_environment())
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (run / "train" / "result.json").exists()
    assert_same(here(file, run / "train"), here(file, tmp_path / "whole"))


def test_two_processes_match_one(workplace: Workplace, forks: Forks, tmp_path: Path) -> None:
    file, run = workplace(steps=6, save_every=3, eval_every=3, lr=1e-3, position_weight="dpace")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "headstart.train", file]
    done = forks.run(*words, "--run-dir", run, env={**clean_environment(), "ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr
    assert (run / "train" / "result.json").is_file()
    assert "Training on 2 processes" in done.stdout
    assert done.stdout.count("Training on") == 1, "only the main process speaks"
    alone = weights(here(file, tmp_path / "alone", "train.gradient_accumulation_steps=2"))
    # Sums in another order; Adam turns the sign of a tiny gradient into a full step of the learning rate.
    torch.testing.assert_close(weights(run / "train" / "last"), alone, rtol=1e-3, atol=3e-4)
    first, second = (metrics(folder)[0] for folder in (run / "train", tmp_path / "alone"))
    assert first["predictions"] == second["predictions"] and first["tau"] == second["tau"], "counted over both ranks"


def test_folder_takes_one_training_at_a_time(workplace: Workplace, forks: Forks) -> None:
    file, run = workplace(steps=1)
    with locked(run):
        done = forks.run("-m", "headstart.train", file, "--run-dir", run, env=clean_environment())
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count(f"Another run (process {os.getpid()}) is working in {run}") == 1
    assert done.stderr.count("choose another --run-dir") == 1
    assert not (run / "train").exists()


def test_both_commands_record_alike(workplace: Workplace, forks: Forks, tmp_path: Path) -> None:
    records = []
    for name, words in (("module", ["-m", "headstart.train"]), ("command", ["-m", "headstart", "train"])):
        file, run = workplace(tmp_path / name, steps=1)
        done = forks.run(*words, file, "--run-dir", run, env=clean_environment())
        assert done.returncode == 0, done.stderr
        records.append(json.loads((run / "stages" / "train.json").read_text()))
    one, other = ({**record, "seconds": 0} for record in records)
    assert one == other and one["is_complete"]


def test_launcher_of_one_process_trains_like_the_command(workplace: Workplace, forks: Forks) -> None:
    file, run = workplace(steps=1)
    words, environment = ["-m", "headstart.train", file, "--run-dir", run], clean_environment()
    done = forks.run(*words, env={**environment, "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "True"})
    assert done.returncode == 0, done.stderr
    assert "Training on 1 process (cpu, float32, 1 CPU threads each)" in done.stdout
    assert load_recipe(str(run / "recipe.yaml")) == load_recipe(str(file)), "as `headstart train` keeps it"
    commands = json.loads((run / "provenance.json").read_text())["commands"]
    assert "headstart/train/__main__.py" in commands[-1]["argv"][0] and commands[-1]["versions"]["torch"]
    assert (run / "train").resolve() == referred(run, "train").resolve()
    again = forks.run(*words, env=environment)
    assert again.returncode == 0 and "4/4 train  done" in again.stdout
