"""How long the conversations of a recipe will be, in tokens: counted in those that are written, else in the prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.data.conversations.records import Conversation
    from headstart.data.prompts.shapes import Prompt
    from headstart.recipes.sections import DataSection
    from headstart.target.model import Target

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
    """Tokens of the conversations to expect; all but `cached` on average.

    Attributes:
        tokens: of a conversation, answers included.
        prompt: that the target reads before its first answer.
        turns: answers that the target writes in a conversation; 0 where given answers are kept.
        answer: tokens of a conversation that are answers: what is learnt from.
        read: tokens that it reads for them: what was read of a conversation is kept for its next turn.
        cached: tokens in the cache for the longest conversation while its last answer is written.
        prompts: that were counted, which are all there are where they are fewer than `SAMPLE`; 0 where none were.
        source: where this comes from, for people.
    """

    tokens: float
    prompt: float
    turns: float
    answer: float
    read: float
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
    """Conversations of one turn, as long as those of other recipes are.

    Args:
        data: of the recipe.
        longest: text that the target reads.
        prompt: tokens of a prompt, template included, where the user says so.
    """
    answer, most = answer_tokens(data.max_new_tokens), max(prompt or 0, data.max_prompt_tokens)
    if data.prompts == "self" and prompt is None:
        most = min(most, _SELF_LONGEST)
    read = PROMPT_TOKENS if prompt is None else prompt
    return Lengths(min(read + answer, longest), read, 1.0, answer, read, min(most + data.max_new_tokens, longest))


def written_lengths(data: DataSection, longest: int, written: Sequence[Conversation]) -> Lengths:
    """Those of conversations that are written; `longest` is the text that the target reads."""
    spans = [item.supervised_spans for item in written]
    tokens = [len(item.tokens) for item in written]
    read = [row[-1][0] - sum(stop - start for start, stop in row[:-1]) for row in spans if row]
    return Lengths(
        tokens=fmean(tokens),
        prompt=fmean(row[0][0] if row else 0 for row in spans),
        turns=fmean(map(len, spans)),
        answer=fmean(sum(item.supervised) for item in written),
        read=sum(read) / len(written),
        cached=min(max(tokens) + data.max_new_tokens, longest),
        source=f"as the {len(written)} that are written",
    )


def usual_answer(data: DataSection, target: Target, prompts: Sequence[Prompt]) -> float | None:
    """Tokens of an answer on average, from a few that the target writes to some of the prompts.

    None where answers are kept as they are given, or where there is nothing to answer.
    """
    from headstart.data.prompts.chat import Unfit, prompt_tokens
    from headstart.data.writing.in_process import InProcess
    from headstart.data.writing.writer import Continuation

    rows: list[list[int]] = []
    for prompt in prompts[:: max(1, len(prompts) // ANSWERED)]:
        if not _answers(prompt, data):
            continue
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
    return fmean(map(len, written))


def counted_lengths(
    data: DataSection, tokenizer: Any, longest: int, prompts: Sequence[Prompt], usual: float | None = None
) -> Lengths:
    """Those of conversations that begin with these prompts; assumed where there are none.

    Args:
        data: of the recipe.
        tokenizer: of the target.
        longest: text that the target reads.
        prompts: some of those that will be answered.
        usual: tokens of an answer on average, where that is known (`usual_answer`).
    """
    if not prompts:
        return assumed_lengths(data, longest)
    usual = answer_tokens(data.max_new_tokens) if usual is None else usual
    template = _tokens_of_a_turn(tokenizer)
    rows = [_conversation(prompt, data, tokenizer, longest, usual, template) for prompt in prompts]
    averages = ("tokens", "prompt", "turns", "answer", "read")
    return Lengths(
        **{name: fmean(getattr(row, name) for row in rows) for name in averages},
        cached=max(row.cached for row in rows),
        prompts=len(rows),
        source=f"from {len(rows)} of the prompts",
    )


def prompts_of(data: DataSection, tokenizer: Any) -> list[Prompt]:
    """The first of the prompts that a recipe names, to plan with; none where the target writes its own.

    Of a dataset on the hub, only what is read is downloaded.

    Raises:
        UserError: prompts that cannot be read.
    """
    from headstart.data.prompts.reading import prompts_for

    return [] if data.prompts == "self" else prompts_for(data, tokenizer, SAMPLE, whole=False).prompts


def _answers(prompt: Prompt, data: DataSection) -> bool:
    """Whether the target answers: given answers may be kept."""
    return data.regenerate or prompt.messages[-1]["role"] != "assistant"


def _conversation(
    prompt: Prompt, data: DataSection, tokenizer: Any, longest: int, usual: float, template: int
) -> Lengths:
    """One conversation, as `headstart.data.conversations.write` would write it."""
    from headstart.data.prompts.chat import Unfit, prompt_tokens

    try:
        opening = len(prompt_tokens(prompt.opening, tokenizer))
    except Unfit:
        return Lengths(0, 0, 0, 0, 0, 0)
    if not _answers(prompt, data):
        later = prompt.messages[len(prompt.opening) :]
        words = [(turn["role"], _words(turn["content"], tokenizer)) for turn in later]
        tokens = opening + sum(count for _, count in words) + template * (len(later) // 2)
        answer = sum(count for role, count in words if role == "assistant")
        return Lengths(min(tokens, longest), opening, 0, answer, 0, 0)
    likely, maximum, read, turns, cached = 0.0, 0, 0, 0, 0  # likely: with usual answers; maximum: with the longest
    for tokens in (opening, *(_words(text, tokenizer) + template for text in prompt.turns[1:])):
        if turns and (tokens > data.max_prompt_tokens or likely + tokens > longest - data.max_new_tokens):
            break
        read, turns = read + tokens, turns + 1
        cached = min(maximum + tokens + data.max_new_tokens, longest)
        likely, maximum = likely + tokens + usual, maximum + tokens + data.max_new_tokens
    return Lengths(min(likely, longest), opening, turns, turns * usual, read, cached)


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
