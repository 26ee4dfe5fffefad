"""The HTTP interfaces of vLLM and llama-server: pages, bodies and counters, for their substitutes.

Text comes from a `StandIn`: a tiny model (`rehearsal.stand_in`), or a script (`tests/engines/fake_engine.py`). This
file needs nothing but Python.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any


class Refused(Exception):
    """A request that the server answers with 400, and with this text."""


def named() -> str:
    """Return the model's name in this process's command line."""
    words = ["", *sys.argv]
    return next((word for option, word in pairwise(words) if option in ("--served-model-name", "--alias")), "target")


@dataclass
class StandIn:
    """A server's identity and counters.

    Attributes:
        kind: vllm or llama.cpp.
        answer: continues a prompt by at most a number of token ids, and adds fields to the reply; also gets the body.
        drafts: per round, 0 for plain decoding.
        model: name of its target.
        window: most tokens of a prompt with its answer; None does not report it.
        tokenize: text to token ids; None has no such page.
        render: chat messages to token ids, and token ids to text; None does not chat.
        rounds: number of rounds that verified drafts.
        accepted: accepted drafts, by position.
    """

    kind: str
    answer: Callable[[list[int], int, dict[str, Any]], tuple[list[int], dict[str, Any]]]
    drafts: int = 0
    model: str = field(default_factory=named)
    window: int | None = None
    tokenize: Callable[[str], list[int]] | None = None
    render: tuple[Callable[[list[dict[str, str]]], list[int]], Callable[[Sequence[int]], str]] | None = None
    rounds: int = 0
    accepted: list[int] = field(default_factory=list)

    def metrics(self) -> str:
        """Return the counters in the text format of Prometheus; vLLM's have labels and float values."""
        if not self.drafts:
            return ""
        prefix, labels = ("vllm", '{engine="0"}') if self.kind == "vllm" else ("llamacpp", "")
        counted = {"drafts": self.rounds, "draft_tokens": self.rounds * self.drafts}
        lines = [f"# TYPE {prefix}:spec_decode_num_drafts_total counter"]
        for name, value in (counted | {"accepted_tokens": sum(self.accepted)}).items():
            number = f"{float(value)}" if self.kind == "vllm" else str(value)
            lines.append(f"{prefix}:spec_decode_num_{name}_total{labels} {number}")
        for place in range(self.drafts):
            inner = f'engine="0",position="{place}"' if self.kind == "vllm" else f'position="{place}"'
            value = self.accepted[place] if place < len(self.accepted) else 0
            lines.append(f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{{inner}}} {value}")
        return "\n".join(lines) + "\n"

    def page(self, path: str) -> str | None:
        """Return the reply to a GET, or None for an unknown page."""
        owner = {"vllm": "vllm", "llama.cpp": "llamacpp"}[self.kind]
        listed: dict[str, Any] = {"id": self.model, "owned_by": owner}
        if self.window is not None and self.kind == "vllm":
            listed["max_model_len"] = self.window
        elif self.window is not None:
            listed["meta"] = {"n_ctx": self.window}
        pages = {"/health": "", "/metrics": self.metrics(), "/v1/models": json.dumps({"data": [listed]})}
        pages |= {"/version": '{"version": "0.0"}'} if self.kind == "vllm" else {"/props": '{"build_info": "b0"}'}
        return pages.get(path)

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply to a POST, or None for an unknown page."""
        vllm = self.kind == "vllm"
        if path == "/tokenize" and self.tokenize is not None:
            return {"tokens": self.tokenize(body["prompt" if vllm else "content"])}
        if path == "/v1/chat/completions" and self.render is not None:
            read, write = self.render
            prompt = read(body["messages"])
            tokens, more = self._written(prompt, body["max_tokens"], body)
            asked = body.get("return_token_ids")
            given = {"prompt_token_ids": prompt} if asked else {}
            choice = {"message": {"role": "assistant", "content": write(tokens)}}
            return {"choices": [choice | ({"token_ids": tokens} if asked else {})], **given, **more}
        if path == "/v1/completions" and vllm:
            tokens, more = self._written(body["prompt"], body["max_tokens"], body)
            ids = {"prompt_token_ids": body["prompt"], "token_ids": tokens} if body.get("return_token_ids") else {}
            of_choice = {name: more.pop(name) for name in ("prompt_logprobs",) if name in more}
            return {"choices": [{"text": "", **ids, **of_choice}], **more}
        if path == "/completion" and not vllm:
            tokens, more = self._written(body["prompt"], body["n_predict"], body)
            ids = {"tokens": tokens} if body.get("return_tokens") else {}
            return {"content": "", "tokens_evaluated": len(body["prompt"]), **ids, **more}
        return None

    def events(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """Split a completion of vLLM into an event per token."""
        (choice,) = reply["choices"]
        return [{**reply, "choices": [{**choice, "token_ids": [token]}]} for token in choice["token_ids"]]

    def _written(self, prompt: list[int], most: int, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        if self.window is not None and len(prompt) + most > self.window:
            raise Refused(
                f"This model's maximum context length is {self.window} tokens. However, you requested {most} output "
                f"tokens and your prompt contains {len(prompt)} input tokens, for a total of {len(prompt) + most}."
            )
        return self.answer(prompt, most, body)


def serve(stand_in: StandIn, host: str, port: int) -> None:
    """Serve forever; print a line per request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            page = stand_in.page(self.path)
            self._say(404 if page is None else 200, page or "")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                reply = stand_in.reply(self.path, body)
            except Refused as problem:
                self._say(400, json.dumps({"error": {"message": str(problem), "code": 400}}))
            else:
                if reply is not None and body.get("stream"):
                    self._stream(stand_in.events(reply))
                else:
                    self._say(404 if reply is None else 200, json.dumps(reply))

        def _stream(self, events: Sequence[dict[str, Any]]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for event in events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")

        def _say(self, status: int, page: str) -> None:
            text = page.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, form: str, *words: object) -> None:
            print(form % words, flush=True)

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    server.serve_forever()
