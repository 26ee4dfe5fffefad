"""Checkpoints of a training.

A checkpoint holds accelerate's state (heads, optimisers, gradient scaler, RNG states of every rank), the best heads so
far, and `checkpoint.json`, written last: the trainer state, the settings, and the size of every other file. A
checkpoint with a missing or truncated file is ignored. Only the newest are kept.

Better heads that a killed run found after its last checkpoint are dropped on resuming: the schedule may follow the
clock, or a new budget, so the resumed run may never reach them.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from headstart.errors import UserError
from headstart.support.artifacts import link_or_copy
from headstart.support.files import PARTIAL, read_json, replace, write_json

MANIFEST = "checkpoint.json"
BEST = "best"
PROCESSES = "number of processes"
ACCUMULATION = "train.gradient_accumulation_steps"
"""Settings keys; their product is the number of batches per step."""
_WEIGHTS = "model.safetensors"
_VISIBLE_WITHIN = 90.0  # seconds; NFS clients cache missing files for up to a minute
_DDP_PREFIX = "module."  # prefix of weight names under DDP


@dataclass
class TrainerState:
    """Progress of a run: `step` optimiser steps in all, `index` of them in epoch `epoch` (from 0)."""

    step: int = 0
    epoch: int = 0
    index: int = 0
    elapsed: float = 0.0  # training seconds over all sessions, including validation and checkpoints
    tokens: int = 0  # predictions of the first draft step trained on so far
    skipped: int = 0  # steps without any predictions
    best_tau: float = 0.0  # best predicted tokens per round so far; 0 before the first validation
    best_step: int = 0  # step of `best_tau`
    lr: float = 0.0  # learning rate of the last step
    budget: list[float | None] = field(default_factory=list)  # [steps, minutes, epochs] of the run
    extended_at: float = 0.0  # fraction of the run done when it last resumed with another budget; 0 if never
    lr_at_extension: float = 0.0  # learning rate then

    def advance(self, predictions: int, steps_per_epoch: int) -> None:
        """Count one step that trained on this number of predictions."""
        self.step, self.index, self.tokens = self.step + 1, self.index + 1, self.tokens + predictions
        if self.index == steps_per_epoch:
            self.epoch, self.index = self.epoch + 1, 0


def save(
    accelerator: Accelerator, folder: Path, trainer_state: TrainerState, settings: dict[str, Any], best: Path, keep: int
) -> None:
    """Write a checkpoint into `folder` atomically and delete all but the newest `keep`; collective. `best` holds the
    heads of `trainer_state.best_step`."""
    path = folder / f"step-{trainer_state.step:08d}"
    partial = path.with_name(path.name + PARTIAL)
    if accelerator.is_main_process:
        for unfinished in folder.glob(f"step-*{PARTIAL}"):  # from a killed run, perhaps of another step
            shutil.rmtree(unfinished)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.copytree(best, partial / BEST, copy_function=link_or_copy)
        written = (file for file in sorted(partial.rglob("*")) if file.is_file())
        files = {str(file.relative_to(partial)): file.stat().st_size for file in written}
        manifest = {"trainer_state": dataclasses.asdict(trainer_state), "settings": settings, "files": files}
        write_json(partial / MANIFEST, manifest)
        replace(partial, path)
        for old in _newest_first(folder)[keep:]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load(accelerator: Accelerator, path: Path) -> None:
    """Restore the prepared heads and optimisers from a checkpoint of any number of ranks; additional ranks keep their
    RNG state."""

    def rename(models: list[nn.Module], folder: str) -> None:
        """Load the weights here if checkpoint and model disagree on the `module.` prefix; otherwise accelerate does."""
        file = Path(folder) / _WEIGHTS
        with safe_open(file, "pt") as weights:
            if set(weights.keys()) <= models[0].state_dict().keys():
                return
        model = accelerator.unwrap_model(models[0])
        state = {name.removeprefix(_DDP_PREFIX): tensor for name, tensor in load_file(file).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        tensors = model.state_dict()
        shared = {tensors[name].data_ptr() for name in state if name in tensors}
        assert not unexpected and all(tensors[name].data_ptr() in shared for name in missing), "the same heads"
        models.clear()

    hook = accelerator.register_load_state_pre_hook(rename)
    try:
        accelerator.load_state(str(path))
    finally:
        hook.remove()


def batches_of_step(settings: Mapping[str, Any]) -> int:
    """Number of batches per optimiser step over all ranks; 0 if the settings lack it."""
    return int(settings.get(PROCESSES, 0)) * int(settings.get(ACCUMULATION, 0))


def find(folder: Path, settings: dict[str, Any], warn: Callable[[str], None]) -> tuple[Path, TrainerState] | None:
    """Find the newest complete checkpoint, if any; truncated ones are skipped with a warning.

    Raises:
        UserError: its settings differ, other than in how the batches of a step are spread (see `batches_of_step`).
    """
    for path in _newest_first(folder):
        manifest = _manifest(path)
        if manifest is None:
            warn(f"The checkpoint {path} is cut short and is ignored.")
            continue
        _check_same_settings(folder.parent, manifest["settings"], settings)
        return path, TrainerState(**manifest["trainer_state"])
    return None


def wait_for(path: Path, trainer_state: TrainerState) -> None:
    """Wait until this rank sees the checkpoint that the main rank chose: a network disk may lag, or show a replaced one
    of the same step."""
    deadline, expected = monotonic() + _VISIBLE_WITHIN, dataclasses.asdict(trainer_state)
    while (_manifest(path) or {}).get("trainer_state") != expected:
        if monotonic() > deadline:
            raise UserError(
                f"The main process of this training sees the checkpoint {path}, and this process does not.",
                "Let all processes see the same folder of runs.",
            )
        sleep(0.5)


def _check_same_settings(run: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise a UserError if settings differ, other than in how the batches of a step are spread over ranks."""
    spread = {PROCESSES, ACCUMULATION} if batches_of_step(kept) == batches_of_step(settings) else set()
    for key in [key for key in settings if key not in spread]:
        if not (differing := _differences(key, kept.get(key), settings[key])):
            continue
        name, was, wanted = differing[0]
        more = f" ({len(differing) - 1} more settings of {key} differ)" if len(differing) > 1 else ""
        remedy = "Go on with the same settings, or begin anew in another folder of runs (--run-dir elsewhere/NAME)."
        if key == PROCESSES:
            batches, rest = divmod(batches_of_step(kept), wanted)
            remedy = f"Use --processes {was}, or begin anew in another folder of runs."
            if batches and not rest:
                remedy = f"Set {ACCUMULATION}={batches} for the same batches per step, or use --processes {was}."
        raise UserError(f"The run in {run} was trained with {name} = {was!r}, and now it is {wanted!r}{more}.", remedy)


def _differences(name: str, kept: Any, wanted: Any) -> list[tuple[str, Any, Any]]:
    """(name, kept value, wanted value) of every differing setting.

    >>> _differences("heads", {"family": "medusa", "num_heads": 4}, {"family": "medusa", "num_heads": 3})
    [('heads.num_heads', 4, 3)]
    """
    if not (isinstance(kept, dict) and isinstance(wanted, dict)):
        return [(name, kept, wanted)] if kept != wanted else []
    if kept.get("family") != wanted.get("family"):  # the other settings are not comparable
        return [(f"{name}.family", kept.get("family"), wanted.get("family"))]
    keys = sorted({*kept, *wanted})
    return [pair for key in keys for pair in _differences(f"{name}.{key}", kept.get(key), wanted.get(key))]


def _manifest(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint's manifest; None if any file is missing or has the wrong size."""
    try:
        manifest: dict[str, Any] = read_json(path / MANIFEST)
        complete = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
    except (UserError, OSError, KeyError, TypeError):
        return None
    return manifest if complete else None


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if path.suffix != PARTIAL), reverse=True)
