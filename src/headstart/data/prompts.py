"""Prompts from files and datasets, whatever shape their records have."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from headstart.data.conversations import Message, Unfit, check_template, prompt_tokens
from headstart.data.sources import Origin, find_origin, read_records
from headstart.errors import UserError

SHAPES = (
    '{"turns": [text, ...]}',
    '{"messages": [{"role", "content"}, ...]}',
    '{"conversations": [{"from", "value"}, ...]} (ShareGPT)',
    '{"instruction", "input", "output"} (Alpaca)',
    '{"prompt": text}',
)
"""Shapes of records that are understood."""

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
}

_TRIES = 1000
"""Rows of a dataset after which one that nothing can be made of is given up."""


@dataclass(frozen=True)
class Prompt:
    """What a user asks.

    Attributes:
        messages: the turns as given, from the system message or the first user message on. Where no answers were
            given, two user messages follow one another.
        category: kind of request, for reports; may be empty.
        id: the record's own, or its file and line.
    """

    messages: list[Message]
    category: str = ""
    id: str = ""

    @property
    def opening(self) -> list[Message]:
        """The messages before the first answer: system message and first user message."""
        first = next(i for i, message in enumerate(self.messages) if message["role"] == "user")
        return self.messages[: first + 1]

    @property
    def turns(self) -> list[str]:
        """What the user says, turn by turn."""
        return [message["content"] for message in self.messages if message["role"] == "user"]


class LeftOut:
    """Records that cannot be used, counted by reason; one object may be shared by threads."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}
        self._lock = Lock()

    def add(self, reason: str, example: str = "") -> None:
        """Count one.

        Args:
            reason: what is said of it, such as "repeated"; see `notice`.
            example: the record and what is wrong with it; the first of each reason is kept.
        """
        with self._lock:
            self.counts[reason] = self.counts.get(reason, 0) + 1
            self.examples.setdefault(reason, example)

    @property
    def notice(self) -> str:
        """One sentence, the most frequent reason first; empty when nothing was left out.

        >>> left_out = LeftOut()
        >>> for reason in ("repeated", "over 384 tokens", "repeated"):
        ...     left_out.add(reason)
        >>> left_out.notice
        'Left out: 2 repeated, 1 over 384 tokens.'
        """
        if not self.counts:
            return ""
        ordered = sorted(self.counts.items(), key=lambda item: -item[1])
        return f"Left out: {', '.join(f'{count} {reason}' for reason, count in ordered)}."


@dataclass(frozen=True)
class Prompts:
    """What `load_prompts` found.

    Attributes:
        prompts: in the order in which they were drawn.
        left_out: the other records that were read on the way.
        origin: the content that they were drawn from.
    """

    prompts: list[Prompt]
    left_out: LeftOut
    origin: Origin


class Unusable(Exception):
    """A well-formed record that makes no prompt; the reason is worded for `LeftOut`."""


def load_prompts(
    source: str,
    split: str,
    tokenizer: Any = None,
    *,
    max_tokens: int | None = None,
    limit: int | None = None,
    seed: int | None = None,
    revision: str | None = None,
    whole: bool = True,
) -> Prompts:
    """Read prompts; those that cannot be used, are repeated or too long are left out and counted.

    With a seed they are drawn from the whole source, in an order that depends on its content and the seed alone: a
    larger `limit` gives the same prompts and then more.

    Args:
        source: a .jsonl file, a .json file with a list, or a name (or folder) that `datasets.load_dataset` knows;
            "name:config" chooses a configuration.
        split: split of a dataset.
        tokenizer: needed with `max_tokens`.
        max_tokens: leave out prompts whose first turn is longer, rendered by the chat template.
        limit: stop after so many prompts.
        seed: of the order; None takes the records as they stand.
        revision: branch, tag or commit of a dataset on the hub.
        whole: a dataset of the hub may be downloaded as a whole; when false only what is read is.

    Raises:
        UserError: missing file, malformed line or record (file and line are named), unknown dataset, split or revision,
            or no prompt left.
    """
    if max_tokens is not None:
        check_template(tokenizer)
    origin = find_origin(source, revision)
    prompts: list[Prompt] = []
    left_out = LeftOut()
    seen: set[str] = set()
    read = misshapen = 0
    for record in read_records(origin, split, seed, whole=whole):
        read += 1
        try:
            prompt = parse_prompt(record.row, record.id)
            key = _key(prompt)
            if key in seen:
                raise Unusable("repeated")
            if max_tokens is not None:
                _check_length(prompt, tokenizer, max_tokens)
        except ValueError as error:
            if _is_file(source):
                raise UserError(f"{source}, {record.location}: {error}.", _accepted()) from None
            misshapen += 1
            left_out.add("of a shape that is not understood", f"{record.location}: {error}. {_accepted()}")
            if misshapen == read == _TRIES:
                break
        except Unusable as reason:
            left_out.add(str(reason), record.location)
        else:
            seen.add(key)
            prompts.append(prompt)
            if len(prompts) == limit:
                break
    if not prompts:
        raise _none_left(source, split, read, left_out)
    return Prompts(prompts, left_out, origin)


def _check_length(prompt: Prompt, tokenizer: Any, max_tokens: int) -> None:
    try:
        tokens = prompt_tokens(prompt.opening, tokenizer)
    except Unfit as refusal:
        raise Unusable(refusal.reason) from None
    if len(tokens) > max_tokens:
        raise Unusable(f"over {max_tokens} tokens")


def _none_left(source: str, split: str, read: int, left_out: LeftOut) -> UserError:
    where = source if _is_file(source) else f"{source!r}, split {split!r}"
    if not read:
        return UserError(f"No usable prompt in {where}: there is none.", "Give a file with prompts in it.")
    said = [f"{count} {reason} (the first: {left_out.examples[reason]})" for reason, count in left_out.counts.items()]
    return UserError(
        f"No usable prompt in {where}: {read} read, {', '.join(said)}.",
        "Raise data.max_prompt_tokens, or give other prompts.",
    )


def _is_file(source: str) -> bool:
    return Path(source).suffix in (".jsonl", ".json")


def deduplicate(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Keep the first of those that ask the same; see `normalise`."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(_key(prompt), prompt)
    return list(first.values())


def normalise(text: str) -> str:
    """The text by which two requests count as the same: case, blanks and closing punctuation do not matter.

    >>> normalise("  What is\\n2 + 2 ?") == normalise("what is 2 + 2")
    True
    >>> normalise("2 + 2") == normalise("2 - 2")
    False
    """
    plain = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()
    return plain.rstrip(" .!?…。！？") or plain


def parse_prompt(row: Mapping[str, Any], name: str) -> Prompt:
    """A prompt from one record of any of `SHAPES`.

    Messages of the assistant without a text (calls of tools, say) are answers that were not given.

    Args:
        row: the record.
        name: its id, when it has none of its own.

    Raises:
        ValueError: a shape that is not understood; the message says what is wrong.
        Unusable: the shape is right, but this record makes no prompt.
    """
    messages: list[Message]
    if "messages" in row:
        messages = _turns(row["messages"], "messages", "role", "content")
    elif "conversations" in row:
        messages = _turns(row["conversations"], "conversations", "from", "value")
    elif "turns" in row:
        if not isinstance(row["turns"], list):
            raise ValueError(f"'turns' is a {type(row['turns']).__name__}, not a list of texts")
        messages = [{"role": "user", "content": _text(turn)} for turn in row["turns"]]
    elif "instruction" in row:
        parts = [_text(row.get(key) or "") for key in ("instruction", "input")]
        messages = [{"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}]
        if output := _text(row.get("output") or ""):
            messages.append({"role": "assistant", "content": output})
    elif "prompt" in row:
        if isinstance(row["prompt"], list):
            messages = _turns(row["prompt"], "prompt", "role", "content")
        else:
            messages = [{"role": "user", "content": _text(row["prompt"])}]
    else:
        raise ValueError(f"unknown shape with the keys {', '.join(map(str, row)) or '(none)'}")
    while messages and messages[0]["role"] == "assistant":  # a greeting that nobody asked for
        messages = messages[1:]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not all(text.strip() for text in asked) or not asked:
        raise Unusable("in which the user says nothing")
    known = next((row[key] for key in ("id", "question_id", "prompt_id") if row.get(key) is not None), name)
    return Prompt(messages, str(row.get("category") or ""), str(known))


def _turns(value: Any, field: str, role_key: str, text_key: str) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"{field!r} is a {type(value).__name__}, not a list of messages")
    messages = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, Mapping):
            raise ValueError(f"message {number} of {field!r} is a {type(turn).__name__}, not an object")
        # ShareGPT files with {"role", "content"} and the other way round are common.
        role = turn.get(role_key, turn.get("role", turn.get("from")))
        text = turn.get(text_key, turn.get("content", turn.get("value")))
        if role not in _ROLES:
            raise Unusable(f"with a message of the role {role!r}")
        if text is None and _ROLES[role] == "assistant":
            continue
        messages.append({"role": _ROLES[role], "content": _text(text)})
    return messages


def _text(value: Any) -> str:
    """A text, or the texts of a list of parts put together."""
    if isinstance(value, list):
        return "".join(_part(part) for part in value)
    if value is None:
        raise Unusable("with a message without a text")
    if not isinstance(value, str):
        raise Unusable(f"with a {type(value).__name__} in the place of a text")
    return value


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return _text(part)
    if part.get("type", "text") not in ("text", "input_text", "output_text"):
        raise Unusable(f"with {part['type']} content")
    return _text(part.get("text"))


def _key(prompt: Prompt) -> str:
    return "\x00".join(normalise(turn) for turn in prompt.turns)


def _accepted() -> str:
    return "Accepted records: " + "; ".join(SHAPES) + "."
