"""How long the conversations of a recipe will be: from its own prompts where there are any, all turns counted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.data.prompts import Prompt
    from headstart.recipe import DataSection
    from headstart.target import Target

PROMPT_TOKENS = 70
"""Tokens of a self-written prompt with its template, on average."""
ANSWER_SHARE = 0.8
"""Length of an answer as a share of data.max_new_tokens, on average."""
SAMPLE = 1000
"""Rows of given prompts that are looked at."""

_SELF_LONGEST = 200
"""Tokens of the longest self-written prompts with their template."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the conversations to expect.

    Attributes:
        tokens: of a conversation, on average, answers included.
        prompt: that the target reads before its first answer, on average.
        turns: answers that the target writes in a conversation, on average; 0 where given answers are kept.
        read: tokens that it reads for them, on average: each turn reads all before it again.
        cached: tokens in the cache for the longest conversation while its last answer is written.
        sample: prompts that this comes from; 0 when it is assumed.
    """

    tokens: float
    prompt: float
    turns: float
    read: float
    cached: int
    sample: int


def expected_lengths(data: DataSection, target: Target, prompts: Sequence[Prompt] | None = None) -> Lengths:
    """What to expect of a recipe's data section.

    Args:
        data: of the recipe.
        target: whose template and context count.
        prompts: some of those that will be answered; None when they are not known.
    """
    longest = target.max_length
    if not prompts:
        cached = min(data.max_prompt_tokens, _SELF_LONGEST if data.prompts == "self" else data.max_prompt_tokens)
        whole = PROMPT_TOKENS + ANSWER_SHARE * data.max_new_tokens
        return Lengths(
            min(whole, longest), PROMPT_TOKENS, 1.0, PROMPT_TOKENS, min(cached + data.max_new_tokens, longest), 0
        )
    template = _tokens_of_a_turn(target.tokenizer)
    rows = [_row(prompt, data, target, template) for prompt in prompts]
    return Lengths(
        tokens=statistics.fmean(row.tokens for row in rows),
        prompt=statistics.fmean(row.prompt for row in rows),
        turns=statistics.fmean(row.turns for row in rows),
        read=statistics.fmean(row.read for row in rows),
        cached=max(row.cached for row in rows),
        sample=len(rows),
    )


def expected_tokens(data: DataSection, target: Target, prompts: Sequence[Prompt] | None = None) -> float:
    """Tokens of a conversation, on average, all turns and answers included."""
    return expected_lengths(data, target, prompts).tokens


def prompts_of(data: DataSection, tokenizer: Any) -> list[Prompt]:
    """The first of the prompts that a recipe names, to plan with; none where the target writes its own.

    Of a dataset on the hub, only what is read is downloaded.

    Raises:
        UserError: prompts that cannot be read.
    """
    from headstart.data.prompts import prompts_for

    if data.prompts == "self":
        return []
    return prompts_for(data, tokenizer, SAMPLE, whole=False).prompts


def _row(prompt: Prompt, data: DataSection, target: Target, template: int) -> Lengths:
    """One conversation, as `headstart.data.generate` would write it."""
    from headstart.data.conversations import Unfit, prompt_tokens

    tokenizer, room = target.tokenizer, target.max_length - data.max_new_tokens
    try:
        opening = len(prompt_tokens(prompt.opening, tokenizer))
    except Unfit:
        return Lengths(0.0, 0.0, 0.0, 0.0, 0, 1)
    if not data.regenerate and prompt.messages[-1]["role"] == "assistant":
        later = prompt.messages[len(prompt.opening) :]
        given = opening + sum(_words(turn["content"], tokenizer) for turn in later) + template * (len(later) // 2)
        return Lengths(float(min(given, target.max_length)), float(opening), 0.0, 0.0, 0, 1)
    likely, maximum = float(opening), opening  # with answers of the usual length, and with the longest
    read, turns, cached = 0.0, 0, 0
    fresh = [opening, *(_words(text, tokenizer) + template for text in prompt.turns[1:])]
    for turn, tokens in enumerate(fresh):
        if turn:
            if tokens > data.max_prompt_tokens or likely + tokens > room:
                break
            likely, maximum = likely + tokens, maximum + tokens
        read, turns = read + likely, turns + 1
        cached = min(maximum + data.max_new_tokens, target.max_length)
        likely, maximum = likely + ANSWER_SHARE * data.max_new_tokens, maximum + data.max_new_tokens
    return Lengths(min(likely, float(target.max_length)), float(opening), float(turns), read, cached, 1)


def _words(text: str, tokenizer: Any) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokens_of_a_turn(tokenizer: Any) -> int:
    """What the template adds to one more user turn and its answer."""
    from headstart.data.conversations import Unfit, has_template, prompt_tokens

    if not has_template(tokenizer):
        return 0
    first = [{"role": "user", "content": "a"}]
    try:
        again = prompt_tokens([*first, {"role": "assistant", "content": "a"}, *first], tokenizer)
        return max(0, len(again) - len(prompt_tokens(first, tokenizer)) - 2 * _words("a", tokenizer))
    except Unfit:
        return 0
