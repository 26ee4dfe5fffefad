"""Stages that train heads and tune their tree on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from headstart.data.conversations.records import each_conversation
from headstart.data.states.online import OnlineStates
from headstart.data.states.served import StreamedStates
from headstart.data.states.store import States
from headstart.heads.base import DraftHead, make_config
from headstart.heads.io import load_heads
from headstart.model.frozen import FrozenModel
from headstart.model.model import Target
from headstart.model.teacher import TeacherModel, teach
from headstart.pipeline.actions import describe_tuning
from headstart.pipeline.data_stages import aux_layers, check_formats, conversation_files, conversations, kept_stores
from headstart.pipeline.launch import launch_training, must_launch
from headstart.pipeline.run import (
    CONVERSATIONS,
    TRAIN,
    TUNE,
    NoTarget,
    Outcome,
    Run,
    Stage,
    before,
    conditions,
    content,
    flat,
    where,
)
from headstart.pipeline.states_servers import served_states
from headstart.support.artifacts import add_reference, artifact, lock_artifact, referred
from headstart.support.files import read_json, write_json
from headstart.support.terminal import program
from headstart.train.processes import broadcast_from_main, count_processes, is_main, on_main, raise_on_all_ranks
from headstart.train.trainer import train
from headstart.train.training_artifact import RESULT, continue_shorter, is_finished, training_artifact, weights_hash
from headstart.tuning.tune import Tuning, tune

_TUNE_VERSION = 5
"""Raise it when the same settings produce another tuning; training has a version of its own."""


def _train_settings(run: Run) -> dict[str, Any]:
    heads = {f"heads.{key}": value for key, value in run.recipe.heads.to_recipe().items()}
    return {**flat("train", run.recipe.train), "train.start_from": weights_hash(run.recipe.train.start_from), **heads}


def _train(run: Run) -> Outcome:
    # Runs on every rank; the main process writes.
    if must_launch(run):
        launch_training(run)
        return _trained(run)
    with raise_on_all_ranks():
        target, stores = _frozen_and_stores(run)
        made = training_artifact(run.folder, run.recipe, make_config(run.recipe.heads, target), *stores)
        if is_main():
            check_formats(run, target)
    with on_main(lock_artifact(made, run.console, wait=count_processes() == 1)):
        with raise_on_all_ranks():
            if is_main() and not is_finished(made.folder):  # before the reference to the shorter training is replaced
                continue_shorter(made, count_processes(), partial(run.console.print, highlight=False, soft_wrap=True))
            if is_main():
                add_reference(run.folder, "train", made, TRAIN)
        if not broadcast_from_main(is_finished(made.folder)):
            with _states_of(run, target, stores):
                train(run.recipe, target, *stores, made.folder, run.console)
    with raise_on_all_ranks():
        trained = _trained(run) if is_main() else Outcome("")
    return trained


def _trained(run: Run) -> Outcome:
    """Describe the finished training of a run."""
    folder = referred(run.folder, "train")
    assert folder is not None, "training adds a reference to it"
    result = read_json(folder / RESULT)
    return Outcome(f"{result['steps']} steps; predicted τ of a chain {result['best']['tau']:.2f}", identity=folder.name)


def _frozen_and_stores(run: Run) -> tuple[FrozenModel, tuple[States, States]]:
    """Return the target (or its teacher) for training, and the training and validation states."""
    section, heads = run.recipe.train, run.recipe.heads
    if not run.recipe.data.online:
        stores = kept_stores(run)
        target = run.frozen()
        if isinstance(target, TeacherModel) and not target.starts(make_config(heads, target).start_layers):
            try:
                target = run.target
            except NoTarget as error:
                add = "Or add the layers that these heads start from, where the target is: headstart data build."
                raise NoTarget(error.problem, f"{error.remedy} {add}") from error
        return target, (stores["train"], stores["validation"])
    files, layers = conversation_files(run).values(), aux_layers(run)
    sharded, kind = section.shard_target and count_processes() > 1, OnlineStates
    if run.recipe.data.states_source:
        reads, kind = run.frozen(), StreamedStates
    else:
        reads = run.load(sharded=True) if sharded else run.target
    trained_on, validated_on = (kind(file, each_conversation(file), reads, layers) for file in files)
    taught = teach(reads, make_config(heads, reads).start_layers) if sharded and isinstance(reads, Target) else None
    return taught or reads, (trained_on, validated_on)


@contextmanager
def _states_of(run: Run, target: FrozenModel, stores: Sequence[States]) -> Iterator[None]:
    """Connect streamed states to their servers; call it on every rank."""
    with ExitStack() as stack:
        if streamed := [store for store in stores if isinstance(store, StreamedStates)]:
            client = stack.enter_context(served_states(run, target, aux_layers(run)))
            for store in streamed:
                store.client = client
        yield


def _tune_settings(run: Run) -> dict[str, Any]:
    return {**flat("tune", run.recipe.tune), **where(run)}


def _tune(run: Run) -> Outcome:
    section, file = run.recipe.tune, run.folder / TUNE / "tuning.json"
    try:
        target = run.target
    except NoTarget as error:
        untuned = f"{program()} export {run.folder} --format vllm --out FOLDER"
        remedy = f"{error.remedy} Or take the heads as they are, which needs no target: {untuned}"
        raise NoTarget(error.problem, remedy) from error
    identity = {
        "version": _TUNE_VERSION,
        "heads": before(run, "train"),
        "texts": content(run.folder / CONVERSATIONS / "validation.jsonl"),
        **_tune_settings(run),
        "conditions": conditions(run),
    }
    made = artifact(run.folder, "tuning", run.recipe.heads.family, identity)
    with lock_artifact(made, run.console):
        add_reference(run.folder, "tune", made, TUNE)
        if "tune" in run.again or not file.is_file():
            texts = conversations(run, "validation")
            tuning = tune(target, trained_heads(run, target), texts, section, console=run.console)
            write_json(file, tuning.to_json())
    return Outcome(describe_tuning(Tuning.from_json(read_json(file))), identity=f"{made.name} {content(file)}")


def trained_heads(run: Run, target: FrozenModel) -> DraftHead:
    """Load the best heads of training, in the target's dtype."""
    return load_heads(run.folder / TRAIN / "best", target).to(target.dtype)


HEAD_STAGES = (
    Stage(
        "train",
        "training the heads",
        1,
        (TRAIN,),
        ("target", "states"),
        _train_settings,
        _train,
        takes_memory="train.batch_tokens (and raise train.gradient_accumulation_steps as much), or set "
        "train.gradient_checkpointing=true",
    ),
    Stage(
        "tune",
        "measuring costs, choosing the tree",
        _TUNE_VERSION,
        (TUNE,),
        ("conversations", "train"),
        _tune_settings,
        _tune,
        takes_memory="tune.context or tune.widths",
    ),
)
