"""The tokenizer's fields of a GGUF file: copied from the target's own file, or written from its tokenizer.

llama.cpp counts the target's tokens by them. It tokenises text with the target's fields alone, so that those of heads
need not say how text is split.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.errors import UserError
from headstart.hub.engines.base import TargetFacts
from headstart.hub.engines.gguf_library import library

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
"""Kinds of tokens, as llama.cpp numbers them."""


def copy_tokenizer(writer: Any, file: Path, without: frozenset[str] = frozenset()) -> None:
    """Write the tokenizer's fields of another GGUF file, but for some of these names."""
    gguf = library()
    reader = gguf.GGUFReader(file)
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer.") or key in without:
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type=inner)


def write_tokenizer(writer: Any, facts: TargetFacts) -> None:
    """Write a target's tokens, from the tokenizer of a Hugging Face folder or id.

    Raises:
        UserError: its tokenizer cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(facts.folder)
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise UserError(
            f"The tokenizer of {facts.name} cannot be read ({str(error).splitlines()[0]}).",
            "Give a target with a fast tokenizer (tokenizer.json) as --target.",
        ) from None
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    by_id = {number: text for text, number in vocabulary.items()}
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
