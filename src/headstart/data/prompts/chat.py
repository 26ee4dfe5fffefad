"""What the target reads of a conversation: its messages, rendered by the tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

from jinja2 import TemplateError

from headstart.errors import UserError

Message = dict[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}; of a given answer also "reasoning_content" and
"tool_calls", which is a list of {"function": {"name", "arguments"}}."""


class Unfit(UserError):
    """A conversation that the chat template makes nothing to learn from of; others of the same source may do.

    It is counted under `reason`, such as "that the chat template refuses".
    """

    def __init__(self, problem: str, remedy: str, reason: str) -> None:
        super().__init__(problem, remedy)
        self.reason = reason


def prompt_tokens(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """What the target reads before it answers: the rendered messages and the generation prompt.

    A target without a chat template reads the text of a single user message as it is, and goes on with it.
    """
    if tokenizer is not None and not has_template(tokenizer) and [message["role"] for message in messages] == ["user"]:
        return list(tokenizer.encode(messages[0]["content"]))
    return list(tokenizer.encode(render(messages, tokenizer, answer=True), add_special_tokens=False))


def render(messages: Sequence[Message], tokenizer: Any, *, answer: bool) -> str:
    """The chat template's text for these messages, `Unfit` where it refuses them; `answer` appends the generation
    prompt."""
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
    """Tokens that a template puts after an answer, from the rendering `before` them and that `after` them.

    The end of the turn is the answer's own last token; what the template puts after it comes with the next turn.
    """
    end = tokenizer.decode([last_token])
    tail = before[before.rindex(end) + len(end) :] if end in before else ""
    return list(tokenizer(tail + after[len(before) :], add_special_tokens=False)["input_ids"])


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def with_template_kwargs(tokenizer: Any, values: Mapping[str, Any]) -> Any:
    """A copy of a tokenizer that always renders its chat template with these variables, beside those that it has
    already; itself without any."""
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
    """A copy of a tokenizer whose chat template renders definitions of tools; itself without any, and `Unfit` where the
    template has no place for them."""
    if tools and not has_variable(tokenizer, "tools"):
        raise Unfit(
            "The target's chat template has no place for definitions of tools.",
            "Use a target that was trained to call tools, or leave the definitions out.",
            "with tools that the chat template does not render",
        )
    return with_template_kwargs(tokenizer, {"tools": list(tools)} if tools else {})


def template_kwargs(tokenizer: Any) -> dict[str, Any]:
    """The variables that `with_template_kwargs` gave to a tokenizer."""
    return dict(getattr(getattr(tokenizer, "apply_chat_template", None), "keywords", {}))


def has_variable(tokenizer: Any, name: str) -> bool:
    return has_template(tokenizer) and bool(re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)))


def check_template(tokenizer: Any) -> None:
    if tokenizer is None or not has_template(tokenizer):
        raise UserError(
            "The target's tokenizer has no chat template, so there is no telling what the assistant wrote.",
            "Choose an instruction-tuned target, or set tokenizer.chat_template and save it with the model.",
        )


def check_prompts(tokenizer: Any, own: bool) -> None:
    """Refuse a target that has no tokenizer, or no chat template where it should write prompts itself (`own`)."""
    if tokenizer is None:
        check_template(tokenizer)
    if own and not has_template(tokenizer):
        raise UserError(
            "The target has no chat template, so it cannot write its own prompts.",
            'Give rows of plain text (data.prompts=FILE.jsonl, each row {"text": ..}), or use an instruction-tuned '
            "target.",
        )


def check_offsets(tokenizer: Any) -> None:
    """Refuse a slow tokenizer, which does not tell where its tokens lie in a text."""
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{type(tokenizer).__name__} does not tell which characters a token covers.",
            "Use a target with a fast tokenizer (tokenizer.json).",
        )
