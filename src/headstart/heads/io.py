"""Heads on disk: a folder with config.json (family and settings) and heads.safetensors (parameters, draft vocabulary).

A folder is written whole or not at all. The frozen weights of the target are never in it; `DraftHead.bind` takes them
from the target again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.errors import UserError, nearest
from headstart.heads.base import DraftHead, families, family
from headstart.support.files import read_json, write_atomic, write_json
from headstart.target.frozen import FrozenModel

CONFIG = "config.json"
WEIGHTS = "heads.safetensors"
RUN_RECIPE = "recipe.yaml"
"""What tells the folder of a run from a folder of heads."""
RUN_HEADS = "heads"
"""Where a run keeps the heads that it came to."""


def heads_folder(path: Path) -> Path:
    """Where the heads lie that a user means by a folder: a folder of heads, or that of a run.

    Raises:
        UserError: a run that has not come to its heads yet.
    """
    if (path / CONFIG).is_file() or not (path / RUN_RECIPE).is_file():
        return path
    if not (path / RUN_HEADS / CONFIG).is_file():
        raise UserError(
            f"The run in {path} has no heads yet.",
            f"Finish it: headstart run {path / RUN_RECIPE} --run-dir {path}",
        )
    return path / RUN_HEADS


def save_heads(heads: DraftHead, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write config.json and heads.safetensors to `folder`, replacing what is there in one step.

    Args:
        heads: to write.
        folder: is made.
        state: their weights, where the heads themselves hold a part of each only; `heads.state_dict()` by default.
    """

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        write_json(partial / CONFIG, settings_of(heads))
        write_weights(heads, partial / WEIGHTS, state)

    write_atomic(folder, write)


def load_heads(folder: Path, target: FrozenModel | None = None, device: torch.device | str | None = None) -> DraftHead:
    """Read heads that `save_heads` wrote, or that were exported.

    Args:
        folder: with config.json and heads.safetensors, or the folder of a run.
        target: binds the heads to it, when they read frozen weights of it.
        device: where the heads go; the target's device by default, the CPU without a target.

    Returns:
        The heads, in the dtype they were saved in (float32 after training).

    Raises:
        UserError: a file is missing or cut short, the settings are not of this version, or the heads do not fit the
            target.
    """
    folder = heads_folder(folder)
    config = read_json(folder / CONFIG)
    exported = isinstance(config, dict) and "format" in config
    return build_heads(config.get("heads") if exported else config, folder / WEIGHTS, target, device)


def settings_of(heads: DraftHead) -> dict[str, Any]:
    """The settings that `build_heads` takes: the family and its config."""
    return {**heads.config.model_dump(mode="json"), "family": heads.family}


def write_weights(heads: DraftHead, path: Path, state: Mapping[str, Tensor] | None = None) -> None:
    """Write everything the heads save (parameters and draft vocabulary) to one safetensors file; see `save_heads`."""
    given = heads.state_dict() if state is None else state
    complete = {name: tensor.detach().cpu().contiguous() for name, tensor in given.items()}
    try:
        save_file(complete, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its text is all that it says of the system's reason
        if reason := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(reason[1]), os.strerror(int(reason[1])), str(path)) from None
        raise


def build_heads(
    settings: Any, weights: Path, target: FrozenModel | None = None, device: torch.device | str | None = None
) -> DraftHead:
    """Heads from their settings and their weights file; see `load_heads`.

    Raises:
        UserError: as `load_heads`.
    """
    state = _read_weights(weights)
    if not isinstance(settings, dict) or "family" not in settings:
        raise UserError(f"{weights.parent / CONFIG} names no head family.", "Give a folder that headstart wrote.")
    cls = family(str(settings["family"]))
    try:
        config = cls.Config.model_validate(settings)
    except ValidationError as error:
        raise _misfit(cls, settings, error, weights.parent) from None
    if target is not None and (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise UserError(
            f"The heads in {weights.parent} read states of size {config.hidden_size} over {config.vocab_size} tokens; "
            f"{target.name} has {target.hidden_size} over {target.vocab_size}.",
            "Load them with the target they were trained on.",
        )
    heads = cls(config)
    _check_state(heads.state_dict(), state, weights)
    saved = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    where = device if device is not None else target.device if target is not None else "cpu"
    heads.to(device=where, dtype=saved)
    heads.load_state_dict(state)
    if target is not None:
        heads.bind(target)
    return heads


def _misfit(cls: type[DraftHead], settings: dict[str, Any], error: ValidationError, folder: Path) -> UserError:
    """Settings that their family does not take: those of another family, or of a newer version."""
    for name in families():
        try:
            family(name).Config.model_validate({**settings, "family": name})
        except ValidationError:
            continue
        return UserError(
            f"{folder / CONFIG} calls the heads {cls.family}, and their settings are those of {name} heads.",
            'Correct "family" there, or export or fetch the heads again.',
        )
    first = error.errors()[0]
    setting = ".".join(str(part) for part in first["loc"])
    fields = cls.Config.model_fields
    remedy = f"Correct it in {CONFIG}." if setting in fields else nearest(setting, fields)
    return UserError(
        f"{cls.family} heads in {folder}: setting {setting!r}: {first['msg'].lower()}.",
        f"{remedy} If a newer headstart wrote them: pip install --upgrade headstart",
    )


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} does not exist.", "Give a folder of trained heads, or fetch it again.")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise UserError(f"{path} is cut short or damaged ({error}).", "Export or fetch the heads again.") from None


def _check_state(expected: dict[str, Tensor], state: dict[str, Tensor], path: Path) -> None:
    """Refuse weights whose names or shapes are not those of the config."""
    missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    misshapen = [name for name in expected if name in state and expected[name].shape != state[name].shape]
    for names, problem in ((missing, "lacks"), (unknown, "has an unknown"), (misshapen, "has another shape of")):
        if names:
            raise UserError(
                f"{path} {problem} tensor {names[0]!r}; it does not belong to the {CONFIG} beside it.",
                "Export or fetch the heads again.",
            )
