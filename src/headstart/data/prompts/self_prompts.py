"""Self-prompting: the target writes the user's turns, so that a first run needs no download.

It continues the chat template's user prefix, optionally with a seed prompt, to the end of the turn. Seed prompts are
openings of many kinds of requests: without them, a target writes few kinds. None is taken from a benchmark or modelled
on a benchmark question.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headstart.data.generation.generator import Continuation, TextGenerator
from headstart.data.generation.in_process import InProcess
from headstart.data.prompts.chat import check_prompts
from headstart.model.model import Target
from headstart.support.detokenizer import decode_text

*_CATEGORIES, _LAST = map(json.loads, Path(__file__).with_name("seed_prompts.jsonl").read_text("utf-8").splitlines())
SEED_PROMPTS: dict[str, list[str]] = {row["category"]: row["seed_prompts"] for row in _CATEGORIES}
"""Seed prompts by category, with the placeholder {topic}."""
SHARES: dict[str, float] = {row["category"]: row["share"] for row in _CATEGORIES if row["share"] != 1}
"""Sampling weights of categories, 1 by default: other text teaches little code and arithmetic. The packaged requests
use the same mixture."""
_TOPICS: list[str] = _LAST["topics"]
_SENTINEL = "\u2603headstart\u2603"
_MAX_PROMPT_TOKENS = 128


def user_prefix(tokenizer: Any) -> str:
    """Return the chat template's text before the first user message."""
    check_prompts(tokenizer, own=True)
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": _SENTINEL}], tokenize=False))
    return text[: text.index(_SENTINEL)]


def generate_prompts(
    target: Target,
    count: int,
    breadth: str,
    seed: int,
    generator: TextGenerator | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[tuple[str, str]]:
    """Generate `count` requests in one batch; return the acceptable ones as (text, category).

    Deterministic for a seed. `breadth` "broad" samples seed prompts, "none" uses none. `check` aborts by raising.
    """
    rng = random.Random(seed)
    by_category = SEED_PROMPTS if breadth == "broad" else {"open": [""]}
    categories = sorted(by_category)
    shares = [SHARES.get(category, 1.0) for category in categories]
    starts = []
    for _ in range(count):
        (category,) = rng.choices(categories, shares)
        starts.append((category, rng.choice(by_category[category]).replace("{topic}", rng.choice(_TOPICS))))
    prefix = user_prefix(target.tokenizer)
    rows = [target.tokenizer(prefix + seed_prompt, add_special_tokens=False)["input_ids"] for _, seed_prompt in starts]
    ends = target.end_tokens
    continuation = Continuation(_MAX_PROMPT_TOKENS, [1.0] * count, ends, seed, top_p=0.95, check=check)
    added = (generator or InProcess(target)).continue_rows(rows, continuation)
    prompts = []
    for (category, seed_prompt), row, tokens in zip(starts, rows, added, strict=True):
        if not tokens or tokens[-1] not in ends:
            continue  # refused, or cut off in the middle
        text = seed_prompt + _added_text(target.tokenizer, row, tokens[:-1])
        if acceptable(text, target.tokenizer.all_special_tokens):
            prompts.append((text.strip(), category))
    return prompts


def _added_text(tokenizer: Any, before: list[int], tokens: list[int]) -> str:
    """Decode tokens in context; on their own, some tokenizers drop the space before the first word."""
    known = decode_text(tokenizer, before, skip_special_tokens=False)
    return decode_text(tokenizer, [*before, *tokens], skip_special_tokens=False)[len(known) :]


def acceptable(text: str, special_tokens: list[str]) -> bool:
    """Whether a generated request is usable: a few words, readable, not repetitive."""
    words = text.split()
    if not 3 <= len(words) <= 300 or any(token in text for token in special_tokens):
        return False
    if len(words) >= 20 and len(set(words)) < 0.35 * len(words):
        return False
    readable = sum(character.isprintable() or character in "\n\t" for character in text)
    return readable >= 0.98 * len(text) and "\ufffd" not in text
