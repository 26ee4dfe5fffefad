"""Experiment trackers: start checks, start through accelerate, and upload of the report.

Trackers raise any kind of exception. `_tracker_errors` turns them into UserErrors at the start; a later error only ends
the tracking.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from headstart.errors import UserError
from headstart.recipes.sections import TrainSection
from headstart.support.files import read_json, write_json

_PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "tensorboard": ("tensorboard", "tensorboardX")}
"""Packages of each tracker; any one suffices."""
RUN_ID = "tracker.json"  # file in a training's folder with its run id, by tracker
_WITH_ID = ("wandb", "trackio")
_WANDB_VARIABLES = {"dir": "WANDB_DIR", "name": "WANDB_NAME", "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME"}


@contextmanager
def _tracker_errors(name: str, failure: str) -> Iterator[None]:
    """Turn any exception of a tracker into a UserError with its message."""
    try:
        yield
    except Exception as error:  # every tracker has its own kinds
        login = (
            "Log in (wandb login), or set WANDB_MODE=offline."
            if name == "wandb"
            else f"Check that {name} works outside headstart."
        )
        raise UserError(f"The tracker {name} {failure}: {error}", f"{login} Or set train.tracker=none.") from error


def check_tracker(name: str) -> None:
    """Raise a UserError for a tracker that is not installed, or wandb without an account."""
    if name == "none":
        return
    packages = _PACKAGES[name]
    installed = next((package for package in packages if importlib.util.find_spec(package) is not None), None)
    if installed is None:
        raise UserError(f"The tracker {name} is not installed.", f"Run: pip install {packages[0]}")
    with _tracker_errors(name, "cannot be imported"):
        module = importlib.import_module(installed)
    with _tracker_errors(name, "cannot start"):
        if name == "wandb" and not _wandb_can_start(module):
            raise RuntimeError("it has no account to log in with, and no terminal to ask on")


def _wandb_can_start(wandb: Any) -> bool:
    """Whether `wandb.init` will neither fail for lack of an account nor wait for input."""
    if wandb.setup().settings.mode in ("offline", "disabled", "dryrun") or sys.stdin.isatty():
        return True
    return bool(wandb.login(prompt=False))


def start_tracker(
    accelerator: Accelerator, section: TrainSection, settings: Mapping[str, Any], run: str, step: int | None
) -> None:
    """Start the recipe's tracker on the main rank, with `settings` as its config, and store its run id in the
    accelerator's folder. A training resumed at `step` continues the same run."""
    name = section.tracker
    if name == "none":
        return
    folder = Path(accelerator.project_dir)
    run_ids = _run_ids(folder) if step is not None else {}
    run_id = run_ids.get(name) or secrets.token_hex(4)
    options = {name: _options(name, folder, run, run_id, name in run_ids)}
    if name == "tensorboard" and step is not None:  # hides what was logged after the checkpoint
        options[name]["purge_step"] = step + 1
    try:
        with _tracker_errors(name, "did not start"):
            if accelerator.is_main_process:
                folder.mkdir(parents=True, exist_ok=True)
            accelerator.init_trackers(section.project, config=flat(settings), init_kwargs=options)
    except UserError:
        accelerator.trackers.clear()  # nothing to finish
        raise
    if accelerator.is_main_process and name in _WITH_ID:
        write_json(folder / RUN_ID, {**run_ids, name: run_id})


def _options(name: str, folder: Path, run: str, run_id: str, resume: bool) -> dict[str, Any]:
    """Start options of a tracker; the user's environment variables take precedence."""
    if name == "tensorboard":
        return {}
    resuming = {"resume": "allow"} if resume else {}
    if name == "trackio":  # identifies runs by name
        return {"name": f"{run}-{run_id}", **resuming}
    options = {"dir": str(folder), "name": run, "id": run_id, **resuming}
    return {key: value for key, value in options.items() if _WANDB_VARIABLES[key] not in os.environ}


def _run_ids(folder: Path) -> dict[str, str]:
    """Run ids by tracker; empty if the file is missing or damaged."""
    try:
        return dict(read_json(folder / RUN_ID))
    except (UserError, TypeError, ValueError):
        return {}


def log_to_tracker(accelerator: Accelerator, values: dict[str, float], step: int, warn: Callable[[str], None]) -> None:
    """Log values to the tracker, if it works."""
    with _dropped_on_error(accelerator, warn):
        accelerator.log(values, step=step)


def finish_trackers(accelerator: Accelerator, warn: Callable[[str], None]) -> None:
    """Flush the trackers, however the run ended."""
    if accelerator.is_main_process:
        with _dropped_on_error(accelerator, warn):
            for tracker in accelerator.trackers:
                tracker.finish()


@contextmanager
def _dropped_on_error(accelerator: Accelerator, warn: Callable[[str], None]) -> Iterator[None]:
    """A context that drops a failing tracker with a warning: training continues without it."""
    try:
        yield
    except Exception as error:  # every tracker has its own kinds
        names = ", ".join(tracker.name for tracker in accelerator.trackers)
        accelerator.trackers.clear()
        warn(f"The tracker {names} failed and gets no more values: {error}")


def memory(device: torch.device) -> dict[str, float]:
    """Memory in GB (1e9 bytes) by logged name: resident set, and the peak allocation on a GPU."""
    values = {"memory/rss_gigabytes": psutil.Process().memory_info().rss / 1e9}
    if device.type == "cuda":
        values["memory/cuda_peak_gigabytes"] = torch.cuda.max_memory_allocated(device) / 1e9
    return values


def link_report(
    section: TrainSection, folder: Path, run: str, report: Path, summary: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Add figures and text of the report to the training's tracker run, if any. Failures are only logged: the report
    itself is written."""
    name, folder = section.tracker, folder.resolve()
    run_ids = _run_ids(folder)
    if name == "none" or (name in _WITH_ID and name not in run_ids):
        return
    figures = {f"report/{key}": value for key, value in flat(summary).items() if isinstance(value, int | float)}
    options = _options(name, folder, run, run_ids.get(name, ""), True)
    if name == "tensorboard":
        options = {"logging_dir": str(folder)}
    try:
        with _tracker_errors(name, "did not take the report"):
            tracker = LOGGER_TYPE_TO_CLASS[name](section.project, **options)
            tracker.start()
            tracker.log({**figures, "report": (report / "report.md").read_text(encoding="utf-8")})
            tracker.finish()
    except UserError as error:
        say(error.problem)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Flatten settings to one level of numbers, booleans and strings, as every tracker accepts.

    >>> flat({"heads": {"family": "medusa", "aux_layers": [1, 2]}, "train.steps": None, "train.lr": 0.1})
    {'heads.family': 'medusa', 'heads.aux_layers': '[1, 2]', 'train.steps': 'None', 'train.lr': 0.1}
    """
    level: dict[str, bool | int | float | str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            level.update(flat(value, f"{prefix}{key}."))
        else:
            level[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return level
