"""A target without its weights, from its config (to plan for large models) or its files (if only texts are needed)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file

from headstart.errors import UserError
from headstart.model.frozen import FrozenModel, refuse_layers, spare_token
from headstart.model.identity import Identity, dtype_name, fingerprint, sample_indices, sketch, sketch_indices
from headstart.model.loading import (
    DTYPES,
    gguf_file,
    known_folder,
    loadable_folder,
    pick_device,
    pick_dtype,
    refuse_code,
    tensor_files,
)

_SAFETENSORS_DTYPES = {"BF16", "F16", "F32"}
"""Safetensors dtypes that a fingerprint can be read from."""


class Checkpoint:
    """A model's parameters in safetensors files, opened on the first read.

    Files may name parameters differently, and store a parameter of all experts in one tensor per expert. Reading raises
    KeyError for other layouts, and OSError or SafetensorError for a missing or damaged file.
    """

    def __init__(self, model: Any, folder: str, revision: str | None) -> None:
        self._folder, self._revision = folder, revision
        self._file_of, self._open = tensor_files(folder, revision), dict[str, Any]()
        self._parts = _parts_by_name(model, self._file_of)

    def read(self, name: str) -> Tensor:
        """Read a parameter that is stored in one tensor."""
        tensor: Tensor = self._saved(*self._parts[name])[:]
        return tensor

    def row(self, name: str, number: int) -> Tensor:
        row: Tensor = self._saved(*self._parts[name])[number]
        return row

    def numbers(self, name: str, shape: tuple[int, ...], indices: Iterable[int]) -> Tensor:
        """Read a parameter's numbers at flat indices; KeyError for another shape or a quantised dtype."""
        parts, values = self._parts[name], list[Tensor]()
        stacked = isinstance(parts[0], list)  # one list per expert; the rows of its matrices are concatenated
        count = len(parts[0]) if stacked else 1
        part_shape = (shape[1] // count, *shape[2:]) if stacked else shape
        if stacked and (len(parts), count * part_shape[0]) != shape[:2]:
            raise KeyError(name)
        for place in indices:
            index = [int(number) for number in torch.unravel_index(torch.tensor(int(place)), shape)]
            part = parts[0]
            if stacked:
                expert, row, *rest = index
                part, index = parts[expert][row // part_shape[0]], [row % part_shape[0], *rest]
            saved = self._saved(part)
            if tuple(saved.get_shape()) != part_shape or saved.get_dtype() not in _SAFETENSORS_DTYPES:
                raise KeyError(name)
            values.append(saved[tuple(slice(at, at + 1) for at in index)].reshape(1))
        return torch.cat(values)

    def _saved(self, part: str) -> Any:
        if (file := self._file_of[part]) not in self._open:
            self._open[file] = safe_open(str(cached_file(self._folder, file, revision=self._revision)), "pt")
        return self._open[file].get_slice(part)


def _parts_by_name(model: Any, saved: Iterable[str]) -> dict[str, list[Any]]:
    """Map parameters to tensors in the files: one, or a list of matrices to concatenate for each expert."""
    transforms = get_model_conversion_mapping(model)
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    own, parts, merged = model.state_dict(), dict[str, list[Any]](), dict[str, dict[str, list[str]]]()
    for part in sorted(saved, key=dot_natural_key):
        name, pattern = rename_source_key(part, renamings, converters, model.base_model_prefix, own)
        if pattern is None:
            parts[name] = [part]
        else:
            merged.setdefault(name, {}).setdefault(pattern, []).append(part)
    for name, by_pattern in merged.items():
        converter = next(one for one in converters if by_pattern.keys() <= set(one.source_patterns))
        operations = [(type(one).__name__, getattr(one, "dim", None)) for one in converter.operations]
        lists = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
        if all(lists) and operations == [("MergeModulelist", 0), ("Concatenate", 1)][: len(operations)]:
            parts[name] = [list(matrices) for matrices in zip(*lists, strict=False)]
    return parts


class Outline(FrozenModel):
    """A model on the `meta` device, without a tokenizer if there is only a config.

    Attributes:
        dtype: dtype that it would be loaded in.
        known: fingerprint of its weights; empty if they are not local.
        files: its weights on disk; None if they are not local.
    """

    def __init__(self, model: Any, tokenizer: Any, spec: str, dtype: torch.dtype) -> None:
        super().__init__(model, tokenizer, spec)
        refuse_layers(self.name, self.config)
        self.dtype, self.known = dtype, ""
        self.files: Checkpoint | None = None

    def identity(self) -> Identity:
        return Identity(self.spec, self.name, self.known)

    def read(self, name: str) -> Tensor:
        """Read a parameter from the files, converted to `dtype`."""
        assert self.files is not None, "the weights are here"
        return self.files.read(name).to(self.dtype)

    def sketch(self) -> dict[str, Any]:
        files = self.files
        assert files is not None, "the weights are here"

        def sample(name: str, weight: Tensor) -> Tensor:
            numbers = files.numbers(name, tuple(weight.shape), sketch_indices(weight.numel()).tolist())
            return numbers.to(self.dtype).float()

        sketched = sketch(self.model, self.tokenizer, self.architecture, sample=sample)
        return {**sketched, "rounded": True} if self.rounded else sketched

    def blank(self, token_id: int) -> bool:
        if self.files is None or token_id >= self.vocab_size:
            return False
        parameters = self.model.named_parameters()
        name = next(name for name, weight in parameters if weight is self.embedding_weight)
        return not 0 < float(self.files.row(name, token_id).float().abs().sum()) < math.inf

    @cached_property
    def kv_shapes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        config = self.config
        heads: int = config.num_attention_heads
        if getattr(config, "kv_lora_rank", None):  # latent attention, which transformers caches unfolded
            keys = config.qk_nope_head_dim + config.qk_rope_head_dim
            return [((heads, keys), (heads, config.v_head_dim))] * self.num_layers
        size = getattr(config, "head_dim", None) or self.hidden_size // heads
        shape = (getattr(config, "num_key_value_heads", None) or heads, size)
        return [(shape, shape)] * self.num_layers

    @cached_property
    def spare_token(self) -> int | None:
        """A dummy without a tokenizer: nothing is drafted here."""
        return 0 if self.tokenizer is None else spare_token(self.tokenizer, self.vocab_size, self.blank)

    @property
    def kv_bytes_per_token(self) -> int:
        numbers = sum(count * size for pair in self.kv_shapes for count, size in pair)
        return numbers * self.dtype.itemsize


def weights_are_here(spec: str, revision: str | None = None) -> bool:
    """Whether a target's weights are local."""
    folder = loadable_folder(spec)
    if Path(folder).is_dir():
        return any(file.suffix in (".safetensors", ".bin") for file in Path(folder).iterdir())
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    return any(isinstance(try_to_load_from_cache(folder, name, revision=revision), str) for name in names)


def outline(spec: str, dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False) -> Outline:
    """Build an outline from the config; the dtype "auto" is the config's, or bfloat16 if that is float32.

    Raises:
        UserError: unknown target, missing or unsuitable config, or a model that does not support token trees.
    """
    try:
        folder, options = known_folder(loadable_folder(spec), revision)
    except UserError as error:
        raise UserError(
            error.problem,
            f"{error.remedy} A folder with the model's config.json alone is enough for a plan: target=FOLDER.",
        ) from error
    options["trust_remote_code"] = trust_remote_code  # without it, transformers prompts
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        saved = getattr(config.get_text_config(), "dtype", None)
        kind = DTYPES.get(dtype, saved if saved in (torch.bfloat16, torch.float16) else torch.bfloat16)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=kind, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises many kinds; all mean the same to the user
        refuse_code(spec, error)
        raise UserError(
            f"Cannot plan for {spec!r}: {type(error).__name__}: {(str(error).splitlines() or ['no reason'])[0]}",
            "Give a folder with the config.json of a causal language model, or a hub id that can be reached.",
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception:  # a folder with the config alone
        tokenizer = None
    return Outline(model, tokenizer, spec, kind)


def unloaded(
    spec: str, dtype: str = "auto", device: str = "auto", revision: str | None = None, trust_remote_code: bool = False
) -> Outline | None:
    """Outline the target that `load_target` would load, with its fingerprint; None if the files do not give one
    (quantised, or other tensor names or shapes than the model's). Raises as `outline`."""
    kind = dtype_name(pick_dtype(dtype, pick_device(device)))
    planned = outline(spec, kind, revision, trust_remote_code)
    folder, options = known_folder(loadable_folder(spec), revision)
    if planned.tokenizer is None:
        return None
    files = Checkpoint(planned.model, folder, options.get("revision"))

    def sample(name: str, parameter: Tensor) -> Tensor:
        return files.numbers(name, tuple(parameter.shape), sample_indices(parameter.numel()))

    try:
        planned.known = fingerprint(planned.model, planned.architecture, sample)
    except (KeyError, OSError, SafetensorError):
        return None
    with suppress(OSError):  # optional: the config has the end tokens, too
        planned.model.generation_config = GenerationConfig.from_pretrained(folder, **options)
    planned.files, planned.rounded = files, gguf_file(spec) is not None
    return planned
