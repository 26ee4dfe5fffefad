"""The stages that make heads: training them, and choosing their tree on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headstart.pipeline.actions import describe_tuning
from headstart.pipeline.data_stages import both_stores, conversation_files, conversations, is_online, kept_stores
from headstart.pipeline.dependencies import before, conditions, content, flat, where
from headstart.pipeline.formats import check_formats
from headstart.pipeline.layout import CONVERSATIONS, STATES, TRAIN, TUNE
from headstart.pipeline.run import Outcome, Run, Stage
from headstart.support.artifacts import artifact, held, referred
from headstart.support.files import read_json, write_json

if TYPE_CHECKING:
    from headstart.data.states.online import States
    from headstart.heads.base import DraftHead

_TUNE_VERSION = 4
"""Raised when the same settings come to mean another tuning; that of training is in its room."""


def _train_settings(run: Run) -> dict[str, Any]:
    from headstart.recipes.sections import FREE_TO_CHANGE
    from headstart.train.artifact import AMOUNT, weights_hash

    heads = {f"heads.{key}": value for key, value in run.recipe.heads.to_recipe().items()}
    noted = run.recipe.train.noted((FREE_TO_CHANGE - set(AMOUNT)) | run.recipe.train.unset())
    settings = {f"train.{key}": value for key, value in noted.items()}
    return {**settings, "train.start_from": weights_hash(run.recipe.train.start_from), **heads}


def _train(run: Run) -> Outcome:
    from headstart.heads.base import make_config
    from headstart.target.teacher import TeacherModel
    from headstart.train.artifact import RESULT, finished, go_on_from_shorter, training
    from headstart.train.loop import train
    from headstart.train.setup import online_states

    target = run.frozen()
    if isinstance(target, TeacherModel) and (
        run.recipe.train.needs_target or not target.starts(make_config(run.recipe.heads, target).start_layers)
    ):
        target = run.target
    stores: Mapping[str, States]
    if is_online(run):
        target = run.target
        stores = online_states(run.recipe, target, conversation_files(run))
    else:
        stores = kept_stores(run) if isinstance(target, TeacherModel) else both_stores(run)
    train_store, judged = stores["train"], stores["calibration"]
    made = training(run.folder, run.recipe, make_config(run.recipe.heads, target), train_store, judged)
    with held(made, run.console) as folder:
        if not finished(folder):  # before the shorter one is referred to no more
            go_on_from_shorter(made, 1, lambda text: run.console.print(text, highlight=False, soft_wrap=True))
        run.refer("train", made, TRAIN)
        if not finished(folder):
            check_formats(run, target)
            train(run.recipe, target, train_store, judged, folder, run.console)
    result = read_json(folder / RESULT)
    return Outcome(f"{result['steps']} steps; predicted τ of a chain {result['best']['tau']:.2f}", identity=made.name)


def without_target(run: Run) -> str:
    """How heads train where the target is not, as a sentence; empty where they cannot."""
    states = referred(run.folder, "states")
    if run.recipe.train.needs_target or is_online(run) or not (run.folder / STATES).is_dir():
        return ""
    if states is None or not any(states.glob("teacher-*")):
        return ""
    return (
        "Or train from the teacher beside the states, without the target: "
        f"python -m headstart.train {run.folder / 'recipe.yaml'} --run-dir {run.folder}"
    )


def _tune_settings(run: Run) -> dict[str, Any]:
    return {**flat("tune", run.recipe.tune), **where(run)}


def _tune(run: Run) -> Outcome:
    from headstart.tuning.tune import Tuning, tune

    section, file = run.recipe.tune, run.folder / TUNE / "tuning.json"
    identity = {
        "version": _TUNE_VERSION,
        "heads": before(run, "train"),
        "texts": content(str(run.folder / CONVERSATIONS / "calibration.jsonl")),
        **_tune_settings(run),
        "conditions": conditions(run),
    }
    made = artifact(run.folder, "tuning", run.recipe.heads.family, identity)
    with held(made, run.console):
        run.refer("tune", made, TUNE)
        if "tune" in run.again or not file.is_file():
            texts = conversations(run, "calibration")
            tuning = tune(run.decoded, trained_heads(run), texts, section, console=run.console)
            write_json(file, tuning.to_json())
    return Outcome(describe_tuning(Tuning.from_json(read_json(file))), identity=f"{made.name} {content(str(file))}")


def trained_heads(run: Run) -> DraftHead:
    """The best heads of training, in the target's dtype."""
    from headstart.heads.io import load_heads

    return load_heads(run.folder / TRAIN / "best", run.decoded).to(run.decoded.dtype)


HEAD_STAGES = (
    Stage("train", "training the heads", 1, (TRAIN,), ("target", "states"), _train_settings, _train),
    Stage(
        "tune",
        "measuring costs, choosing the tree",
        _TUNE_VERSION,
        (TUNE,),
        ("conversations", "train"),
        _tune_settings,
        _tune,
    ),
)
"""In order."""
