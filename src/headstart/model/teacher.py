"""The teacher: the parts of a target that head training needs, stored beside its hidden states.

Heads read embeddings, LM head, final norm and, for a warm start, the last layers: about 6 of 140 GB of a 70B model.
Training on stored states without the target is bit-exact.

    teacher-<fingerprint>-<dtype>/
        base.safetensors          embeddings, LM head, final norms
        layer-<n>.safetensors     linear maps, biases and norms of a layer, without experts
        teacher.json              properties of the target, sizes and hashes of the files; written last

Layers are added on demand, and all stores of a folder share one teacher.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from headstart.errors import UserError
from headstart.model.frozen import FrozenModel
from headstart.model.identity import Identity, unsharded
from headstart.model.model import Target
from headstart.model.outline import Outline
from headstart.support.files import file_hash, need_disk, read_json, write_atomic, write_json, write_tensors

MANIFEST = "teacher.json"
_BASE = "base.safetensors"
_FORMAT = 2
_AGAIN = "Write it again where the target is: headstart data build RECIPE computes nothing else anew."


class TeacherModel(FrozenModel):
    """A target without most of its layers: heads can be created, trained and exported, not decoded with.

    The model is of the target's class, with missing parameters on the `meta` device. `manifest` is the teacher.json.
    """

    def __init__(self, model: Any, manifest: Mapping[str, Any]) -> None:
        super().__init__(model, None, manifest["spec"])
        self.dtype = getattr(torch, manifest["dtype"])
        self._layers = [number for number in range(self.num_layers) if _layer_file(number) in manifest["files"]]
        self.end_tokens = frozenset(manifest["end_tokens"])
        self.settings = manifest["settings"]
        self.vocabulary = manifest["vocabulary"]
        self._manifest = manifest

    def starts(self, layers: int) -> bool:
        """Whether it has this many of the last layers, for heads that start from them."""
        return all(layer in self._layers for layer in range(max(0, self.num_layers - layers), self.num_layers))

    @cached_property
    def spare_token(self) -> int | None:
        token: int | None = self._manifest["spare_token"]
        return token

    @property
    def name(self) -> str:
        return str(self._manifest["name"])

    @property
    def kv_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        return [(tuple(keys), tuple(values)) for keys, values in self._manifest["kv_shapes"]]

    def identity(self) -> Identity:
        return Identity(self.spec, self.name, self._manifest["fingerprint"])

    def sketch(self) -> dict[str, Any]:
        return dict(self._manifest["sketch"])


def teacher_folder(states: Path, fingerprint: str, dtype: str) -> Path:
    """Return the path of a target's teacher in the folder of its hidden states, which have this dtype."""
    return states / f"teacher-{fingerprint[:16]}-{dtype}"


def save_teacher(states: Path, target: Target | Outline, layers: int = 1, revision: str | None = None) -> Path | None:
    """Save the teacher of a target (loaded, or read from its files) with this many last layers; skip intact files.

    Returns:
        The teacher's folder; None for a target that training must load: quantised, with an adapter, or of a class
        outside transformers.

    Raises:
        UserError: too little free disk.
    """
    if not _can_teach(target):
        return None
    folder = teacher_folder(states, target.identity().fingerprint, target.dtype_name)
    is_intact = folder.is_dir() and teacher_problem(folder, thorough=True) is None
    files = _manifest(folder)["files"] if is_intact else {}
    missing = {file: tensors for file, tensors in _tensors_by_file(target, layers).items() if file not in files}
    if not missing:
        return folder
    size = sum(tensor.numel() * tensor.itemsize for tensors in missing.values() for tensor in tensors.values())
    need_disk(states, size, "Keeping the teacher")
    for file, tensors in missing.items():
        write_atomic(folder / file, partial(write_tensors, tensors=_read(target, tensors)))
        files[file] = {"bytes": (folder / file).stat().st_size, "sha256": file_hash(folder / file)}
    write_json(folder / MANIFEST, {**_facts(target, revision), "sketch": target.sketch(), "files": files})
    return folder


def teach(target: Target | Outline, layers: int = 1, device: torch.device | None = None) -> TeacherModel | None:
    """Build a teacher in memory, with this many of its last layers, on the target's device by default.

    If the target is not loaded, its weights are read from its files. If it is sharded, they are gathered: call this on
    all ranks. Returns None in the same cases as `save_teacher`.
    """
    if isinstance(target, Outline) and not _can_teach(target):
        return None
    files = _tensors_by_file(target, layers)
    model, facts = target.model, _facts(target, None)
    # The sharded model reports only the key heads of this rank.
    shapes = Outline(_empty(type(model), facts["config"]), None, target.spec, target.dtype).kv_shapes
    manifest = {**facts, "kv_shapes": shapes, "files": dict.fromkeys(files)}
    if isinstance(target, Outline):
        manifest["sketch"] = target.sketch()
    tensors = {name: tensor for kept in files.values() for name, tensor in _read(target, kept).items()}
    return _assembled(type(model), manifest, tensors, device or target.device)


def _read(target: Target | Outline, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return complete parameters: unsharded, or read from the files if the target is not loaded."""
    if isinstance(target, Outline):
        return {name: target.read(name) for name in tensors}
    return {name: unsharded(tensor).detach() for name, tensor in tensors.items()}


def _can_teach(target: FrozenModel) -> bool:
    """Whether `load_teacher` can rebuild the target from its config: a transformers class with plain weights, without
    adapter or quantised layers."""
    model = target.model
    if target.origin is not None or getattr(transformers, type(model).__name__, None) is not type(model):
        return False
    if isinstance(target, Outline):  # some classes load weights in float32
        kept = (getattr(model, name, None) for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"))
        if target.files is None or any(kept):
            return False
    plain = (type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() for weight in model.parameters())
    if getattr(model.config, "quantization_config", None) is not None or not all(plain):
        return False
    try:
        empty = _empty(type(model), _config_of(model))
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):  # an incomplete config
        return False
    return _shapes(empty) == _shapes(model)


def load_teacher(folder: Path, device: torch.device) -> TeacherModel:
    """Read a teacher; raises UserError if it is missing, truncated or damaged."""
    manifest = _manifest(folder)
    if problem := teacher_problem(folder, thorough=True):
        raise UserError(problem, f"Delete it, if it is there. {_AGAIN}")
    name, version = manifest["class"], manifest["transformers"]
    cls = getattr(transformers, name, None)
    if cls is None:
        raise UserError(
            f"This transformers ({transformers.__version__}) has no {name}, the class of {manifest['name']}.",
            f"Install the version that the teacher was written with: pip install transformers=={version}",
        )
    tensors = {name: tensor for file in manifest["files"] for name, tensor in load_file(folder / file).items()}
    return _assembled(cls, manifest, tensors, device)


def _assembled(
    cls: Any, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device
) -> TeacherModel:
    model = _empty(cls, manifest["config"])
    for name, tensor in tensors.items():
        parameter = nn.Parameter(tensor.to(device), requires_grad=False)
        for alias in (name, *manifest["tied"].get(name, ())):
            path, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(path), leaf, parameter)
    return TeacherModel(model.eval().requires_grad_(False), manifest)


def teacher_problem(folder: Path, thorough: bool = False) -> str | None:
    """Check a teacher by file sizes, and by hashes if `thorough`; return None if it is intact or missing."""
    if not folder.is_dir():
        return None
    try:
        manifest = _manifest(folder)
    except UserError as error:
        return error.problem
    for file, known in manifest["files"].items():
        path = folder / file
        sized = path.is_file() and path.stat().st_size == known["bytes"]
        if not sized or (thorough and file_hash(path) != known["sha256"]):
            return f"{path} is missing, cut short or damaged."
    return None


def _manifest(folder: Path) -> dict[str, Any]:
    """Read a teacher's manifest; raises UserError if it is missing or of another format."""
    try:
        manifest = read_json(folder / MANIFEST)
    except UserError:
        raise UserError(
            f"{folder} holds no complete teacher: its {MANIFEST} is missing or cut short.", _AGAIN
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise UserError(f"{folder} is a teacher of another format.", _AGAIN)
    return manifest


def _facts(target: Target | Outline, revision: str | None) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "name": target.name,
        "spec": target.spec,
        "revision": revision,
        "fingerprint": target.identity().fingerprint,
        "settings": target.settings,
        "vocabulary": target.vocabulary,
        "dtype": target.dtype_name,
        "end_tokens": sorted(target.end_tokens),
        "spare_token": target.spare_token,
        "kv_shapes": target.kv_shapes,
        "class": type(target.model).__name__,
        "transformers": transformers.__version__,
        "config": _config_of(target.model),
        "tied": {first: others for first, *others in _names(target.model).values() if others},
    }


def _config_of(model: Any) -> dict[str, Any]:
    """Return the config as JSON, with the defaults, which differ between versions."""
    return dict(json.loads(model.config.to_json_string(use_diff=False)))


def _empty(cls: Any, config: Mapping[str, Any]) -> Any:
    with torch.device("meta"):
        return cls(cls.config_class.from_dict(dict(config)))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model.named_parameters(remove_duplicate=False)}


def _names(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _tensors_by_file(target: Target | Outline, layers: int) -> dict[str, dict[str, Tensor]]:
    """Return tensors by file and name, tied ones once: embeddings, LM head and norms outside the layers, and the last
    `layers` layers."""
    names = _names(target.model)

    def by_name(parameters: Iterable[Tensor]) -> dict[str, Tensor]:
        return {names[id(parameter)][0]: parameter for parameter in parameters}

    def own(modules: Iterable[nn.Module]) -> list[Tensor]:
        return [parameter for module in modules for parameter in module.parameters(recurse=False)]

    outside = own([target.model.get_input_embeddings(), target.model.get_output_embeddings()])
    for child in target.decoder.children():
        if child is not target.layers:
            outside += [parameter for parameter in child.parameters() if parameter.ndim == 1]
    files = {_BASE: by_name(outside)}
    for number in range(max(0, target.num_layers - layers), target.num_layers):
        modules = (module for path, module in target.layers[number].named_modules() if path.count(".") <= 1)
        files[_layer_file(number)] = by_name(parameter for parameter in own(modules) if parameter.ndim <= 2)
    return files


def _layer_file(number: int) -> str:
    return f"layer-{number + 1:03d}.safetensors"
