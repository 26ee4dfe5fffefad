"""GGUF files of heads for llama.cpp; each kind of heads is an `Arrangement`.

The tokenizer's fields are the target's: llama.cpp counts the target's tokens by them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Published
from headstart.hub.engines.base import NOTE, Finding, Format, TargetFacts, drafts_of, refuse_activation
from headstart.hub.engines.gguf_blocks import Blocks
from headstart.hub.engines.gguf_eagle3 import Eagle3
from headstart.hub.engines.gguf_file import (
    AGAIN,
    D2T,
    FACTORS,
    HOOKS,
    OTHER,
    Arrangement,
    Limit,
    as_kept,
    file_of,
    frequency_factors,
    layer_keys,
    opened,
    permuted,
    shape_of,
    unpermuted,
    value,
    written,
)
from headstart.hub.engines.gguf_library import library
from headstart.hub.engines.gguf_tokenizer import copy_tokenizer, write_tokenizer
from headstart.hub.engines.huggingface import files_of, note
from headstart.hub.engines.rules import unchanged

ARRANGEMENTS: tuple[Arrangement, ...] = (Eagle3(), Blocks())
FILE = "heads.gguf"
_QUANTISED = "q8_0"


class Gguf(Format):
    """heads.gguf for llama.cpp."""

    name = "gguf"
    engines = ("llama.cpp",)
    about = "a GGUF file for llama.cpp"
    dtypes = ("bfloat16", "float16", "float32", _QUANTISED)

    def check_heads(self, published: Published, facts: TargetFacts) -> list[str]:
        if not any(published.layout in one.layouts for one in ARRANGEMENTS):
            raise UserError(
                f"llama.cpp drafts with EAGLE-3, DFlash and DSpark heads, and these are {files_of(published)} heads.",
                "Train eagle3, dflash or dspark heads for it.",
            )
        refuse_activation(published, "llama.cpp")
        for is_so, problem, remedy in _limits(published, facts.model_type, facts.num_layers):
            if is_so:
                raise UserError(problem, remedy)
        return []

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        gguf, arrangement = library(), _arrangement(published)
        held, stored = _stored(published, arrangement, dtype)
        writer = gguf.GGUFWriter(folder / FILE, arrangement.architecture)
        writer.add_name(f"Draft heads for {facts.name}")
        keys = {**layer_keys(arrangement.architecture, published), **arrangement.keys(published)}
        for key, one in keys.items():
            _add(writer, key, one)
        writer.add_string(f"{NOTE}.note", json.dumps(note(held, facts)))
        if facts.gguf is not None:
            copy_tokenizer(writer, facts.gguf, without=frozenset(keys))
        else:
            write_tokenizer(writer, facts)
        for name, (numbers, kind) in stored.items():
            writer.add_tensor(name, numbers, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def holds(self, folder: Path) -> bool:
        return file_of(folder) is not None

    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        return _read(opened(folder))

    def check(self, folder: Path, engine: str, facts: TargetFacts | None = None) -> list[Finding]:
        try:
            return [Finding(engine, *said) for said in _check(opened(folder), facts)]
        except UserError as error:
            return [Finding(engine, error.problem, error.remedy)]

    def commands(
        self, folder: Path | str, published: Published, facts: TargetFacts, drafts: Mapping[str, int]
    ) -> dict[str, list[str]]:
        count, kind = drafts_of(published, drafts.get("llama.cpp", 0)), _arrangement(published).spec_type(published)
        heads = ["-md", f"{folder}/{FILE}", "--spec-type", kind, "--spec-draft-n-max", str(count)]
        return {"llama.cpp": ["llama-server", "-m", str(facts.gguf or "TARGET.gguf"), *heads]}


def _arrangement(published: Published) -> Arrangement:
    return next(one for one in ARRANGEMENTS if published.layout in one.layouts)


def _limits(published: Published, model_type: str, layers: int) -> Iterator[Limit]:
    aux_layers, rope = published.aux_layers, {} if published.layer is None else published.layer.rope_parameters
    yield from _arrangement(published).limits(published, layers)
    kind = rope.get("rope_type", "default")
    yield kind not in ("default", "linear", "llama3"), f"headstart writes no {kind} positions for llama.cpp.", OTHER
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


def _add(writer: Any, key: str, one: Any) -> None:
    if isinstance(one, bool):
        writer.add_bool(key, one)
    elif isinstance(one, int):
        writer.add_uint32(key, one)
    elif isinstance(one, float):
        writer.add_float32(key, one)
    elif isinstance(one, list):
        writer.add_array(key, one)
    else:
        writer.add_string(key, one)


def _stored(
    published: Published, arrangement: Arrangement, dtype: str
) -> tuple[Published, dict[str, tuple[np.ndarray[Any, Any], Any]]]:
    """The heads in the numbers that the file holds, and the file's tensors: raw numbers and their kind.

    Norms stay in float32, and so do matrices whose rows cannot be cut into blocks.
    """
    gguf = library()
    kinds = gguf.GGMLQuantizationType
    wanted = {"float32": kinds.F32, "float16": kinds.F16, "bfloat16": kinds.BF16, _QUANTISED: kinds.Q8_0}[dtype]
    names, counts = arrangement.names(published), arrangement.permuted(published)
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
        if name in counts:
            raw = gguf.quants.quantize(permuted(exact, counts[name]).contiguous().numpy(), kind)
        stored[names[name]] = raw, kind
    if published.draft_ids_D is not None:
        stored[D2T] = published.draft_ids_D.to(torch.int64).numpy(), kinds.I64
    assert published.layer is not None, "these heads have decoder layers"
    if (factors_R := frequency_factors(published.layer)) is not None:
        stored[FACTORS] = factors_R.numpy(), kinds.F32
    return as_kept(published).with_tensors(held), stored


# -- reading -----------------------------------------------------------------------------------------------------------


def _of_file(reader: Any) -> Arrangement:
    """What the file's architecture holds.

    Raises:
        UserError: no heads.
    """
    architecture = value(reader, "general.architecture")
    for one in ARRANGEMENTS:
        if one.architecture == architecture:
            return one
    known = " or ".join(repr(one.architecture) for one in ARRANGEMENTS)
    raise UserError(
        f"The GGUF file is of the architecture {architecture!r}, and draft heads are of {known}.",
        "Give the file of the draft heads, not that of a model.",
    )


def _read(reader: Any) -> Published:
    arrangement = _of_file(reader)
    settings = arrangement.settings(reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    own = {name: shape_of(one) for name, one in tensors.items()}
    if said := next(_wrong_tensors(arrangement, settings, own), None):
        raise UserError(*said)
    names, counts = arrangement.names(settings), arrangement.permuted(settings)
    found = {}
    for name in settings.expected():
        tensor = tensors[names[name]]
        numbers = library().quants.dequantize(np.array(tensor.data), tensor.tensor_type)
        weight = torch.from_numpy(np.array(numbers, dtype=np.float32)).reshape(shape_of(tensor))
        found[name] = unpermuted(weight, counts[name]) if name in counts else weight
    return settings.with_tensors(found)


def _wrong_tensors(
    arrangement: Arrangement, settings: Published, own: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, str]]:
    if settings.num_layers != 1 and settings.layout not in BLOCKS:
        yield f"llama.cpp runs one layer, and the heads have {settings.num_layers}.", AGAIN
        return
    names, known = arrangement.names(settings), arrangement.beside(settings)
    wanted = {names[name]: shape for name, shape in settings.expected().items()}
    for name, shape in wanted.items():
        if name not in own:
            yield f"The tensor {name} is missing, and llama.cpp stops without it.", AGAIN
        elif own[name] != shape:
            yield f"The tensor {name} is {list(own[name])}, and {list(shape)} is expected.", AGAIN
    for name in sorted(set(own) - set(wanted)):
        if name not in known:
            yield f"llama.cpp has no tensor {name} in such heads, and stops at it.", AGAIN
        elif own[name] != known[name]:
            yield f"The tensor {name} is {list(own[name])}, and {list(known[name])} is expected.", AGAIN


def _check(reader: Any, facts: TargetFacts | None) -> Iterator[tuple[str, str]]:
    arrangement = _of_file(reader)
    settings = arrangement.settings(reader)
    own = {tensor.name: shape_of(tensor) for tensor in reader.tensors}
    noted = written(reader)
    theirs: Mapping[str, Any] = {} if noted is None else noted.target
    model_type = facts.model_type if facts is not None else str(theirs.get("model_type", ""))
    layers = facts.num_layers if facts is not None else int(theirs.get("num_layers", 0))
    found = [(problem, remedy) for is_so, problem, remedy in _limits(settings, model_type, layers) if is_so]
    found += _wrong_tensors(arrangement, settings, own)
    found += arrangement.faults(reader, settings)
    if facts is not None and settings.vocab_size != facts.vocab_size:
        found.append(
            (f"The file has {settings.vocab_size} tokens, and {facts.name} {facts.vocab_size}.", "Export it again.")
        )
    if "tokenizer.ggml.tokens" not in reader.fields:
        found.append(("The file has no tokenizer, and llama.cpp needs the target's.", "Export it again."))
    yield from found
    if not found and noted is not None:
        yield from unchanged(_read(reader), noted, facts)
