"""A stand-in for vLLM and llama-server.

    python fake_engine.py {vllm|llama.cpp} [fault] ...   then the engine's own arguments

It accepts one draft per round, for any number of drafts. Faults: `start` and `memory` exit at once, `answer` refuses
every request, `silent` drafts nothing, `abort` gives up after a token.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Lock
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: it has links named train, data, eval ...

from rehearsal.engine_http import Refused, StandIn, serve

KIND, FAULT, REST = sys.argv[1], sys.argv[2], sys.argv[3:]
COUNTING = Lock()


def drafts_asked() -> int:
    """Return the drafts per round from the arguments; their path to heads must exist."""
    if KIND == "vllm" and "--speculative-config" in REST:
        asked = json.loads(REST[REST.index("--speculative-config") + 1])
        assert (Path(asked["model"]) / "model.safetensors").is_file()
        return int(asked["num_speculative_tokens"])
    if KIND == "llama.cpp" and "-md" in REST:
        assert Path(REST[REST.index("-md") + 1]).is_file()
        return int(REST[REST.index("--spec-draft-n-max") + 1])
    return 0


def answer(prompt: list[int], count: int, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Return `count` tokens; with drafts, each round writes two."""
    assert all(isinstance(token, int) for token in prompt) and body["temperature"] == 0
    assert body["return_token_ids"] if KIND == "vllm" else body["return_tokens"] and not body["cache_prompt"]
    if FAULT == "answer":
        raise Refused("the prompt is too long")
    if FAULT == "abort":
        return [7], {"choices": [{"token_ids": [7], "finish_reason": "abort"}]}
    if FAULT != "silent" and ENGINE.drafts:
        rounds = count // 2  # the prefill gives the first token; tokens past the end are cut off
        with COUNTING:
            ENGINE.rounds += rounds
            ENGINE.accepted[0] += rounds
    return [7 + number for number in range(count)], {}


if FAULT in ("start", "memory"):
    problem = "no such layer: midlayer.surprise" if FAULT == "start" else "out of memory"
    print(f"INFO loading\nRuntimeError: {problem}", flush=True)
    sys.exit(3)
ENGINE = StandIn(KIND, answer, drafts=drafts_asked(), accepted=[0])
serve(ENGINE, "127.0.0.1", int(REST[REST.index("--port") + 1]))
