"""Replies in OpenAI's format, whole or in chunks, from the pieces and answers of a request's choices."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from headstart.model.model import Target
from headstart.serve.requests import ChatRequest, CompletionRequest
from headstart.streaming import Answer
from headstart.support.detokenizer import IncrementalDetokenizer, decode_text

_CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)


class TextFilter:
    """Cuts a text before its first stop string, and holds back text that may begin one.

    Attributes:
        length: characters of the text so far, those held back included.
    """

    def __init__(self, stops: Sequence[str], tools: bool = False) -> None:
        self._stops, self._marker = stops, _CALL if tools else None
        self._held, self._ended = "", False
        self.length = 0

    def push(self, piece: str) -> str:
        """Add a piece; return the text that can be sent. With tools, text from the first call on is held."""
        if self._ended:
            return ""
        self._held, before = self._held + piece, len(self._held)
        text = self._held
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            text, self._ended = text[: min(found)], True
        self.length += len(text) - before
        begins = text.find(self._marker) if self._marker else -1
        if begins < 0:
            begins = len(text) if self._ended else self._first_possible(text)
        self._held = text[begins:]
        return text[:begins]

    def flush(self) -> str:
        """Return the text held back."""
        return self._held

    def _first_possible(self, text: str) -> int:
        """Return where a text that may be the beginning of a stop string or of a tool call starts."""
        wanted = [*self._stops, *([self._marker] if self._marker else ())]
        longest = max(map(len, wanted), default=1)
        starts = range(max(0, len(text) - longest + 1), len(text))
        return next((at for at in starts if any(one.startswith(text[at:]) for one in wanted)), len(text))


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split a text into content and tool calls; a malformed call leaves the whole text as content.

    >>> split_calls('<tool_call>{"name": "now", "arguments": {}}</tool_call>')[1][0]["function"]
    {'name': 'now', 'arguments': '{}'}
    >>> split_calls("<tool_call>{now}</tool_call>")
    ('<tool_call>{now}</tool_call>', [])
    """
    calls = []
    for body in _CALLS.findall(text):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return text, []
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return text, []
        function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({"id": f"call_{uuid4().hex}", "type": "function", "function": function})
    return (_CALLS.sub("", text).strip(), calls) if calls else (text, [])


class Choice:
    """One choice of a reply: its text so far, then its calls and its answer."""

    def __init__(self, index: int, stops: Sequence[str], tools: bool) -> None:
        self.index, self.text, self._tools = index, "", tools
        self.filter = TextFilter(stops, tools)
        self.calls: list[dict[str, Any]] = []
        self.answer: Answer | None = None

    def push(self, event: str | Answer) -> str:
        """Add a piece or the final answer; return the new content."""
        if isinstance(event, Answer):
            self.answer, content = event, self.filter.flush()
            if self._tools:
                content, self.calls = split_calls(content)
        else:
            content = self.filter.push(event)
        self.text += content
        return content

    @property
    def finish_reason(self) -> str | None:
        if self.answer is None or self.calls:
            return "tool_calls" if self.calls else None
        return "stop" if self.answer.finish_reason == "end" else self.answer.finish_reason


def accepted_drafts(answer: Answer) -> int:
    """Return the number of drafts that became tokens of the answer."""
    return min(round((answer.tokens_per_round - 1) * answer.rounds), len(answer.tokens))


class Reply:
    """Builds the reply to one request, or its chunks."""

    def __init__(
        self, request: ChatRequest | CompletionRequest, model: str, target: Target, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._chat, self._target = isinstance(request, ChatRequest), target
        self._kind = "chat.completion" if self._chat else "text_completion"
        self._head = {"id": f"{self._kind}-{uuid4().hex}", "created": int(time()), "model": model}
        self._prompt_tokens = sum(map(len, prompts))
        self._likeliest = request.likeliest if self._chat else None
        count = len(prompts) * (request.n or 1)
        self.choices = [Choice(index, request.stops, request.offers_tools) for index in range(count)]

    def whole(self) -> dict[str, Any]:
        """Return the reply, after the answers of all choices."""
        choices = []
        for choice in self.choices:
            message: dict[str, Any] = {"role": "assistant", "content": choice.text}
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": choice.calls}
            body = {"message": message} if self._chat else {"text": choice.text}
            choices.append(self._choice(choice, body))
        return {**self._head, "object": self._kind, "choices": choices, **self.figures()}

    def figures(self) -> dict[str, Any]:
        """Return token counts and timings, summed over the choices that have an answer."""
        answers = [choice.answer for choice in self.choices if choice.answer is not None]
        tokens, rounds = sum(len(answer.tokens) for answer in answers), sum(answer.rounds for answer in answers)
        accepted = sum(map(accepted_drafts, answers))
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
            "completion_tokens_details": {"accepted_prediction_tokens": accepted},
        }
        timings = {
            "first_token_ms": min(answer.first_token_ms for answer in answers),
            "tokens_per_second": sum(answer.tokens_per_second for answer in answers),
            "tokens_per_round": 1 + accepted / max(rounds, 1),
            "rounds": rounds,
            "paused_rounds": sum(answer.paused_rounds for answer in answers),
        }
        return {"usage": usage, "timings": {name: round(value, 3) for name, value in timings.items()}}

    def chunk(self, choice: Choice | None, content: str = "", **more: Any) -> dict[str, Any]:
        """Return a chunk with new content of a choice, or without choices; a choice's first has the role alone."""
        choices = []
        if choice is not None:
            delta: dict[str, Any] = {"content": content} if content else {}
            if not choice.text and choice.answer is None:
                delta = {"role": "assistant", "content": ""}
            if choice.calls:
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(choice.calls)]
            choices = [self._choice(choice, {"delta": delta} if self._chat else {"text": content})]
        kind = f"{self._kind}.chunk" if self._chat else self._kind
        return {**self._head, "object": kind, "choices": choices, **more}

    def _choice(self, choice: Choice, body: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if choice.answer is not None and choice.answer.logprobs is not None:
            logprobs = self._logprobs(choice, choice.answer)
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _logprobs(self, choice: Choice, answer: Answer) -> dict[str, Any]:
        """Return the log-probabilities of the tokens of the text, end token and stop string excluded."""
        target, content, offset = self._target, [], 0
        pieces = IncrementalDetokenizer(target.tokenizer, target.end_tokens, target.markup)
        offsets = []
        for token, known in zip(answer.tokens, answer.logprobs or (), strict=True):
            if offset < choice.filter.length and token not in target.end_tokens:
                own, *_ = entries = [self._entry(*pair) for pair in known.items()]
                likeliest = sorted(entries, key=lambda entry: -entry["logprob"])
                content.append({**own, "top_logprobs": likeliest[: self._likeliest]})
                offsets.append(offset)
            offset += len(pieces.push([token]))
        if self._chat:
            return {"content": content, "refusal": None}
        return {
            "tokens": [one["token"] for one in content],
            "token_logprobs": [one["logprob"] for one in content],
            "top_logprobs": [{top["token"]: top["logprob"] for top in one["top_logprobs"]} for one in content],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = decode_text(self._target.tokenizer, [token], skip_special_tokens=False)
        # Part of a character has no text of its own; JSON has no infinity.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": octets}
