"""Expected conversation lengths in tokens, from written conversations or from the prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from headstart.data.conversations.records import Conversation
from headstart.data.prompts.chat import Unfit, prompt_tokens, with_tools
from headstart.data.prompts.loading import load_prompts
from headstart.data.prompts.shapes import Prompt
from headstart.recipes.sections import DataSection

PROMPT_TOKENS = 66
"""Average tokens of a self-written prompt, template included."""
ANSWER_TOKENS = 325
"""Average tokens of an uncut answer; lengths are assumed to be exponentially distributed. Predicts the mean of 1558
answers of SmolLM2-135M-Instruct, cut at 32 to 160 tokens, within 3 %."""
SAMPLE = 1000
"""Maximum number of given prompts to count."""
_SELF_LONGEST = 200
"""Tokens of the longest self-written prompts, template included."""
_TURN = 10
"""Approximate template tokens of each further user turn and its answer."""


@dataclass(frozen=True)
class Lengths:
    """Expected lengths of conversations in tokens; all but `cached` are averages.

    Attributes:
        tokens: of a conversation, answers included.
        answer: supervised tokens of a conversation.
        turns: answers the target writes in a conversation; 0 where given answers are kept.
        cached: KV cache length for the longest conversation.
        prompts: number of counted prompts; if below `SAMPLE`, all there are. 0 if none were counted.
        source: a phrase on where the numbers come from.
    """

    tokens: float
    answer: float
    turns: float
    cached: int
    prompts: int = 0
    source: str = "assumed"


def answer_tokens(maximum: int) -> float:
    """Return the average tokens of an answer that is cut at `maximum`.

    >>> round(answer_tokens(64)), round(answer_tokens(160)), round(answer_tokens(4096))
    (58, 126, 325)
    """
    return ANSWER_TOKENS * -math.expm1(-maximum / ANSWER_TOKENS)


def assumed_lengths(data: DataSection, longest: int, prompt: int | None = None) -> Lengths:
    """Assume one turn of typical length. `longest` is the target's context; `prompt` is the user's own figure for the
    tokens of a prompt, template included."""
    answer, most = answer_tokens(data.max_new_tokens), max(prompt or 0, data.max_prompt_tokens)
    if data.prompts == "self" and prompt is None:
        most = min(most, _SELF_LONGEST)
    read = PROMPT_TOKENS if prompt is None else prompt
    return Lengths(min(read + answer, longest), answer, 1.0, min(most + data.max_new_tokens, longest))


def written_lengths(data: DataSection, longest: int, written: Sequence[Conversation]) -> Lengths:
    """Measure written conversations; `longest` is the target's context."""
    tokens = [len(item.tokens) for item in written]
    return Lengths(
        tokens=fmean(tokens),
        answer=fmean(sum(item.supervised) for item in written),
        turns=fmean(len(item.supervised_spans) for item in written),
        cached=min(max(tokens) + data.max_new_tokens, longest),
        source=f"as the {len(written)} that are written",
    )


def counted_lengths(data: DataSection, tokenizer: Any, longest: int, prompts: Sequence[Prompt]) -> Lengths:
    """Count the tokens of prompts to estimate their conversations; assumed lengths without prompts."""
    if not prompts:
        return assumed_lengths(data, longest)
    rows = [_of_prompt(prompt, data, tokenizer, longest) for prompt in prompts]
    return Lengths(
        tokens=fmean(row.tokens for row in rows),
        answer=fmean(row.answer for row in rows),
        turns=fmean(row.turns for row in rows),
        cached=max(row.cached for row in rows),
        prompts=len(rows),
        source=f"from {len(rows)} of the prompts",
    )


def prompts_of(data: DataSection, tokenizer: Any) -> list[Prompt]:
    """Load the first `SAMPLE` given prompts of a recipe, streaming Hub datasets; a UserError if they are unreadable."""
    return [] if not data.sources else load_prompts(data, tokenizer, limit=SAMPLE, whole=False).prompts


def _of_prompt(prompt: Prompt, data: DataSection, tokenizer: Any, longest: int) -> Lengths:
    def count(messages: Sequence[Mapping[str, Any]]) -> int:
        return sum(len(tokenizer(each["content"], add_special_tokens=False)["input_ids"]) for each in messages)

    try:
        asked = len(prompt_tokens(prompt.opening, with_tools(tokenizer, prompt.tools)))
    except Unfit:
        return Lengths(0, 0, 0, 0)
    turns, usual, first = 1, answer_tokens(data.max_new_tokens), len(prompt.opening)
    if not data.regenerate and prompt.messages[-1]["role"] == "assistant":
        answers = [message for message in prompt.messages[first:] if message["role"] == "assistant"]
        template = _TURN * (len(answers) - 1)
        return Lengths(min(asked + count(prompt.messages[first:]) + template, longest), count(answers), 0, 0)
    for message in prompt.asked[first:]:
        further = count([message]) + _TURN
        room = longest - data.max_new_tokens - asked - turns * usual
        if further > min(room, data.max_prompt_tokens):
            break
        asked += further
        turns += 1
    cached = min(asked + turns * data.max_new_tokens, longest)
    return Lengths(min(asked + turns * usual, longest), turns * usual, turns, cached)
