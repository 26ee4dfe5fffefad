"""Checkpoints: folders that are complete, or are not used.

A checkpoint holds what accelerate saves (heads, optimiser, gradient scaler, random states of every process) and
`checkpoint.json`, written last: where the run stands, and the size of every file. The newest are kept.

The best heads so far are in it as well. A run that was killed may have found better ones after its last checkpoint,
and the run that goes on from there may never find them again: its schedule may follow the clock, or a new budget.
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
from headstart.support.artifacts import give, link_or_copy
from headstart.support.files import PARTIAL, read_json, replace, write_json

MANIFEST = "checkpoint.json"
BEST = "best"
PROCESSES = "number of processes"
ACCUMULATION = "train.gradient_accumulation_steps"
"""Keys of a checkpoint's settings. A step reads as many batches as both make together."""
_WEIGHTS = "model.safetensors"
_SEEN_WITHIN = 90.0
"""Seconds; clients of NFS look for what was not there a moment ago after one minute at the latest."""
_OF_SEVERAL = "module."
"""How the names of weights begin where several processes trained them."""


@dataclass
class TrainerState:
    """Where a run stands: `index` steps of an epoch, counted from 0, are taken, and `step` in all.

    Attributes:
        elapsed: seconds spent training, validation and checkpoints included, over all sessions.
        tokens: supervised predictions of the first draft step learnt from so far.
        skipped: steps without any, which changed nothing.
        best_tau: best predicted tokens per round so far, measured at `best_step`; 0 before the first validation.
        lr: learning rate of the last step.
        budget: [steps, minutes, epochs] that the run was to train for.
        onward: share of the run that was done when a larger budget took over from a smaller one; 0 when none did.
        onward_lr: learning rate then.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    elapsed: float = 0.0
    tokens: int = 0
    skipped: int = 0
    best_tau: float = 0.0
    best_step: int = 0
    lr: float = 0.0
    budget: list[float | None] = field(default_factory=list)
    onward: float = 0.0
    onward_lr: float = 0.0

    def advance(self, learnt: int, per_epoch: int) -> None:
        """One step on, which learnt from so many predictions."""
        self.step, self.index, self.tokens = self.step + 1, self.index + 1, self.tokens + learnt
        if self.index == per_epoch:
            self.epoch, self.index = self.epoch + 1, 0


def save(
    accelerator: Accelerator,
    folder: Path,
    trainer_state: TrainerState,
    settings: dict[str, Any],
    best: Path,
    keep: int,
) -> None:
    """Write a checkpoint into `folder`, move it into place in one step, and delete all but the newest `keep`.

    Every process calls it. `best` holds the heads of `trainer_state.best_step`.
    """
    path = folder / f"step-{trainer_state.step:08d}"
    partial = path.with_name(path.name + PARTIAL)
    if accelerator.is_main_process:
        for unfinished in folder.glob(f"step-*{PARTIAL}"):  # of a run that was killed; perhaps at another step
            shutil.rmtree(unfinished)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.copytree(best, partial / BEST, copy_function=link_or_copy)
        written = (file for file in sorted(partial.rglob("*")) if file.is_file())
        files = {str(file.relative_to(partial)): file.stat().st_size for file in written}
        manifest = {"standing": dataclasses.asdict(trainer_state), "settings": settings, "files": files}
        write_json(partial / MANIFEST, manifest)
        replace(partial, path)
        for old in _newest_first(folder)[keep:]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load(accelerator: Accelerator, path: Path) -> None:
    """Give the prepared heads and optimisers the state of a checkpoint, of however many processes it is.

    Random states are those of as many processes as there were; further ones keep their own.
    """

    def rename(models: list[nn.Module], folder: str) -> None:
        """Load weights here when their names begin otherwise: accelerate wraps the heads where several train."""
        file = Path(folder) / _WEIGHTS
        with safe_open(file, "pt") as weights:
            if set(weights.keys()) <= models[0].state_dict().keys():
                return
        model = accelerator.unwrap_model(models[0])
        state = {name.removeprefix(_OF_SEVERAL): tensor for name, tensor in load_file(file).items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        tensors = model.state_dict()
        shared = {tensors[name].data_ptr() for name in state if name in tensors}
        assert not unexpected and all(tensors[name].data_ptr() in shared for name in missing), "the same heads"
        models.clear()

    hook = accelerator.register_load_state_pre_hook(rename)
    accelerator.load_state(str(path))
    hook.remove()


def fits(kept: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a step reads as many batches now as when a checkpoint with the settings `kept` was written."""
    if kept.get(PROCESSES) == settings.get(PROCESSES):
        return kept.get(ACCUMULATION) == settings.get(ACCUMULATION)
    before, now = batches_of_step(kept), batches_of_step(settings)
    return before is not None and before == now


def batches_of_step(settings: Mapping[str, Any]) -> int | None:
    """How many batches an optimiser step reads over all processes; None where the settings do not say."""
    ranks, each = settings.get(PROCESSES), settings.get(ACCUMULATION)
    return None if ranks is None or each is None else int(ranks) * int(each)


def find(folder: Path, settings: dict[str, Any], warn: Callable[[str], None]) -> tuple[Path, TrainerState] | None:
    """The newest complete checkpoint, or None when there is none; one that was cut short is skipped with a warning.

    One of other settings is a UserError, save for the number of processes where `fits` says so.
    """
    for path in _newest_first(folder):
        manifest = _manifest(path)
        if manifest is None:
            warn(f"The checkpoint {path} is cut short; falling back to the one before it.")
            continue
        _check_same_settings(folder.parent, manifest["settings"], settings)
        return path, TrainerState(**manifest["standing"])
    return None


def wait_for(path: Path, trainer_state: TrainerState) -> None:
    """Wait until this process sees a whole checkpoint, the one that another process chose: a network disk may show it
    later here, and until then one of the same step that it has replaced."""
    end, standing = monotonic() + _SEEN_WITHIN, dataclasses.asdict(trainer_state)
    while (_manifest(path) or {}).get("standing") != standing:
        if monotonic() > end:
            raise UserError(
                f"The checkpoint {path} is there for the main process of this training, and not on this machine.",
                "Let all processes see the same folder of runs.",
            )
        sleep(0.5)


def _check_same_settings(run: Path, kept: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings; how the batches of a step are spread over processes may differ."""
    spread = {PROCESSES, ACCUMULATION} if fits(kept, settings) else set()
    for key in [key for key in settings if key not in spread]:
        if not (differing := _differing(key, kept.get(key), settings[key])):
            continue
        name, was, wanted = differing[0]
        more = f" ({len(differing) - 1} more settings of {key} differ)" if len(differing) > 1 else ""
        remedy = "Go on with the same settings, or begin anew in another folder of runs (--run-dir elsewhere/NAME)."
        raise UserError(
            f"The run in {run} was trained with {name} = {was!r}, and now it is {wanted!r}{more}.",
            _other_processes(kept, settings) if key == PROCESSES else remedy,
        )


def _other_processes(kept: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What to type to go on with another number of processes."""
    batches, ranks = batches_of_step(kept), int(settings[PROCESSES])
    if batches is None or batches % ranks:
        return f"Start {kept.get(PROCESSES)} processes, or begin anew in another folder of runs."
    return (
        f"Set {ACCUMULATION}={batches // ranks}, so that a step reads as many batches, or start "
        f"{kept[PROCESSES]} processes."
    )


def restore_best(path: Path, best: Path) -> None:
    """Put the best heads that a checkpoint knows of into the folder `best`, whatever is there now."""
    give(path / BEST, best)


def _differing(name: str, kept: Any, wanted: Any) -> list[tuple[str, Any, Any]]:
    """(name, what was kept, what is wanted) of every setting in which two differ.

    >>> _differing("heads", {"family": "medusa", "num_heads": 4}, {"family": "medusa", "num_heads": 3})
    [('heads.num_heads', 4, 3)]
    """
    if not (isinstance(kept, dict) and isinstance(wanted, dict)):
        return [(name, kept, wanted)] if kept != wanted else []
    if kept.get("family") != wanted.get("family"):  # then nothing else is the same either
        return [(f"{name}.family", kept.get("family"), wanted.get("family"))]
    keys = sorted({*kept, *wanted})
    return [pair for key in keys for pair in _differing(f"{name}.{key}", kept.get(key), wanted.get(key))]


def _manifest(path: Path) -> dict[str, Any] | None:
    """The checkpoint's manifest, or None when a file is missing or has another size than it was written with."""
    try:
        manifest: dict[str, Any] = read_json(path / MANIFEST)
        complete = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
    except (UserError, OSError, KeyError, TypeError):
        return None
    return manifest if complete else None


def _newest_first(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if path.suffix != PARTIAL), reverse=True)
