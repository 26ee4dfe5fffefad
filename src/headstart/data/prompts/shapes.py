"""Parsing of records in any of the usual prompt formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.data.prompts.chat import NOT_UTF8, Message, Unusable, is_utf8, parse_arguments, read_messages, text_of

SHAPES = (
    '{"turns": [text, ...]}',
    '{"messages": [{"role", "content"}, ...]}, with "tools" and "tool_calls"',
    '{"conversations": [{"from", "value"}, ...]} (ShareGPT)',
    '{"instruction", "input", "output"} (Alpaca)',
    '{"prompt": text}',
    '{"text": text} (plain text, for targets without a chat template)',
)
"""Supported record shapes."""

_COLUMNS = ("messages", "conversations", "turns", "instruction", "prompt", "conversation", "text")
"""Columns that identify a shape, by precedence; null columns are skipped."""
_WITH_SYSTEM = ("conversations", "conversation", "instruction")
"""Shapes with an optional `system` column."""
_MESSAGE_KEYS = ("reasoning_content", "tool_calls", "function_call", "name", "tool_call_id")
"""Optional keys of messages."""


@dataclass(frozen=True)
class Prompt:
    """A user's request of one or several turns.

    Attributes:
        messages: turns from the system or first user message on; without given answers, user messages are adjacent.
        id: the record's id, or file and line.
        plain: the only message is a text to continue, not a request.
        tools: tool definitions.
    """

    messages: list[Message]
    category: str = ""
    id: str = ""
    plain: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def opening(self) -> list[Message]:
        """The messages up to the first user message."""
        return opening(self.messages)

    @property
    def without_answers(self) -> list[Message]:
        """The messages without answers, up to the first tool result, which belongs to a given answer's call."""
        results = (i for i, message in enumerate(self.messages) if message["role"] == "tool")
        return [message for message in self.messages[: next(results, None)] if message["role"] != "assistant"]

    @property
    def turns(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]


def opening(messages: Sequence[Message]) -> list[Message]:
    """Return the messages up to the first user message."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return list(messages[: first + 1])


def parse_prompt(row: Mapping[str, Any], name: str, *, keeps_answers: bool = False) -> Prompt:
    """Parse one record of any of `SHAPES`; `name` is the default id. See `read_messages`.

    An unknown role after the user counts as the assistant, unless given answers are trained on (`keeps_answers`).

    Raises:
        ValueError: unknown shape.
        Unusable: known shape, but no prompt.
    """
    present = [column for column in _COLUMNS if column in row]
    column = next((column for column in present if row[column] is not None), next(iter(present), None))
    if column is None:
        raise ValueError(f"unknown shape with the keys {', '.join(map(str, row)) or '(none)'}")
    messages = _messages(row, column, keeps_answers)
    while messages and messages[0]["role"] == "assistant":  # a greeting
        messages = messages[1:]
    user_texts = [message["content"] for message in messages if message["role"] == "user"]
    if not all(text.strip() for text in user_texts) or not user_texts:
        raise Unusable("in which the user says nothing")
    if column in _WITH_SYSTEM and messages[0]["role"] != "system":
        system = text_of(row.get("system") or "")
        if system.strip():
            messages = [{"role": "system", "content": system}, *messages]
    own_id = next((row[key] for key in ("id", "question_id", "prompt_id") if row.get(key) is not None), name)
    category, tools = str(row.get("category") or ""), tools_of(row.get("tools"))
    if not is_utf8([messages, category, str(own_id), tools]):
        raise Unusable(NOT_UTF8)
    return Prompt(messages, category, str(own_id), plain=column == "text", tools=tools)


def _messages(row: Mapping[str, Any], column: str, keeps_answers: bool) -> list[Message]:
    value = row[column]
    if column in ("messages", "conversations", "conversation") or (column == "prompt" and isinstance(value, list)):
        return _turns(value, column, keeps_answers)
    if column == "turns":
        if not isinstance(value, list):
            raise ValueError(f"'turns' is a {type(value).__name__}, not a list of texts")
        return [{"role": "user", "content": text_of(turn)} for turn in value]
    if column == "instruction":
        parts = [text_of(row.get(key) or "") for key in ("instruction", "input")]
        request = {"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}
        output = text_of(row.get("output") or "")
        return [request, {"role": "assistant", "content": output}] if output else [request]
    text = text_of(value)
    if column == "text" and not text.strip():
        raise Unusable("without text")
    return [{"role": "user", "content": text}]


def _turns(value: Any, field: str, keeps_answers: bool) -> list[Message]:
    if not isinstance(value, list):
        raise ValueError(f"{field!r} is a {type(value).__name__}, not a list of messages")
    turns: list[dict[str, Any]] = []
    for number, turn in enumerate(value, start=1):
        if not isinstance(turn, Mapping):
            raise ValueError(f"message {number} of {field!r} is a {type(turn).__name__}, not an object")
        # {"from", "value"} in `messages` and {"role", "content"} in `conversations` are common.
        keys = (("role", "content"), ("from", "value"))
        (role_key, text_key), (other_role, other_text) = reversed(keys) if field.startswith("conv") else keys
        fields = {key: _without_nulls(turn[key]) for key in _MESSAGE_KEYS if turn.get(key)}
        if not isinstance(reasoning := fields.get("reasoning_content"), str) or not reasoning.strip():
            fields.pop("reasoning_content", None)
        role, content = turn.get(role_key, turn.get(other_role)), turn.get(text_key, turn.get(other_text))
        if role == "function_call" and keeps_answers:  # in ShareGPT the text is the call
            calls, content = parse_arguments(text_of(content)), None
            fields["tool_calls"] = calls if isinstance(calls, list) else [calls]
        turns.append({**fields, "role": role, "content": content})
    messages = read_messages(turns, any_answerer=not keeps_answers)
    for message in messages:
        if "tool_calls" in message or (message["role"] == "assistant" and not keeps_answers):
            break
        if message["role"] == "tool":
            raise Unusable("with a message of the role 'tool'")
    return messages


def tools_of(value: Any) -> list[dict[str, Any]]:
    """Return tool definitions from a list or its JSON; an empty list for other content, such as names of tools."""
    try:
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        return []
    if not isinstance(tools, list) or not all(
        isinstance(tool, Mapping) and ("function" in tool or "name" in tool) for tool in tools
    ):
        return []
    return list(_without_nulls(tools))


def _without_nulls(value: Any) -> Any:
    """Drop null keys: tables give every object the keys of all others."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
