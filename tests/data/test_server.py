"""Conversations written by servers: the same answers as in process, through every fault of a server."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.data.conversations.building import Splits, build_conversations
from headstart.data.conversations.identity import identity
from headstart.data.generation.generator import Continuation
from headstart.data.generation.in_process import InProcess
from headstart.data.generation.servers import Servers
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.pipeline.data_stages import help_with_data
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from headstart.recipes.recipe import load_recipe
from headstart.recipes.sections import DataSection
from headstart.servers import client
from headstart.servers.client import Stopped
from headstart.support.artifacts import Artifact, add_reference
from headstart.support.terminal import Bar
from tests.data.http_server import Reply, http_server
from tests.data.loading import everything, of_part, write_rows
from tests.test_pipeline import tiny_recipe

ENDS = frozenset({2})
Answer = Callable[[list[int], int], list[int]]


@dataclass
class Fake:
    """A server that answers like vLLM or llama-server. Each completion request consumes one fault until none is left.

    Faults: `drop` closes the connection, `cut` truncates the reply, `junk` is not JSON, `empty` has no completion,
    `abort` stops early; a number is an HTTP status; a pair is a status and its Retry-After.

    Attributes:
        answer: gives the tokens after a prompt.
        kind: "vllm" or "llama.cpp".
        window: the context it reports and enforces.
        slots: concurrent requests that llama-server reports.
        key: required API key; requests without it get 401.
        faults: remaining faults; with `always`, the first repeats.
        extra: fields added to every completion.
        tokenize: the /tokenize endpoint; None replies 404.
        bodies: completion requests received.
        most: largest number of concurrent requests.
    """

    answer: Answer
    kind: str = "vllm"
    window: int | None = None
    slots: int | None = None
    key: str = ""
    faults: list[Any] = field(default_factory=list)
    always: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    tokenize: Callable[[str], list[int]] | None = None
    pause: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    busy: int = 0
    most: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fault(self) -> Any:
        with self.lock:
            return (self.faults[0] if self.always else self.faults.pop(0)) if self.faults else None

    def about(self, path: str) -> dict[str, Any] | None:
        """Return the body of a GET request, or None for an unknown path."""
        owner = {"vllm": "vllm", "llama.cpp": "llamacpp"}[self.kind]
        window = {"max_model_len": self.window} if self.kind == "vllm" else {}
        pages = {"/v1/models": {"data": [{"id": "fake", "owned_by": owner, **window}]}}
        if self.kind == "llama.cpp":
            pages["/props"] = {"default_generation_settings": {"n_ctx": self.window}, "total_slots": self.slots}
        return pages.get(path)

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.kind == "vllm":
            assert body["return_token_ids"] and body["model"] == "fake"
            written = self.answer(body["prompt"], body["max_tokens"])
            return {"choices": [{"text": "", "token_ids": written, **self.extra}]}
        assert body["return_tokens"]
        stopped = {"content": "", "tokens_evaluated": len(body["prompt"])}
        return {**stopped, "tokens": self.answer(body["prompt"], body["n_predict"]), **self.extra}

    def reply(self, path: str, headers: Mapping[str, str], body: dict[str, Any] | None) -> Reply | None:
        if body is None:
            page = self.about(path)
            lacks_key = bool(self.key) and headers.get("Authorization") != f"Bearer {self.key}"
            return Reply(401 if lacks_key else 404 if page is None else 200, page or {"error": "none"})
        if path == "/tokenize":
            tokens = self.tokenize(body.get("prompt", body.get("content"))) if self.tokenize else []
            return Reply(200 if self.tokenize else 404, {"tokens": tokens})
        assert path == {"vllm": "/v1/completions", "llama.cpp": "/completion"}[self.kind]
        with self.lock:
            self.bodies.append(body)
            self.times.append(time.monotonic())
            self.busy += 1
            self.most = max(self.most, self.busy)
        time.sleep(self.pause)
        try:
            return self.complete(body, self.fault())
        finally:
            with self.lock:
                self.busy -= 1

    def complete(self, body: dict[str, Any], fault: Any) -> Reply | None:
        most = body.get("max_tokens", body.get("n_predict"))
        if self.window is not None and len(body["prompt"]) + most > self.window:
            fault = 400
        if fault == "drop":
            return None
        if fault is None or fault == "cut":
            page = self.completion(body)
            return Reply(400 if "refused" in page else 200, page, cut=9 if fault else 0)
        if isinstance(fault, str):
            aborted = {"choices": [{"token_ids": [5], "finish_reason": "abort"}]}
            return Reply(200, {"junk": "<html>one moment</html>", "empty": {"error": "none"}, "abort": aborted}[fault])
        status, *after = fault if isinstance(fault, tuple) else (fault,)
        return Reply(status, {"error": "too much to do"}, {"Retry-After": after[0]} if after else {})


Serve = Callable[..., Fake]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as running:

        def start(answer: Answer, **options: Any) -> Fake:
            fake = Fake(answer, **options)
            fake.url = running.enter_context(http_server(fake.reply))
            return fake

        yield start


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.002)
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.01)


def counting(prompt: list[int], most: int) -> list[int]:
    """Continue a prompt with tokens that depend on it; half of the prompts end before `most`."""
    written = [10 + (sum(prompt) + step) % 50 for step in range(most)]
    return written if sum(prompt) % 2 else [*written[: most // 2], 2]


def continuation(rows: int, **more: Any) -> Continuation:
    common: dict[str, Any] = {"max_new_tokens": 6, "temperatures": [0.0] * rows, "ends": ENDS, "seed": 3}
    return Continuation(**{**common, **more})


def built(target: Target, settings: DataSection, folder: Path, console: Console | None = None) -> Splits:
    """Build conversations with the section's servers, if it has any."""
    servers = Servers(settings.server, target, settings.server_requests) if settings.server else None
    return build_conversations(target, settings, folder, console, servers=servers)


def asked(servers: Servers, rows: list[list[int]], **more: Any) -> list[list[int]]:
    return servers.continue_rows(rows, continuation(len(rows), **more))


def together(number: int) -> Answer:
    """Answer only when `number` requests are under way at once."""
    meeting = threading.Barrier(number)

    def answer(prompt: list[int], most: int) -> list[int]:
        meeting.wait(60)
        return counting(prompt, most)

    return answer


def numbered(count: int) -> list[list[int]]:
    return [[5, 6, 7 + number] for number in range(count)]


ROWS = numbered(12)
WANTED = [counting(row, 6) for row in ROWS]
NOWHERE = "http://127.0.0.1:9"  # the discard service's port: nothing listens there


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_rows_come_back_in_order(tiny_target: Target, serve: Serve, kind: str, path: str) -> None:
    fake = serve(together(4), kind=kind)
    assert asked(Servers([fake.url + path], tiny_target, 4), ROWS) == WANTED
    assert len(fake.bodies) == 12 and fake.most == 4, "never more than 4 requests at once"


@pytest.mark.parametrize(
    "fault", ["drop", "cut", "junk", "empty", "abort", 408, 429, 500, 503, (429, "0"), (503, "soon")]
)
def test_transient_faults_are_retried(tiny_target: Target, serve: Serve, fault: Any) -> None:
    fake = serve(counting, faults=[fault] * 5)
    assert asked(Servers([fake.url], tiny_target, 3), ROWS) == WANTED
    assert len(fake.bodies) == 12 + 5


def test_retry_after_is_respected(tiny_target: Target, serve: Serve) -> None:
    fake = serve(counting, faults=[(429, "0.4")])
    assert asked(Servers([fake.url], tiny_target, 1), ROWS[:2]) == WANTED[:2]
    assert fake.times[1] - fake.times[0] >= 0.4


def test_retries_back_off(tiny_target: Target, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 0.02)
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.16)
    fake = serve(counting, faults=[500] * 5)
    assert asked(Servers([fake.url], tiny_target, 1), ROWS[:1]) == WANTED[:1]
    gaps = [later - earlier for earlier, later in zip(fake.times, fake.times[1:], strict=False)]
    assert all(gap >= least / 2 for gap, least in zip(gaps, [0.02, 0.04, 0.08, 0.16, 0.16], strict=True))


def test_busy_server_is_waited_for(tiny_target: Target, serve: Serve) -> None:
    """However many requests it rejects, as long as it answers others."""
    open_ = threading.Semaphore(1)
    fake = serve(counting, pause=0.01)
    fake.fault = lambda: None if open_.acquire(blocking=False) else 429  # type: ignore[method-assign]

    def answer(prompt: list[int], most: int) -> list[int]:
        time.sleep(0.02)
        open_.release()
        return counting(prompt, most)

    fake.answer = answer
    rows = numbered(30)
    assert asked(Servers([fake.url], tiny_target, 12), rows) == [counting(row, 6) for row in rows]
    assert len(fake.bodies) > 60, "most are rejected"


def test_unreachable_servers_are_an_error(tiny_target: Target, serve: Serve) -> None:
    fake = serve(counting, faults=[503], always=True)
    with pytest.raises(UserError) as told:
        asked(Servers([fake.url], tiny_target, 1), ROWS[:1])
    assert fake.url in told.value.problem and "503" in told.value.problem and "too much to do" in told.value.problem
    assert "data.server" in told.value.remedy and "keeps the finished batches" in told.value.remedy
    assert len(fake.bodies) == client.TRIES
    with pytest.raises(UserError, match=rf"{NOWHERE} did not answer: ConnectError.*{2 * client.TRIES} tries"):
        asked(Servers([NOWHERE, NOWHERE], tiny_target, 16), ROWS)


@pytest.mark.parametrize("fault", ["drop", 500, "junk"])
def test_bad_server_is_dropped(tiny_target: Target, serve: Serve, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(client, "FIRST_WAIT", 600.0)
    monkeypatch.setattr(client, "LONGEST_WAIT", 600.0)
    good, bad = serve(counting), serve(counting, faults=[fault], always=True)
    rows = numbered(60)
    assert asked(Servers([bad.url, good.url, NOWHERE], tiny_target, 4), rows) == [counting(row, 6) for row in rows]
    assert len(good.bodies) == 60
    assert 1 <= len(bad.bodies) <= 4, "the first requests alone"


def test_servers_share_the_work(tiny_target: Target, serve: Serve) -> None:
    answer = together(4)
    both = [serve(answer), serve(answer)]
    assert asked(Servers([one.url for one in both], tiny_target, 4), ROWS) == WANTED
    assert [len(one.bodies) for one in both] == [6, 6], "requests go to the less busy server"


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ([5, 999_999], "wrote token id 999999, and tiny has ids from 0 to"),
        ([5, -1], "wrote token id -1"),
        ([5, "word"], "wrote token id 'word'"),
        ([5] * 7, "wrote 7 tokens where 6 were asked for"),
        ([5] * 4, "after 4 of 6 tokens, but not at an end-of-turn token"),
        ([], "after 0 of 6 tokens"),
    ],
)
def test_bad_answers_are_refused(tiny_target: Target, serve: Serve, kind: str, written: list[Any], said: str) -> None:
    fake = serve(lambda _prompt, _most: written, kind=kind)
    with pytest.raises(UserError, match=said) as told:
        asked(Servers([fake.url], tiny_target, 1), ROWS[:1])
    assert fake.url in told.value.problem
    assert len(fake.bodies) == 1, "no retry"


def test_tokens_after_the_end_are_cut(tiny_target: Target, serve: Serve) -> None:
    fake = serve(lambda _prompt, _most: [5, 2, 6, 7, 8, 9])
    assert asked(Servers([fake.url], tiny_target, 1), ROWS[:1]) == [[5, 2]]


def test_end_tokens_of_the_server_alone_are_ignored(tiny_target: Target, serve: Serve) -> None:
    """llama-server ends at tokens of its own choice."""
    whole = [11, 0, 12, 0, 13, 2]

    def until_zero(prompt: list[int], most: int) -> list[int]:
        left = whole[len(prompt) - 3 :][:most]
        return left[: left.index(0) + 1] if 0 in left else left

    fake = serve(until_zero, kind="llama.cpp", extra={"stop_type": "eos"})
    assert asked(Servers([fake.url], tiny_target, 1), ROWS[:1]) == [whole]
    assert [body["n_predict"] for body in fake.bodies] == [6, 4, 2]


@pytest.mark.parametrize(
    ("kind", "extra", "said"),
    [
        ("vllm", {"prompt_token_ids": [1, 5, 6, 7]}, "did not read the token ids .*: 4 token ids for 3"),
        ("vllm", {"prompt_token_ids": [5, 6, 8]}, "did not read the token ids"),
        ("llama.cpp", {"tokens_evaluated": 4}, "did not read the token ids .*: 4 token ids for 3"),
        ("vllm", {"token_ids": None}, "returns no token ids"),
    ],
)
def test_server_that_reads_other_tokens_is_refused(
    tiny_target: Target, serve: Serve, kind: str, extra: dict[str, Any], said: str
) -> None:
    fake = serve(counting, kind=kind, extra=extra)
    with pytest.raises(UserError, match=f"{fake.url} {said}"):
        asked(Servers([fake.url], tiny_target, 1), ROWS[:1])


def test_echoed_prompt_may_match(tiny_target: Target, serve: Serve) -> None:
    fake = serve(counting, extra={"prompt_token_ids": ROWS[0]})
    assert asked(Servers([fake.url], tiny_target, 1), ROWS[:1]) == WANTED[:1]


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_another_tokenizer_is_refused(tiny_target: Target, serve: Serve, kind: str) -> None:
    def own(text: str) -> list[int]:
        return list(tiny_target.tokenizer(text, add_special_tokens=False)["input_ids"])

    assert asked(Servers([serve(counting, kind=kind, tokenize=own).url], tiny_target, 2), ROWS) == WANTED
    other = serve(counting, kind=kind, tokenize=lambda text: [*own(text)[:-1], 5])
    with pytest.raises(UserError, match=f"{other.url} serves fake with another tokenizer than that of tiny"):
        asked(Servers([other.url], tiny_target, 2), ROWS)
    assert not other.bodies


@pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
def test_window_is_the_smallest_reported(tiny_target: Target, serve: Serve, kind: str) -> None:
    def window(*fakes: Fake) -> int:
        return Servers([*(fake.url for fake in fakes), NOWHERE], tiny_target, 4).window

    large, small, silent = (serve(counting, kind=kind, window=size) for size in (1 << 20, 24, None))
    assert window(large, small, silent) == 24
    assert window(silent) == window(large) == tiny_target.max_length


def test_refused_row_comes_back_empty(tiny_target: Target, serve: Serve) -> None:
    fake = serve(counting, faults=[None] * 5 + [400])
    how = continuation(12)
    assert Servers([fake.url], tiny_target, 1).continue_rows(ROWS, how) == [*WANTED[:5], [], *WANTED[6:]]
    assert len(fake.bodies) == 12, "no retry"
    assert list(how.refused) == [5] and f"{fake.url}/v1/completions answered 400" in how.refused[5]


def test_refusing_everything_ends_the_work(tiny_target: Target, serve: Serve) -> None:
    fake = serve(counting)
    servers = Servers([fake.url], tiny_target, 8)
    assert asked(servers, ROWS) == WANTED
    fake.faults, fake.always = [400], True
    with pytest.raises(UserError, match="answered 400"):
        for _ in range(100):
            assert asked(servers, ROWS) == [[]] * 12
    # A few batches refused completely, say over the context, do not end the work.
    assert 64 < len(fake.bodies) - 12 < 12 * 12


def test_default_number_of_requests() -> None:
    assert client.Pool([NOWHERE], None, "").requests == client.REQUESTS
    assert client.Pool([NOWHERE] * 8, None, "").requests == 8 * client.REQUESTS
    assert client.Pool([NOWHERE] * 8, 3, "").requests == 3


def test_one_address_may_serve_many_gpus(tiny_target: Target, serve: Serve) -> None:
    def requests(number: int | None = None, **fake: Any) -> int:
        servers = Servers([serve(counting, **fake).url, NOWHERE], tiny_target, number)
        assert servers.concurrent_batches(64) == 1 + -(-2 * servers.requests // 64)
        return servers.requests

    assert requests() >= 2 * 8 * 64, "vLLM with --data-parallel-size 8"
    assert requests(kind="llama.cpp", slots=3) == 2 * 2 * 3 and requests(kind="llama.cpp") == requests()
    assert requests(5) == requests(5, kind="llama.cpp", slots=3) == 5


def test_connections_raise_the_soft_limit_of_open_files(tiny_target: Target, serve: Serve) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert len(asked(Servers([serve(counting).url], tiny_target, 400), numbered(20))) == 20
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(hard, 512)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


PROCESS = """
import os, signal, sys
sys.path.append(sys.argv[1])  # last: its links are called train, data, eval ...
from rehearsal.engine_http import Refused, StandIn, serve
answers = int(sys.argv[3])
def answer(prompt, most, body):
    global answers
    answers -= 1
    if answers < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if prompt[-1] == 12:
        raise Refused("too long")
    written = [10 + (sum(prompt) + step) % 50 for step in range(most)]
    return (written if sum(prompt) % 2 else [*written[: most // 2], 2]), {}
serve(StandIn("vllm", answer), "127.0.0.1", int(sys.argv[2]))
"""
"""A server process that kills itself in the middle of an answer after a number of them, and refuses one prompt."""


def test_survives_a_killed_server_and_a_refused_prompt(tiny_target: Target) -> None:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [one.getsockname()[1] for one in sockets]
    repository = str(Path(__file__).parents[2])
    processes = [
        subprocess.Popen([sys.executable, "-c", PROCESS, repository, str(port), answers], stdout=subprocess.DEVNULL)
        for port, answers in zip(ports, ("2", "1000"), strict=True)
    ]
    try:
        for port in ports:
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert all(process.poll() is None for process in processes)
                time.sleep(0.02)
        servers, how = Servers([f"http://127.0.0.1:{port}" for port in ports], tiny_target, 4), continuation(12)
        assert servers.continue_rows(ROWS, how) == [*WANTED[:5], [], *WANTED[6:]]
        assert list(how.refused) == [5] and "answered 400" in how.refused[5]
        assert processes[0].wait(60) == -9 and processes[1].poll() is None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_connections_use_keepalive(serve: Serve) -> None:
    """Otherwise a dead machine goes unnoticed for half an hour while an answer is written."""
    reply = client.Endpoint(serve(counting).url).send("/v1/models")
    connection = reply.extensions["network_stream"].get_extra_info("socket")
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_KEEPIDLE"):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_threads_share_the_requests(tiny_target: Target, serve: Serve) -> None:
    fake = serve(together(4))
    servers = Servers([fake.url], tiny_target, 4)
    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(lambda _: asked(servers, ROWS), range(5))) == [WANTED] * 5
    assert fake.most == 4


class TestKey:
    """The API key in the environment."""

    def test_key_is_sent(self, tiny_target: Target, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(client.KEY, " sk-secret\n")
        fake = serve(counting, key="sk-secret")
        assert asked(Servers([fake.url], tiny_target, 2), ROWS) == WANTED

    def test_missing_key_is_explained(self, tiny_target: Target, serve: Serve) -> None:
        with pytest.raises(UserError, match=f"answered 401.*export {client.KEY}="):
            asked(Servers([serve(counting, key="sk-secret").url], tiny_target, 2), ROWS)

    @pytest.mark.parametrize("fault", [401, 500])
    def test_messages_hide_the_key(
        self, tiny_target: Target, serve: Serve, monkeypatch: pytest.MonkeyPatch, fault: int
    ) -> None:
        monkeypatch.setenv(client.KEY, "to")  # the server's reply contains it
        with pytest.raises(UserError, match=r"\*\*\*o much \*\*\* do") as told:
            asked(Servers([serve(counting, faults=[fault], always=True).url], tiny_target, 1), ROWS[:1])
        assert "too much" not in str(told.value)

    @pytest.mark.parametrize("key", ["sk-\u00e9", "sk-\nsecret"])
    def test_malformed_key_is_refused(self, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
        monkeypatch.setenv(client.KEY, key)
        with pytest.raises(UserError, match=f"{client.KEY} holds characters that no key has") as told:
            Servers([NOWHERE], tiny_target, 1)
        assert "sk-" not in str(told.value)


@pytest.mark.parametrize("status", [400, 401, 404])
def test_permanent_errors_are_not_retried(tiny_target: Target, serve: Serve, status: int) -> None:
    fake = serve(counting, faults=[status], always=True)
    with pytest.raises(UserError, match=f"/v1/completions answered {status}: .*too much to do"):
        asked(Servers([fake.url], tiny_target, 1), ROWS[:1])
    assert len(fake.bodies) == 1


def test_each_row_has_its_own_seed(tiny_target: Target, serve: Serve) -> None:
    def seeds(kind: str, **more: Any) -> dict[int, int | None]:
        fake = serve(counting, kind=kind)
        asked(Servers([fake.url], tiny_target, 4), ROWS, temperatures=[1.0] * 11 + [0.0], **more)
        warm = [body for body in fake.bodies if body["temperature"] == 1.0]
        assert all((body["top_k"], body["min_p"]) == (64, 0.0) for body in warm)
        return {body["prompt"][-1]: body.get("seed") for body in fake.bodies}

    found = seeds("vllm")
    assert found == seeds("vllm") == seeds("llama.cpp")
    assert found.pop(18) is None and len(set(found.values())) == 11
    assert seeds("vllm", seed=4) != {**found, 18: None}


def test_end_tokens_are_the_targets(tiny_target: Target, serve: Serve) -> None:
    fake = serve(counting)
    asked(Servers([fake.url], tiny_target, 1), ROWS[1:2], ends=frozenset({60, 2}))
    assert fake.bodies[0]["stop_token_ids"] == [2, 60] and fake.bodies[0]["ignore_eos"] is True


def test_stopped_work_sends_no_more_requests(tiny_target: Target, serve: Serve) -> None:
    fake = serve(counting, pause=0.05)

    def stops() -> None:
        if len(fake.bodies) >= 3:
            raise Stopped

    with pytest.raises(Stopped):
        asked(Servers([fake.url], tiny_target, 2), ROWS, check=stops)
    time.sleep(0.2)
    assert len(fake.bodies) < 12


ONE_AT_A_TIME = threading.Lock()


def greedy(target: Target) -> Answer:
    def answer(prompt: list[int], most: int) -> list[int]:
        with ONE_AT_A_TIME:
            return InProcess(target).continue_rows([prompt], Continuation(most, [0.0], target.end_tokens, 0))[0]

    return answer


def brief(target: Target) -> Answer:
    """Short answers with an end token, so that later turns follow; the random target never ends one."""
    return lambda prompt, _most: [*(40 + (sum(prompt) + step) % 50 for step in range(3)), min(target.end_tokens)]


class TestConversations:
    """Conversations written by a server with the tiny target."""

    def section(self, folder: Path, **more: Any) -> DataSection:
        file = folder / "prompts.jsonl"
        rows = [{"turns": [f"Question {i}: why {'so ' * (i % 5)}?", "And then?"][: 1 + i % 2]} for i in range(14)]
        write_rows(file, *rows)
        values = {"conversations": 6, "heldout": 2, "validation": 2, "max_new_tokens": 8, "batch_size": 3}
        return DataSection.model_validate({"prompts": str(file), **values, **more})

    @pytest.mark.parametrize("kind", ["vllm", "llama.cpp"])
    def test_match_those_written_in_process(
        self, tiny_target: Target, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        notes: list[str] = []
        monkeypatch.setattr(Bar, "update", lambda _self, _done, _total, note: notes.append(note))
        here = built(tiny_target, self.section(tmp_path), tmp_path / "here")
        fakes = [serve(greedy(tiny_target), kind=kind, faults=faults) for faults in (["drop", 503, "cut"], [])]
        section = self.section(tmp_path, server=",".join(fake.url for fake in fakes), server_requests=3)
        assert everything(built(tiny_target, section, tmp_path / "there")) == everything(here)
        assert sum(len(fake.bodies) for fake in fakes) >= 8
        assert "answer tokens/s, 3 requests at a time" in notes[-1]

    def test_restart_requests_missing_answers(
        self, tiny_target: Target, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "TRIES", 2)
        whole, fake = serve(greedy(tiny_target)), serve(greedy(tiny_target))
        section = self.section(tmp_path, server=whole.url, server_requests=1)
        splits = built(tiny_target, section, tmp_path / "whole")
        fake.faults = [None] * 6 + [500] * 2  # the server dies in a later part, and comes back
        section = self.section(tmp_path, server=fake.url, server_requests=1)
        with pytest.raises(UserError, match="keeps the finished batches"):
            built(tiny_target, section, tmp_path / "cut")
        parts = list((tmp_path / "cut" / "batches").glob("*.jsonl"))
        answered = sum(any(item.supervised) for part in parts for item in of_part(part))
        assert 0 < answered < 8
        before = len(fake.bodies)
        assert everything(built(tiny_target, section, tmp_path / "cut")) == everything(splits)
        prompts = [tuple(body["prompt"]) for body in fake.bodies]
        first, again = prompts[:before], prompts[before:]
        finished = {
            tuple(item.tokens[: item.supervised.index(True)])
            for part in parts
            for item in of_part(part)
            if any(item.supervised)
        }
        assert finished <= set(first) and not finished & set(again)
        assert everything(built(tiny_target, section, tmp_path / "cut")) == everything(splits)
        assert len(fake.bodies) == len(prompts), "nothing is requested again"

    def test_end_at_the_servers_context(self, tiny_target: Target, serve: Serve, tmp_path: Path) -> None:
        def section(**more: Any) -> DataSection:
            made = self.section(tmp_path, **more)
            rows = [{"turns": [f"Question {i}?", "And " * (20 * (i % 3)) + "then?"]} for i in range(14)]
            write_rows(Path(str(made.prompts)), *rows)
            return made

        whole = built(tiny_target, section(server=serve(brief(tiny_target)).url), tmp_path / "whole")
        window = min(len(item.tokens) for item in whole.train) + 20
        fake, told = serve(brief(tiny_target), window=window), StringIO()
        splits = built(tiny_target, section(server=fake.url), tmp_path / "there", Console(file=told, width=500))
        shorter = 0
        for item, other in zip(splits.train, whole.train, strict=True):
            assert item.tokens == other.tokens[: len(item.tokens)]
            assert len(item.tokens) <= window and item.messages[-1]["role"] == "assistant"
            shorter += len(item.tokens) < len(other.tokens)
        assert 0 < shorter < 6
        assert f"later turns that a context of {window} tokens does not hold" in told.getvalue()
        assert all(len(body["prompt"]) + body["max_tokens"] <= window for body in fake.bodies)

    def test_refused_prompts_are_left_out(self, tiny_target: Target, serve: Serve, tmp_path: Path) -> None:
        """In the middle of a job: the first turn of one conversation, and the second turn of another."""
        section = self.section(tmp_path, server=serve(brief(tiny_target)).url)
        whole = built(tiny_target, section, tmp_path / "whole")
        short = next(item for item in whole.train if len(item.supervised_spans) == 1)
        long = next(item for item in whole.train if len(item.supervised_spans) == 2)
        refused = [list(item.tokens[: item.supervised_spans[-1][0]]) for item in (short, long)]
        fake, told = serve(brief(tiny_target)), StringIO()
        asked_for = fake.completion

        def completion(body: dict[str, Any]) -> dict[str, Any]:
            return {"refused": True} if body["prompt"] in refused else asked_for(body)

        fake.completion = completion  # type: ignore[method-assign]
        section = self.section(tmp_path, server=fake.url)
        splits = built(tiny_target, section, tmp_path / "there", Console(file=told, width=500))
        written = {item.id: item for item in splits.train}
        assert short.id not in written and len(written) == 6, "another prompt replaces it"
        assert written[long.id].tokens == long.tokens[: long.supervised_spans[0][1]]
        assert [message["role"] for message in written[long.id].messages] == ["user", "assistant"]
        assert "1 that a server refused (the first: " in told.getvalue() and "answered 400" in told.getvalue()
        assert "1 later turns that a server refused" in told.getvalue()

    def test_next_part_starts_during_a_slow_answer(self, tiny_target: Target, serve: Serve, tmp_path: Path) -> None:
        here = built(tiny_target, self.section(tmp_path), tmp_path / "here")
        slow = list(here.train[0].tokens[: here.train[0].supervised_spans[0][0]])
        others, in_time = threading.Event(), list[bool]()

        def answer(prompt: list[int], most: int) -> list[int]:
            if len(fake.bodies) == 8:  # two for validation, six in two parts
                others.set()
            if prompt == slow:
                in_time.append(others.wait(20))
            return greedy(tiny_target)(prompt, most)

        fake = serve(answer)
        there = built(tiny_target, self.section(tmp_path, server=fake.url), tmp_path / "there")
        assert everything(there) == everything(here)
        assert in_time == [True], "the next part is requested meanwhile"

    def test_loads_no_target(self, tiny_target: Target, tiny_target_folder: Path, serve: Serve, tmp_path: Path) -> None:
        def run(**data: Any) -> Run:
            changes = {"server": serve(greedy(tiny_target)).url, **data}
            recipe = tiny_recipe(tmp_path, tiny_target_folder, data=changes)
            return Run(recipe, tmp_path / "run", Console(file=StringIO()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("headstart.model.loading.load_target", lambda *_, **__: pytest.fail("loaded"))
            execute(run(states="online"), stages_until("states"))
        written = (tmp_path / "run" / "data" / "conversations" / "train.jsonl").read_text()
        stored = run()
        assert stored.target.model.device.type == "cpu"
        execute(stored, stages_until("states"))
        assert (tmp_path / "run" / "data" / "conversations" / "train.jsonl").read_text() == written
        assert len(list(tmp_path.glob("artifacts/conversations/*"))) == 1, "the same, with the target loaded"

    def test_helpers_load_none(self, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Helpers cannot take over writing from servers; there may be states to compute later."""
        recipe = tiny_recipe(tmp_path, tiny_target_folder, data={"server": NOWHERE})
        monkeypatch.setattr("headstart.model.loading.load_target", lambda *_, **__: pytest.fail("loaded"))
        run, done = Run(recipe, tmp_path / "run", Console(quiet=True)), set[str]()
        add_reference(run.folder, "conversations", Artifact(tmp_path / "artifacts" / "conversations" / "a", {}))
        help_with_data(run, done)
        assert not done

    def test_self_prompts_come_from_the_server(
        self, tiny_target: Target, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("headstart.data.prompts.self_prompts.acceptable", lambda _text, _special: True)
        monkeypatch.setattr(InProcess, "continue_rows", lambda *_: pytest.fail("in process"))
        end = min(tiny_target.end_tokens)
        fake = serve(lambda prompt, _most: [*prompt[-4:], 40 + sum(prompt) % 50, end])
        sizes = {"conversations": 6, "heldout": 2, "validation": 2, "max_new_tokens": 8, "batch_size": 8}
        section = DataSection.model_validate({**sizes, "server": [fake.url]})
        assert len(built(tiny_target, section, tmp_path / "data").train) == 6
        assert {body["temperature"] for body in fake.bodies} == {0.0, 1.0}

    def test_identity_names_a_server_without_its_address(self, tiny_target: Target, tmp_path: Path) -> None:
        def known(**more: Any) -> dict[str, Any]:
            return identity(tiny_target, self.section(tmp_path, **more))

        assert known(server_requests=3) == known()
        assert known(server="http://a:1") == known(server="http://b:2,http://c", server_requests=2)
        assert {**known(server="http://a:1"), "writing_dtype": "auto"} == {**known(), "server": True}


class TestRecipe:
    def test_server_addresses(self) -> None:
        def addresses(text: str) -> Any:
            return load_recipe("quickstart", [f"data.server={text}"]).data.server

        assert addresses("http://localhost:8000") == ("http://localhost:8000",)
        assert addresses("http://a:1, https://b/v1") == addresses("[http://a:1, https://b/v1]")
        assert addresses("http://a:1, https://b/v1") == ("http://a:1", "https://b/v1")
        assert addresses("null") is addresses("''") is None

    @pytest.mark.parametrize("text", ["localhost:8000", "ftp://a", "http://", "http://a,b"])
    def test_malformed_address_is_refused(self, text: str) -> None:
        with pytest.raises(UserError, match=r"'data\.server' has '.*http://localhost:8000"):
            load_recipe("quickstart", [f"data.server={text}"])
