"""Where a training lies, whoever starts it: an artifact named by the heads, the data and the settings it depends on.

How long is trained (steps, minutes, epochs) is the artifact's amount: a longer training goes on from the checkpoint of
a shorter one, which keeps its own heads.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.errors import UserError
from headstart.heads.base import HeadConfig
from headstart.heads.io import WEIGHTS, heads_folder
from headstart.recipes.recipe import Recipe
from headstart.recipes.sections import FREE_TO_CHANGE
from headstart.support.artifacts import Artifact, artifact, link_or_copy, relatives
from headstart.support.files import PARTIAL, read_json
from headstart.train import checkpoint

if TYPE_CHECKING:
    from headstart.data.states.online import States

RESULT = "result.json"
"""Written last: a training that has it is finished."""
AMOUNT = ("steps", "minutes", "epochs")
_VERSION = 1
_ACCUMULATION = "gradient_accumulation_steps"


def training(
    run_folder: Path, recipe: Recipe, config: HeadConfig, train_store: States, valid_store: States
) -> Artifact:
    """The artifact of a training.

    Args:
        run_folder: of the run that it is for.
        recipe: its `train` section is read.
        config: of the heads, with the target's sizes filled in.
        train_store: conversations to learn from.
        valid_store: conversations to judge by.
    """
    section = recipe.train.model_dump(mode="json")
    settings = recipe.train.noted(FREE_TO_CHANGE | recipe.train.unset())
    settings["start_from"] = weights_hash(recipe.train.start_from)
    identity = {
        "version": _VERSION,
        "heads": {**config.model_dump(mode="json"), "family": config.family},
        "train": settings,
        "data": train_store.fingerprint,
        "validation": valid_store.fingerprint,
        "amount": {key: section[key] for key in AMOUNT},
    }
    return artifact(run_folder, "heads", config.family, identity)


def finished(folder: Path) -> bool:
    """Whether the training in an artifact's folder is over."""
    return (folder / RESULT).is_file()


def go_on_from_shorter(of: Artifact, ranks: int, say: Callable[[str], None]) -> None:
    """Begin a training with the newest checkpoint of those that differ only in being shorter, when there is one.

    So does the same training on another number of processes, where a step reads as many batches.

    Args:
        of: the training; nothing happens when it has checkpoints of its own.
        ranks: processes that train.
        say: takes a sentence for the user.
    """
    checkpoints = of.folder / "checkpoints"
    if checkpoint.find(checkpoints, {}, lambda _: None) is not None:
        return
    best: tuple[int, Path] | None = None
    shorter = True
    settings = {checkpoint.PROCESSES: ranks, checkpoint.ACCUMULATION: _accumulation(of)}
    for other in relatives(of, _spread_aside):
        if not _within(other.identity["amount"], of.identity["amount"]):
            continue
        found = checkpoint.find(other.folder / "checkpoints", {}, lambda _: None)
        if found is None or not (other.folder / "metrics.jsonl").is_file():
            continue
        kept = read_json(found[0] / checkpoint.MANIFEST)["settings"]
        kept = {checkpoint.PROCESSES: kept.get(checkpoint.PROCESSES), checkpoint.ACCUMULATION: _accumulation(other)}
        fits = checkpoint.fits(kept, settings)
        if fits and (best is None or found[1].step > best[0]):
            best = found[1].step, found[0]
            shorter = other.base == of.base
    if best is None:
        return
    _, path = best
    partial = checkpoints / (path.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    checkpoints.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path.parent.parent / "metrics.jsonl", of.folder / "metrics.jsonl")
    shutil.copytree(path, partial, copy_function=link_or_copy)
    partial.rename(checkpoints / path.name)
    what = "A shorter training" if shorter else "A training on another number of processes"
    say(f"{what} of these heads is there ({path.parent.parent.name}): going on from it.")


def _spread_aside(of: Artifact) -> dict[str, Any]:
    """The identity without the amount, and without how the batches of a step are spread."""
    train = of.base.get("train") or {}
    return {**of.base, "train": {key: value for key, value in train.items() if key != _ACCUMULATION}}


def _accumulation(of: Artifact) -> int | None:
    value = of.identity["train"].get(_ACCUMULATION)
    return None if value is None else int(value)


def _within(shorter: dict[str, Any], longer: dict[str, Any]) -> bool:
    """Whether one amount is no more than another; None has no end.

    >>> _within({"steps": None, "minutes": 5, "epochs": 50}, {"steps": None, "minutes": 6, "epochs": 50})
    True
    >>> _within({"steps": None, "minutes": 5, "epochs": 50}, {"steps": 100, "minutes": 6, "epochs": 50})
    False
    """

    def size(amount: dict[str, Any], key: str) -> float:
        value = amount.get(key)
        return float("inf") if value is None else float(value)

    return all(size(shorter, key) <= size(longer, key) for key in AMOUNT)


def weights_hash(folder: str | None) -> str | None:
    """Hash of the weights that `train.start_from` names; None without any.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if folder is None:
        return None
    file = heads_folder(Path(folder).expanduser()) / WEIGHTS
    try:
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UserError(f"Cannot read {file} ({error.strerror}).", "Check train.start_from.") from None
