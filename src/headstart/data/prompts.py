"""Prompts from files and datasets, whatever shape their records have."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.data.conversations import Message, check_template, prompt_tokens
from headstart.errors import UserError
from headstart.files import read_json, read_jsonl

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


def load_prompts(
    source: str, split: str, tokenizer: Any = None, *, max_tokens: int | None = None, limit: int | None = None
) -> list[Prompt]:
    """Read prompts, drop repeated ones and those that are too long.

    Args:
        source: a .jsonl file, a .json file with a list, or a name (or folder) that `datasets.load_dataset` knows;
            "name:config" chooses a configuration.
        split: split of a dataset.
        tokenizer: needed with `max_tokens`.
        max_tokens: leave out prompts whose first turn is longer, rendered by the chat template.
        limit: stop after so many prompts.

    Raises:
        UserError: missing file, malformed line (file and line are named), unknown shape, unknown dataset or split, or
            no prompt left.
    """
    if max_tokens is not None:
        check_template(tokenizer)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    read = 0
    for prompt in _read(source, split, streaming=limit is not None):
        read += 1
        key = _key(prompt)
        if key in seen or (max_tokens is not None and len(prompt_tokens(prompt.opening, tokenizer)) > max_tokens):
            continue
        seen.add(key)
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise UserError(
            f"No usable prompt in {source}: {read} read, {f'all over {max_tokens} tokens' if read else 'none there'}.",
            "Raise data.max_prompt_tokens or give another file." if read else "Give a file with prompts in it.",
        )
    return prompts


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


def parse_prompt(row: Mapping[str, Any], name: str) -> Prompt | None:
    """A prompt from one record of any of `SHAPES`; None when its text is blank.

    Raises:
        ValueError: a shape that is not understood, or a field of the wrong type; the message says which.
    """
    messages: list[Message]
    if "messages" in row:
        messages = _turns(row["messages"], "messages", "role", "content")
    elif "conversations" in row:
        messages = _turns(row["conversations"], "conversations", "from", "value")
    elif "turns" in row:
        if not isinstance(row["turns"], list):
            raise ValueError(f"'turns' is a {type(row['turns']).__name__}, not a list of texts")
        messages = [{"role": "user", "content": _text(turn, "turns")} for turn in row["turns"]]
    elif "instruction" in row:
        parts = [_text(row.get(key) or "", key) for key in ("instruction", "input")]
        messages = [{"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}]
        if output := _text(row.get("output") or "", "output"):
            messages.append({"role": "assistant", "content": output})
    elif "prompt" in row:
        if isinstance(row["prompt"], list):
            messages = _turns(row["prompt"], "prompt", "role", "content")
        else:
            messages = [{"role": "user", "content": _text(row["prompt"], "prompt")}]
    else:
        raise ValueError(f"unknown shape with the keys {', '.join(map(str, row)) or '(none)'}")
    while messages and messages[0]["role"] == "assistant":  # a greeting that nobody asked for
        messages = messages[1:]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not all(text.strip() for text in asked) or not asked:
        return None
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
            raise ValueError(f"message {number} of {field!r} has the role {role!r}; known: {', '.join(_ROLES)}")
        messages.append({"role": _ROLES[role], "content": _text(text, field)})
    return messages


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a text in {field!r} is a {type(value).__name__}")
    return value


def _key(prompt: Prompt) -> str:
    return "\x00".join(normalise(turn) for turn in prompt.turns)


def _read(source: str, split: str, *, streaming: bool) -> Iterator[Prompt]:
    path = Path(source).expanduser()
    if path.suffix == ".jsonl":
        yield from _parse_file(path, ((f"line {number}", row) for number, row in read_jsonl(path)))
    elif path.suffix == ".json":
        rows = read_json(path)
        if not isinstance(rows, list):
            raise UserError(f"{path} holds a {type(rows).__name__}, not a list.", "Write a list of records, or JSONL.")
        yield from _parse_file(path, ((f"record {number}", row) for number, row in enumerate(rows, start=1)))
    elif path.is_file():
        raise UserError(f"{path} is neither .jsonl nor .json.", "Convert it: one JSON object a line.")
    else:
        yield from _read_dataset(source, split, streaming=streaming)


def _parse_file(path: Path, rows: Iterable[tuple[str, Any]]) -> Iterator[Prompt]:
    for where, row in rows:
        if not isinstance(row, Mapping):
            raise UserError(f"{path}, {where}: a {type(row).__name__}, not an object.", _accepted())
        try:
            prompt = parse_prompt(row, f"{path.stem}-{where.split()[1]}")
        except ValueError as error:
            raise UserError(f"{path}, {where}: {error}.", _accepted()) from None
        if prompt is None:
            raise UserError(f"{path}, {where}: the user says nothing.", "Give it a text or remove it.")
        yield prompt


def _read_dataset(source: str, split: str, *, streaming: bool) -> Iterator[Prompt]:
    for number, row in enumerate(_dataset_rows(source, split, streaming=streaming)):
        try:
            prompt = parse_prompt(row, f"{split}-{number}")
        except ValueError as error:
            raise UserError(f"Dataset {source!r}, split {split!r}, row {number}: {error}.", _accepted()) from None
        if prompt is not None:  # blank records are nobody's mistake in a public dataset
            yield prompt


def _dataset_rows(source: str, split: str, *, streaming: bool) -> Iterator[Mapping[str, Any]]:
    import datasets  # slow to import, and few runs need it

    name, _, config = source.partition(":")
    try:
        yield from datasets.load_dataset(name, config or None, split=split, streaming=streaming)
    except Exception as error:  # datasets raises many kinds; all mean the same to the user
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise UserError(
            f"Cannot read prompts from {source!r}, split {split!r}: {type(error).__name__}: {reason}.",
            "Give 'self', a .jsonl or .json file, or the name of a dataset that datasets.load_dataset can reach.",
        ) from error


def _accepted() -> str:
    return "Accepted records: " + "; ".join(SHAPES) + "."
