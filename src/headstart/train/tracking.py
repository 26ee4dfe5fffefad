"""Trackers: whether the one that a recipe names can start, and starting it, through accelerate."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from headstart.errors import UserError
from headstart.recipes.sections import TrainSection
from headstart.support.files import read_json, write_json

_PACKAGES = {"wandb": ("wandb",), "trackio": ("trackio",), "tensorboard": ("tensorboard", "tensorboardX")}
"""What each tracker needs, any one of them."""

RUN_ID = "tracker.json"
"""In the folder of a training: the id of its run, by tracker."""
_WITH_ID = ("wandb", "trackio")
_WANDB_SAYS = {"dir": "WANDB_DIR", "name": "WANDB_NAME", "id": "WANDB_RUN_ID", "resume": "WANDB_RESUME"}

_NONE = "Or set train.tracker=none."
_REMEDIES = {
    "wandb": f"Log in (wandb login), or set WANDB_MODE=offline. {_NONE}",
    "trackio": f"Check that trackio works by itself (trackio show). {_NONE}",
    "tensorboard": f"Check that tensorboard imports and that the run's folder can be written. {_NONE}",
}


def check_tracker(name: str) -> None:
    """Refuse a tracker that will not start, before anything is done for the run.

    Raises:
        UserError: it is not installed, cannot be imported, or wandb has nobody to log in as.
    """
    if name == "none":
        return
    packages = _PACKAGES[name]
    installed = next((package for package in packages if importlib.util.find_spec(package) is not None), None)
    if installed is None:
        raise UserError(f"The tracker {name} is not installed.", f"Run: pip install {packages[0]}")
    try:
        module = importlib.import_module(installed)
    except Exception as error:  # a broken package fails in its own way
        raise UserError(
            f"The tracker {name} cannot be imported: {error}",
            f"Run: pip install --force-reinstall {installed}. {_NONE}",
        ) from error
    if name == "wandb" and not _wandb_can_start(module):
        raise UserError("The tracker wandb has no account to log in with, and nobody to ask.", _REMEDIES["wandb"])


def start_tracker(
    accelerator: Accelerator, section: TrainSection, settings: Mapping[str, Any], run: str, step: int | None
) -> None:
    """Start the recipe's tracker, on the main process only; the accelerator's folder keeps the id of its run.

    Args:
        accelerator: of the training.
        section: names the tracker and the project.
        settings: to show beside the curves.
        run: name of the run.
        step: that the training goes on from, in the same run of the tracker; None when it begins.

    Raises:
        UserError: when it does not start; the message is the tracker's own.
    """
    name = section.tracker
    if name == "none":
        return
    folder = Path(accelerator.project_dir)
    note = _note(folder / RUN_ID) if step is not None else {}
    run_id = str(note.get(name) or secrets.token_hex(4))
    options = {name: _options(name, folder, run, run_id, name in note, step)}
    try:
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        accelerator.init_trackers(section.project, config=flat(settings), init_kwargs=options)
        if accelerator.is_main_process and name in _WITH_ID:
            write_json(folder / RUN_ID, {**note, name: run_id})
    except Exception as error:  # every tracker has its own kinds
        accelerator.trackers.clear()  # there is nothing to finish
        raise UserError(f"The tracker {name} did not start: {error}", _REMEDIES[name]) from error


def _options(name: str, folder: Path, run: str, run_id: str, again: bool, step: int | None) -> dict[str, Any]:
    """What a tracker is started with; what its user says by environment variables comes first.

    `again` says whether a run with this id was begun before, `step` where the training goes on from.
    """
    if name == "tensorboard":  # hides what was logged after the checkpoint that the training goes on from
        return {} if step is None else {"purge_step": step + 1}
    if name == "trackio":  # which knows runs by their names
        return {"name": f"{run}-{run_id}", **({"resume": "allow"} if again else {})}
    options = {"dir": str(folder), "name": run, "id": run_id, **({"resume": "allow"} if again else {})}
    return {key: value for key, value in options.items() if _WANDB_SAYS[key] not in os.environ}


def _note(file: Path) -> dict[str, Any]:
    try:
        return dict(read_json(file))
    except (UserError, TypeError, ValueError):
        return {}


def finish_trackers(accelerator: Accelerator) -> None:
    """Let trackers write what they still hold, however the run ended."""
    if accelerator.is_main_process:
        for tracker in accelerator.trackers:
            tracker.finish()


def log_table(
    accelerator: Accelerator, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
) -> None:
    """Log a table on the main process: wandb has tables, the others get one in Markdown."""
    if not accelerator.is_main_process or not rows:
        return
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.log_table(name, list(columns), [list(row) for row in rows], step=step)
        else:
            _log_text(tracker, name, _markdown(columns, rows), step)


def memory(device: torch.device) -> dict[str, float]:
    """Memory in GB (1e9 bytes) by logged name: resident in this process, and on a GPU the most allocated so far."""
    values = {"memory/rss_gigabytes": psutil.Process().memory_info().rss / 1e9}
    if device.type == "cuda":
        values["memory/cuda_peak_gigabytes"] = torch.cuda.max_memory_allocated(device) / 1e9
    return values


def alert(accelerator: Accelerator, title: str, text: str, step: int) -> None:
    """Have the tracker tell people: wandb and trackio send alerts, tensorboard shows a text."""
    if not accelerator.is_main_process:
        return
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            tracker.tracker.alert(title, text, level="WARN")
        elif tracker.name == "trackio":
            tracker.tracker.alert(title, text, step=step)
        else:
            _log_text(tracker, "alerts", f"**{title}** {text}", step)


def _log_text(tracker: Any, name: str, text: str, step: int) -> None:
    if tracker.name == "trackio":
        trackio = importlib.import_module("trackio")
        tracker.tracker.log({name: trackio.Markdown(text)}, step=step)
    else:
        tracker.tracker.add_text(name, text, step)
        tracker.tracker.flush()


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table.

    >>> print(_markdown(["a", "b"], [["x|y", 1]]))
    | a | b |
    | --- | --- |
    | x\\|y | 1 |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def link_report(
    section: TrainSection, folder: Path, run: str, report: Path, summary: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Add the report to the run of the tracker that watched the training, when there is one.

    wandb gets the figures as the run's summary and the report as an artifact, the others its text. A tracker
    that fails here is said, and no more: the report itself is there.
    """
    name, note = section.tracker, _note(folder / RUN_ID)
    if name == "none" or (name in _WITH_ID and name not in note):
        return
    figures = {f"report/{key}": value for key, value in flat(summary).items() if isinstance(value, int | float)}
    options = _options(name, folder.resolve(), run, str(note.get(name)), True, None)
    text = (report / "report.md").read_text(encoding="utf-8")
    try:
        if name == "wandb":
            _link_in_wandb(section.project, options, report, figures)
        elif name == "trackio":
            trackio = importlib.import_module("trackio")
            session = trackio.init(project=section.project, **options)
            session.log({**figures, "report": trackio.Markdown(text)})
            session.finish()
        else:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            with tensorboard.SummaryWriter(str(folder.resolve() / section.project)) as writer:
                for key, value in figures.items():
                    writer.add_scalar(key, value)
                writer.add_text("report", text)
    except Exception as error:  # every tracker has its own kinds
        say(f"The report is not linked in {name}: {error}")


def _link_in_wandb(project: str, options: Mapping[str, Any], report: Path, figures: Mapping[str, Any]) -> None:
    wandb = importlib.import_module("wandb")
    session = wandb.init(project=project, **options)
    session.summary.update(dict(figures))
    artifact = wandb.Artifact(f"report-{session.id}", type="report")
    artifact.add_dir(str(report))
    session.log_artifact(artifact)
    session.finish()


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Settings as every tracker takes them: one level, with numbers, truths and texts only.

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


def _wandb_can_start(wandb: Any) -> bool:
    """Whether `wandb.init` will neither fail for want of an account nor wait for someone to type."""
    settings = wandb.setup().settings
    if settings.mode in ("offline", "disabled", "dryrun") or sys.stdin.isatty():
        return True
    if "prompt" not in inspect.signature(wandb.login).parameters:  # versions before it say so when they start
        return True
    return bool(wandb.login(prompt=False))
