"""Seed prompts: openings of many kinds of requests, for diverse self-prompts.

Without an opening, a target writes few kinds of requests. `{topic}` is filled from TOPICS. No seed prompt is taken from
a benchmark or modelled on a benchmark question.
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
