"""Conversation messages, and their rendering with the tokenizer's chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy, deepcopy
from functools import lru_cache, partial
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables

from headstart.errors import UserError
from headstart.support.detokenizer import TEMPLATE_ERRORS

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}, see `read_messages`; an answer may also have
"reasoning_content" and "tool_calls", a list of {"function": {"name", "arguments"}}."""

NOT_UTF8 = "with text that is not UTF-8"
"""The reason for leaving out records with lone surrogates."""
_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "ipython", "observation"), "tool"),
}
"""By role or speaker, in lower case."""
_TEXTS = ("text", "input_text", "output_text")
"""Types of parts that hold text."""


class Unusable(Exception):
    """A well-formed record that makes no prompt; the reason is worded for `LeftOut`."""


class Unfit(UserError):
    """A conversation unusable with this chat template, counted under `reason` ("that the chat template refuses")."""

    def __init__(self, problem: str, remedy: str, reason: str) -> None:
        super().__init__(problem, remedy)
        self.reason = reason


def is_utf8(value: Any) -> bool:
    """Whether every string in a JSON value can be encoded: a lone surrogate (half an emoji) cannot."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


def prompt_tokens(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Tokenize rendered messages with the generation prompt; without a chat template, a single user text as it is."""
    if tokenizer is not None and not has_template(tokenizer) and [message["role"] for message in messages] == ["user"]:
        return list(tokenizer.encode(messages[0]["content"]))
    return list(tokenizer.encode(render(messages, tokenizer, answer=True), add_special_tokens=False))


def render(messages: Sequence[Message], tokenizer: Any, *, answer: bool) -> str:
    """Render messages with the chat template; `answer` appends the generation prompt.

    Raises:
        Unfit: the template refuses the messages, or a text in them or in the template's variables is not UTF-8.
    """
    check_template(tokenizer)
    try:
        text = _apply_template(messages, tokenizer, answer)
        text.encode()
    except UnicodeEncodeError as error:
        fields = {"messages": list(messages), **template_kwargs(tokenizer)}
        held = next((name for name, value in fields.items() if not is_utf8(value)), "The chat template")
        raise Unfit(
            f"{held} holds text that is not UTF-8: {error.object[error.start]!r}.",
            "Leave out that character, or convert the text to UTF-8.",
            NOT_UTF8,
        ) from None
    except TEMPLATE_ERRORS as error:
        roles = ", ".join(message.get("role", "?") for message in messages) or "none"
        raise Unfit(
            f"The target's chat template refuses a conversation with the roles {roles}: {error}.",
            "Start with the user (after at most one system message) and let user and assistant alternate.",
            "that the chat template refuses",
        ) from error
    return text


def _apply_template(messages: Sequence[Message], tokenizer: Any, answer: bool) -> str:
    """Render with the arguments of tool calls as objects, or as JSON for templates that write them out unconverted."""

    def apply(given: Sequence[Message]) -> str:
        return str(tokenizer.apply_chat_template(list(given), tokenize=False, add_generation_prompt=answer))

    if not (called := _calls_with_arguments(messages)):
        return apply(messages)
    with suppress(*TEMPLATE_ERRORS):  # such as a TypeError from a concatenation with an object
        text = apply(messages)
        if not any(function["arguments"] and str(function["arguments"]) in text for function in called):
            return text
    as_json = deepcopy(list(messages))
    for function in _calls_with_arguments(as_json):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return apply(as_json)


def _calls_with_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    functions = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return [function for function in functions if isinstance(function.get("arguments"), dict)]


def read_messages(turns: Iterable[Mapping[str, Any]], any_answerer: bool = False) -> list[Message]:
    """Normalise messages for chat templates: a known role, one text, tool calls with arguments as objects.

    Assistant messages with neither text nor tool calls are dropped; other non-null keys are kept. `any_answerer` maps
    an unknown role after the user to the assistant.

    Raises:
        Unusable: an unknown role, content other than text, or malformed tool calls.
    """
    messages = list[Message]()
    for turn in turns:
        speaker, content = turn.get("role"), turn.get("content")
        role = _ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
        if role is None and any_answerer and messages and messages[-1]["role"] == "user":
            role = "assistant"
        if role is None:
            raise Unusable(f"with a message of the role {speaker!r}")
        calls = _calls(turn) if role == "assistant" else []
        if content is None and role == "assistant" and not calls:
            continue
        others = {key: turn[key] for key in turn.keys() - {"tool_calls", "function_call"} if turn[key] is not None}
        message = {**others, "role": role, "content": "" if content is None and calls else text_of(content)}
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    return messages


def _calls(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an answer's tool calls with arguments as objects, as chat templates expect."""
    called = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if not isinstance(called, list) or not all(isinstance(call, Mapping) for call in called):
        raise Unusable("with tool calls that are not a list")
    calls = []
    for call in called:
        function = call.get("function", call)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Unusable("with a tool call that names no function")
        if isinstance(arguments := function.get("arguments"), str):
            function = {**function, "arguments": parse_arguments(arguments or "{}")}
        calls.append({**call, "function": function} if "function" in call else {"function": function})
    return calls


def parse_arguments(text: str) -> Any:
    """Parse the JSON of a tool call; raise `Unusable` if it is malformed."""
    try:
        return json.loads(text)
    except ValueError:
        raise Unusable("with tool arguments that are not JSON") from None


def text_of(content: Any) -> str:
    """Join text parts into one text; raise `Unusable` for other kinds of content."""
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
        if other := next((kind for part in parts if (kind := part.get("type", "text")) not in _TEXTS), None):
            raise Unusable(f"with {other} content")
        return "".join(text_of(part.get("text")) for part in parts)
    if content is None:
        raise Unusable("with a message without text")
    if not isinstance(content, str):
        kind = type(content).__name__
        raise Unusable(f"with {'an' if kind[0] in 'aeiou' else 'a'} {kind} where text is expected")
    return content


def added_tokens(before: str, after: str, last_token: int, tokenizer: Any) -> list[int]:
    """Return the tokens between two renderings; template text after the answer's end token counts to the next turn."""
    end = tokenizer.decode([last_token])
    tail = before[before.rindex(end) + len(end) :] if end in before else ""
    return list(tokenizer(tail + after[len(before) :], add_special_tokens=False)["input_ids"])


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def with_template_kwargs(tokenizer: Any, values: Mapping[str, Any]) -> Any:
    """Copy a tokenizer and bind chat template variables, in addition to earlier ones; unchanged without any."""
    if not values:
        return tokenizer
    check_template(tokenizer)
    for name in values:
        if not has_variable(tokenizer, name):
            raise UserError(
                f"The target's chat template has no variable {name!r}.",
                "Leave it out, or correct it (chat_template_kwargs, in a recipe data.chat_template_kwargs).",
            )
    bound = copy(tokenizer)
    bound.apply_chat_template = partial(tokenizer.apply_chat_template, **values)
    return bound


def with_tools(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Copy a tokenizer with tool definitions bound to its chat template; `Unfit` if the template does not use them."""
    if tools and not has_variable(tokenizer, "tools"):
        raise Unfit(
            "The target's chat template does not use tool definitions.",
            "Use a target that was trained to call tools, or leave the definitions out.",
            "with tools that the chat template does not render",
        )
    return with_template_kwargs(tokenizer, {"tools": list(tools)} if tools else {})


def template_kwargs(tokenizer: Any) -> dict[str, Any]:
    """Return the variables bound by `with_template_kwargs`."""
    return dict(getattr(getattr(tokenizer, "apply_chat_template", None), "keywords", {}))


def has_variable(tokenizer: Any, name: str) -> bool:
    """Whether the chat template (one of several, if it has names) reads a variable."""
    templates = getattr(tokenizer, "chat_template", None) or ""
    try:
        return any(
            name in _variables(text) for text in (templates.values() if isinstance(templates, dict) else [templates])
        )
    except TemplateSyntaxError:
        return True  # rendering names the error


@lru_cache
def _variables(template: str) -> set[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    # transformers' own tag, which marks the assistant's text.
    return find_undeclared_variables(environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)))


def check_template(tokenizer: Any) -> None:
    if tokenizer is None or not has_template(tokenizer):
        raise UserError(
            "The target's tokenizer has no chat template, so prompts and answers cannot be told apart.",
            "Choose an instruction-tuned target, or set tokenizer.chat_template and save it with the model.",
        )


def check_prompts(tokenizer: Any, own: bool) -> None:
    """Refuse a target without a tokenizer, or without a chat template if it writes its `own` prompts."""
    if tokenizer is None:
        check_template(tokenizer)
    if own and not has_template(tokenizer):
        raise UserError(
            "The target has no chat template, so it cannot write its own prompts.",
            'Give rows of plain text (data.prompts=FILE.jsonl, each row {"text": ..}), or use an instruction-tuned '
            "target.",
        )


def check_offsets(tokenizer: Any) -> None:
    """Refuse a slow tokenizer, which has no character offsets."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{type(tokenizer).__name__} has no character offsets of its tokens.",
            "Use a target with a fast tokenizer (tokenizer.json).",
        )
