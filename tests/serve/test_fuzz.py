"""Requests with random values in random places: every reply is a success or an error of the request."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from headstart.decoder import Decoder
from headstart.model.model import Target
from tests.serve.running import TOOLS_CHATML, running
from tests.tiny import tiny_model, tiny_tokenizer

NAMES = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "x"}
COMMON: dict[str, Any] = {
    "model": "tiny", "stream": False, "stream_options": {"include_usage": True}, "n": 1, "max_tokens": 3,
    "min_tokens": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1,
    "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 2.5}, "seed": 7, "stop": ["x", "yz"],
    "stop_token_ids": [9], "ignore_eos": False, "draft": "on", "user": "u", "store": True, "metadata": {"a": "b"},
    "service_tier": "auto",
}  # fmt: skip
CHAT: dict[str, Any] = {
    **COMMON, "logprobs": True, "top_logprobs": 2, "tool_choice": "auto", "parallel_tool_calls": True,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "t"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [NAMES]},
        {"role": "tool", "content": "r", "tool_call_id": "x"},
        {"role": "user", "content": "u"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "response_format": {"type": "text"}, "chat_template_kwargs": {"tools": None}, "max_completion_tokens": 2,
}  # fmt: skip
COMPLETION = {**COMMON, "logprobs": 2, "prompt": ["Hi", "one two"]}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 64, 128, 1 << 31, -(1 << 63), (1 << 63) - 1, 1 << 64, 10**400),
    *(0.0, -0.5, 1e-9, 0.5, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "a", "\ud83d", "\x00", "{{", "<|im_end|>", "🙂", "x" * 5000, "NaN", "role", "user"),
    *([], {}, [[]], [{}], [None], {"": ""}, {"a": {"b": [1, "\ud83d"]}}, [1, "a"], [0] * 50, ["a"] * 20),
)


def changed(body: Any, chance: random.Random) -> Any:
    """Return a copy with one value, or one name, replaced at random."""
    body, place = copy.deepcopy(body), None
    value: Any = body
    while isinstance(value, dict | list) and value and (place is None or chance.random() < 0.7):
        holder, place = value, chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = holder[place]
    if isinstance(holder, dict) and chance.random() < 0.1:
        holder[chance.choice(["", "a", "\ud83d", "messages", "content", "-5", "tokenize"])] = holder.pop(place)
    else:
        alike = [odd for odd in ODD if type(odd) is type(value)]  # passes the first checks
        holder[place] = chance.choice(alike if alike and chance.random() < 0.7 else ODD)
    return body


def test_no_body_makes_the_server_fail() -> None:
    tokenizer = tiny_tokenizer(TOOLS_CHATML)
    model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024)
    chance, statuses = random.Random(1), dict[int, int]()
    with running(Decoder(Target(model, tokenizer, "tiny")), drafter="ngram") as server:
        for _ in range(250):
            route, body = chance.choice([("chat/completions", CHAT), ("completions", COMPLETION)])
            for _ in range(chance.choice([1, 1, 2, 3])):
                body = changed(body, chance)
            reply = server.client.post(
                f"/v1/{route}", content=json.dumps(body), headers={"Content-Type": "application/json"}
            )
            assert reply.status_code in (200, 400, 404), f"{reply.text} for {body}"
            if reply.status_code != 200:
                assert reply.json()["error"]["message"]
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            assert "server_error" not in reply.text, f"{reply.text} for {body}"
        assert server.count("headstart_running") == 0
    assert min(statuses[200], statuses[400]) > 40, f"both are reached: {statuses}"
