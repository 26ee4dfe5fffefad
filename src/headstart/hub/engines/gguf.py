"""GGUF files of heads for llama.cpp: limits, checks and writing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Layout, Published
from headstart.hub.engines.base import AGAIN, HEADS_GGUF, NOTE, Faults, Format, Note, note_of
from headstart.hub.engines.faults import changed, engine_limits, short_context
from headstart.hub.engines.gguf_file import (
    ARCHITECTURES,
    BLOCK,
    CAUSAL,
    D2T,
    DFLASH2_KEYS,
    FACTORS,
    MASK,
    SLIDING,
    WINDOW,
    GgufFile,
    file_of,
    frequency_factors,
    permuted,
    permuted_heads,
    read_heads,
    read_settings,
    tensor_names,
    wrong_tensors,
)
from headstart.hub.engines.known_engines import LESS_CAUSAL, LLAMA_CPP
from headstart.hub.engines.parsing import are_tokens
from headstart.hub.target_facts import TargetFacts, kind_of
from headstart.model.loading import gguf_library, read_gguf

HOOKS = frozenset(
    {
        *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "gpt_oss"),
        *("gemma4", "gemma4_text", "lfm2", "minimax_m2"),
    }
)
"""Model types where llama.cpp passes hidden states to heads (all but the last layer's)."""


class Gguf(Format):
    """heads.gguf for llama.cpp."""

    name = "gguf"
    engines = ("llama.cpp",)
    dtypes = ("bfloat16", "float16", "float32", "q8_0")

    def limits(self, published: Published, facts: TargetFacts, engine: str) -> Faults:
        if published.layout not in ARCHITECTURES:
            problem = f"llama.cpp drafts with EAGLE-3, DFlash and DSpark heads, not with {kind_of(published)} heads."
            raise UserError(problem, "Train eagle3, dflash, dflash2 or dspark heads for it.")
        return _limits(published, facts, None)

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        file, tensors = folder / HEADS_GGUF, _stored(published, dtype)
        _write(file, published, facts, tensors)
        rounded = replace(read_heads(GgufFile(file)), steps=published.steps)
        _write(file, published, facts, tensors, note=json.dumps(note_of(rounded, facts)))

    def recognizes(self, folder: Path) -> bool:
        return file_of(folder) is not None

    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        return read_heads(GgufFile(folder))

    def faults(self, folder: Path, engine: str, facts: TargetFacts | None) -> Faults:
        return _faults(GgufFile(folder), facts)


def _limits(settings: Published, facts: TargetFacts | None, note: Note | None) -> Faults:
    yield from engine_limits(settings, LLAMA_CPP, facts, note)
    if settings.layout in BLOCKS and not 0 <= settings.mask_token_id < settings.vocab_size:
        problem = f"The mask token {settings.mask_token_id} is outside the vocabulary of {settings.vocab_size} tokens."
        yield problem, "Train with a heads.mask_token_id inside the target's vocabulary."
    if settings.layout in BLOCKS and len(set(settings.causal_layers)) > 1:
        yield "llama.cpp runs either all layers of a block causally or none; here only some are causal.", LESS_CAUSAL
    count, size = settings.selector_top_k, settings.hidden_size
    if size < (least := count * (count + 1)):
        problem = f"llama.cpp needs a hidden size of at least {least} for {count} candidates; these heads have {size}."
        yield problem, "Train with a lower heads.selector_top_k, or serve with vLLM (--format vllm)."
    model_type = facts.model_type if facts is not None else (note.target if note else {}).get("model_type")
    if model_type and model_type not in HOOKS:
        problem = f"llama.cpp has no hooks in {model_type} targets (only in {', '.join(sorted(HOOKS))})."
        yield problem, "Serve with vLLM (--format vllm)."


def _faults(file: GgufFile, facts: TargetFacts | None) -> Faults:
    settings, note = read_settings(file), file.note
    faults = [*_limits(settings, facts, note), *short_context(settings, facts)]
    faults += [*wrong_tensors(settings, file.shapes), *_wrong_keys(file, settings)]
    yield from faults
    if not faults and note is not None:
        yield from changed(read_heads(file), note, facts)


def _wrong_keys(file: GgufFile, settings: Published) -> Faults:
    if "tokenizer.ggml.tokens" not in file.fields:
        yield "The file has no tokenizer, and llama.cpp needs the target's.", AGAIN
    if settings.layout in BLOCKS:
        for key in (f"{BLOCK}.block_size", MASK):
            if file.value(key) is None:
                yield f"The file does not say {key}: llama.cpp stops or uses its default.", AGAIN
    elif settings.draft_ids_D is not None and not are_tokens(settings.draft_ids_D, settings.vocab_size):
        problem = "d2t does not name distinct tokens of the target: llama.cpp reads token ids, not offsets."
        yield problem, "Add its index to each entry."


# -- writing -----------------------------------------------------------------------------------------------------------


_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
"""llama.cpp's token types."""
_Stored = dict[str, tuple[np.ndarray[Any, Any], Any]]
"""Raw data and type of the file's tensors."""


def _write(file: Path, published: Published, facts: TargetFacts, tensors: _Stored, note: str = "") -> None:
    """Write a file. Raises UserError without the gguf package or the target's tokenizer."""
    gguf = gguf_library()
    types = gguf.GGUFValueType
    writer = gguf.GGUFWriter(file, ARCHITECTURES[published.layout])
    writer.add_name(f"Draft heads for {facts.name}")
    keys = _keys(published)
    kinds = {bool: types.BOOL, int: types.UINT32, float: types.FLOAT32, str: types.STRING, list: types.ARRAY}
    for key, content in keys.items():
        writer.add_key_value(key, content, kinds[type(content)])
    if note:
        writer.add_string(f"{NOTE}.note", note)
    if facts.gguf is not None:
        _copy_tokenizer(writer, facts.gguf, without=frozenset(keys))
    else:
        _write_tokenizer(writer, facts)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
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
    if published.layout is Layout.DFLASH2:
        keys |= {f"{of}.{key}": getattr(published, name) for name, key in DFLASH2_KEYS.items()}
    if published.sliding_window:
        keys |= {f"{of}.{WINDOW}": published.sliding_window, f"{of}.{SLIDING}": published.sliding}
    if published.causal:
        keys[f"{of}.{CAUSAL}"] = True
    if published.layout is Layout.DSPARK:
        keys |= {f"{of}.sample_from_anchor": True, f"{of}.has_confidence_head": published.confidence}
    return keys


def _stored(published: Published, dtype: str) -> _Stored:
    """Quantise matrices, for q8_0 only if their rows divide into blocks. Other tensors stay in float32."""
    gguf = gguf_library()
    kinds = gguf.GGMLQuantizationType
    chosen = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16, "q8_0": kinds.Q8_0}[dtype]
    head_counts = permuted_heads(published)
    stored: _Stored = {}
    for name, in_file in tensor_names(published).items():
        exact = published.tensors[name].float()
        kind = kinds.F32 if exact.dim() != 2 or (chosen == kinds.Q8_0 and exact.shape[1] % 32) else chosen
        if name in head_counts:
            exact = permuted(exact, head_counts[name]).contiguous()
        stored[in_file] = gguf.quants.quantize(exact.numpy(), kind), kind
    if published.draft_ids_D is not None:
        stored[D2T] = published.draft_ids_D.to(torch.int64).numpy(), kinds.I64
    assert published.layer is not None, "these heads have decoder layers"
    if (factors_R := frequency_factors(published.layer)) is not None:
        stored[FACTORS] = factors_R.numpy(), kinds.F32
    return stored


# -- the tokenizer's fields --------------------------------------------------------------------------------------------
# llama.cpp only counts tokens with them: it tokenises text with the target's own file.


def _copy_tokenizer(writer: Any, file: Path, without: frozenset[str]) -> None:
    """Copy the tokenizer's fields of another GGUF file, except `without`."""
    gguf = gguf_library()
    for key, field in read_gguf(file).fields.items():
        if key.startswith("tokenizer.") and key not in without:
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=inner)


def _write_tokenizer(writer: Any, facts: TargetFacts) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(facts.folder, trust_remote_code=facts.trust_remote_code)
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"The tokenizer of {facts.name} cannot be read ({str(error).splitlines()[0]}).",
            "Give a target with a fast tokenizer (tokenizer.json) as --target.",
        ) from None
    special = set(tokenizer.all_special_ids)
    by_id = {token: text for text, token in tokenizer.get_vocab().items()}
    tokens = range(max(facts.vocab_size, len(by_id)))
    writer.add_token_list([by_id.get(token, f"[unused{token}]") for token in tokens])
    writer.add_token_types(
        [_UNUSED if token not in by_id else _CONTROL if token in special else _NORMAL for token in tokens]
    )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or []]
    if merges and not model.get("byte_fallback"):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_merges(merges)
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(token) for token in tokens])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
