"""A target without its weights, from its config (to plan for large models) or its files (if only texts are needed)."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file

from headstart.errors import UserError
from headstart.model.frozen import FrozenModel, refuse_layers, spare_token
from headstart.model.identity import Identity, dtype_name, fingerprint, sample_indices
from headstart.model.loading import (
    DTYPES,
    known_folder,
    loadable_folder,
    pick_device,
    pick_dtype,
    refuse_code,
    tensor_files,
)

_SAFETENSORS_DTYPES = {"BF16", "F16", "F32"}
"""Safetensors dtypes that a fingerprint can be read from."""


class Outline(FrozenModel):
    """A model on the `meta` device, without a tokenizer if there is only a config. `dtype` is the dtype that it would
    run in, `known` the fingerprint of its weights if they are local."""

    def __init__(self, model: Any, tokenizer: Any, spec: str, dtype: torch.dtype) -> None:
        super().__init__(model, tokenizer, spec)
        refuse_layers(self.name, self.config)
        self.dtype, self.known = dtype, ""

    def identity(self) -> Identity:
        return Identity(self.spec, self.name, self.known)

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
        return 0 if self.tokenizer is None else spare_token(self.tokenizer, self.vocab_size)

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
    known = None if planned.tokenizer is None else _fingerprint_of_files(planned, folder, options.get("revision"))
    if known is None:
        return None
    with suppress(OSError):  # the config has the end tokens as well
        planned.model.generation_config = GenerationConfig.from_pretrained(folder, **options)
    planned.known = known
    return planned


def _fingerprint_of_files(planned: Outline, folder: str, revision: str | None) -> str | None:
    file_of, files = tensor_files(folder, revision), dict[str, Any]()

    def sample(name: str, parameter: Tensor) -> Tensor:
        file = file_of[name]
        if file not in files:
            files[file] = opened.enter_context(safe_open(str(cached_file(folder, file, revision=revision)), "pt"))
        saved, shape = files[file].get_slice(name), tuple(parameter.shape)
        if tuple(saved.get_shape()) != shape or saved.get_dtype() not in _SAFETENSORS_DTYPES:
            raise KeyError(name)
        values = []
        for place in sample_indices(parameter.numel()):
            index = [int(number) for number in torch.unravel_index(torch.tensor(place), shape)]
            values.append(saved[tuple(slice(at, at + 1) for at in index)].reshape(1))
        return torch.cat(values)

    with ExitStack() as opened:
        try:
            return fingerprint(planned.model, planned.architecture, sample)
        except (KeyError, OSError, SafetensorError):
            return None
