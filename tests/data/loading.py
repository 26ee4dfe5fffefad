"""Prompts of one source, as tests read them."""

from __future__ import annotations

from typing import Any

from headstart.data.prompts.reading import Limits, Prompts, load_prompts
from headstart.recipes.sections import PromptSource


def load(source: str, split: str = "train", tokenizer: Any = None, **how: Any) -> Prompts:
    """The prompts of a source; `how` are fields of `Limits`, a revision, and what `load_prompts` takes."""
    limits = Limits(**{name: how.pop(name) for name in ("max_tokens", "prefix_tokens", "exclude") if name in how})
    given = PromptSource(source=source, split=split, revision=how.pop("revision", None))
    return load_prompts((given,), tokenizer, limits, **how)
