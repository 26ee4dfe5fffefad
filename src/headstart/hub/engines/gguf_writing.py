"""A GGUF file of draft heads is written: keys, tensors in the asked dtype, and the target's tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import Layout, Published
from headstart.hub.engines.base import NOTE, note_of
from headstart.hub.engines.gguf_file import (
    ARCHITECTURES,
    D2T,
    FACTORS,
    MASK,
    frequency_factors,
    library,
    permuted,
    permuted_heads,
    rope_in_file,
    tensor_names,
)
from headstart.hub.target_facts import TargetFacts

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
"""Kinds of tokens, as llama.cpp numbers them."""


def write_gguf(file: Path, published: Published, facts: TargetFacts, dtype: str) -> None:
    """Write heads that llama.cpp can draft with; a UserError without the package gguf or the target's tokenizer."""
    held, stored = _stored(published, dtype)
    writer = library().GGUFWriter(file, ARCHITECTURES[published.layout])
    writer.add_name(f"Draft heads for {facts.name}")
    keys = _keys(published)
    for key, content in keys.items():
        _add(writer, key, content)
    writer.add_string(f"{NOTE}.note", json.dumps(note_of(held, facts)))
    if facts.gguf is not None:
        _copy_tokenizer(writer, facts.gguf, without=frozenset(keys))
    else:
        _write_tokenizer(writer, facts)
    for name, (numbers, kind) in stored.items():
        writer.add_tensor(name, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _keys(published: Published) -> dict[str, Any]:
    layer, of = published.layer, ARCHITECTURES[published.layout]
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
    if published.layout is Layout.EAGLE3:
        return keys | {
            f"{of}.target_hidden_size": published.hidden_size,
            f"{of}.norm_before_residual": published.norm_before_residual,
            f"{of}.norm_before_fc": published.norm_before_fc,
        }
    keys |= {f"{of}.block_size": published.block_size, MASK: published.mask_token_id}
    if published.layout is Layout.DSPARK:
        keys |= {f"{of}.sample_from_anchor": True, f"{of}.has_confidence_head": published.confidence}
    return keys


def _add(writer: Any, key: str, content: Any) -> None:
    if isinstance(content, bool):
        writer.add_bool(key, content)
    elif isinstance(content, int):
        writer.add_uint32(key, content)
    elif isinstance(content, float):
        writer.add_float32(key, content)
    elif isinstance(content, list):
        writer.add_array(key, content)
    else:
        writer.add_string(key, content)


def _stored(published: Published, dtype: str) -> tuple[Published, dict[str, tuple[np.ndarray[Any, Any], Any]]]:
    """The heads in the numbers that the file holds, and the file's tensors: raw numbers and their kind.

    Norms stay in float32, and so do matrices whose rows cannot be cut into blocks.
    """
    gguf = library()
    kinds = gguf.GGMLQuantizationType
    wanted = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16, "q8_0": kinds.Q8_0}[dtype]
    names, head_counts = tensor_names(published), permuted_heads(published)
    held: dict[str, Tensor] = {}
    stored: dict[str, tuple[np.ndarray[Any, Any], Any]] = {}
    for name, tensor in published.tensors.items():
        if name not in names:
            continue
        kind = kinds.F32 if tensor.dim() == 1 or (wanted == kinds.Q8_0 and tensor.shape[1] % 32) else wanted
        exact = tensor.float()
        # A row's numbers do not depend on its place, so that the rounded heads are those before the permutation.
        raw = gguf.quants.quantize(exact.numpy(), kind)
        held[name] = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind), dtype=np.float32))
        if name in head_counts:
            raw = gguf.quants.quantize(permuted(exact, head_counts[name]).contiguous().numpy(), kind)
        stored[names[name]] = raw, kind
    if published.draft_ids_D is not None:
        stored[D2T] = published.draft_ids_D.to(torch.int64).numpy(), kinds.I64
    layer = published.layer
    assert layer is not None, "these heads have decoder layers"
    if (factors_R := frequency_factors(layer)) is not None:
        stored[FACTORS] = factors_R.numpy(), kinds.F32
    rope = layer.rope_parameters
    read_back = replace(
        layer,
        rms_norm_eps=float(np.float32(layer.rms_norm_eps)),
        rope_parameters=rope_in_file(
            float(np.float32(rope["rope_theta"])),
            float(np.float32(rope["factor"])) if rope.get("factor") else None,
            None if factors_R is None else factors_R.tolist(),
        ),
    )
    return replace(published, layer=read_back, tensors=held), stored


# -- the tokenizer's fields --------------------------------------------------------------------------------------------
# llama.cpp counts the target's tokens by them. It tokenises text with the target's own fields, so that those of heads
# need not say how text is split.


def _copy_tokenizer(writer: Any, file: Path, without: frozenset[str]) -> None:
    """Write the tokenizer's fields of another GGUF file, but for some of these names."""
    gguf = library()
    for key, field in gguf.GGUFReader(file).fields.items():
        if key.startswith("tokenizer.") and key not in without:
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=inner)


def _write_tokenizer(writer: Any, facts: TargetFacts) -> None:
    """Write a target's tokens, from the tokenizer of a Hugging Face folder or id."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(facts.folder)
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"The tokenizer of {facts.name} cannot be read ({str(error).splitlines()[0]}).",
            "Give a target with a fast tokenizer (tokenizer.json) as --target.",
        ) from None
    special = set(tokenizer.all_special_ids)
    by_id = {number: text for text, number in tokenizer.get_vocab().items()}
    count = max(facts.vocab_size, len(by_id))
    texts = [by_id.get(number, f"[unused{number}]") for number in range(count)]
    kinds = [_UNUSED if number not in by_id else _CONTROL if number in special else _NORMAL for number in range(count)]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
    if merges and not model.get("byte_fallback"):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(texts)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(texts)
        writer.add_token_scores([-float(number) for number in range(count)])
        writer.add_token_types(kinds)
    for name, number in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        if number is not None:
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
