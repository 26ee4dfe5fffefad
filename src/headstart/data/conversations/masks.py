"""The mask of a given conversation: which of its tokens the assistant wrote.

Where the assistant's text lies is found by rendering the chat template, never by patterns of a model's markup:

    whole    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    prefix   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    span                                                            Hello.<|im_end|>

The prefix is the rendering of the messages before the answer with the generation prompt: what the target reads just
before it writes. It has to be the beginning of the whole rendering. The span ends with the first special token after
the answer's text: the one the target writes to end its turn. What the template adds after it is not supervised. An
answer that calls tools ends with the last special token of its turn: some stand around the calls. Where it is not known
where the turn ends, since a template renders the last answer in another way, it ends with the first after the calls.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from headstart.data.prompts.chat import Message, Unfit, check_offsets, render


def encode(
    messages: Sequence[Message], tokenizer: Any, *, strict: bool = True, max_tokens: int | None = None
) -> tuple[list[int], list[bool]]:
    """Tokens of a rendered conversation, and for each of them whether the assistant wrote it.

    An answer that the template rewrites (it drops reasoning once another turn follows, for example) is refused where
    `strict`, else left unsupervised. At most `max_tokens` tokens are kept, from the beginning.

    Raises:
        UserError: no chat template, or a tokenizer that does not tell where its tokens lie in a text.
        Unfit: a template that refuses the conversation or rewrites an answer, or nothing left to supervise.
    """
    whole = render(messages, tokenizer, answer=False)
    check_offsets(tokenizer)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    tokens: list[int] = list(encoded["input_ids"])
    starts, stops = _places(encoded["offset_mapping"])
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    ends = {*tokenizer.all_special_ids, *added}
    supervised = [False] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            before, after = (render(messages[:stop], tokenizer, answer=False) for stop in (index, index + 1))
            if before == after:
                raise _not_rendered("results of tools")
        if message["role"] != "assistant":
            continue
        span = _answer_span(messages, index, whole, tokenizer)
        if span is None:
            if strict:
                raise Unfit(
                    f"The chat template rewrites the answer in message {index + 1} of {len(messages)}: what the target "
                    "reads before answering is not the beginning of the rendered conversation.",
                    "Let the target write the answers (data.regenerate=true), or end the conversation with the answer "
                    "that counts: reasoning is often dropped once another turn follows.",
                    "in which the chat template rewrites an answer",
                )
            continue
        start, text_stop, turn_stop = span
        first = bisect_left(starts, start)
        following = range(bisect_left(starts, text_stop, first), bisect_left(starts, turn_stop, first))
        special = [i for i in following if tokens[i] in ends]
        if message.get("tool_calls") and (turn_stop < len(whole) or message is messages[-1]):
            special, text_stop = special[-1:], len(whole[:turn_stop].rstrip())
        stop = special[0] + 1 if special else bisect_right(stops, text_stop, first)
        supervised[first:stop] = [True] * (stop - first)
    if max_tokens is not None and any(supervised) and not any(supervised[:max_tokens]):
        raise Unfit(
            f"The first answer of a conversation begins after {max_tokens} tokens.",
            "Raise the limit or shorten it.",
            f"whose first answer begins after {max_tokens} tokens",
        )
    tokens, supervised = tokens[:max_tokens], supervised[:max_tokens]
    if not any(supervised):
        raise Unfit(
            f"Nothing is supervised in a conversation of {len(messages)} messages and {len(tokens)} tokens.",
            "Give it an assistant turn with text in it, or let the target write the answers (data.regenerate=true).",
            "without an answer to learn from",
        )
    return tokens, supervised


def _answer_span(messages: Sequence[Message], index: int, whole: str, tokenizer: Any) -> tuple[int, int, int] | None:
    """Where the answer in this message lies in the whole rendering; None when the template rewrote it.

    In characters: its text is [start, text_stop), and its turn ends before turn_stop.
    """
    if index == 0:
        raise Unfit(
            "A conversation starts with the assistant.",
            "Drop its turns before the first user message.",
            "that the assistant starts",
        )
    prefix = render(messages[:index], tokenizer, answer=True)
    if not whole.startswith(prefix):
        return None
    start = len(prefix)
    text = messages[index]["content"].strip()  # some templates strip what they are given
    reasoning = messages[index].get("reasoning_content", "").strip()
    closed = render(messages[: index + 1], tokenizer, answer=False)
    if whole.startswith(closed):
        # A template may write something of its own first, such as an empty thinking block.
        reasoning_start = whole.find(reasoning, start, len(closed))
        if reasoning_start < 0:
            raise Unfit(
                f"The chat template does not render the reasoning of the answer in message {index + 1}.",
                "Let the target write the answers (data.regenerate=true), or remove reasoning_content.",
                "with reasoning that the chat template does not render",
            )
        text_start = whole.find(text, reasoning_start + len(reasoning), len(closed))
        turn_stop = len(closed)
    elif reasoning:
        return None
    else:
        lead = len(whole[start:]) - len(whole[start:].lstrip())
        text_start = start + lead if whole.startswith(text, start + lead) else -1
        turn_stop = len(whole)
    if text_start < 0:
        return None
    return start, _after_calls(messages[index], whole[:turn_stop], text_start + len(text)), turn_stop


def _after_calls(answer: Message, rendered: str, text_stop: int) -> int:
    """Where the name of the last tool that an answer calls ends in the rendering; where its text does, without any."""
    stop = text_stop
    for call in answer.get("tool_calls", ()):
        function = call.get("function", call) if isinstance(call, dict) else {}
        name = str(function.get("name") or "") if isinstance(function, dict) else ""
        place = rendered.find(name, stop)
        if not name or place < 0:
            raise _not_rendered("calls of tools")
        stop = place + len(name)
    return stop


def _not_rendered(what: str) -> Unfit:
    return Unfit(
        f"The chat template does not render {what}.",
        "Let the target write the answers (data.regenerate=true), or use a target that was trained to call tools.",
        f"with {what} that the chat template does not render",
    )


def _places(offsets: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """First and last character of each token.

    Byte-level tokenizers report a token without its leading blanks, so that a token of blanks alone looks empty and as
    if it stood after them; such a token starts where the one before it stopped.

    >>> _places([(0, 5), (6, 6), (6, 9)])
    ([0, 5, 6], [5, 6, 9])
    """
    starts: list[int] = []
    stops: list[int] = []
    reached = 0
    for start, stop in offsets:
        starts.append(min(start, reached))
        reached = max(reached, stop)
        stops.append(reached)
    return starts, stops
