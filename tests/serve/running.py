"""A server in a thread, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from headstart.decoder import Decoder
from headstart.serve.app import Service
from headstart.serve.options import ServeOptions
from headstart.serve.server import Server, bind

TOOLS_CHATML = (
    "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class Running:
    """A running server and a client of it."""

    service: Service
    server: Server
    url: str
    client: httpx.Client

    def post(self, route: str, **body: Any) -> Any:
        """Send a request and return the reply, which must be a success."""
        reply = self.client.post(f"/v1/{route}", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def chat(self, content: str = "Hello", **body: Any) -> Any:
        return self.post("chat/completions", messages=[{"role": "user", "content": content}], **body)

    def count(self, name: str) -> float:
        """Return the value of a metric; 0 if it has none yet."""
        lines = self.client.get("/metrics").text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


@contextmanager
def running(decoder: Decoder, **options: Any) -> Iterator[Running]:
    service = Service(decoder, ServeOptions(port=0, model_name="tiny", **options))
    listening = threading.Event()
    server = Server(service, listening.set)
    with bind(service.options) as bound:
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=[[bound]])
        thread.start()
        assert listening.wait(60)
        with httpx.Client(base_url=url, timeout=60) as client:
            yield Running(service, server, url, client)
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def until(holds: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def write(monkeypatch: pytest.MonkeyPatch, decoder: Decoder, text: str) -> None:
    """Force the text of every answer, by a logits processor."""
    tokenizer, honest = decoder.target.tokenizer, decoder.stream
    script = [*tokenizer.encode(text), tokenizer.eos_token_id]

    def stream(prompt: list[int], **options: Any) -> Any:
        def force(input_ids: Any, scores: Any) -> Any:
            at = input_ids.shape[1] - len(prompt)
            if 0 <= at < len(script):
                scores[:, script[at]] += 1000
            return scores

        return honest(prompt, processors=[force], **options)

    monkeypatch.setattr(decoder, "stream", stream)


@dataclass
class Gate:
    """Blocks the target's forwards after the first ones until it is opened."""

    forwards: int = 0
    opened: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, decoder: Decoder, first: int = 3) -> Gate:
        gate, honest = cls(), decoder.target.forward_tree

        def forward(*args: Any, **kwargs: Any) -> Any:
            gate.forwards += 1
            if gate.forwards > first:
                assert gate.opened.wait(60)
            return honest(*args, **kwargs)

        monkeypatch.setattr(decoder.target, "forward_tree", forward)
        return gate
