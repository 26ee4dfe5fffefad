"""How long the conversations of a recipe will be, in tokens: counted in those that are written, else in the prompts."""

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
"""Tokens of a self-written prompt with its template, on average."""
ANSWER_TOKENS = 325
"""Tokens of an answer that nothing cuts short, on average; lengths are taken as distributed exponentially. With that,
the mean of 1558 answers of SmolLM2-135M-Instruct, cut at 32 to 160 tokens, comes out within 3 %."""
SAMPLE = 1000
"""Rows of given prompts that are looked at."""
_SELF_LONGEST = 200
"""Tokens of the longest self-written prompts with their template."""
_TURN = 10
"""Tokens that chat templates add to a further user turn and its answer, about."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the conversations to expect; all but `cached` on average.

    Attributes:
        tokens: of a conversation, answers included.
        answer: of its answers: what is learnt from.
        turns: answers that the target writes in a conversation; 0 where given answers are kept.
        cached: tokens in the cache for the longest conversation while its last answer is written.
        prompts: that were counted, which are all that are given where they are fewer than `SAMPLE`; 0 where none were.
        source: where this comes from, for people.
    """

    tokens: float
    answer: float
    turns: float
    cached: int
    prompts: int = 0
    source: str = "assumed"


def answer_tokens(maximum: int) -> float:
    """Tokens of an answer of at most so many, on average.

    >>> round(answer_tokens(64)), round(answer_tokens(160)), round(answer_tokens(4096))
    (58, 126, 325)
    """
    return ANSWER_TOKENS * -math.expm1(-maximum / ANSWER_TOKENS)


def assumed_lengths(data: DataSection, longest: int, prompt: int | None = None) -> Lengths:
    """Conversations of one turn, as long as those of other recipes are. `longest` is the text that the target reads;
    `prompt` are tokens of a prompt, template included, where the user says so."""
    answer, most = answer_tokens(data.max_new_tokens), max(prompt or 0, data.max_prompt_tokens)
    if data.prompts == "self" and prompt is None:
        most = min(most, _SELF_LONGEST)
    read = PROMPT_TOKENS if prompt is None else prompt
    return Lengths(min(read + answer, longest), answer, 1.0, min(most + data.max_new_tokens, longest))


def written_lengths(data: DataSection, longest: int, written: Sequence[Conversation]) -> Lengths:
    """Those of conversations that are written; `longest` is the text that the target reads."""
    tokens = [len(item.tokens) for item in written]
    return Lengths(
        tokens=fmean(tokens),
        answer=fmean(sum(item.supervised) for item in written),
        turns=fmean(len(item.supervised_spans) for item in written),
        cached=min(max(tokens) + data.max_new_tokens, longest),
        source=f"as the {len(written)} that are written",
    )


def counted_lengths(data: DataSection, tokenizer: Any, longest: int, prompts: Sequence[Prompt]) -> Lengths:
    """Those of conversations that begin with these prompts; assumed where there are none."""
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
    """The first of the prompts that a recipe names, to plan with; none where the target writes its own.

    Of a dataset on the hub, only what is read is downloaded. Prompts that cannot be read are a UserError.
    """
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
