"""The loss mask of a given conversation: the tokens that the assistant wrote.

Spans are found by rendering the chat template, never by matching a model's markup:

    whole    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    prefix   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    span                                                            Hello.<|im_end|>

The prefix is the rendering of the earlier messages with the generation prompt; the whole rendering must start with it.
If an answer has no reasoning, markup that the template puts before its text (an empty thinking block, say) is not
supervised.

The span includes the first special token after the text only if the template also puts it after a final answer;
otherwise it is a separator the model never generates. Special tokens may enclose tool calls, so with calls the span
ends with the last special token of the turn. If the end of the turn is unknown (the template renders this answer
differently when it is the last message), the span ends with the first special token after the calls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from headstart.data.prompts.chat import Message, Unfit, check_offsets, render
from headstart.support.detokenizer import MARK


def encode(messages: Sequence[Message], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Render and tokenize a conversation; return tokens and loss mask.

    An answer that the template rewrites (dropping reasoning once another turn follows, say) is not supervised.

    Raises:
        UserError: no chat template, or a tokenizer without character offsets.
        Unfit: the template refuses the conversation or rewrites every answer, or nothing is left to supervise.
    """
    whole = render(messages, tokenizer, answer=False)
    check_offsets(tokenizer)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    tokens: list[int] = list(encoded["input_ids"])
    starts, stops = _places(encoded["offset_mapping"])
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    special_ids = {*tokenizer.all_special_ids, *added}
    supervised = [False] * len(tokens)
    rewritten = False
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            before, after = (render(messages[:stop], tokenizer, answer=False) for stop in (index, index + 1))
            if before == after:
                raise _not_rendered("tool results")
        if message["role"] != "assistant":
            continue
        span = _answer_span(messages, index, whole, tokenizer)
        if span is None:
            rewritten = True
            continue
        start, text_stop, turn_stop, ending = span
        first = bisect_left(starts, start)
        following = range(bisect_left(starts, text_stop, first), bisect_left(starts, turn_stop, first))
        special = [i for i in following if tokens[i] in special_ids]
        if special and not ending.startswith(whole[text_stop : stops[special[0]]]):
            special = []
        if message.get("tool_calls") and (turn_stop < len(whole) or message is messages[-1]):
            special, text_stop = special[-1:], len(whole[:turn_stop].rstrip())
        stop = special[0] + 1 if special else bisect_right(stops, text_stop, first)
        supervised[first:stop] = [True] * (stop - first)
    if rewritten and not any(supervised):
        raise Unfit(
            "The chat template rewrites each answer: rendering the whole conversation changes every answer's text or "
            "the messages before it, so no answer can be located.",
            "Let the target write the answers (data.regenerate=true).",
            "in which the chat template rewrites each answer",
        )
    if not any(supervised):
        raise Unfit(
            f"Nothing is supervised in a conversation of {len(messages)} messages and {len(tokens)} tokens.",
            "Give it an assistant turn with text in it, or let the target write the answers (data.regenerate=true).",
            "without an answer to learn from",
        )
    return tokens, supervised


def _answer_span(
    messages: Sequence[Message], index: int, whole: str, tokenizer: Any
) -> tuple[int, int, int, str] | None:
    """Find an answer in the whole rendering; None if the template rewrote it.

    Returns:
        Character offsets: start of the assistant's text, end of the text (with the names of called tools), upper bound
        for the end of the turn; and the string that the template renders after the text (and the calls) if the
        conversation ends with this answer.
    """
    if index == 0:
        raise Unfit(
            "A conversation starts with the assistant.",
            "Drop its turns before the first user message.",
            "that the assistant starts",
        )
    before, answer = messages[:index], messages[index]
    prefix = render(before, tokenizer, answer=True)
    if not whole.startswith(prefix):
        return None
    text = answer["content"].strip()  # some templates strip their input
    reasoning = answer.get("reasoning_content", "").strip()
    rendered_to_answer = render([*before, answer], tokenizer, answer=False)
    if reasoning not in rendered_to_answer[len(prefix) :]:
        raise Unfit(
            f"The chat template does not render the reasoning of the answer in message {index + 1}.",
            "Let the target write the answers (data.regenerate=true), or remove reasoning_content.",
            "with reasoning that the chat template does not render",
        )
    # A template may write something of its own first, such as an empty thinking block.
    lead, found, _ = render([*before, {**answer, "content": MARK}], tokenizer, answer=False).partition(MARK)
    start_if_last = len(lead) if found and rendered_to_answer.startswith(lead) else len(prefix)
    answer_start = start_if_last if whole.startswith(rendered_to_answer[:start_if_last]) else len(prefix)
    if reasoning and answer_start != start_if_last:
        return None
    unchanged = whole.startswith(rendered_to_answer)
    turn_stop = len(rendered_to_answer) if unchanged else len(whole)
    text_start = whole.find(text, answer_start, turn_stop)
    text_start_if_last = rendered_to_answer.find(text, start_if_last)
    if text_start < 0 or text_start_if_last < 0 or (not unchanged and whole[answer_start:text_start].strip()):
        return None
    written = bool(reasoning) or not whole[len(prefix) : text_start].strip()
    text_stop = _after_calls(answer, whole[:turn_stop], text_start + len(text))
    ending = rendered_to_answer[_after_calls(answer, rendered_to_answer, text_start_if_last + len(text)) :]
    return len(prefix) if written else text_start, text_stop, turn_stop, ending


def _after_calls(answer: Message, rendered: str, text_stop: int) -> int:
    """Return the offset after the last called tool's name in the rendering; `text_stop` without calls."""
    for call in answer.get("tool_calls", ()):
        name = call["function"]["name"]
        place = rendered.find(name, text_stop)
        if place < 0:
            raise _not_rendered("tool calls")
        text_stop = place + len(name)
    return text_stop


def _not_rendered(what: str) -> Unfit:
    return Unfit(
        f"The chat template does not render {what}.",
        "Let the target write the answers (data.regenerate=true), or use a target that was trained to call tools.",
        f"with {what} that the chat template does not render",
    )


def _places(offsets: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the start and end offset of each token.

    Byte-level tokenizers report tokens without leading whitespace, so a whitespace-only token has a zero-length span
    after the whitespace; move its start to the previous token's end.

    >>> _places([(0, 5), (6, 6), (6, 9)])
    ([0, 5, 6], [5, 6, 9])
    """
    stops = list(accumulate((stop for _, stop in offsets), max))
    return [min(start, reached) for (start, _), reached in zip(offsets, [0, *stops], strict=False)], stops
