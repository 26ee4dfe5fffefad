"""What GGUF files of all kinds of heads have in common: the keys of decoder layers and tensors, read and written.

Shape suffixes: I inputs, N rows, R pairs of a head.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import LayerSizes, Layout, Published
from headstart.hub.engines.base import NOTE, Written
from headstart.hub.engines.gguf_library import library

HOOKS = frozenset(
    {
        *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "gpt_oss"),
        *("gemma4", "gemma4_text", "lfm2", "minimax_m2"),
    }
)
"""transformers' types of targets whose layers llama.cpp gives to heads; never the last one's output."""
FACTORS = "rope_freqs.weight"
D2T = "d2t"
AGAIN = "Export or convert the heads again."
OTHER = "Export with --format vllm, or train without that."
Limit = tuple[bool, str, str]
"""Whether it is so, what llama.cpp would get wrong, what to do."""


class Arrangement(ABC):
    """How llama.cpp knows a kind of heads.

    Attributes:
        architecture: of the file.
        layouts: that it holds.
    """

    architecture: str
    layouts: frozenset[Layout]

    @abstractmethod
    def spec_type(self, published: Published) -> str:
        """What `--spec-type` of llama-server calls it."""

    @abstractmethod
    def limits(self, published: Published, layers: int) -> Iterator[Limit]:
        """What llama.cpp cannot do; `layers` of the target, 0 where that is not known."""

    @abstractmethod
    def keys(self, published: Published) -> dict[str, Any]:
        """Keys of its own, beside those of the layers."""

    @abstractmethod
    def names(self, published: Published) -> dict[str, str]:
        """Names of the file's tensors by those of `published`."""

    def permuted(self, published: Published) -> dict[str, int]:
        """Heads of the matrices whose rows go in pairs of neighbours, by the published name."""
        return {}

    @abstractmethod
    def settings(self, reader: Any) -> Published:
        """Everything of a file's heads but their tensors.

        Raises:
            UserError: a key is missing, or says what headstart does not have.
        """

    def beside(self, published: Published) -> dict[str, tuple[int, ...]]:
        """Shapes of tensors that a file may hold beside those of the heads."""
        assert published.layer is not None, "these heads have decoder layers"
        return {
            "token_embd.weight": (published.vocab_size, published.hidden_size),
            FACTORS: (published.layer.head_dim // 2,),
        }

    def faults(self, reader: Any, published: Published) -> Iterator[tuple[str, str]]:
        """What else is wrong with a file."""
        yield from ()


def permuted(weight_NI: Tensor, heads: int) -> Tensor:
    """Rows of each head in pairs of neighbours, from the two halves that transformers turns together.

    >>> permuted(torch.arange(4)[:, None], 1)[:, 0].tolist()
    [0, 2, 1, 3]
    """
    rows, inputs = weight_NI.shape
    return weight_NI.reshape(heads, 2, rows // heads // 2, inputs).transpose(1, 2).reshape(rows, inputs)


def unpermuted(weight_NI: Tensor, heads: int) -> Tensor:
    """The opposite of `permuted`."""
    rows, inputs = weight_NI.shape
    return weight_NI.reshape(heads, rows // heads // 2, 2, inputs).transpose(1, 2).reshape(rows, inputs)


def layer_keys(of: str, published: Published) -> dict[str, Any]:
    """The keys of decoder layers and of the vocabulary, for a file of the architecture `of`."""
    layer = published.layer
    assert layer is not None, "these heads have decoder layers"
    rope = layer.rope_parameters
    keys: dict[str, Any] = {
        f"{of}.context_length": layer.max_position_embeddings,
        f"{of}.embedding_length": published.hidden_size,
        f"{of}.block_count": published.num_layers,
        f"{of}.feed_forward_length": layer.intermediate_size,
        f"{of}.attention.head_count": layer.num_attention_heads,
        f"{of}.attention.head_count_kv": layer.num_key_value_heads,
        f"{of}.attention.key_length": layer.head_dim,
        f"{of}.attention.value_length": layer.head_dim,
        f"{of}.attention.layer_norm_rms_epsilon": float(layer.rms_norm_eps),
        f"{of}.rope.dimension_count": layer.head_dim,
        f"{of}.rope.freq_base": float(rope["rope_theta"]),
        f"{of}.vocab_size": published.vocab_size,
        f"{of}.target_layers": list(published.aux_layers),
    }
    if rope.get("rope_type") == "linear":
        keys |= {f"{of}.rope.scaling.type": "linear", f"{of}.rope.scaling.factor": float(rope["factor"])}
    return keys


def as_kept(published: Published) -> Published:
    """The same with numbers as a GGUF file keeps them, and as they are read back."""
    layer = published.layer
    assert layer is not None, "these heads have decoder layers"
    factors_R = frequency_factors(layer)
    kept = replace(
        layer,
        rms_norm_eps=float(np.float32(layer.rms_norm_eps)),
        rope_parameters=_rope(
            float(np.float32(layer.rope_parameters["rope_theta"])),
            float(np.float32(layer.rope_parameters["factor"])) if layer.rope_parameters.get("factor") else None,
            None if factors_R is None else factors_R.tolist(),
        ),
    )
    return replace(published, layer=kept)


def _rope(base: float, factor: float | None, factors: list[float] | None) -> dict[str, Any]:
    """Rotary positions as a GGUF file says them: of those of the kind llama3 each pair's factor."""
    if factors is not None:
        return {"rope_type": "llama3", "rope_theta": base, "factors": factors}
    if factor is not None:
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    return {"rope_type": "default", "rope_theta": base}


def frequency_factors(layer: LayerSizes) -> Tensor | None:
    """What llama.cpp divides each pair's frequency by, for positions of the kind llama3; None for others."""
    rope = layer.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    pairs_R = torch.arange(0, layer.head_dim, 2, dtype=torch.float32) / layer.head_dim
    waves_R = 2 * math.pi * float(rope["rope_theta"]) ** pairs_R
    context = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    smooth_R = ((context / waves_R - low) / (high - low)).clamp(0, 1)
    shrunk_R: Tensor = (1 - smooth_R) / factor + smooth_R
    return shrunk_R.reciprocal()


# -- reading -----------------------------------------------------------------------------------------------------------


def file_of(folder: Path) -> Path | None:
    """The GGUF file of a folder, or the file itself; None where there is none, or several."""
    if folder.is_file():
        return folder if folder.suffix == ".gguf" else None
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return files[0] if len(files) == 1 else None


def opened(folder: Path) -> Any:
    """A reader of the folder's GGUF file, whose numbers stay in the file until they are used.

    Raises:
        UserError: there is none, or it is damaged.
    """
    file = file_of(folder)
    if file is None:
        raise UserError(f"{folder} has no GGUF file, or several.", "Give the file itself.")
    try:
        return library().GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file} is cut short or damaged ({error}).", "Fetch or export it again.") from None


def value(reader: Any, key: str, default: Any = None) -> Any:
    """What a file says under a key."""
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def needed(reader: Any, of: str, key: str) -> Any:
    """A key that a file of the architecture `of` must have.

    Raises:
        UserError: it has not.
    """
    found = value(reader, f"{of}.{key}")
    if found is None:
        raise UserError(f"The GGUF file does not say {of}.{key}.", AGAIN)
    return found


def written(reader: Any) -> Written | None:
    """What the file says of itself, where it is ours."""
    noted = value(reader, f"{NOTE}.note")
    return Written.of(json.loads(noted)) if isinstance(noted, str) else None


def layer_sizes_of(reader: Any, of: str) -> LayerSizes:
    """Sizes of the decoder layers in a file.

    Raises:
        UserError: it does not say them.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, size = int(needed(reader, of, "attention.head_count")), int(needed(reader, of, "embedding_length"))
    scaled = value(reader, f"{of}.rope.scaling.type") == "linear"
    rope = _rope(
        float(needed(reader, of, "rope.freq_base")),
        float(needed(reader, of, "rope.scaling.factor")) if scaled else None,
        np.array(tensors[FACTORS].data).reshape(-1).tolist() if FACTORS in tensors else None,
    )
    return LayerSizes(
        intermediate_size=int(needed(reader, of, "feed_forward_length")),
        num_attention_heads=heads,
        num_key_value_heads=int(value(reader, f"{of}.attention.head_count_kv", heads)),
        head_dim=int(value(reader, f"{of}.attention.key_length", size // heads)),
        hidden_act="silu",
        rms_norm_eps=float(needed(reader, of, "attention.layer_norm_rms_epsilon")),
        rope_parameters=rope,
        max_position_embeddings=int(needed(reader, of, "context_length")),
    )


def tokens_of(reader: Any, of: str) -> int:
    """How many tokens a file's vocabulary has."""
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    return len(tokens.data) if tokens is not None else int(needed(reader, of, "vocab_size"))


def shape_of(tensor: Any) -> tuple[int, ...]:
    """Of a tensor of a file, as torch has it."""
    return tuple(int(size) for size in reversed(tensor.shape))
