"""Read the multi-token-prediction (MTP) modules of a target's checkpoint, which transformers skips.

A module has a norm of the token's embedding, a norm of the state before it, a linear map of both, one decoder layer of
the target's kind, and a final norm. Heads run it (see `headstart.heads.parts.native_module`). Published arrangements:

    DeepSeek-V3, GLM-4.5   model.layers.{L + k}.  enorm, hnorm, eh_proj, shared_head.norm and the layer; embedding first
    Qwen3-Next, Qwen3.5    mtp.                   pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm, layers.{k}; the
                                                  same order
    MiMo                   model.mtp_layers.{k}.  token_layernorm, hidden_layernorm, input_proj, final_layernorm and the
                                                  layer; the state first, read before the target's final norm

"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from headstart.errors import UserError
from headstart.model.frozen import FrozenModel
from headstart.model.loading import loadable_folder, silent, tensor_files
from headstart.replay.patch import FINAL

_VOCABULARY = 8
"""Vocabulary size of a one-layer model, with unused embeddings and LM head."""


@dataclass(frozen=True)
class Arrangement:
    """Naming scheme of a checkpoint's modules.

    Attributes:
        name: stored with heads.
        found_by: regex of the joining map's name; its group, if any, is the module's number.
        parts: names of embedding norm, state norm, joining map and last norm.
        layer: prefix of the decoder layer within a module.
        once: whether modules share everything but their layers.
        state_first: whether the input of the joining map is the state, then the embedding.
        final: whether the state is the target's after its final norm.
    """

    name: str
    found_by: str
    parts: tuple[str, str, str, str]
    layer: str = ""
    once: bool = False
    state_first: bool = False
    final: bool = True


ARRANGEMENTS = (
    Arrangement(
        "deepseek", r"^(?:.*\.)?layers\.(\d+)\.eh_proj\.weight$", ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    ),
    Arrangement(
        "qwen",
        r"^(?:.*\.)?mtp\.fc\.weight$",
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        "layers.{number}.",
        once=True,
    ),
    Arrangement(
        "mimo",
        r"^(?:.*\.)?mtp_layers\.(\d+)\.input_proj\.weight$",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        state_first=True,
        final=False,
    ),
)
_SHARED = ("shared_head.head.weight", "embed_tokens.weight")
"""Names of a module's copies of LM head and embeddings."""


@dataclass(frozen=True)
class ShippedFiles:
    """The modules in a target's checkpoint.

    Attributes:
        folder: folder or hub id of the checkpoint.
        file_of: file of each tensor.
        joins: names of the joining maps, one per module.
    """

    target: FrozenModel
    folder: str
    file_of: Mapping[str, str]
    arrangement: Arrangement
    joins: Sequence[str]

    @property
    def state_layer(self) -> int:
        """Layer of the target with the states that a module reads."""
        return FINAL if self.arrangement.final else self.target.num_layers

    def prefix(self, number: int) -> str:
        """Return the name prefix of a module's parts."""
        return self.joins[number].removesuffix(f"{self.arrangement.parts[2]}.weight")

    def layer_prefix(self, number: int) -> str:
        """Return the name prefix of a module's layer."""
        return self.prefix(number) + self.arrangement.layer.format(number=number)

    def layer_config(self, number: int) -> Any:
        """Return the config of a one-layer model for a module."""
        sparse = any(name.startswith(f"{self.layer_prefix(number)}mlp.experts.") for name in self.file_of)
        return _config(self.target.config, sparse)

    def parts(self, number: int) -> list[Tensor]:
        """Read a module's embedding norm, state norm, joining map and last norm."""
        names = [f"{self.prefix(number)}{part}.weight" for part in self.arrangement.parts]
        tensors = self._read(names)
        return [tensors[name] for name in names]

    def layer(self, number: int) -> dict[str, Tensor]:
        """Read the tensors of a module's layer, by name within the layer."""
        below, others = self.layer_prefix(number), (*_SHARED, *(f"{part}.weight" for part in self.arrangement.parts))
        names = [name for name in self.file_of if name.startswith(below) and name.removeprefix(below) not in others]
        return {name.removeprefix(below): tensor for name, tensor in self._read(names).items()}

    def other_weights(self) -> list[Tensor | None]:
        """Read the modules' LM head and embeddings, each None if equal to the target's."""
        shared: dict[str, Tensor] = {}
        for number in range(len(self.joins)):
            names = {f"{self.layer_prefix(number)}{name}": name for name in _SHARED}
            tensors = self._read([name for name in names if name in self.file_of])
            shared |= {names[name]: tensor for name, tensor in tensors.items()}
        of_target = (self.target.lm_head_weight, self.target.embedding_weight)
        return [_if_other(shared.get(name), weight) for name, weight in zip(_SHARED, of_target, strict=True)]

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read tensors by name; raise UserError if any is missing, quantised or unreadable."""
        if missing := sorted(set(names) - self.file_of.keys()):
            raise UserError(
                f"The checkpoint of {self.target.name} lacks {missing[0]} of its multi-token-prediction modules.",
                "Fetch the checkpoint again, all of its files.",
            )
        revision = getattr(self.target.config, "_commit_hash", None)
        tensors: dict[str, Tensor] = {}
        for file in sorted({self.file_of[name] for name in names}):
            try:
                with safe_open(str(cached_file(self.folder, file, revision=revision)), "pt") as content:
                    tensors |= {name: content.get_tensor(name) for name in names if self.file_of[name] == file}
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"The file {file} of {self.target.name} cannot be read: {error}", "Fetch the checkpoint again."
                ) from error
        marks = ("_scale_inv", "_scale", ".qweight")
        quantised = [n for n, x in tensors.items() if n.endswith(marks) or x.itemsize == 1 or not x.is_floating_point()]
        if quantised:
            raise UserError(
                f"The multi-token-prediction modules of {self.target.name} are quantised ({quantised[0]}).",
                "Take the checkpoint in bfloat16.",
            )
        return tensors


def shipped_files(target: FrozenModel) -> ShippedFiles:
    """Find the modules in a target's checkpoint; raises UserError if it has none."""
    folder = _folder(target)
    files = tensor_files(folder, getattr(target.config, "_commit_hash", None)) if folder else {}
    for arrangement in ARRANGEMENTS:
        if joins := _joins(arrangement, files, target.num_layers):
            return ShippedFiles(target, folder, files, arrangement, joins)
    raise UserError(
        f"The checkpoint of {target.name} has no multi-token-prediction modules: there are no tensors "
        f"model.layers.{target.num_layers}.eh_proj, mtp.fc or model.mtp_layers.0.input_proj. transformers leaves "
        "them out of what it saves.",
        "Name the checkpoint as it was published (a hub id or a folder with its safetensors files), or train MTP "
        "heads: headstart run mtp target=...",
    )


def ships_modules(folder: Path) -> bool:
    """Whether a folder's tensors include such modules."""
    names = tensor_files(str(folder))
    return any(re.match(arrangement.found_by, name) for arrangement in ARRANGEMENTS for name in names)


def check_shipped(target: FrozenModel) -> None:
    """Read the modules and build their layers; raises UserError if they are incomplete, not finite, or do not match the
    config."""
    files, size, again = shipped_files(target), target.hidden_size, "Fetch the checkpoint again, or export it anew."
    for number in range(len(files.joins)):
        parts, where = files.parts(number), f"{files.prefix(number)}* of {target.name}"
        if not all(bool(tensor.isfinite().all()) for tensor in (*files.layer(number).values(), *parts)):
            raise UserError(f"{where} holds numbers that are not finite: every draft would be noise.", again)
        if [tuple(part.shape) for part in parts] != [(size,), (size,), (size, 2 * size), (size,)]:
            raise UserError(f"The norms and the joining map of {where} have other shapes than the config says.", again)
        load_layer(files, number, type(target.model), files.layer_config(number), target.dtype)


def load_layer(files: ShippedFiles, number: int, cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a one-layer model of this class with a module's layer and last norm; raises UserError on failure."""
    where, base = f"{files.layer_prefix(number)}*", cls.base_model_prefix
    tensors = {f"{base}.layers.0.{name}": tensor for name, tensor in files.layer(number).items()}
    tensors[f"{base}.norm.weight"] = files.parts(number)[3]
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    try:
        with silent():
            model, info = cls.from_pretrained(None, config=config, state_dict=tensors, **options)
    except Exception as error:  # transformers raises many kinds; all mean the same to the user
        raise UserError(
            f"The layer {where} of {files.target.name} cannot be built: {type(error).__name__}: {error}",
            "Update transformers, or take another drafter.",
        ) from error
    if lacking := sorted(name for name in info["missing_keys"] if ".layers." in name):
        raise UserError(
            f"The checkpoint of {files.target.name} lacks tensors of its layer {where}: {', '.join(lacking[:3])}.",
            "Fetch the checkpoint again, all of its files.",
        )
    return model


def _config(known: Any, sparse: bool) -> Any:
    config = copy.deepcopy(known)
    config.num_hidden_layers, config.vocab_size = 1, _VOCABULARY
    config.tie_word_embeddings = False
    config.__dict__.pop("quantization_config", None)
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    one_layer = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in one_layer.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _folder(target: FrozenModel) -> str:
    """Return the folder or hub id of the checkpoint; "" if unknown."""
    spec = target.spec or str(getattr(target.config, "_name_or_path", ""))
    try:
        return loadable_folder(spec) if spec else ""
    except UserError:
        return ""


def _joins(arrangement: Arrangement, names: Mapping[str, Any], layers: int) -> list[str]:
    numbered: list[tuple[int, str]] = []
    for name in names:
        if match := re.match(arrangement.found_by, name):
            number = int(match[1]) if match.groups() else 0
            if arrangement is not ARRANGEMENTS[0] or number >= layers:
                numbered.append((number, name))
    joins = [name for _, name in sorted(numbered)]
    if joins and arrangement.once:
        below = joins[0].removesuffix(f"{arrangement.parts[2]}.weight") + "layers."
        count = len({name.removeprefix(below).partition(".")[0] for name in names if name.startswith(below)})
        return joins * max(1, count)
    return joins


def _if_other(shipped: Tensor | None, weight: Tensor) -> Tensor | None:
    """Return a module's copy of a target's weight, or None if they are equal."""
    if shipped is None or weight.is_meta or (shipped.shape == weight.shape and torch.equal(shipped.to(weight), weight)):
        return None
    return shipped.to(weight)
