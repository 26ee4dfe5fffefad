"""GGUF files of heads for llama.cpp: what it cannot do, what a file gets wrong, how it is served."""

from __future__ import annotations

from pathlib import Path

from headstart.errors import UserError
from headstart.heads.exchange.published import BLOCKS, Published
from headstart.hub.engines.base import AGAIN, HEADS_GGUF, Faults, Format, Written
from headstart.hub.engines.faults import engine_limits, unchanged
from headstart.hub.engines.gguf_file import (
    ARCHITECTURES,
    BLOCK,
    MASK,
    GgufFile,
    file_of,
    read_heads,
    read_settings,
    wrong_tensors,
)
from headstart.hub.engines.gguf_writing import write_gguf
from headstart.hub.engines.known_engines import LLAMA_CPP
from headstart.hub.engines.parsing import are_tokens
from headstart.hub.target_facts import TargetFacts, kind_of

HOOKS = frozenset(
    {
        *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "gpt_oss"),
        *("gemma4", "gemma4_text", "lfm2", "minimax_m2"),
    }
)
"""transformers' types of targets whose layers llama.cpp gives to heads; never the last one's output."""


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
        return _limits(published, facts, None)

    def write(self, published: Published, facts: TargetFacts, folder: Path, dtype: str) -> None:
        write_gguf(folder / HEADS_GGUF, published, facts, dtype)

    def holds(self, folder: Path) -> bool:
        return file_of(folder) is not None

    def read(self, folder: Path, facts: TargetFacts | None = None) -> Published:
        return read_heads(GgufFile(folder))

    def faults(self, folder: Path, engine: str, facts: TargetFacts | None) -> Faults:
        return _faults(GgufFile(folder), facts)


def _limits(settings: Published, facts: TargetFacts | None, written: Written | None) -> Faults:
    """What llama.cpp cannot do with these heads."""
    yield from engine_limits(settings, LLAMA_CPP, facts, written)
    if settings.layout in BLOCKS and not 0 <= settings.mask_token_id < settings.vocab_size:
        yield (
            f"The mask token is {settings.mask_token_id}, which is no token of a vocabulary of {settings.vocab_size}: "
            "llama.cpp stops.",
            "Train with a heads.mask_token_id of the target's vocabulary.",
        )
    model_type = facts.model_type if facts is not None else (written.target if written else {}).get("model_type")
    if model_type and model_type not in HOOKS:
        yield (
            f"llama.cpp has no hooks in {model_type} targets: it would stop when it drafts.",
            f"It has them in {', '.join(sorted(HOOKS))}; serve this one with vLLM (--format vllm).",
        )


def _faults(file: GgufFile, facts: TargetFacts | None) -> Faults:
    settings, written = read_settings(file), file.written
    sound = True
    for fault in (
        *_limits(settings, facts, written),
        *wrong_tensors(settings, file.shapes),
        *_wrong_keys(file, settings),
    ):
        sound = False
        yield fault
    if sound and written is not None:
        yield from unchanged(read_heads(file), written, facts)


def _wrong_keys(file: GgufFile, settings: Published) -> Faults:
    if "tokenizer.ggml.tokens" not in file.fields:
        yield "The file has no tokenizer, and llama.cpp needs the target's.", AGAIN
    if settings.layout in BLOCKS:
        for key in (f"{BLOCK}.block_size", MASK):
            if file.value(key) is None:
                yield f"The file does not say {key}, and llama.cpp stops or takes one of its own.", AGAIN
    elif settings.draft_ids_D is not None and not are_tokens(settings.draft_ids_D, settings.vocab_size):
        yield (
            "d2t does not name distinct tokens of the target: llama.cpp reads token ids there, and Hugging Face files "
            "hold offsets.",
            "Add each entry's place to it.",
        )
