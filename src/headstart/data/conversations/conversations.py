"""Conversations as tokens, with a mask of what the assistant wrote.

Where the assistant's text lies is found by rendering the chat template, never by patterns of a model's markup:

    whole    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    prefix   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    span                                                            Hello.<|im_end|>

The prefix is the rendering of the messages before the answer with the generation prompt: what the target reads just
before it writes. It has to be the beginning of the whole rendering. The span ends with the first special token after
the answer's text: the one the target writes to end its turn. What the template adds after it is not supervised.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from headstart.errors import UserError
from headstart.support.files import read_jsonl, write_jsonl

Message = dict[str, str]
"""One turn: {"role": "system" | "user" | "assistant", "content": text}; of a given answer also "reasoning_content"."""


class Unfit(UserError):
    """A conversation that the chat template makes nothing to learn from of; others of the same source may do.

    Args:
        problem: what is wrong with it.
        remedy: what to do about it.
        reason: said of those that are left out, such as "that the chat template refuses".
    """

    def __init__(self, problem: str, remedy: str, reason: str) -> None:
        super().__init__(problem, remedy)
        self.reason = reason


@dataclass(frozen=True)
class Conversation:
    """A conversation ready for training.

    Attributes:
        id: unique within its file.
        tokens: the rendered conversation.
        supervised: for each token, whether the assistant wrote it; its end-of-turn token counts, the template's text
            after that does not.
        messages: the turns as text.
        category: kind of request, for reports; may be empty.
        sampling: how the answers were drawn (temperature, seed, ...); empty when they were given.
    """

    id: str
    tokens: list[int]
    supervised: list[bool]
    messages: list[Message]
    category: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.supervised), "one mask entry per token"

    @property
    def supervised_spans(self) -> list[tuple[int, int]]:
        """[start, stop) of every run of supervised tokens.

        >>> Conversation("a", [5, 6, 7, 8], [False, True, True, False], []).supervised_spans
        [(1, 3)]
        """
        spans: list[tuple[int, int]] = []
        for flag, run in groupby(enumerate(self.supervised), key=lambda pair: pair[1]):
            indices = [index for index, _ in run]
            if flag:
                spans.append((indices[0], indices[-1] + 1))
        return spans

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; the mask is kept as its runs."""
        return {
            "id": self.id,
            "category": self.category,
            "messages": self.messages,
            "sampling": self.sampling,
            "tokens": self.tokens,
            "supervised": [list(span) for span in self.supervised_spans],
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Conversation:
        """Back from `to_json`.

        Raises:
            ValueError: when a field is missing or of another type.
        """
        try:
            tokens = [int(token) for token in row["tokens"]]
            supervised = [False] * len(tokens)
            for start, stop in row["supervised"]:
                if not 0 <= start < stop <= len(tokens):
                    raise ValueError(f"supervised run [{start}, {stop}) of {len(tokens)} tokens")
                supervised[start:stop] = [True] * (stop - start)
            messages = [
                {"role": str(turn["role"]), "content": str(turn["content"])}
                | ({"reasoning_content": str(turn["reasoning_content"])} if "reasoning_content" in turn else {})
                for turn in row["messages"]
            ]
            return cls(
                str(row["id"]),
                tokens,
                supervised,
                messages,
                str(row.get("category", "")),
                dict(row.get("sampling", {})),
            )
        except KeyError as error:
            raise ValueError(f"no {error.args[0]!r}") from None
        except TypeError as error:
            raise ValueError(str(error)) from None


def read_conversations(path: Path) -> list[Conversation]:
    """Read what `write_conversations` wrote.

    Raises:
        UserError: missing file, or a line that is not a conversation; the message names file and line.
    """
    conversations: list[Conversation] = []
    for number, row in read_jsonl(path):
        try:
            conversations.append(Conversation.from_json(row))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: not a tokenised conversation ({error}).",
                "Delete the file and run the command again, or pass a file of prompts as data.prompts.",
            ) from None
    return conversations


def write_conversations(path: Path, conversations: Sequence[Conversation]) -> None:
    """Write one conversation a line, atomically."""
    write_jsonl(path, (conversation.to_json() for conversation in conversations))


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts begin with alike.

    >>> alike([1, 2, 3], [1, 2, 4, 3]), alike([1, 2], [1, 2, 3])
    (2, 2)
    """
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def prompt_tokens(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """What the target reads before it answers: the rendered messages and the generation prompt.

    A target without a chat template reads the text of a single user message as it is, and goes on with it.

    Raises:
        UserError: no tokenizer, or several messages for a target without a chat template.
        Unfit: the template refuses these messages.
    """
    if tokenizer is not None and not has_template(tokenizer) and [turn["role"] for turn in messages] == ["user"]:
        return list(tokenizer.encode(messages[0]["content"]))
    return list(tokenizer.encode(render(messages, tokenizer, answer=True), add_special_tokens=False))


def render(messages: Sequence[Message], tokenizer: Any, *, answer: bool) -> str:
    """The chat template's text for these messages.

    Args:
        messages: the turns.
        tokenizer: with a chat template.
        answer: append the generation prompt, for the assistant to go on.

    Raises:
        UserError: no tokenizer or chat template.
        Unfit: the template refuses these messages.
    """
    check_template(tokenizer)
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer))
    except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        roles = ", ".join(message.get("role", "?") for message in messages) or "none"
        raise Unfit(
            f"The target's chat template refuses a conversation with the roles {roles}: {error}.",
            "Start with the user (after at most one system message) and let user and assistant alternate.",
            "that the chat template refuses",
        ) from error


def added_tokens(before: str, after: str, last_token: int, tokenizer: Any) -> list[int]:
    """Tokens that a template puts after an answer.

    The end of the turn is the answer's own last token; what the template puts after it comes with the next turn.

    Args:
        before: the conversation up to the answer, rendered; `after` begins with it.
        after: the same with what follows.
        last_token: of the answer, as the target wrote it.
        tokenizer: of the target.
    """
    end = tokenizer.decode([last_token])
    tail = before[before.rindex(end) + len(end) :] if end in before else ""
    return list(tokenizer(tail + after[len(before) :], add_special_tokens=False)["input_ids"])


def has_template(tokenizer: Any) -> bool:
    """Whether a target can chat; without a chat template it can only go on with a text."""
    return bool(getattr(tokenizer, "chat_template", None))


def with_template_kwargs(tokenizer: Any, values: Mapping[str, Any]) -> Any:
    """A tokenizer that renders its chat template with these variables, always.

    Args:
        tokenizer: of the target; it stays as it is.
        values: by name, as in data.chat_template_kwargs; without any, the tokenizer itself comes back.

    Raises:
        UserError: no chat template, or one that does not know such a variable.
    """
    if not values:
        return tokenizer
    check_template(tokenizer)
    for name in values:
        if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
            raise UserError(
                f"The target's chat template has no variable {name!r}.",
                "Correct data.chat_template_kwargs, or leave it out.",
            )
    bound = copy(tokenizer)
    bound.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return bound


def check_template(tokenizer: Any) -> None:
    """Refuse a target that cannot chat.

    Raises:
        UserError: no tokenizer, or one without a chat template.
    """
    if tokenizer is None or not has_template(tokenizer):
        raise UserError(
            "The target's tokenizer has no chat template, so there is no telling what the assistant wrote.",
            "Choose an instruction-tuned target, or set tokenizer.chat_template and save it with the model.",
        )


def check_prompts(tokenizer: Any, prompts: object) -> None:
    """Refuse a target that cannot answer a recipe's prompts, before they are read.

    Args:
        tokenizer: of the target.
        prompts: as the recipe names them.

    Raises:
        UserError: no tokenizer, or no chat template and prompts that the target should write itself.
    """
    if tokenizer is None:
        check_template(tokenizer)
    if prompts == "self" and not has_template(tokenizer):
        raise UserError(
            "The target has no chat template, so it cannot write its own prompts.",
            'Give rows of plain text (data.prompts=FILE.jsonl, each row {"text": ..}), or use an instruction-tuned '
            "target.",
        )


def check_offsets(tokenizer: Any) -> None:
    """Refuse a tokenizer that does not tell where its tokens lie in a text.

    Raises:
        UserError: it is a slow one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers.",
            "Use a target with a fast tokenizer (tokenizer.json).",
        )


def encode(
    messages: Sequence[Message], tokenizer: Any, *, strict: bool = True, max_tokens: int | None = None
) -> tuple[list[int], list[bool]]:
    """Tokens of a rendered conversation, and which of them the assistant wrote.

    Args:
        messages: the turns, at least one of them the assistant's.
        tokenizer: a fast tokenizer with a chat template.
        strict: refuse a conversation in which the template rewrites an answer (reasoning that is dropped once another
            turn follows, for example). When false such answers are left unsupervised and the others are kept.
        max_tokens: keep only so many tokens from the beginning.

    Returns:
        (tokens, supervised), of the same length.

    Raises:
        UserError: no chat template, or a tokenizer that does not tell where its tokens lie in a text.
        Unfit: a template that refuses the conversation or rewrites an answer, or nothing left to supervise.
    """
    whole = render(messages, tokenizer, answer=False)
    check_offsets(tokenizer)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    tokens: list[int] = list(encoded["input_ids"])
    starts, stops = _places(encoded["offset_mapping"])
    ends = _special_ids(tokenizer)
    supervised = [False] * len(tokens)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        span = _answer_span(messages, turn, whole, tokenizer)
        if span is None:
            if strict:
                raise _rewritten(turn, len(messages))
            continue
        first = bisect_left(starts, span.start)
        following = range(bisect_left(starts, span.text_stop, first), bisect_left(starts, span.turn_stop, first))
        end_of_turn = next((i for i in following if tokens[i] in ends), None)
        stop = bisect_right(stops, span.text_stop, first) if end_of_turn is None else end_of_turn + 1
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


class _Span(NamedTuple):
    """Characters of an answer: its text is [start, text_stop), its turn ends before turn_stop."""

    start: int
    text_stop: int
    turn_stop: int


def _answer_span(messages: Sequence[Message], turn: int, whole: str, tokenizer: Any) -> _Span | None:
    """Where the answer of this turn lies in the whole rendering; None when the template rewrote it."""
    if turn == 0:
        raise Unfit(
            "A conversation starts with the assistant.",
            "Drop its turns before the first user message.",
            "that the assistant starts",
        )
    prefix = render(messages[:turn], tokenizer, answer=True)
    if not whole.startswith(prefix):
        return None
    start = len(prefix)
    text = messages[turn]["content"].strip()  # some templates strip what they are given
    reasoning = messages[turn].get("reasoning_content", "").strip()
    closed = render(messages[: turn + 1], tokenizer, answer=False)
    if whole.startswith(closed):
        # A template may write something of its own first, such as an empty thinking block.
        told = whole.find(reasoning, start, len(closed))
        if told < 0:
            raise Unfit(
                f"The chat template does not render the reasoning of the answer in message {turn + 1}.",
                "Let the target write the answers (data.regenerate=true), or remove reasoning_content.",
                "with reasoning that the chat template does not render",
            )
        index = whole.find(text, told + len(reasoning), len(closed))
        turn_stop = len(closed)
    elif reasoning:
        return None
    else:
        lead = len(whole[start:]) - len(whole[start:].lstrip())
        index = start + lead if whole.startswith(text, start + lead) else -1
        turn_stop = len(whole)
    return None if index < 0 else _Span(start, index + len(text), turn_stop)


def _rewritten(turn: int, turns: int) -> Unfit:
    reason = "in which the chat template rewrites an answer"
    if turn == turns - 1:
        return Unfit(
            f"The chat template rewrites the answer in message {turn + 1} of {turns}: what the target reads before "
            "answering is not the beginning of the rendered conversation.",
            "Let the target write the answers (data.regenerate=true): its own tokens are used then.",
            reason,
        )
    return Unfit(
        f"The chat template rewrites the answer in message {turn + 1} of {turns} once another turn follows "
        "(it drops reasoning from earlier turns, for example).",
        "Train on single-turn conversations, or keep each conversation up to the answer that counts.",
        reason,
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


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset([*tokenizer.all_special_ids, *added])
