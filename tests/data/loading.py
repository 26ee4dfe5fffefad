"""Helpers of tests that read prompts and build conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headstart.data.conversations.building import Splits
from headstart.data.conversations.masks import encode
from headstart.data.conversations.records import Conversation
from headstart.data.prompts.loading import Prompts, load_prompts
from headstart.model.model import Target
from headstart.recipes.sections import DataSection


def load(source: str, split: str = "train", tokenizer: Any = None, **how: Any) -> Prompts:
    """Load the prompts of a source; `how` holds fields of the data section and arguments of `load_prompts`."""
    names = ("max_prompt_tokens", "prefix_tokens", "exclude", "revision", "regenerate")
    settings = {name: how.pop(name) for name in names if name in how}
    data = DataSection(prompts=source, split=split).model_copy(update=settings)
    return load_prompts(data, tokenizer, **how)


def write_rows(path: Path, *rows: Any) -> str:
    """Write JSONL, lone surrogates included; return the path for a recipe."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    start = [] if system is None else [{"role": "system", "content": system}]
    return [*start, *({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts))]


def everything(splits: Splits) -> list[list[Conversation]]:
    return [splits.train, splits.validation, splits.heldout]


def of_part(file: Path) -> list[Conversation]:
    """Read the conversations of a part, without its header line."""
    return [Conversation.from_json(json.loads(line)) for line in file.read_text().splitlines()[1:]]


def some_conversations(target: Target, count: int = 7) -> list[Conversation]:
    """Encode given answers of several lengths."""
    made = []
    for i in range(count):
        messages = turns(f"q{i}", "la " * (1 + 5 * i % 7))
        made.append(Conversation(f"c{i}", *encode(messages, target.tokenizer), messages))
    return made
