"""Reader for untrusted checkpoints: it reads no pickles, and checks sizes and paths in the files before using them.

A checkpoint is a folder of config.json and safetensors files, sharded or not. Names and shapes come from the headers;
tensors are loaded lazily.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import LM_HEAD, MASK_HIDDEN
from headstart.hub.engines.base import NOTE, Note
from headstart.support.files import no_folder, read_json

CONFIG = "config.json"
WRITE, CORRECT = f"Write it into {CONFIG}.", f"Correct it in {CONFIG}."
FETCH, ANOTHER = f"Fetch the checkpoint again, or correct its {CONFIG}.", "Take another checkpoint."
AUX_IDS = "eagle_aux_hidden_state_layer_ids"
"""Key of the aux layers of EAGLE-3 heads, see `Checkpoint.aux_ids`."""
_INDEX = "*.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_PREFIXES = ("model.", "medusa_head.", "medusa_heads.")
_RENAMED = {"midlayer.": "layers.0.", "fusion_fc.": "fc.", "embed_in.": "embed_tokens."}
_FIRST_LM_HEAD = "lm_heads.0.weight"
_OLD_MEDUSA = re.compile(r"(\d+)\.(\d+)\.(linear\.)?(weight|bias)")

_AGAIN = "Fetch the checkpoint again."


@dataclass(frozen=True)
class StoredTensor:
    """A lazy tensor, described by the header of its file; the dtype is safetensors' name."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """Config and tensors of a folder; see `open_checkpoint`."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config, with the nested settings of speculators lifted to the top."""
        nested = self.config.get("transformer_layer_config")
        return {**nested, **self.config} if isinstance(nested, Mapping) else dict(self.config)

    @cached_property
    def names(self) -> dict[str, str]:
        """Names in the files by published name (see `headstart.heads.exchange.published`)."""
        names = {_published_name(name): name for name in self.tensors}
        if self.config.get("original_lm_head") is True and LM_HEAD not in names and _FIRST_LM_HEAD in names:
            names[LM_HEAD] = names.pop(_FIRST_LM_HEAD)  # Medusa heads that share the target's LM head
        return names

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by published name."""
        shapes = {name: self.tensors[in_file].shape for name, in_file in self.names.items()}
        if len(mask := shapes.get(MASK_HIDDEN, ())) == 2:  # vLLM flattens it, and some files lack a dimension
            shapes[MASK_HIDDEN] = (1, *mask)
        return shapes

    @property
    def is_speculators(self) -> bool:
        """Whether the config is one of the speculators library."""
        return "speculators_model_type" in self.config

    @property
    def architectures(self) -> set[str]:
        given = self.config.get("architectures")
        return set(map(str, given if isinstance(given, list) else []))

    @property
    def eagle_config(self) -> Mapping[str, Any]:
        """The section of the config that SGLang reads."""
        section = self.config.get("eagle_config")
        return section if isinstance(section, Mapping) else {}

    @property
    def aux_ids(self) -> tuple[Any, Any]:
        """The aux layers of EAGLE-3 heads as written for vLLM and llama.cpp, and one less each for SGLang."""
        return self.config.get(AUX_IDS), self.eagle_config.get(AUX_IDS)

    @property
    def note(self) -> Note | None:
        """headstart's note; None if headstart did not write the folder."""
        return Note.of(self.config.get(NOTE))

    def read(self, name: str) -> Tensor:
        """Load a tensor by published name, on the CPU. Raises UserError if its file is damaged."""
        tensor = self.tensors[self.names[name]].load()
        return tensor[None] if name == MASK_HIDDEN and tensor.ndim == 2 else tensor


def checkpoint_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Checkpoint:
    """Build a checkpoint of files that are not written yet."""
    stored = {
        name: StoredTensor("F32" if tensor.is_floating_point() else "I64", tuple(tensor.shape), partial(tensor.cpu))
        for name, tensor in tensors.items()
    }
    return Checkpoint(Path(), config, stored)


def _published_name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, published in _RENAMED.items():
        if name.startswith(theirs):
            name = published + name.removeprefix(theirs)
    if old_name := _OLD_MEDUSA.fullmatch(name):
        head, block, linear, kind = old_name.groups()
        return f"blocks.{head}.layers.{block}.{kind}" if linear else f"lm_heads.{head}.{kind}"
    return name


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder and read its headers. Raises UserError for missing, pickled or damaged files, or files outside."""
    if not folder.is_dir():
        raise no_folder(folder, "Give a folder with config.json and safetensors files.")
    config = read_json(folder / CONFIG, _AGAIN)
    if not isinstance(config, dict):
        raise UserError(f"{folder / CONFIG} holds no settings.", _AGAIN)
    tensors: dict[str, StoredTensor] = {}
    for file in _files(folder):
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118  # not a mapping
                if name in tensors:
                    raise UserError(f"{folder} has the tensor {name!r} twice.", "Keep one set of safetensors files.")
                header = handle.get_slice(name)
                load = partial(_loaded, file, name)
                tensors[name] = StoredTensor(header.get_dtype(), tuple(header.get_shape()), load)
    return Checkpoint(folder, config, tensors)


def whole(value: Any, name: str, minimum: int = 1, maximum: int = 1 << 24) -> int:
    """Check an integer of a config. Raises UserError for other types or implausible values."""
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise _wrong_setting(value, name, f"a whole number from {minimum} to {maximum}")
    return value


def number(value: Any, name: str, limit: float = 1) -> float:
    """Check a number of a config. Raises UserError for other types, below 0, or from `limit` on."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < limit:
        raise _wrong_setting(value, name, f"a number from 0 to below {limit:g}")
    return float(value)


def _wrong_setting(value: Any, name: str, expected: str) -> UserError:
    return UserError(f"The checkpoint's {name} is {value!r}, not {expected}.", f"Correct {name} in its {CONFIG}.")


def _files(folder: Path) -> list[Path]:
    """List the safetensors files in a folder's index, or all if it has none."""
    if indices := sorted(folder.glob(_INDEX)):
        index = read_json(indices[0], _AGAIN)
        named = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(named, dict) or not named:
            raise UserError(f"{indices[0]} names no files.", _AGAIN)
        names = sorted({str(value) for value in named.values()})
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(
                    f"{indices[0]} names the file {name!r}, which is not a safetensors file beside it.",
                    "Do not use this checkpoint: its index points outside its folder.",
                )
            if not (folder / name).is_file():
                raise UserError(f"{folder} lacks {name}, which its index names.", _AGAIN)
        return [folder / name for name in names]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickled := sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern)):
        raise UserError(
            f"{folder} stores its weights in {pickled[0]}, a pickled file, which can run arbitrary code when loaded.",
            "Take a revision with safetensors files, or convert it: https://huggingface.co/spaces/safetensors/convert",
        )
    raise UserError(f"{folder} has no safetensors files.", "Give a folder of draft heads.")


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; the library checks the header against the file size first."""
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        raise UserError(f"{file} is cut short or damaged ({error}).", "Fetch it again.") from None


def _loaded(file: Path, name: str) -> Tensor:
    with opened(file) as handle:
        tensor: Tensor = handle.get_tensor(name)
    return tensor


def absolute_ids(offsets_D: Tensor) -> Tensor:
    """Convert offsets to token ids of the target: draft token i is token i + offset i.

    >>> absolute_ids(torch.tensor([0, 0, 5])).tolist()
    [0, 1, 7]
    """
    return offsets_D.to(torch.int64) + torch.arange(len(offsets_D))


def offsets(ids_D: Tensor) -> Tensor:
    """Invert `absolute_ids`."""
    return ids_D.to(torch.int64) - torch.arange(len(ids_D))
