"""Heads on disk: a folder with config.json (family and settings) and heads.safetensors (parameters, draft vocabulary).

A folder is written atomically. It never holds frozen weights of the target; `DraftHead.bind` restores them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.base import DraftHead, family, parse_heads
from headstart.model.frozen import FrozenModel
from headstart.model.identity import dtype_name
from headstart.model.loading import DTYPES
from headstart.support.files import read_json, write_atomic, write_json, write_tensors

CONFIG = "config.json"
WEIGHTS = "heads.safetensors"
AGAIN = "Export or fetch the heads again."
_VERSION = "version"
"""Key in the safetensors header."""
RUN_RECIPE, _RUN_HEADS = "recipe.yaml", "heads"
"""File that marks the folder of a run, and its subfolder of finished heads."""


def heads_folder(path: Path) -> Path:
    """Resolve a folder to heads: itself, or the heads of a finished run."""
    if (path / CONFIG).is_file() or not (path / RUN_RECIPE).is_file():
        return path
    if not (path / _RUN_HEADS / CONFIG).is_file():
        raise UserError(
            f"The run in {path} has no heads yet.", f"Finish it: headstart run {path / RUN_RECIPE} --run-dir {path}"
        )
    return path / _RUN_HEADS


def save_heads(heads: DraftHead, folder: Path) -> None:
    """Write config.json and heads.safetensors to `folder`, replacing it atomically."""

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        write_json(partial / CONFIG, heads.config.model_dump(mode="json"))
        write_weights(heads, partial / WEIGHTS)

    write_atomic(folder, write)


def load_heads(folder: Path, target: FrozenModel | None = None, device: torch.device | str | None = None) -> DraftHead:
    """Load saved or exported heads from their folder or their run's, in their saved dtype, by default onto the target's
    device, and bind them to the target if given. Raises a UserError for damaged files, unknown settings, and heads that
    do not fit the target."""
    folder = heads_folder(folder)
    config = read_json(folder / CONFIG, AGAIN)
    return build_heads(config.get("heads") if is_exported(config) else config, folder / WEIGHTS, target, device)


def is_exported(config: Any) -> bool:
    """Whether a config.json is an export's (which names the target) instead of training's."""
    return isinstance(config, dict) and "format" in config


def write_weights(heads: DraftHead, path: Path) -> None:
    """Write parameters and draft vocabulary to one safetensors file, with their version in the header."""
    tensors = heads.state_dict()
    write_tensors(path, tensors, {"format": "pt", _VERSION: _version(tensors)})


def version_of(folder: Path) -> str:
    """Read the version of saved heads, a hash of their weights, from the file's header; empty if it has none."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return str((file.metadata() or {}).get(_VERSION, ""))


def _version(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def build_heads(
    settings: Any,
    weights: Path,
    target: FrozenModel | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> DraftHead:
    """Build heads from settings and a weights file, by default in the saved dtype; see `load_heads`."""
    folder = weights.parent
    state = _read_weights(weights)
    if not isinstance(settings, dict) or "family" not in settings:
        raise UserError(f"{folder / CONFIG} names no head family.", "Give a folder that headstart wrote.")
    try:
        config = parse_heads(settings)
        with torch.device("meta"):  # allocate nothing until the file's shapes are checked
            heads = family(config.family)(config)
    except UserError as error:
        newer = "If a newer headstart wrote the heads, upgrade it from where you have it."
        raise UserError(f"{folder / CONFIG}: {error.problem}", f"{error.remedy} {newer}") from None
    if target is not None and (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
        raise UserError(
            f"The heads in {folder} read states of size {config.hidden_size} over {config.vocab_size} tokens; "
            f"{target.name} has {target.hidden_size} over {target.vocab_size}.",
            "Load them with the target they were trained on.",
        )
    if target is not None and not all(layer <= target.num_layers for layer in heads.aux_layers):
        raise UserError(
            f"{folder / CONFIG}: aux_layers are {list(heads.aux_layers)}, and {target.name} has {target.num_layers} "
            "layers.",
            "Load them with the target they were trained on.",
        )
    _check_tensors(heads, state, weights)
    saved = next((tensor.dtype for tensor in state.values() if tensor.is_floating_point()), torch.float32)
    where = device if device is not None else target.device if target is not None else "cpu"
    heads.to(dtype=dtype or saved).to_empty(device=where)
    for buffer in heads.buffers():  # unsaved buffers are zero until `bind`
        buffer.zero_()
    heads.load_state_dict(state)
    if infinite := next((name for name, weight in heads.named_parameters() if not weight.isfinite().all()), None):
        raise UserError(
            f"{weights}: {infinite} holds numbers that are not finite, or too large for {dtype_name(dtype or saved)}.",
            f"{AGAIN} In float16, which ends at 65504, use bfloat16.",
        )
    if target is not None:
        heads.bind(target)
    return heads


def _check_tensors(heads: DraftHead, state: Mapping[str, Tensor], weights: Path) -> None:
    """Check a file's names, shapes, dtypes and draft vocabulary against the heads."""
    expected, config = heads.state_dict(), heads.config
    for name in sorted(expected.keys() | state.keys()):
        given, needed = (_describe(part[name]) if name in part else "missing" for part in (state, expected))
        if given != needed:
            raise UserError(
                f"{weights} does not belong to the {CONFIG} beside it: {name} is {given} in the file and {needed} by "
                "the settings.",
                AGAIN,
            )
    ids_D = state["draft_to_target_D"]
    if not len(ids_D) or ids_D[0] < 0 or ids_D[-1] >= config.vocab_size or (ids_D.diff() <= 0).any():
        raise UserError(
            f"{weights}: draft_to_target_D does not name {config.draft_width} different tokens of a vocabulary of "
            f"{config.vocab_size}, rising.",
            AGAIN,
        )


def _describe(tensor: Tensor) -> str:
    kind = "floats" if tensor.dtype in DTYPES.values() else dtype_name(tensor.dtype)
    return f"{list(tensor.shape)} {kind}"


def _read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"{path} does not exist.", "Give a folder of trained heads, or fetch it again.")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise UserError(f"{path} is cut short or damaged ({error}).", AGAIN) from None
