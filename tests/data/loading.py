"""Prompts of one source, as tests read them."""

from __future__ import annotations

from typing import Any

from headstart.data.prompts.loading import Prompts, load_prompts
from headstart.recipes.sections import DataSection


def load(source: str, split: str = "train", tokenizer: Any = None, **how: Any) -> Prompts:
    """The prompts of a source; `how` are settings of the data, and what `load_prompts` takes."""
    names = ("max_prompt_tokens", "prefix_tokens", "exclude", "revision")
    settings = {name: how.pop(name) for name in names if name in how}
    data = DataSection(prompts=source, split=split).model_copy(update=settings)
    return load_prompts(data, tokenizer, **how)
