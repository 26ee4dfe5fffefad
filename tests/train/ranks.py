"""Entry points for the ranks of a training in tests; each runs in its own fork (`tests.forks`)."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headstart.cli.app import app
from headstart.data.states.store import States, StateStore
from headstart.errors import UserError
from headstart.heads.base import HeadBatch, families
from headstart.heads.io import save_heads
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.pipeline import head_stages
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.replay.patch import FINAL
from headstart.train import batches, checkpoint, processes, trainer
from headstart.train.processes import join_processes, leave_processes
from tests.train.conftest import before_step, on_read, online_states
from tests.train.stores import Silent
from tests.train.test_golden import HEADS

POISONED = 7
KINDS = ("medusa", "eagle3", "dflash")
"""Heads that read the last state alone, that draft step by step from several layers, and that draft blocks."""


def families_of(how: str) -> list[str]:
    """Choose the families for two processes: all from the store, one of each kind otherwise.

    Other tests train every family online on one process; sharing work does not depend on it.
    """
    return [*families()] if how == "stored" else [*KINDS]


def recipe_of(name: str, **train: Any) -> Recipe:
    """Small heads of a family, with batches so small that some have no predictions."""
    settings = {"steps": 3, "epochs": 3, "batch_tokens": 64, "eval_every": 100, "save_every": 2}
    settings |= {"lr": 0.3, "min_lr_ratio": 1, "max_grad_norm": 1e9, **train}
    heads = {"draft_vocab_size": 40, **HEADS[name]}
    return parse_recipe({"name": "tiny", "target": "tiny", "heads": heads, "train": settings})


def both_states(folder: Path, target: Target, how: str) -> list[States]:
    """Return the states for training and validation: stored by the fixture `states`, or online from the same texts."""
    if how == "online":
        return [*online_states(folder, target)]
    return [StateStore(folder / split) for split in ("train", "validation")]


def silent(store: States) -> Any:
    """Remove the answer of every other conversation."""
    return Silent(store, set(range(0, len(store), 2)))


def plain_steps(heads: nn.Module, section: Any) -> list[torch.optim.Optimizer]:
    """Plain gradient descent. Adam would turn a rounding error into a full step."""
    return [torch.optim.SGD([weight for weight in heads.parameters() if weight.requires_grad], section.lr)]


def take_plain_steps() -> None:
    """Replace all optimisers by gradient descent."""
    trainer.make_optimizers = plain_steps


def train_families_packed(
    target_folder: str, states: str, folder: str, accumulation: int | str = 1, how: str = "stored", packing: bool = True
) -> None:
    """Run `train_families` for one family of each kind on the batches of packing, packed or padded."""
    pack = batches.epoch_batches
    trainer.epoch_batches = batches.epoch_batches = lambda *args, **kwargs: pack(*args, **{**kwargs, "packing": True})
    train_families(target_folder, states, folder, accumulation, how, KINDS, packing=packing)


def train_families(
    target_folder: str,
    states: str,
    folder: str,
    accumulation: int | str = 1,
    how: str = "stored",
    names: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Train these families, or `families_of`. Each rank saves <folder>/<family>/start-<rank> and of-<rank>."""
    join_processes("cpu")
    target = load_target(target_folder, "float32", "cpu")
    store, valid = both_states(Path(states), target, how)
    go = trainer._Trainer.train
    take_plain_steps()

    def keep(run: Any) -> Any:
        save_heads(run.heads, run.folder / f"start-{run.rank}")
        result = go(run)
        save_heads(run.heads, run.folder / f"of-{run.rank}")
        return result

    trainer._Trainer.train = keep
    for name in names or families_of(how):
        recipe = recipe_of(name, gradient_accumulation_steps=int(accumulation), **settings)
        trainer.train(recipe, target, silent(store), valid, Path(folder) / name)
    leave_processes()


def train_some_steps(
    target_folder: str, states: str, folder: str, accumulation: int | str, start_from: str, stop: int | str = ""
) -> None:
    """Train or resume Medusa heads, or low-rank updates of earlier ones, to step 8; Ctrl-C comes after `stop` steps."""
    join_processes("cpu")
    target = load_target(target_folder, "float32", "cpu")
    store, valid = both_states(Path(states), target, "stored")
    take_plain_steps()
    if stop:
        at(int(stop) - 1, lambda rank: signal.raise_signal(signal.SIGINT))
    settings: dict[str, Any] = {"gradient_accumulation_steps": int(accumulation)}
    if start_from:
        settings.update(start_from=start_from, lora_rank=2)
    recipe = recipe_of("medusa", steps=8, lr=0.1, **settings)
    with suppress(KeyboardInterrupt):
        trainer.train(recipe, target, silent(store), valid, Path(folder))
    leave_processes()


def poison(step: int) -> None:
    """From this step on, the stored states of one conversation contain NaN."""

    def spoil(indices: list[int], batch: HeadBatch) -> None:
        if POISONED in indices:
            batch.states[FINAL][indices.index(POISONED), -5:] = math.nan

    at(step - 2, lambda _: on_read(pytest.MonkeyPatch(), "train", spoil))


def at(step: int, act: Callable[[int], None]) -> None:
    """Call `act(rank)` when this step begins."""
    before_step(pytest.MonkeyPatch(), lambda run: act(run.rank) if run.trainer_state.step == step else None)


def train(*arguments: str) -> None:
    """Run `headstart train`."""
    app(["train", *arguments])


def train_plainly(*arguments: str) -> None:
    """Train by gradient descent and also save the initial weights."""
    go = trainer._Trainer.train

    def keep(run: Any) -> Any:
        save_heads(run.heads, run.folder / f"start-{run.rank}")
        return go(run)

    trainer._Trainer.train = keep
    take_plain_steps()
    train(*arguments)


def train_poisoned(*arguments: str) -> None:
    poison(2)
    train(*arguments)


def train_until_one_is_killed(*arguments: str) -> None:
    processes._EXIT_TIMEOUT = 0.5  # the other rank is dead
    at(5, lambda rank: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None)
    train(*arguments)


def train_until_ctrl_c(*arguments: str) -> None:
    """Interrupt twice, as a terminal and then the launcher do; a scheduler signals the other rank."""

    def ask(rank: int) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT if rank == 0 else signal.SIGUSR1)

    at(3, ask)
    train(*arguments)


def train_with_an_old_view(*arguments: str) -> None:
    """Let rank 1 see a stale shared folder: first no checkpoint, then a replaced one of the same step, then the new."""
    manifest, looked = checkpoint._manifest, list[Path]()
    if os.environ["RANK"] == "1":

        def later(path: Path) -> Any:
            now = manifest(path)
            assert now is not None
            looked.append(path)
            before = {**now, "trainer_state": {**now["trainer_state"], "elapsed": 0.5}}
            return [None, before, now][min(len(looked), 3) - 1]

        checkpoint._manifest = later
        checkpoint._newest_first = lambda folder: []
        trainer.read_jsonl = lambda file: iter(())
        head_stages.is_finished = lambda folder: False
    try:
        train(*arguments)
    finally:
        assert len(looked) in (0, 3), "waits for the checkpoint chosen by the main process"


def train_by_two_clocks(*arguments: str) -> None:
    """Let the main process's clock jump past the time budget during a step, while the other clock runs on."""
    late, ticks = [0.0], count()

    def jump(rank: int) -> None:
        late[0] = 1000.0 if rank == 0 else 0.0

    trainer.monotonic = lambda: late[0] + 1e-3 * next(ticks)
    at(3, jump)
    train(*arguments)


def train_with_one_refusing(*arguments: str) -> None:
    """Raise on rank 1 alone, as a fault of its own disk would."""

    def refuse(rank: int) -> None:
        if rank == 1:
            raise UserError("The disk of this machine is full.", "Make room.")

    processes._EXIT_TIMEOUT = 0.5  # the main process raises nothing
    at(2, refuse)
    train(*arguments)
