"""GGUF files of EAGLE-3 heads for llama.cpp.

Of a Hugging Face checkpoint three things differ: rows of queries and keys are permuted, since llama.cpp turns pairs of
neighbours where transformers turns the two halves of a head; `d2t` holds token ids, not offsets; and tensors have other
names. The tokenizer's fields are the target's: llama.cpp counts the target's tokens by them.

Shape suffixes: D draft vocabulary, E hidden size, R pairs of a head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.published import LayerSizes, Layout, Published
from headstart.hub.engines.base import NOTE, Finding, Format, TargetFacts, Written, drafts_of, refuse_activation
from headstart.hub.engines.gguf_library import library
from headstart.hub.engines.gguf_tokenizer import copy_tokenizer, write_tokenizer
from headstart.hub.engines.huggingface import files_of, note
from headstart.hub.engines.rules import unchanged

ARCHITECTURE = "eagle3"
FILE = "heads.gguf"
HOOKS = frozenset(
    {
        *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "gpt_oss"),
        *("gemma4", "gemma4_text", "lfm2", "minimax_m2"),
    }
)
"""transformers' types of targets whose layers llama.cpp gives to heads; never the last one's output."""
_NAMES = {
    "fc.weight": "fc.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_norm.weight": "enc.output_norm.weight",
}
_FACTORS = "rope_freqs.weight"
_D2T = "d2t"
_QUANTISED = "q8_0"


class Gguf(Format):
    """heads.gguf for llama.cpp."""

    name = "gguf"
    engines = ("llama.cpp",)
    about = "a GGUF file for llama.cpp"
    dtypes = ("bfloat16", "float16", "float32", _QUANTISED)

    def check_heads(self, published: Published, facts: TargetFacts) -> list[str]:
        if published.layout is not Layout.EAGLE3:
            raise UserError(
                f"llama.cpp drafts with EAGLE-3 heads, and these are {files_of(published)} heads.",
                "Train eagle3 heads for it.",
            )
        refuse_activation(published, "llama.cpp")
        for is_so, problem, remedy in _limits(published, facts.model_type, facts.num_layers):
            if is_so:
                raise UserError(problem, remedy)
        return []

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        gguf = library()
        held, stored = _stored(published, dtype)
        assert published.layer is not None, "these heads have a decoder layer"
        writer = gguf.GGUFWriter(folder / FILE, ARCHITECTURE)
        writer.add_name(f"Draft heads for {facts.name}")
        for key, value in _keys(published, published.layer).items():
            _add(writer, key, value)
        writer.add_string(f"{NOTE}.note", json.dumps(note(held, facts)))
        if facts.gguf is not None:
            copy_tokenizer(writer, facts.gguf)
        else:
            write_tokenizer(writer, facts)
        for name, (numbers, kind) in stored.items():
            writer.add_tensor(name, numbers, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def holds(self, folder: Path) -> bool:
        return _file(folder) is not None

    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        return _read(_open(folder))

    def check(self, folder: Path, engine: str, facts: TargetFacts | None = None) -> list[Finding]:
        try:
            return [Finding(engine, *said) for said in _check(_open(folder), facts)]
        except UserError as error:
            return [Finding(engine, error.problem, error.remedy)]

    def commands(
        self, folder: Path | str, published: Published, facts: TargetFacts, drafts: Mapping[str, int]
    ) -> dict[str, list[str]]:
        count = drafts_of(published, drafts.get("llama.cpp", 0))
        heads = ["-md", f"{folder}/{FILE}", "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(count)]
        return {"llama.cpp": ["llama-server", "-m", str(facts.gguf or "TARGET.gguf"), *heads]}


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


def _limits(published: Published, model_type: str, layers: int) -> Iterator[tuple[bool, str, str]]:
    """(whether it is so, what llama.cpp would get wrong, what to do)."""
    aux_layers, rope = published.aux_layers, {} if published.layer is None else published.layer.rope_parameters
    other = "Export with --format vllm, or train without that."
    yield published.num_layers != 1, f"llama.cpp runs one layer, and the heads have {published.num_layers}.", other
    yield len(aux_layers) != 3, f"llama.cpp fuses 3 layers of the target, and the heads read {len(aux_layers)}.", other
    yield published.aux_norms, "llama.cpp has no norm of each aux state (heads.aux_norms).", other
    yield (
        published.norm_output,
        "llama.cpp feeds back the state before the norm, whatever norm_output says (heads.feedback).",
        "Export with --format vllm, or train with heads.feedback=pre_norm.",
    )
    kind = rope.get("rope_type", "default")
    yield kind not in ("default", "linear", "llama3"), f"headstart writes no {kind} positions for llama.cpp.", other
    yield (
        bool(model_type) and model_type not in HOOKS,
        f"llama.cpp has no hooks in {model_type} targets: it would stop when it drafts.",
        f"It has them in {', '.join(sorted(HOOKS))}; serve this one with vLLM (--format vllm).",
    )
    deepest = layers - 1
    yield (
        bool(aux_layers) and layers > 0 and (max(aux_layers) > deepest or min(aux_layers) < 1),
        f"llama.cpp gives heads the layers 1 to {deepest} of this target, and these read {list(aux_layers)}.",
        f"Train with heads.aux_layers up to {deepest}, or export with --format vllm.",
    )


def _keys(published: Published, layer: LayerSizes) -> dict[str, Any]:
    """Everything but tensors and tokenizer, by the keys that llama.cpp reads."""
    rope, of = layer.rope_parameters, ARCHITECTURE
    keys: dict[str, Any] = {
        f"{of}.context_length": layer.max_position_embeddings,
        f"{of}.embedding_length": published.hidden_size,
        f"{of}.block_count": 1,
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
        f"{of}.target_hidden_size": published.hidden_size,
        f"{of}.norm_before_residual": published.norm_before_residual,
        f"{of}.norm_before_fc": published.norm_before_fc,
    }
    if rope.get("rope_type") == "linear":
        keys |= {f"{of}.rope.scaling.type": "linear", f"{of}.rope.scaling.factor": float(rope["factor"])}
    return keys


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _stored(published: Published, dtype: str) -> tuple[Published, dict[str, tuple[np.ndarray[Any, Any], Any]]]:
    """The heads in the numbers that the file holds, and the file's tensors: raw numbers and their kind.

    Norms stay in float32, and so do matrices whose rows cannot be cut into blocks.
    """
    gguf = library()
    kinds = gguf.GGMLQuantizationType
    wanted = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16, _QUANTISED: kinds.Q8_0}[dtype]
    layer = published.layer
    assert layer is not None, "these heads have a decoder layer"
    counts = {
        "layers.0.self_attn.q_proj.weight": layer.num_attention_heads,
        "layers.0.self_attn.k_proj.weight": layer.num_key_value_heads,
    }
    held: dict[str, Tensor] = {}
    stored: dict[str, tuple[np.ndarray[Any, Any], Any]] = {}
    for name, tensor in published.tensors.items():
        if name not in _NAMES:
            continue
        kind = kinds.F32 if tensor.dim() == 1 or (wanted == kinds.Q8_0 and tensor.shape[1] % 32) else wanted
        exact = tensor.float()
        # A row's numbers do not depend on its place, so that the rounded heads are those before the permutation.
        raw = gguf.quants.quantize(exact.numpy(), kind)
        held[name] = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind), dtype=np.float32))
        if name in counts:
            raw = gguf.quants.quantize(permuted(exact, counts[name]).contiguous().numpy(), kind)
        stored[_NAMES[name]] = raw, kind
    if published.draft_ids_D is not None:
        stored[_D2T] = published.draft_ids_D.to(torch.int64).numpy(), kinds.I64
    if (factors_R := frequency_factors(layer)) is not None:
        stored[_FACTORS] = factors_R.numpy(), kinds.F32
    return _as_kept(published, layer).with_tensors(held), stored


def _as_kept(published: Published, layer: LayerSizes) -> Published:
    """The same with numbers as a GGUF file keeps them, and as they are read back."""
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


def _file(folder: Path) -> Path | None:
    if folder.is_file():
        return folder if folder.suffix == ".gguf" else None
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return files[0] if len(files) == 1 else None


def _open(folder: Path) -> Any:
    """A reader of the folder's GGUF file, whose numbers stay in the file until they are used.

    Raises:
        UserError: there is none, or it is damaged.
    """
    file = _file(folder)
    if file is None:
        raise UserError(f"{folder} has no GGUF file, or several.", "Give the file itself.")
    try:
        return library().GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file} is cut short or damaged ({error}).", "Fetch or export it again.") from None


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.fields.get(key)
    return default if field is None else field.contents()


def _needed(reader: Any, key: str) -> Any:
    found = _value(reader, f"{ARCHITECTURE}.{key}")
    if found is None:
        raise UserError(f"The GGUF file does not say {ARCHITECTURE}.{key}.", "Export or convert the heads again.")
    return found


def _written(reader: Any) -> Written | None:
    """What the file says of itself, where it is ours."""
    noted = _value(reader, f"{NOTE}.note")
    return Written.of(json.loads(noted)) if isinstance(noted, str) else None


def _settings(reader: Any) -> Published:
    """Everything of the heads but their tensors."""
    architecture = _value(reader, "general.architecture")
    if architecture != ARCHITECTURE:
        raise UserError(
            f"The GGUF file is of the architecture {architecture!r}, and EAGLE-3 heads are of {ARCHITECTURE!r}.",
            "Give the file of the draft heads, not that of a model.",
        )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    heads, size = int(_needed(reader, "attention.head_count")), int(_needed(reader, "embedding_length"))
    scaled = _value(reader, f"{ARCHITECTURE}.rope.scaling.type") == "linear"
    rope = _rope(
        float(_needed(reader, "rope.freq_base")),
        float(_needed(reader, "rope.scaling.factor")) if scaled else None,
        np.array(tensors[_FACTORS].data).reshape(-1).tolist() if _FACTORS in tensors else None,
    )
    written = _written(reader)
    layer = LayerSizes(
        intermediate_size=int(_needed(reader, "feed_forward_length")),
        num_attention_heads=heads,
        num_key_value_heads=int(_value(reader, f"{ARCHITECTURE}.attention.head_count_kv", heads)),
        head_dim=int(_value(reader, f"{ARCHITECTURE}.attention.key_length", size // heads)),
        hidden_act="silu",
        rms_norm_eps=float(_needed(reader, "attention.layer_norm_rms_epsilon")),
        rope_parameters=rope,
        max_position_embeddings=int(_needed(reader, "context_length")),
    )
    tokens = reader.fields.get("tokenizer.ggml.tokens")
    vocab = len(tokens.data) if tokens is not None else int(_needed(reader, "vocab_size"))
    ids_D = torch.from_numpy(np.array(tensors[_D2T].data)).reshape(-1) if _D2T in tensors else None
    return Published(
        layout=Layout.EAGLE3,
        hidden_size=size,
        vocab_size=vocab,
        steps=written.steps if written and written.steps else 5,
        tensors={},
        draft_ids_D=ids_D,
        layer=layer,
        num_layers=int(_needed(reader, "block_count")),
        aux_layers=tuple(int(layer) for layer in _needed(reader, "target_layers")),
        norm_before_residual=bool(_value(reader, f"{ARCHITECTURE}.norm_before_residual", False)),
        norm_before_fc=bool(_value(reader, f"{ARCHITECTURE}.norm_before_fc", False)),
    )


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _read(reader: Any) -> Published:
    settings = _settings(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if said := next(_wrong_tensors(settings, {name: _shape(one) for name, one in tensors.items()}), None):
        raise UserError(*said)
    layer = settings.layer
    assert layer is not None, "these heads have a decoder layer"
    counts = {"blk.0.attn_q.weight": layer.num_attention_heads, "blk.0.attn_k.weight": layer.num_key_value_heads}
    found = {}
    for name in settings.expected():
        tensor = tensors[_NAMES[name]]
        numbers = library().quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        weight = torch.from_numpy(np.array(numbers, dtype=np.float32)).reshape(_shape(tensor))
        found[name] = unpermuted(weight, counts[tensor.name]) if tensor.name in counts else weight
    return settings.with_tensors(found)


def _wrong_tensors(settings: Published, own: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    again = "Export or convert the heads again."
    if settings.num_layers != 1:
        yield f"llama.cpp runs one layer, and the heads have {settings.num_layers}.", again
        return
    wanted = {_NAMES[name]: shape for name, shape in settings.expected().items()}
    assert settings.layer is not None, "these heads have a decoder layer"
    known = {
        "token_embd.weight": (settings.vocab_size, settings.hidden_size),
        _D2T: (settings.draft_width,),
        _FACTORS: (settings.layer.head_dim // 2,),
    }
    for name, shape in wanted.items():
        if name not in own:
            yield f"The tensor {name} is missing, and llama.cpp stops without it.", again
        elif own[name] != shape:
            yield f"The tensor {name} is {list(own[name])}, and {list(shape)} is expected.", again
    for name in sorted(set(own) - set(wanted)):
        if name not in known:
            yield f"llama.cpp has no tensor {name} in such heads, and stops at it.", again
        elif own[name] != known[name]:
            yield f"The tensor {name} is {list(own[name])}, and {list(known[name])} is expected.", again


def _check(reader: Any, facts: TargetFacts | None) -> Iterator[tuple[str, str]]:
    settings = _settings(reader)
    own = {tensor.name: _shape(tensor) for tensor in reader.tensors}
    written = _written(reader)
    theirs: Mapping[str, Any] = {} if written is None else written.target
    model_type = facts.model_type if facts is not None else str(theirs.get("model_type", ""))
    layers = facts.num_layers if facts is not None else int(theirs.get("num_layers", 0))
    found = [(problem, remedy) for is_so, problem, remedy in _limits(settings, model_type, layers) if is_so]
    found += _wrong_tensors(settings, own)
    ids_D = settings.draft_ids_D
    if ids_D is not None:
        found += _wrong_ids(ids_D, settings.vocab_size)
    if facts is not None and settings.vocab_size != facts.vocab_size:
        found.append(
            (f"The file has {settings.vocab_size} tokens, and {facts.name} {facts.vocab_size}.", "Export it again.")
        )
    if "tokenizer.ggml.tokens" not in reader.fields:
        found.append(("The file has no tokenizer, and llama.cpp needs the target's.", "Export it again."))
    yield from found
    if not found and written is not None:
        yield from unchanged(_read(reader), written, facts)


def _wrong_ids(ids_D: Tensor, vocab_size: int) -> Iterator[tuple[str, str]]:
    outside = bool(((ids_D < 0) | (ids_D >= vocab_size)).any())
    if outside or len(torch.unique(ids_D)) != len(ids_D):
        yield (
            "d2t does not name distinct tokens of the target: llama.cpp reads token ids there, and Hugging Face files "
            "hold offsets.",
            "Add each entry's place to it.",
        )
