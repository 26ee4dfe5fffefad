"""A server that answers as vLLM or llama-server do: their paths, their bodies, their counters. Stands in for both.

    python fake_engine.py {vllm|llama.cpp} [fault] ...   the engine's own arguments behind

One draft of each round is accepted, however many there are. Faults: `start` ends at once, `answer` refuses every
request, `silent` drafts nothing.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

KIND, FAULT, REST = sys.argv[1], sys.argv[2], sys.argv[3:]


def drafts_asked() -> int:
    """Drafts a round, from arguments that must name heads which are there."""
    if KIND == "vllm" and "--speculative-config" in REST:
        asked = json.loads(REST[REST.index("--speculative-config") + 1])
        assert (Path(asked["model"]) / "model.safetensors").is_file()
        return int(asked["num_speculative_tokens"])
    if KIND == "llama.cpp" and "-md" in REST:
        assert Path(REST[REST.index("-md") + 1]).is_file()
        return int(REST[REST.index("--spec-draft-n-max") + 1])
    return 0


DRAFTS = drafts_asked()
COUNTED = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}


def answer(count: int) -> list[int]:
    """So many tokens; a round writes two with drafts."""
    rounds = count // 2 if DRAFTS else 0  # the first token is the prompt's; what goes beyond the end is cut off
    if FAULT != "silent":
        COUNTED["drafts"] += rounds
        COUNTED["draft_tokens"] += rounds * DRAFTS
        COUNTED["accepted_tokens"] += rounds
    return [7 + number for number in range(count)]


def metrics() -> str:
    """The counters in the text format of Prometheus; vLLM's have labels and float values."""
    if not DRAFTS:
        return ""
    prefix, labels = ("vllm", '{engine="0"}') if KIND == "vllm" else ("llamacpp", "")
    lines = [f"# TYPE {prefix}:spec_decode_num_drafts_total counter"]
    for name, value in COUNTED.items():
        number = f"{float(value)}" if KIND == "vllm" else str(value)
        lines.append(f"{prefix}:spec_decode_num_{name}_total{labels} {number}")
    for place in range(DRAFTS):
        inner = f'engine="0",position="{place}"' if KIND == "vllm" else f'position="{place}"'
        value = COUNTED["accepted_tokens"] if place == 0 else 0
        lines.append(f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{{inner}}} {value}")
    return "\n".join(lines)


class Handler(BaseHTTPRequestHandler):
    """The pages that headstart asks for."""

    def do_GET(self) -> None:
        pages = {"/health": "", "/metrics": metrics()}
        pages |= {"/version": '{"version": "0.0"}'} if KIND == "vllm" else {"/props": '{"build_info": "b0"}'}
        self.say(200 if self.path in pages else 404, pages.get(self.path, ""))

    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert all(isinstance(token, int) for token in body["prompt"]) and body["temperature"] == 0
        if FAULT == "answer":
            self.say(400, '{"error": "the prompt is too long"}')
        elif KIND == "vllm":
            assert self.path == "/v1/completions" and body["return_token_ids"]
            self.say(200, json.dumps({"choices": [{"token_ids": answer(body["max_tokens"])}]}))
        else:
            assert self.path == "/completion" and body["return_tokens"] and not body["cache_prompt"]
            self.say(200, json.dumps({"tokens": answer(body["n_predict"])}))

    def say(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


if FAULT == "start":
    print("INFO loading\nRuntimeError: no such layer: midlayer.surprise", flush=True)
    sys.exit(3)
HTTPServer(("127.0.0.1", int(REST[REST.index("--port") + 1])), Handler).serve_forever()
