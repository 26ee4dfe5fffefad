"""GGUF files of heads for llama.cpp: what it cannot do, what a file gets wrong, how it is served."""

from __future__ import annotations

from pathlib import Path

import torch

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Layout, Published
from headstart.hub.engines.base import Faults, Format
from headstart.hub.engines.gguf_file import (
    AGAIN,
    ARCHITECTURES,
    BLOCK,
    D2T,
    DEFAULT_BLOCK,
    FILE,
    MASK,
    GgufFile,
    file_of,
    read_heads,
    read_settings,
    wrong_tensors,
)
from headstart.hub.engines.gguf_writing import write_gguf
from headstart.hub.engines.rules import unchanged
from headstart.hub.target_facts import TargetFacts, kind_of

HOOKS = frozenset(
    {
        *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "gpt_oss"),
        *("gemma4", "gemma4_text", "lfm2", "minimax_m2"),
    }
)
"""transformers' types of targets whose layers llama.cpp gives to heads; never the last one's output."""
_OTHER = "Export with --format vllm, or train without that."


class Gguf(Format):
    """heads.gguf for llama.cpp."""

    name = "gguf"
    engines = ("llama.cpp",)
    dtypes = ("bfloat16", "float16", "float32", "q8_0")

    def limits(self, published: Published, facts: TargetFacts, engine: str) -> Faults:
        if published.layout not in ARCHITECTURES:
            raise UserError(
                f"llama.cpp drafts with EAGLE-3, DFlash and DSpark heads, and these are {kind_of(published)} heads.",
                "Train eagle3, dflash or dspark heads for it.",
            )
        return _limits(published, facts.model_type, facts.num_layers)

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        write_gguf(folder / FILE, published, facts, dtype)

    def holds(self, folder: Path) -> bool:
        return file_of(folder) is not None

    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        return read_heads(GgufFile(folder))

    def faults(self, folder: Path, engine: str, facts: TargetFacts | None = None) -> Faults:
        return _faults(GgufFile(folder), facts)


def _limits(published: Published, model_type: str, layers: int) -> Faults:
    """What llama.cpp cannot do with these heads; `layers` of the target, 0 where that is not known."""
    yield from _limits_of_blocks(published) if published.layout in BLOCKS else _limits_of_eagle3(published)
    assert published.layer is not None, "these heads have decoder layers"
    if published.layer.hidden_act != "silu":
        yield (
            f"The heads' MLP uses {published.layer.hidden_act}, and llama.cpp computes silu alone.",
            "Train them with heads.hidden_act=silu.",
        )
    kind = published.layer.rope_parameters.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        yield f"headstart writes no {kind} positions for llama.cpp.", _OTHER
    if model_type and model_type not in HOOKS:
        yield (
            f"llama.cpp has no hooks in {model_type} targets: it would stop when it drafts.",
            f"It has them in {', '.join(sorted(HOOKS))}; serve this one with vLLM (--format vllm).",
        )
    aux_layers, deepest = published.aux_layers, layers - 1
    if aux_layers and layers > 0 and (max(aux_layers) > deepest or min(aux_layers) < 1):
        yield (
            f"llama.cpp gives heads the layers 1 to {deepest} of this target, and these read {list(aux_layers)}.",
            f"Train with heads.aux_layers up to {deepest}, or export with --format vllm.",
        )


def _limits_of_eagle3(published: Published) -> Faults:
    if published.num_layers != 1:
        yield f"llama.cpp runs one layer, and the heads have {published.num_layers}.", _OTHER
    if (count := len(published.aux_layers)) != 3:
        yield f"llama.cpp fuses 3 layers of the target, and the heads read {count}.", _OTHER
    if published.aux_norms:
        yield "llama.cpp has no norm of each aux state (heads.aux_norms).", _OTHER
    if published.norm_output:
        yield (
            "llama.cpp feeds back the state before the norm, whatever norm_output says (heads.feedback).",
            "Export with --format vllm, or train with heads.feedback=pre_norm.",
        )


def _limits_of_blocks(published: Published) -> Faults:
    aux_layers = list(published.aux_layers)
    if sorted(set(aux_layers)) != aux_layers:
        yield (
            f"The layers {aux_layers} do not rise, and engines join their outputs in the order of the layers.",
            "Train with rising heads.aux_layers.",
        )
    if not 0 <= published.mask_token_id < published.vocab_size:
        yield (
            f"The mask token is {published.mask_token_id}, which is no token of a vocabulary of "
            f"{published.vocab_size}: llama.cpp stops.",
            "Train with a heads.mask_token_id of the target's vocabulary.",
        )
    if published.layout is Layout.DSPARK and not published.markov_rank:
        yield (
            "llama.cpp knows DSpark heads by their Markov head, and these have none (heads.markov_rank=0).",
            "Train dflash heads, or with a heads.markov_rank.",
        )


def _faults(file: GgufFile, facts: TargetFacts | None) -> Faults:
    settings, note = read_settings(file), file.written
    theirs = {} if note is None else note.target
    model_type = facts.model_type if facts is not None else str(theirs.get("model_type", ""))
    layers = facts.num_layers if facts is not None else int(theirs.get("num_layers", 0))
    faults = list(_limits(settings, model_type, layers))
    faults += wrong_tensors(settings, file.shapes)
    faults += _wrong_keys(file, settings)
    if facts is not None and settings.vocab_size != facts.vocab_size:
        faults.append(
            (f"The file has {settings.vocab_size} tokens, and {facts.name} {facts.vocab_size}.", "Export it again.")
        )
    if "tokenizer.ggml.tokens" not in file.fields:
        faults.append(("The file has no tokenizer, and llama.cpp needs the target's.", "Export it again."))
    yield from faults
    if not faults and note is not None:
        yield from unchanged(read_heads(file), note, facts)


def _wrong_keys(file: GgufFile, settings: Published) -> Faults:
    if settings.layout in BLOCKS:
        if file.value(f"{BLOCK}.block_size") is None:
            then = "stops" if settings.layout is Layout.DSPARK else f"takes {DEFAULT_BLOCK}"
            yield f"The file does not say {BLOCK}.block_size, and llama.cpp then {then}.", AGAIN
        if file.value(MASK) is None:
            yield f"The file does not say {MASK}, and llama.cpp fills blocks with no token at all.", AGAIN
        if D2T in file.tensors:
            yield "There is a d2t, and the whole vocabulary is drafted.", _OTHER
    elif (ids_D := settings.draft_ids_D) is not None:
        outside = bool(((ids_D < 0) | (ids_D >= settings.vocab_size)).any())
        if outside or len(torch.unique(ids_D)) != len(ids_D):
            yield (
                "d2t does not name distinct tokens of the target: llama.cpp reads token ids there, and Hugging Face "
                "files hold offsets.",
                "Add each entry's place to it.",
            )
