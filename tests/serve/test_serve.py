"""A server on a tiny target: its text, formats, limits and end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import GenerationConfig

from headstart.decoder import Decoder
from headstart.model.model import Target
from headstart.serve.app import MAX_BODY, default_sampling
from headstart.serve.replies import TextFilter
from headstart.tree.tree import TreeShape
from tests.forks import Forks
from tests.hub.helpers import export, make_heads
from tests.serve.running import TOOLS_CHATML, Gate, Running, running, until, write
from tests.test_cli import refused
from tests.tiny import tiny_model, tiny_tokenizer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    tokenizer = tiny_tokenizer(TOOLS_CHATML)
    target = Target(tiny_model("llama", vocab_size=len(tokenizer), max_length=1024), tokenizer, "tiny")
    return Decoder(target, make_heads(target), TreeShape.chain(2))


@pytest.fixture(scope="module")
def server(decoder: Decoder) -> Iterator[Running]:
    with running(decoder) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chunks(server: Running, route: str, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of a streamed reply, without the last line."""
    reply = server.client.post(f"/v1/{route}", json={"stream": True, **body})
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, last = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


# -- text --------------------------------------------------------------------------------------------------------------


def test_greedy_text_is_the_decoders(server: Running, decoder: Decoder) -> None:
    expected = decoder.generate("one two one two", max_new_tokens=60)
    reply = server.chat("one two one two", temperature=0, max_completion_tokens=60, draft="on", model="tiny")
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert (choice["finish_reason"], choice["logprobs"]) == (expected.finish_reason.replace("end", "stop"), None)
    prompt, usage = len(decoder.tokens("one two one two")), reply["usage"]
    accepted = usage.pop("completion_tokens_details")["accepted_prediction_tokens"]
    count = len(expected.tokens)
    assert usage == {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    timings = reply["timings"]
    assert 0 < accepted == round((timings["tokens_per_round"] - 1) * timings["rounds"])
    assert timings["first_token_ms"] > 0 and timings["tokens_per_second"] > 0 and timings["paused_rounds"] == 0


def test_prompts_of_completions(server: Running, decoder: Decoder) -> None:
    texts = ["Hello", "one two"]
    expected = [decoder.generate(text, raw=True, max_new_tokens=9).text for text in texts]
    ids = [decoder.tokens(text, raw=True) for text in texts]
    for prompt, answers in ((texts[0], expected[:1]), (texts, expected), (ids[0], expected[:1]), (ids, expected)):
        reply = server.post("completions", prompt=prompt, temperature=0, max_tokens=9)
        assert [choice["text"] for choice in reply["choices"]] == answers
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
def test_streamed_text_is_the_whole_text(server: Running, route: str) -> None:
    prompt: Any = {"prompt": "Hello"} if route == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    body = {**prompt, "seed": 3, "max_tokens": 40, "n": 2, "temperature": 1.0}
    whole = server.post(route, **body)
    texts, reasons = ["", ""], ["", ""]
    *parts, last = chunks(server, route, stream_options={"include_usage": True}, **body)
    for part in parts:
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        reasons[choice["index"]] = choice["finish_reason"] or ""
    known = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in whole["choices"]]
    assert texts == known and known[0] != known[1]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    assert last["choices"] == [] and last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    *_, final = chunks(server, route, **body)
    assert final["timings"]["rounds"] > 0 and "usage" not in final


def test_choices_and_seeds(server: Running, decoder: Decoder) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "presence_penalty": 0.5}
    choices = server.chat("Hi", n=3, seed=5, max_tokens=12, draft="off", **options)["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    expected = [decoder.generate("Hi", seed=5 + i, max_new_tokens=12, draft="off", **options).text for i in range(3)]
    assert texts == expected and len(set(texts)) == 3
    assert server.chat("Hi", max_tokens=60)["choices"] != server.chat("Hi", max_tokens=60)["choices"], "random seeds"


def test_lengths(server: Running, decoder: Decoder) -> None:
    def count(**options: Any) -> Any:
        return server.chat("Hi", temperature=0, **options)["usage"]["completion_tokens"]

    tokens = decoder.generate("Hi", max_new_tokens=60).tokens
    assert count(max_tokens=5) == 5
    assert count(max_tokens=50, stop_token_ids=[tokens[3]]) == tokens.index(tokens[3]) + 1
    end = decoder.target.tokenizer.eos_token_id
    assert count(max_tokens=50, logit_bias={str(end): 100}) == 1
    assert count(max_tokens=50, logit_bias={str(end): 100}, min_tokens=7) == 8
    assert count(max_tokens=50, logit_bias={str(end): 100}, ignore_eos=True) == 50
    with running(decoder, max_tokens=6) as short:
        assert short.chat(temperature=0, logit_bias={str(end): -100})["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two STOP three", ["STOP"], "one two "),
        ("one ST two STO", ["STOP"], "one ST two STO"),
        ("STOP", "STOP", ""),
        ("a\n\nb", ["\n\n"], "a"),
        ("one two three", ["three", "two"], "one "),
        ("naïve 漢字 END", [" END"], "naïve 漢字"),
    ],
)
def test_stop_strings_end_the_text_and_are_not_part_of_it(
    text: str, stops: Any, expected: str, server: Running, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, decoder, text)
    (choice,) = server.chat(stop=stops, max_tokens=60)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
    parts = chunks(server, "completions", prompt="x", stop=stops, max_tokens=60)
    assert "".join(part["choices"][0]["text"] for part in parts) == expected


def test_text_is_held_back_only_while_it_may_begin_a_stop_string() -> None:
    kept = TextFilter(["abc"], tools=True)
    assert [kept.push(piece) for piece in "xabdab"] == ["x", "", "", "abd", "", ""] and kept.held == "ab"
    assert (kept.push("<tool"), kept.push("_x"), kept.push("<tool_call>y z")) == ("ab", "<tool_x", "")
    assert (kept.held, kept.length) == ("<tool_call>y z", len("xabdab<tool_x<tool_call>y z"))
    assert kept.push(" abc d") == "" and kept.held == "<tool_call>y z "


def test_logprobs(server: Running, decoder: Decoder, client: openai.OpenAI) -> None:
    expected = decoder.generate("Hi", max_new_tokens=6, logprobs=2)
    assert expected.logprobs is not None
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=6, temperature=0, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    content = reply.choices[0].logprobs.content  # type: ignore[union-attr]  # asked for
    assert content is not None
    own = [values[token] for token, values in zip(expected.tokens, expected.logprobs, strict=True)]
    assert [entry.logprob for entry in content] == pytest.approx(own)
    for entry, values in zip(content, expected.logprobs, strict=True):
        likeliest = sorted(values.values(), reverse=True)[:2]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(likeliest)
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
    prompt = decoder.tokens("Hi")
    listed = client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=1).choices[0]
    assert listed.logprobs is not None and listed.logprobs.token_logprobs == pytest.approx(own)
    assert listed.logprobs.text_offset is not None and listed.logprobs.text_offset[0] == 0
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0, "logprobs": True}
    *earlier, last = chunks(server, "chat/completions", **body)
    assert [one["logprob"] for one in last["choices"][0]["logprobs"]["content"]] == pytest.approx(own)
    assert not any(part["choices"][0]["logprobs"] for part in earlier)


def test_log_probabilities_end_with_the_text(
    server: Running, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(monkeypatch, decoder, "one two STOP three")
    (choice,) = server.post("completions", prompt="x", stop="STOP", max_tokens=60, logprobs=0)["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "one two "
    assert choice["logprobs"]["text_offset"][-1] < len("one two ")
    (whole,) = server.post("completions", prompt="x", max_tokens=60, logprobs=0)["choices"]
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"] == "one two STOP three"


@pytest.mark.parametrize("stream", [False, True])
def test_tools(
    stream: bool, decoder: Decoder, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, server: Running
) -> None:
    write(monkeypatch, decoder, f"Let me see.\n{CALL}")
    question: Any = [{"role": "user", "content": "Rain?"}]
    tools: Any = [WEATHER]
    create = client.chat.completions.create
    if stream:
        pieces = list(create(model="tiny", messages=question, tools=tools, stream=True))
        content = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        last = pieces[-1].choices[0]
        calls, reason = last.delta.tool_calls, last.finish_reason
    else:
        choice = create(model="tiny", messages=question, tools=tools).choices[0]
        content, reason = choice.message.content or "", choice.finish_reason
        calls = choice.message.tool_calls  # type: ignore[assignment]  # the same fields
    assert calls is not None
    (call,) = calls
    assert call.function is not None
    assert (content, reason) == ("Let me see.\n", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments or "")) == ("weather", {"city": "Ulm"})
    again = [*question, {"role": "assistant", "content": "", "tool_calls": [call.model_dump(exclude={"index"})]}]
    again.append({"role": "tool", "tool_call_id": call.id, "content": "no"})
    assert create(model="tiny", messages=again, tools=tools).choices[0].message.tool_calls
    text = create(model="tiny", messages=question, tools=tools, tool_choice="none").choices[0].message.content
    assert text == f"Let me see.\n{CALL}"


def test_malformed_call_stays_text(server: Running, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("<tool_call>{weather}</tool_call>", '<tool_call>{"name": 1}</tool_call>', "see <tool_call> for more"):
        with monkeypatch.context() as patched:
            write(patched, decoder, text)
            (choice,) = server.chat(tools=[WEATHER])["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_harmless_fields(server: Running) -> None:
    harmless = {
        "user": "anna", "store": False, "metadata": {"a": "b"}, "parallel_tool_calls": True, "service_tier": "auto",
        "tool_choice": "auto", "response_format": {"type": "text"}, "seed": None, "stop": None, "tools": [],
        "chat_template_kwargs": {}, "stream_options": None, "logprobs": False, "top_k": -1,
    }  # fmt: skip
    assert server.chat(max_tokens=2, **harmless)["choices"]


def test_sampling_defaults_are_the_targets(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_sampling(decoder) == {"temperature": 1.0}
    config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20)
    monkeypatch.setattr(decoder.target.model, "generation_config", config)
    assert default_sampling(decoder) == {"temperature": 0.6, "top_k": 20}


# -- errors ------------------------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
DEEP = b'{"messages": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": [{}]}, "role"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "nobody"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "dict"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "tool calls"),
        ({"messages": [{"role": 5, "content": "x"}]}, "role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 5000}, "lower max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"min_tokens": 3}, "Raise max_tokens, or lower min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 10**400}, "number"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": (1 << 63) - 1, "n": 2}, "seed"),
        ({"n": 0}, "n"),
        ({"n": 100}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"draft": "maybe"}, "draft"),
        ({"stream": "yes"}, "stream"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [5]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"chat_template_kwargs": {"thinking": True}}, "thinking"),
        ({"chat_template_kwargs": {"messages": 5}}, "template"),
        ({"functions": []}, "functions"),
        ({"model": "gpt"}, "model"),
    ],
)
def test_bad_fields_of_chats(change: dict[str, Any], says: str, server: Running) -> None:
    reply = server.client.post("/v1/chat/completions", json={**CHAT, **change})
    error = reply.json()["error"]
    assert reply.status_code == (404 if "model" in change else 400), reply.text
    assert says in error["message"] + str(error["param"]) and error["message"].endswith((".", "'tiny'."))
    assert error["type"] == "invalid_request_error" and len(error["message"]) < 500


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [""], 5, [1, "a"], [-1], [10**6], [1.5], ["a", 1], {"a": 1}, [[[1]]], [True]]
)
def test_bad_prompts(prompt: Any, server: Running) -> None:
    reply = server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert reply.status_code == 400 and reply.json()["error"]["message"].endswith("."), reply.text


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b"5", b"{", b"\xff\xfe", DEEP, b'{"a": NaN}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"messages": [{"role": "user", "content": "x", "name": "\\ud83d"}]}',
        b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": ' + b'[{"a":' * 900 + b"1" + b"}]" * 900 + b"}",
    ],
)  # fmt: skip
def test_bad_bodies(body: bytes, server: Running) -> None:
    for route in ("completions", "chat/completions"):
        for kind in ("application/json", "text/plain"):
            reply = server.client.post(f"/v1/{route}", content=body, headers={"Content-Type": kind})
            assert reply.status_code == 400 and reply.json()["error"]["message"].endswith("."), reply.text


def test_other_statuses(server: Running, decoder: Decoder) -> None:
    assert server.client.get("/v1/nothing").status_code == 404
    assert server.client.get("/v1/completions").json()["error"]["message"]
    for body in (b"x" * (MAX_BODY + 1), iter([b"x" * MAX_BODY, b"x"])):
        large = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert large.status_code == 413 and str(MAX_BODY) in large.json()["error"]["message"]
    with running(decoder, api_key="secret") as locked:
        for headers in ({}, {"Authorization": "Bearer guess"}, {"Authorization": b"Bearer \xe9"}):
            reply = locked.client.get("/v1/models", headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert locked.client.get("/health").status_code == 200
        with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="secret", max_retries=0) as known:
            assert [model.id for model in known.models.list()] == ["tiny"]


def test_a_failure_of_the_decoding(server: Running, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes differ")

    failed = server.count('headstart_requests_total{outcome="failed"}')
    monkeypatch.setattr(decoder.target, "forward_tree", fail)
    body = {**CHAT, "max_tokens": 20, "ignore_eos": True}
    reply = server.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 500 and "shapes" not in reply.text and "log" in reply.json()["error"]["message"]
    streamed = server.client.post("/v1/chat/completions", json={**body, "stream": True})
    assert json.loads(streamed.text.splitlines()[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert server.count('headstart_requests_total{outcome="failed"}') == failed + 2


# -- limits and the end ------------------------------------------------------------------------------------------------


def test_queue_and_metrics(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate.install(monkeypatch, decoder)
    with running(decoder, max_requests=2, max_queue=1) as server, ThreadPoolExecutor(3) as pool:
        options = {"max_tokens": 20, "ignore_eos": True, "temperature": 0, "draft": "off"}
        asked = [pool.submit(server.chat, **options) for _ in range(3)]
        until(lambda: server.count("headstart_running") == 2 and server.count("headstart_queued") == 1)
        reply = server.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["code"] == "queue_full"
        gate.opened.set()
        texts = {answer.result()["choices"][0]["message"]["content"] for answer in asked}
        assert len(texts) == 1
        prompt = len(decoder.tokens("Hello"))
        for name, value in (
            ('requests_total{outcome="completed"}', 3),
            ('requests_total{outcome="refused"}', 1),
            ("running", 0),
            ("queued", 0),
            ("prompt_tokens_total", 3 * prompt),
            ("generated_tokens_total", 60),
            ("accepted_draft_tokens_total", 0),
            ("rounds_total", 57),
            ("first_token_seconds_count", 3),
            ("tokens_per_second_count", 3),
        ):
            assert server.count(f"headstart_{name}") == value, name


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_decoding(
    stream: bool, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate.install(monkeypatch, decoder)
    with running(decoder, max_requests=1) as server:
        body = {**CHAT, "max_tokens": 900, "n": 2, "ignore_eos": True, "stream": stream, "draft": "off"}
        request = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        sent = json.dumps(body)
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.sendall(f"{request}{len(sent)}\r\n\r\n{sent}".encode())
            until(lambda: gate.forwards > 3)
            assert server.count("headstart_queued") == 1
        until(lambda: server.count("headstart_queued") == 0)
        gate.opened.set()
        until(lambda: server.count("headstart_running") == 0)
        assert gate.forwards <= 5
        assert server.count('headstart_requests_total{outcome="cancelled"}') == 1
        assert server.chat(max_tokens=2)["choices"]


def test_clients_that_come_and_go_do_not_change_the_texts_of_others(decoder: Decoder) -> None:
    greedy: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
    sampled: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 4, "draft": "off"}
    with running(decoder, max_requests=4) as server:

        def text(prompt: str, **options: Any) -> str:
            return str(server.chat(prompt, **options)["choices"][0]["message"]["content"])

        def leave(number: int) -> None:
            body = {**CHAT, "max_tokens": 800, "ignore_eos": True, "stream": True}
            with httpx.Client(base_url=server.url) as client:
                for _ in range(12):
                    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                        for count, _ in enumerate(reply.iter_lines()):
                            if count > number:
                                break

        asked = [(prompt, options) for prompt in ("Hi", "one two one two", "x" * 60) for options in (greedy, sampled)]
        alone = [text(prompt, **options) for prompt, options in asked]
        with ThreadPoolExecutor(5) as pool:
            leaving = [pool.submit(leave, number) for number in (1, 3, 9)]
            texts = [pool.submit(text, prompt, **options) for _ in range(6) for prompt, options in asked]
            assert [answer.result() for answer in texts] == alone * 6
            assert [done.result() for done in leaving] == [None] * 3
        until(lambda: not server.service.jobs.running)
        assert server.count('headstart_requests_total{outcome="failed"}') == 0


def test_running_requests_finish_and_new_ones_are_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate.install(monkeypatch, decoder)
    with running(decoder, max_requests=1) as server, ThreadPoolExecutor(2) as pool:
        options = {"max_tokens": 20, "ignore_eos": True, "draft": "off"}
        asked = [pool.submit(server.chat, **options) for _ in range(2)]
        until(lambda: gate.forwards > 3 and server.service.jobs.waiting)
        server.server.handle_exit(signal.SIGTERM, None)
        reply = server.client.post("/v1/chat/completions", json=CHAT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
        assert server.client.get("/health").status_code == 503
        gate.opened.set()
        assert [answer.result()["usage"]["completion_tokens"] for answer in asked] == [20, 20]
        until(lambda: server.server.should_exit)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url)


def test_drain_has_an_end(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate.install(monkeypatch, decoder)
    body = {**CHAT, "max_tokens": 900, "ignore_eos": True, "draft": "off"}
    with running(decoder, drain=0.0) as server, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.client.post, "/v1/chat/completions", json=body)
        until(lambda: gate.forwards > 3)
        server.server.handle_exit(signal.SIGTERM, None)
        assert asked.result().status_code == 503
        gate.opened.set()
        until(lambda: server.server.should_exit)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_the_command(
    sent: signal.Signals, tiny_target: Target, tiny_target_folder: Path, tmp_path: Path, forks: Forks
) -> None:
    """In a process of its own, for its signals: from the printed request to the exit code."""
    export(tmp_path / "heads", Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    words = ["serve", "heads", "--port", "0", "--dtype", "float32", "--log", "log", "--model-name", "tiny"]
    process = forks.start("-m", "headstart", *words)
    until(lambda: "\nfrom openai" in process.out.read_text() or process.poll() is not None)
    said = process.out.read_text()
    (curl,) = [line for line in said.splitlines() if line.startswith("curl ")]
    reply = json.loads(subprocess.run(curl, shell=True, capture_output=True, check=True).stdout)
    assert reply["model"] == "tiny" and reply["usage"]["completion_tokens"] > 0
    taken = curl.split()[1].split("/")[2].split(":")[1]
    assert f"127.0.0.1:{taken}" in refused("serve", "heads", "--port", taken)
    process.send_signal(sent)
    assert process.wait() == 0, process.err.read_text()
    assert "headstart export heads --format vllm" in said and len(list((tmp_path / "log").glob("*.jsonl"))) == 1


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "headstart.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "pip install fastapi uvicorn prometheus-client" in refused("serve", "heads")
