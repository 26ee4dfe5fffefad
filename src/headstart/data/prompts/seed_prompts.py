"""Seed prompts: openings of many kinds of requests, for diverse self-prompts.

A target that writes prompts from nothing falls into a few habits; given an opening, it continues that kind of request.
`{topic}` is filled from TOPICS. No seed prompt is taken from a benchmark or modelled on a benchmark question.
"""

from __future__ import annotations

import json
from pathlib import Path

_FILE = Path(__file__).with_name("seed_prompts.jsonl")
*_CATEGORIES, _LAST = map(json.loads, _FILE.read_text(encoding="utf-8").splitlines())

SEED_PROMPTS: dict[str, list[str]] = {row["category"]: row["seed_prompts"] for row in _CATEGORIES}
SHARES: dict[str, float] = {row["category"]: row["share"] for row in _CATEGORIES if row["share"] != 1}
"""Sampling weights of categories, 1 by default: other text teaches little code and arithmetic. The packaged requests
use the same mixture."""
TOPICS: list[str] = _LAST["topics"]


def seed_prompt_list(breadth: str) -> list[tuple[str, str]]:
    """List (category, seed prompt) pairs; "none" gives a single empty seed prompt."""
    if breadth == "none":
        return [("open", "")]
    return [(category, seed_prompt) for category, seed_prompts in SEED_PROMPTS.items() for seed_prompt in seed_prompts]
