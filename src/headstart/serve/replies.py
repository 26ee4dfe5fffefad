"""Replies in OpenAI's format, whole or in chunks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from headstart.model.model import Target
from headstart.serve.requests import ChatRequest, Request, stops_of, tools_of
from headstart.streaming import Answer
from headstart.support.detokenizer import IncrementalDetokenizer, decode_text

_CALL = "<tool_call>"
_CALLS = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)


class TextFilter:
    """Cuts a text before its first stop string, and holds back text that may begin one, or a tool call.

    Attributes:
        held: the text held back; with tools, all text from the first call on.
        length: characters of the text so far, those held back included.
    """

    def __init__(self, stops: Sequence[str], tools: bool = False) -> None:
        self.held, self.length = "", 0
        self._stops, self._ended = stops, False
        self._marks = [*stops, _CALL] if tools else stops
        self._longest = max(map(len, self._marks), default=1)

    def push(self, piece: str) -> str:
        """Add a piece; return the text that can be sent."""
        if self._ended:
            return ""
        self.length -= len(self.held)
        text = self.held + piece
        if found := [at for stop in self._stops if (at := text.find(stop)) >= 0]:
            text, self._ended = text[: min(found)], True
        self.length += len(text)
        begins = text.find(_CALL) if len(self._marks) > len(self._stops) else -1
        if begins < 0:
            starts = range(len(text) if self._ended else max(0, len(text) - self._longest + 1), len(text))
            begins = next((at for at in starts if any(mark.startswith(text[at:]) for mark in self._marks)), len(text))
        self.held = text[begins:]
        return text[:begins]


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


def accepted_drafts(answer: Answer) -> int:
    """Return the number of drafts that became tokens of the answer."""
    return min(round((answer.tokens_per_round - 1) * answer.rounds), len(answer.tokens))


class Choice:
    """One choice of a reply: its text so far, then its answer and tool calls."""

    def __init__(self, request: Request) -> None:
        self.text, self.calls = "", list[dict[str, Any]]()
        self.answer: Answer | None = None
        self._tools = bool(tools_of(request))
        self.filter = TextFilter(stops_of(request), self._tools)

    def push(self, event: str | Answer) -> str:
        """Add a piece, or the answer after the last one; return the new content."""
        if isinstance(event, str):
            content = self.filter.push(event)
        else:
            self.answer, content = event, self.filter.held
            if self._tools:
                content, self.calls = split_calls(content)
        self.text += content
        return content


class Reply:
    """Builds the reply to one request, or its chunks."""

    def __init__(self, request: Request, model: str, target: Target, prompts: Sequence[Sequence[int]]) -> None:
        self._chat, self._target = isinstance(request, ChatRequest), target
        self._likeliest = request.top_logprobs or 0 if isinstance(request, ChatRequest) else None
        self._kind = "chat.completion" if self._chat else "text_completion"
        self._head = {"id": f"{self._kind}-{uuid4().hex}", "created": int(time()), "model": model}
        self._prompt_tokens = sum(map(len, prompts))
        self.choices = [Choice(request) for _ in range(len(prompts) * (request.n or 1))]

    def whole(self) -> dict[str, Any]:
        """Return the reply, after the answers of all choices."""
        choices = []
        for index, choice in enumerate(self.choices):
            message: dict[str, Any] = {"role": "assistant", "content": choice.text}
            if choice.calls:
                message |= {"content": choice.text or None, "tool_calls": choice.calls}
            choices.append(self._choice(index, {"message": message} if self._chat else {"text": choice.text}))
        return {**self._head, "object": self._kind, "choices": choices, **self.figures()}

    def chunk(self, index: int | None, content: str = "", **more: Any) -> dict[str, Any]:
        """Return a chunk with new content of a choice, or without choices; a choice's first has the role alone."""
        choices = []
        if index is not None:
            choice = self.choices[index]
            delta: dict[str, Any] = {"content": content} if content else {}
            if not choice.text and choice.answer is None:
                delta = {"role": "assistant", "content": ""}
            if choice.calls:
                delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(choice.calls)]
            choices = [self._choice(index, {"delta": delta} if self._chat else {"text": content})]
        kind = f"{self._kind}.chunk" if self._chat else self._kind
        return {**self._head, "object": kind, "choices": choices, **more}

    def figures(self) -> dict[str, Any]:
        """Return token counts and timings of all choices."""
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
            "first_token_ms": round(min(answer.first_token_ms for answer in answers), 1),
            "tokens_per_second": round(sum(answer.tokens_per_second for answer in answers), 1),
            "tokens_per_round": round(1 + accepted / max(rounds, 1), 3),
            "rounds": rounds,
            "paused_rounds": sum(answer.paused_rounds for answer in answers),
        }
        return {"usage": usage, "timings": timings}

    def _choice(self, index: int, body: dict[str, Any]) -> dict[str, Any]:
        choice, reason, logprobs = self.choices[index], None, None
        if (answer := choice.answer) is not None:
            reason = "tool_calls" if choice.calls else answer.finish_reason.replace("end", "stop")
            if answer.logprobs is not None:
                logprobs = self._logprobs(answer.tokens, answer.logprobs, choice.filter.length)
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[dict[int, float]], length: int) -> dict[str, Any]:
        """Return the log-probabilities of the text's tokens, without the end token and a stop string."""
        pieces = IncrementalDetokenizer(self._target.tokenizer, self._target.end_tokens, self._target.markup)
        content, offsets, offset = list[dict[str, Any]](), list[int](), 0
        for token, known in zip(tokens, logprobs, strict=True):
            if offset < length and token not in self._target.end_tokens:
                entries = [self._entry(*pair) for pair in known.items()]
                top = sorted(entries, key=lambda entry: -entry["logprob"])[: self._likeliest]
                content.append({**entries[0], "top_logprobs": top})
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
