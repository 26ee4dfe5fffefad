"""The artifact of a training, addressed by the heads, data and settings it depends on.

The budget (steps, minutes, epochs) is the artifact's amount: a longer training continues from the checkpoint of a
shorter one, which keeps its own heads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.data.states.store import States
from headstart.errors import UserError
from headstart.heads.base import HeadConfig
from headstart.heads.io import WEIGHTS, heads_folder
from headstart.heads.settings import Role
from headstart.recipes.recipe import Recipe
from headstart.support.artifacts import Artifact, artifact, link_into_run, relatives
from headstart.support.files import file_hash, read_json
from headstart.train import checkpoint

RESULT = "result.json"  # written last; marks a finished training
_VERSION = 2  # bumped when the same settings train other heads
_ACCUMULATION = "gradient_accumulation_steps"


def training_artifact(
    run_folder: Path, recipe: Recipe, config: HeadConfig, train_store: States, valid_store: States
) -> Artifact:
    """The artifact of a training; `config` is the heads' complete config, with the target's sizes."""
    identity = {
        "version": _VERSION,
        "heads": {**config.model_dump(mode="json"), "family": config.family},
        "train": {**recipe.train.of_role(Role.CONTENT), "start_from": weights_hash(recipe.train.start_from)},
        "data": train_store.fingerprint,
        "validation": valid_store.fingerprint,
        "amount": recipe.train.of_role(Role.AMOUNT),
    }
    return artifact(run_folder, "heads", config.family, identity)


def is_finished(folder: Path) -> bool:
    return (folder / RESULT).is_file()


def continue_shorter(of: Artifact, ranks: int, say: Callable[[str], None]) -> None:
    """Seed a training without checkpoints from the related training with the most steps.

    A related training differs only by a smaller budget, or by the number of ranks at equal batches per step.
    """
    checkpoints = of.folder / "checkpoints"
    if checkpoint.find(checkpoints, {}, lambda _: None) is not None:
        return
    settings = {checkpoint.PROCESSES: ranks, checkpoint.ACCUMULATION: of.identity["train"][_ACCUMULATION]}
    candidates = []
    for other in relatives(of, _without_accumulation):
        newest = checkpoint.find(other.folder / "checkpoints", {}, lambda _: None)
        has_metrics = (other.folder / "metrics.jsonl").is_file()
        if newest and has_metrics and _within(other.identity["amount"], of.identity["amount"]):
            path, trainer_state = newest
            kept = read_json(path / checkpoint.MANIFEST)["settings"]
            if checkpoint.batches_of_step(kept) == checkpoint.batches_of_step(settings):
                candidates.append((trainer_state.step, path, other.base == of.base))
    if not candidates:
        return
    _, path, only_shorter = max(candidates, key=lambda candidate: candidate[0])
    shutil.copyfile(path.parent.parent / "metrics.jsonl", of.folder / "metrics.jsonl")
    link_into_run(path, checkpoints / path.name)
    kind = "a shorter training" if only_shorter else "a training on another number of processes"
    say(f"Continuing from {kind} of these heads ({path.parent.parent.name}).")


def _without_accumulation(of: Artifact) -> dict[str, Any]:
    """The identity without the amount and the gradient accumulation."""
    train = {key: value for key, value in of.base.get("train", {}).items() if key != _ACCUMULATION}
    return {**of.base, "train": train}


def _within(shorter: dict[str, Any], longer: dict[str, Any]) -> bool:
    """Whether one amount is at most another; None is unlimited.

    >>> _within({"steps": None, "minutes": 5, "epochs": 50}, {"steps": None, "minutes": 6, "epochs": 50})
    True
    >>> _within({"steps": None, "minutes": 5, "epochs": 50}, {"steps": 100, "minutes": 6, "epochs": 50})
    False
    """
    pairs = [(shorter.get(key), longer[key]) for key in longer]
    return all(more is None or (less is not None and less <= more) for less, more in pairs)


def weights_hash(folder: str | None) -> str | None:
    """Hash of the weights of `train.start_from`; None without one."""
    if folder is None:
        return None
    file = heads_folder(Path(folder).expanduser()) / WEIGHTS
    try:
        return file_hash(file)[:16]
    except OSError as error:
        raise UserError(f"Cannot read {file} ({error.strerror}).", "Check train.start_from.") from None
