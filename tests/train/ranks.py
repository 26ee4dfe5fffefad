"""What one of several processes of a training does, in tests: each in a fork of its own (`tests.forks`)."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headstart.cli.app import app
from headstart.data.states.online import OnlineStates
from headstart.data.states.store import States, StateStore
from headstart.errors import UserError
from headstart.heads.base import families
from headstart.heads.io import save_heads
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.replay.patch import FINAL
from headstart.train import batches, checkpoint, processes, trainer, training_artifact
from headstart.train.joint import Joint
from headstart.train.processes import join_processes, leave_processes
from tests.train.conftest import conversations
from tests.train.stores import Silent
from tests.train.test_golden import HEADS

POISONED = 7
KINDS = ("medusa", "eagle3", "dflash")
"""Heads on the last state alone, on states of several layers one step after the other, and in blocks."""


def families_of(how: str) -> list[str]:
    """What is trained on two processes: every family from the store, and one of each kind in other ways, in which every
    family is trained on one process elsewhere. How processes share their work does not depend on the family."""
    return [*families()] if how == "stored" else [*KINDS]


def recipe_of(name: str, **train: Any) -> Recipe:
    """Small heads of a family; batches are so small that some hold nothing to learn from."""
    settings = {
        "steps": 3,
        "epochs": 3,
        "batch_tokens": 64,
        "lr": 0.3,
        "min_lr_ratio": 1,
        "max_grad_norm": 1e9,
        "eval_every": 100,
        "save_every": 2,
        **train,
    }
    heads = {"draft_vocab_size": 40, "family": name, **HEADS[name]}
    return parse_recipe({"name": "tiny", "target": "tiny", "heads": heads, "train": settings})


def joint_of(how: str) -> dict[str, Any]:
    """Train settings with which an adapter of the target learns too, from the second step on; else none."""
    # Dropout would draw other numbers on each process.
    return {"joint": {"rank": 2, "warmup": 0.3, "dropout": 0.0, "lr_ratio": 1.0}} if how == "joint" else {}


def both_states(folder: Path, target: Target, how: str) -> list[States]:
    """Those of training and of validation: as the fixture `states` stored them, or computed online from the same
    conversations."""
    if how != "online":
        return [StateStore(folder / split) for split in ("train", "validation")]
    made = (conversations(24, 0, target.vocab_size), conversations(7, 1, target.vocab_size))
    return [OnlineStates(folder, one, target, [1, 2, 3, FINAL]) for one in made]


def silent(store: States) -> Any:
    """The store in which every other conversation has no answer."""
    return Silent(store, set(range(0, len(store), 2)))


def plain_steps(heads: nn.Module, section: Any) -> list[torch.optim.Optimizer]:
    """Gradient descent: a step is as long as its gradient, where Adam makes a whole step of a rounding error."""
    return [torch.optim.SGD([weight for weight in heads.parameters() if weight.requires_grad], section.lr)]


def take_plain_steps() -> None:
    """Heads and adapters learn by gradient descent from here on."""
    trainer.make_optimizers = plain_steps
    Joint.optimizer = lambda joint: torch.optim.SGD(joint._trained(), 0.0)  # each step sets the rate


def train_families_packed(
    target_folder: str,
    states: str,
    folder: str,
    gradient_accumulation_steps: int | str = 1,
    how: str = "stored",
    packing: bool = True,
) -> None:
    """As `train_families`, one of each kind in the batches of packing, whether they are packed or not."""
    trainer.epoch_batches = batches.epoch_batches = batches.packed_batches
    train_families(target_folder, states, folder, gradient_accumulation_steps, how, KINDS, packing=packing)


def train_families(
    target_folder: str,
    states: str,
    folder: str,
    gradient_accumulation_steps: int | str = 1,
    how: str = "stored",
    names: Sequence[str] = (),
    **settings: Any,
) -> None:
    """Train these families, or `families_of`; each process leaves its weights in <folder>/<family>: start-<rank>, then
    of-<rank>."""
    join_processes("cpu")
    target = load_target(target_folder, "float32", "cpu")
    store, valid = both_states(Path(states), target, how)
    go = trainer._Trainer.train
    take_plain_steps()

    def save(run: Any, what: str) -> None:
        folder = run.folder / f"{what}-{run.rank}"
        save_heads(run.heads, folder)
        if run.joint is not None:
            run.joint.save(folder, run.drift)

    def keep(run: Any) -> Any:
        save(run, "start")
        result = go(run)
        save(run, "of")
        return result

    trainer._Trainer.train = keep
    for name in names or families_of(how):
        trainer.train(
            recipe_of(name, gradient_accumulation_steps=int(gradient_accumulation_steps), **joint_of(how), **settings),
            target,
            silent(store),
            valid,
            Path(folder) / name,
        )
    leave_processes()


def train_some_steps(
    target_folder: str,
    states: str,
    folder: str,
    gradient_accumulation_steps: int | str = 1,
    start_from: str = "",
    stop: int | str | None = None,
) -> None:
    """Train Medusa heads for 8 steps, or low-rank updates of earlier ones, or go on; a Ctrl-C ends it after `stop`
    steps."""
    join_processes("cpu")
    target = load_target(target_folder, "float32", "cpu")
    store, valid = both_states(Path(states), target, "stored")
    take_plain_steps()
    if stop is not None:
        at(int(stop) - 1, lambda rank: signal.raise_signal(signal.SIGINT))
    settings: dict[str, Any] = {"gradient_accumulation_steps": int(gradient_accumulation_steps)}
    if start_from:
        settings.update(start_from=start_from, lora_rank=2)
    recipe = recipe_of("medusa", steps=8, lr=0.1, **settings)
    with suppress(KeyboardInterrupt):
        trainer.train(recipe, target, silent(store), valid, Path(folder))
    leave_processes()


def poison(step: int) -> None:
    """From this step on, the stored states of a conversation are not numbers."""
    read_batch, take = trainer.read_batch, trainer._Trainer._step

    def poisoned(store: StateStore, batch: Any, *args: Any) -> Any:
        made = read_batch(store, batch, *args)
        if POISONED in batch and store.folder.name == "train":
            made.batch.states[FINAL][batch.index(POISONED), -5:] = math.nan
        return made

    def counted(run: Any, *args: Any) -> float:
        if run.trainer_state.step == step - 2:
            trainer.read_batch = poisoned
        return take(run, *args)

    trainer._Trainer._step = counted


def at(step: int, act: Callable[[int], None]) -> None:
    """Call `act` with the rank before this many steps are done."""
    take = trainer._Trainer._step

    def acting(run: Any, *args: Any) -> float:
        if run.trainer_state.step == step:
            act(run.rank)
        return take(run, *args)

    trainer._Trainer._step = acting


def train(*arguments: str) -> None:
    """`python -m headstart.train`."""
    app(["train", *arguments])


def train_plainly(*arguments: str) -> None:
    """With gradient descent; leaves the weights that it starts from beside the others."""
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
    processes._PATIENCE = 0.5  # nobody is left to be told
    at(5, lambda rank: os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else None)
    train(*arguments)


def train_until_ctrl_c(*arguments: str) -> None:
    """As in a terminal, once from there and once more from the launcher; a scheduler signals the other process."""

    def ask(rank: int) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT if rank == 0 else signal.SIGUSR1)

    at(3, ask)
    train(*arguments)


def train_with_an_old_view(*arguments: str) -> None:
    """One process sees the folder of runs as it was before anything was trained, and its checkpoint some moments later:
    first nothing, then another of the same step, which it has replaced."""
    manifest, looked = checkpoint._manifest, list[Path]()
    if os.environ["RANK"] == "1":

        def later(path: Path) -> Any:
            now = manifest(path)
            assert now is not None
            looked.append(path)
            before = {**now, "standing": {**now["standing"], "elapsed": 0.5}}
            return [None, before, now][min(len(looked), 3) - 1]

        checkpoint._manifest = later
        checkpoint._newest_first = lambda folder: []
        trainer.read_jsonl = lambda file: iter(())
        training_artifact.finished = lambda folder: False
    try:
        train(*arguments)
    finally:
        assert len(looked) in (0, 3), "it waits for the checkpoint that the main process chose"


def train_by_two_clocks(*arguments: str) -> None:
    """The clock of the main process jumps past the end of the training while a step is taken, that of the other one
    goes on."""
    late, ticks = [0.0], count()

    def jump(rank: int) -> None:
        late[0] = 1000.0 if rank == 0 else 0.0

    trainer.monotonic = lambda: late[0] + 1e-3 * next(ticks)
    at(3, jump)
    train(*arguments)


def train_with_one_refusing(*arguments: str) -> None:
    """One process finds what the others do not: a fault of its own disk, say."""

    def refuse(rank: int) -> None:
        if rank == 1:
            raise UserError("The disk of this machine is full.", "Make room.")

    processes._PATIENCE = 0.5  # the main process has nothing to say
    at(2, refuse)
    train(*arguments)
