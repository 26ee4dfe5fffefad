"""Layout and reader of GGUF files of draft heads. There are two architectures:

    eagle3  EAGLE-3 heads of one layer. Rows of queries and keys are permuted: llama.cpp rotates adjacent pairs,
            transformers the two halves of a head. `d2t` holds token ids, not offsets.
    dflash  block drafters; DSpark if there is a Markov head, DFlash 2 if there are pairwise scores. Rows as in Hugging
            Face checkpoints; embeddings and LM head are the target's; the mask token is a tokenizer field.

Shape suffixes: D draft vocabulary, I inputs, N rows, R pairs of a head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import (
    BLOCKS,
    DFLASH2_LOGITS,
    DFLASH2_SIZES,
    LM_HEAD,
    MARKOV_EMBEDDING,
    MARKOV_LM_HEAD,
    PREDECESSORS,
    SELECTOR,
    SUCCESSORS,
    LayerSizes,
    Layout,
    Published,
)
from headstart.hub.engines.base import AGAIN, NOTE, Faults, Note
from headstart.hub.engines.checkpoint import ANOTHER
from headstart.hub.engines.known_engines import LLAMA_CPP, tensor_faults
from headstart.hub.engines.parsing import window_settings
from headstart.model.loading import gguf_library, read_gguf

EAGLE3, BLOCK = "eagle3", "dflash"
ARCHITECTURES = {Layout.EAGLE3: EAGLE3, **dict.fromkeys(BLOCKS, BLOCK)}
FACTORS, D2T, MASK = "rope_freqs.weight", "d2t", "tokenizer.ggml.mask_token_id"
_DEFAULT_BLOCK = 16
"""llama.cpp's default block size."""
_MARKOV, _CONFIDENCE, _SELECTOR = "markov_w1.weight", "conf_proj.weight", "selector_hidden.weight"
_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    LM_HEAD: "output.weight",
    MARKOV_EMBEDDING: _MARKOV,
    MARKOV_LM_HEAD: "markov_w2.weight",
    "confidence_head.proj.weight": _CONFIDENCE,
    "confidence_head.proj.bias": "conf_proj.bias",
    PREDECESSORS: "selector_predecessor.weight",
    SUCCESSORS: "selector_successor.weight",
    SELECTOR: _SELECTOR,
}
_NAMES_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **{f"{part}_conv.base_kernel": f"{name}_conv_base" for part, name in (("attention", "attn"), ("mlp", "ffn"))},
    **{f"{part}_conv.kernel_projection": f"{name}_conv_proj" for part, name in (("attention", "attn"), ("mlp", "ffn"))},
}
_REFUSED = (
    *("selector_", "conv_", "attention.scale", "attention.clamp_kqv", "logit_scale", "residual_scale"),
    *("embedding_scale", "attn_logit_softcapping", "final_logit_softcapping", "expert_count", "parallel_drafting"),
)
"""Key prefixes of unsupported variants."""
WINDOW, SLIDING, CAUSAL = (f"attention.{name}" for name in ("sliding_window", "sliding_window_pattern", "causal"))
"""Keys of block drafters: window size, which layers slide, and whether all layers are causal."""
DFLASH2_KEYS = {**{name: name for name in (*DFLASH2_SIZES, *DFLASH2_LOGITS)}, "output_multiplier": "logit_scale"}
"""DFlash 2's keys by setting."""


def tensor_names(published: Published) -> dict[str, str]:
    """Map published tensor names to names in the file."""
    return {name: _tensor_name(name) for name in published.expected()}


def _tensor_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, number, part = name.removesuffix(".weight").split(".", 2)
    return f"blk.{number}.{_NAMES_IN_LAYER[part]}" + ".weight" * name.endswith(".weight")


def permuted_heads(published: Published) -> dict[str, int]:
    """Return the number of attention heads of each permuted matrix, by published name."""
    if published.layout is not Layout.EAGLE3:
        return {}
    assert published.layer is not None, "these heads have a decoder layer"
    return {
        "layers.0.self_attn.q_proj.weight": published.layer.num_attention_heads,
        "layers.0.self_attn.k_proj.weight": published.layer.num_key_value_heads,
    }


def permuted(weight_NI: Tensor, heads: int) -> Tensor:
    """Interleave the two halves of each head's rows, for RoPE on adjacent pairs.

    >>> permuted(torch.arange(4)[:, None], 1)[:, 0].tolist()
    [0, 2, 1, 3]
    """
    return weight_NI.reshape(heads, 2, -1, weight_NI.shape[1]).transpose(1, 2).flatten(0, 2)


def unpermuted(weight_NI: Tensor, heads: int) -> Tensor:
    """Invert `permuted`."""
    return weight_NI.reshape(heads, -1, 2, weight_NI.shape[1]).transpose(1, 2).flatten(0, 2)


def frequency_factors(layer: LayerSizes) -> Tensor | None:
    """Return llama.cpp's divisor of each pair's frequency for llama3 RoPE; None for other types."""
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
    """Return the GGUF file of a folder, or the file itself; None unless there is exactly one."""
    if folder.is_file():
        return folder if folder.suffix == ".gguf" else None
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return files[0] if len(files) == 1 else None


class GgufFile:
    """An open GGUF file with lazy tensors. Raises UserError if it is damaged."""

    def __init__(self, folder: Path) -> None:
        file = file_of(folder)
        if file is None:
            raise UserError(f"{folder} does not have exactly one GGUF file.", "Give the file itself.")
        reader = read_gguf(file)
        self.fields: dict[str, Any] = reader.fields
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.value("general.architecture"))

    def value(self, key: str, default: Any = None) -> Any:
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def setting(self, key: str) -> Any:
        """Return the value of a required key of the architecture. Raises UserError if it is missing."""
        content = self.value(f"{self.architecture}.{key}")
        if content is None:
            raise UserError(f"The GGUF file does not say {self.architecture}.{key}.", AGAIN)
        return content

    @property
    def note(self) -> Note | None:
        """headstart's note; None if headstart did not write the file."""
        note = self.value(f"{NOTE}.note")
        return Note.of(json.loads(note)) if isinstance(note, str) else None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in torch's order."""
        return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self.tensors.items()}


def read_settings(file: GgufFile) -> Published:
    """Read the heads without their tensors. Raises UserError for unsupported heads."""
    of = file.architecture
    if of not in (EAGLE3, BLOCK):
        problem = f"The GGUF file has the architecture {of!r}; draft heads have {EAGLE3!r} or {BLOCK!r}."
        raise UserError(problem, "Give a file of draft heads, not of a model.")
    note, d2t = file.note, file.tensors.get(D2T)
    layout, steps, of_block = Layout.EAGLE3, note.steps if note and note.steps else 5, dict[str, Any]()
    if of == BLOCK:
        layout, d2t = Layout.DSPARK if _MARKOV in file.tensors else Layout.DFLASH, None
        if _SELECTOR in file.tensors or any(f"{BLOCK}.{name}" in file.fields for name in DFLASH2_SIZES):
            layout, of_block = Layout.DFLASH2, {name: int(file.setting(name)) for name in DFLASH2_SIZES}
            of_block["output_multiplier"] = file.value(f"{BLOCK}.logit_scale") or 1.0
            of_block["final_logit_softcapping"] = file.value(f"{BLOCK}.final_logit_softcapping", 0.0)
        block_size = int(file.value(f"{BLOCK}.block_size", _DEFAULT_BLOCK))
        steps = block_size - (layout is not Layout.DSPARK)
        causal, window = bool(file.value(f"{BLOCK}.{CAUSAL}", False)), int(file.value(f"{BLOCK}.{WINDOW}", 0))
        sliding = [bool(slides) for slides in file.setting(SLIDING)] if window else [False]
        of_block |= window_settings(sliding, [causal] * len(sliding), window)
        of_block |= {"block_size": block_size, "mask_token_id": int(file.value(MASK, -1))}
    elif file.setting("block_count") != 1:
        raise UserError("llama.cpp runs one layer of EAGLE-3 heads, and the file has several.", AGAIN)
    tokens, layer = file.fields.get("tokenizer.ggml.tokens"), _layer_sizes(file)
    _refuse_variants(file, layout, layer.head_dim)
    return Published(
        layout=layout,
        hidden_size=int(file.setting("embedding_length")),
        vocab_size=len(tokens.data) if tokens is not None else int(file.setting("vocab_size")),
        steps=steps,
        tensors={},
        draft_ids_D=None if d2t is None else torch.from_numpy(np.array(d2t.data)).reshape(-1),
        layer=layer,
        num_layers=int(file.setting("block_count")),
        aux_layers=tuple(int(layer) for layer in file.setting("target_layers")),
        norm_before_residual=bool(file.value(f"{of}.norm_before_residual", False)),
        norm_before_fc=bool(file.value(f"{of}.norm_before_fc", False)),
        markov_rank=file.shapes[_MARKOV][1] if _MARKOV in file.tensors else 0,
        confidence=_CONFIDENCE in file.tensors,
        **of_block,
    )


def _refuse_variants(file: GgufFile, layout: Layout, head_dim: int) -> None:
    of, known = file.architecture, set(DFLASH2_KEYS.values()) if layout is Layout.DFLASH2 else set()
    names = {key.removeprefix(f"{of}.") for key in file.fields} - known
    usual: dict[str, tuple[Any, ...]] = {
        "rope.scaling.type": ("none", "linear"),
        "rope.dimension_count": (head_dim,),
        **({WINDOW: (0,)} if layout is Layout.EAGLE3 else {}),
        **({"sample_from_anchor": (True,)} if layout is Layout.DSPARK else {}),
        **{name: () for name in names if name.startswith(_REFUSED)},
    }
    for key, values in usual.items():
        if ((value := file.value(f"{of}.{key}")) and value not in values) or (value is False and True in values):
            raise UserError(f"The GGUF file has {of}.{key} = {value!r}, which headstart does not support.", ANOTHER)


def _layer_sizes(file: GgufFile) -> LayerSizes:
    heads, of = int(file.setting("attention.head_count")), file.architecture
    rope = {"rope_type": "default", "rope_theta": float(file.setting("rope.freq_base"))}
    if FACTORS in file.tensors:  # llama3 is stored as divisors of the frequencies
        rope |= {"rope_type": "llama3", "factors": np.array(file.tensors[FACTORS].data).reshape(-1).tolist()}
    elif file.value(f"{of}.rope.scaling.type") == "linear":
        rope |= {"rope_type": "linear", "factor": float(file.setting("rope.scaling.factor"))}
    return LayerSizes(
        intermediate_size=int(file.setting("feed_forward_length")),
        num_attention_heads=heads,
        num_key_value_heads=int(file.value(f"{of}.attention.head_count_kv", heads)),
        head_dim=int(file.value(f"{of}.attention.key_length", int(file.setting("embedding_length")) // heads)),
        hidden_act="silu",
        rms_norm_eps=float(file.setting("attention.layer_norm_rms_epsilon")),
        rope_parameters=rope,
        max_position_embeddings=int(file.setting("context_length")),
    )


def read_heads(file: GgufFile) -> Published:
    """Read the heads. Raises UserError for missing, unknown or misshapen tensors."""
    settings, shapes = read_settings(file), file.shapes
    for fault in wrong_tensors(settings, shapes):
        raise UserError(*fault)
    head_counts, weights = permuted_heads(settings), {}
    for name, in_file in tensor_names(settings).items():
        tensor = file.tensors[in_file]
        exact = gguf_library().quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        weight = torch.from_numpy(np.array(exact, dtype=np.float32)).reshape(shapes[in_file])
        weights[name] = unpermuted(weight, head_counts[name]) if name in head_counts else weight
    return settings.with_tensors(weights)


def wrong_tensors(settings: Published, shapes: Mapping[str, tuple[int, ...]]) -> Faults:
    """Report missing, unknown or misshapen tensors."""
    assert settings.layer is not None, "these heads have decoder layers"
    table = (settings.vocab_size, settings.hidden_size)
    optional = {"token_embd.weight": table, FACTORS: (settings.layer.head_dim // 2,)}
    optional |= {_NAMES[LM_HEAD]: table} if settings.layout in BLOCKS else {D2T: (settings.draft_width,)}
    required = {_tensor_name(name): shape for name, shape in settings.expected().items()}
    return tensor_faults(required, optional, shapes, LLAMA_CPP)
