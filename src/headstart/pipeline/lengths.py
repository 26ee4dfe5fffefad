"""How long the conversations of a recipe will be: from its own prompts where there are any, all turns counted."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from headstart.data.prompts.shapes import Prompt
    from headstart.recipes.sections import DataSection
    from headstart.target.model import Target
    from headstart.target.outline import Outline

PROMPT_TOKENS = 66
"""Tokens of a self-written prompt with its template, on average."""
ANSWER_TOKENS = 325
"""Tokens of an answer that nothing cuts short, on average; lengths are taken as distributed exponentially. With that,
the mean of 1558 answers of SmolLM2-135M-Instruct, cut at 32 to 160 tokens, comes out within 3 %."""
SAMPLE = 1000
"""Rows of given prompts that are looked at."""
ANSWERED = 12
"""Of these, prompts that the target answers, to see how long its answers are."""

_SELF_LONGEST = 200
"""Tokens of the longest self-written prompts with their template."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the conversations to expect.

    Attributes:
        tokens: of a conversation, on average, answers included.
        prompt: that the target reads before its first answer, on average.
        turns: answers that the target writes in a conversation, on average; 0 where given answers are kept.
        answer: tokens of a conversation that are answers, on average: what is learnt from.
        read: tokens that it reads for them, on average: what was read of a conversation is kept for its next turn.
        cached: tokens in the cache for the longest conversation while its last answer is written.
        sample: prompts that this comes from; 0 when it is assumed.
        written: conversations of this run that it comes from, when there are any.
    """

    tokens: float
    prompt: float
    turns: float
    answer: float
    read: float
    cached: int
    sample: int
    written: int = 0


class Characters:
    """Stands in for the tokenizer of a target of which only the config is here: four characters are a token."""

    chat_template = "<|im_start|>{role}\n{content}<|im_end|>\n"
    all_special_tokens: Sequence[str] = ()

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **_: Any) -> list[int]:
        """As many numbers as the text has tokens."""
        return [0] * -(-len(text) // 4)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        """The messages in ChatML."""
        return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in messages)


def answer_tokens(maximum: int) -> float:
    """Tokens of an answer of at most so many, on average.

    >>> round(answer_tokens(64)), round(answer_tokens(160)), round(answer_tokens(4096))
    (58, 126, 325)
    """
    return ANSWER_TOKENS * -math.expm1(-maximum / ANSWER_TOKENS)


def given_lengths(data: DataSection, target: Target | Outline, prompt: int) -> Lengths:
    """Conversations of one turn whose prompts have so many tokens, template included: what a user says they have."""
    answer, longest = answer_tokens(data.max_new_tokens), target.max_length
    cached = min(max(prompt, data.max_prompt_tokens) + data.max_new_tokens, longest)
    return Lengths(min(prompt + answer, longest), prompt, 1.0, answer, prompt, cached, 0)


def written_lengths(data: DataSection, target: Target | Outline, parts: Iterable[Path]) -> Lengths | None:
    """What the conversations that a run has written already say of those to come; None where there are none.

    Args:
        data: of the recipe.
        target: whose context counts.
        parts: files of parts of training conversations.
    """
    from headstart.data.conversations.parts import Part

    found = [item for file in itertools.islice(parts, SAMPLE) for item in Part.read(file).conversations][:SAMPLE]
    if not found:
        return None
    tokens = [len(item.tokens) for item in found]
    starts = [[start for start, _ in item.supervised_spans] for item in found]
    prompt = statistics.fmean(row[0] if row else 0 for row in starts)
    read = statistics.fmean(
        max((start for start, _ in item.supervised_spans), default=0)
        - sum(stop - start for start, stop in item.supervised_spans[:-1])
        for item in found
    )
    cached = min(max(tokens) + data.max_new_tokens, target.max_length)
    answer = statistics.fmean(sum(item.supervised) for item in found)
    turns = statistics.fmean(map(len, starts))
    return Lengths(statistics.fmean(tokens), prompt, turns, answer, read, cached, 0, len(found))


def usual_answer(data: DataSection, target: Target, prompts: Sequence[Prompt]) -> float | None:
    """Tokens of an answer on average, from a few that the target writes to the first of the prompts.

    None where answers are kept as they are given, or where there is nothing to answer.
    """
    from headstart.data.prompts.chat import Unfit, prompt_tokens
    from headstart.data.writing.in_process import InProcess
    from headstart.data.writing.writer import Continuation

    rows: list[list[int]] = []
    for prompt in prompts[:: max(1, len(prompts) // ANSWERED)]:
        if data.regenerate or prompt.messages[-1]["role"] != "assistant":
            try:
                row = prompt_tokens(prompt.opening, target.tokenizer)
            except Unfit:
                continue
            rows += [row] if len(row) + data.max_new_tokens <= target.max_length else []
    if not rows:
        return None
    temperatures = [data.temperature] * len(rows)
    continuation = Continuation(data.max_new_tokens, temperatures, target.end_tokens, data.seed)
    written = InProcess(target).continue_rows(rows, continuation)
    return statistics.fmean(map(len, written))


def expected_lengths(
    data: DataSection,
    target: Target | Outline,
    prompts: Sequence[Prompt] | None = None,
    usual: float | None = None,
) -> Lengths:
    """What to expect of a recipe's data section.

    Args:
        data: of the recipe.
        target: whose template and context count.
        prompts: some of those that will be answered; None when they are not known.
        usual: tokens of an answer on average, where that is known (`usual_answer`).
    """
    longest = target.max_length
    if not prompts:
        cached = min(data.max_prompt_tokens, _SELF_LONGEST if data.prompts == "self" else data.max_prompt_tokens)
        answer = answer_tokens(data.max_new_tokens)
        most = min(cached + data.max_new_tokens, longest)
        return Lengths(min(PROMPT_TOKENS + answer, longest), PROMPT_TOKENS, 1.0, answer, PROMPT_TOKENS, most, 0)
    tokenizer = target.tokenizer or Characters()
    template = _tokens_of_a_turn(tokenizer)
    usual = answer_tokens(data.max_new_tokens) if usual is None else usual
    rows = [_row(prompt, data, tokenizer, target.max_length, template, usual) for prompt in prompts]
    return Lengths(
        tokens=statistics.fmean(row.tokens for row in rows),
        prompt=statistics.fmean(row.prompt for row in rows),
        turns=statistics.fmean(row.turns for row in rows),
        answer=statistics.fmean(row.answer for row in rows),
        read=statistics.fmean(row.read for row in rows),
        cached=max(row.cached for row in rows),
        sample=len(rows),
    )


def expected_tokens(data: DataSection, target: Target | Outline, prompts: Sequence[Prompt] | None = None) -> float:
    """Tokens of a conversation, on average, all turns and answers included."""
    return expected_lengths(data, target, prompts).tokens


def prompts_of(data: DataSection, tokenizer: Any) -> list[Prompt]:
    """The first of the prompts that a recipe names, to plan with; none where the target writes its own.

    Of a dataset on the hub, only what is read is downloaded.

    Raises:
        UserError: prompts that cannot be read.
    """
    from headstart.data.prompts.reading import prompts_for

    if data.prompts == "self":
        return []
    return prompts_for(data, tokenizer or Characters(), SAMPLE, whole=False).prompts


def _row(prompt: Prompt, data: DataSection, tokenizer: Any, longest: int, template: int, usual: float) -> Lengths:
    """One conversation, as `headstart.data.conversations.building` would write it."""
    from headstart.data.prompts.chat import Unfit, prompt_tokens

    room = longest - data.max_new_tokens
    try:
        opening = len(prompt_tokens(prompt.opening, tokenizer))
    except Unfit:
        return Lengths(0.0, 0.0, 0.0, 0.0, 0.0, 0, 1)
    if not data.regenerate and prompt.messages[-1]["role"] == "assistant":
        later = prompt.messages[len(prompt.opening) :]
        given = opening + sum(_words(turn["content"], tokenizer) for turn in later) + template * (len(later) // 2)
        answers = sum(_words(turn["content"], tokenizer) for turn in later if turn["role"] == "assistant")
        return Lengths(float(min(given, longest)), float(opening), 0.0, float(answers), 0.0, 0, 1)
    likely, maximum = float(opening), opening  # with answers of the usual length, and with the longest
    read, turns, cached = 0.0, 0, 0
    fresh = [opening, *(_words(text, tokenizer) + template for text in prompt.turns[1:])]
    for turn, tokens in enumerate(fresh):
        if turn:
            if tokens > data.max_prompt_tokens or likely + tokens > room:
                break
            likely, maximum = likely + tokens, maximum + tokens
        read, turns = read + tokens, turns + 1
        cached = min(maximum + data.max_new_tokens, longest)
        likely, maximum = likely + usual, maximum + data.max_new_tokens
    return Lengths(min(likely, float(longest)), float(opening), float(turns), turns * usual, read, cached, 1)


def _words(text: str, tokenizer: Any) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokens_of_a_turn(tokenizer: Any) -> int:
    """What the template adds to one more user turn and its answer."""
    from headstart.data.prompts.chat import Unfit, has_template, prompt_tokens

    if not has_template(tokenizer):
        return 0
    first = [{"role": "user", "content": "a"}]
    try:
        again = prompt_tokens([*first, {"role": "assistant", "content": "a"}, *first], tokenizer)
        return max(0, len(again) - len(prompt_tokens(first, tokenizer)) - 2 * _words("a", tokenizer))
    except Unfit:
        return 0
