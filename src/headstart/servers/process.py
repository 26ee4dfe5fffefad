"""A client for a running serving engine, and a child process that runs one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from time import monotonic, perf_counter, sleep
from typing import Any, Self

from headstart.errors import UserError
from headstart.servers import guard
from headstart.servers.client import Endpoint, RetryableError
from headstart.servers.completions import CompletionRequest, served_by
from headstart.servers.engines import ENGINES, ServingEngine

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.25
_HEALTH_SECONDS = 5.0
_METRICS_SECONDS = 60.0
_TERM_SECONDS = 20.0
"""Time from SIGTERM to SIGKILL."""
_STOP_SECONDS = _TERM_SECONDS + guard.KILL_SECONDS + 5.0
_LAST_LINES = 6
_KILLED = 137
"""Exit code after SIGKILL, which the kernel sends when memory runs out."""
_NOISE = re.compile(r"^\s*(\(.*?\)\s*)?((INFO|WARNING|srv|slot|que)\b|[\d.]+ [IWD] )")
_CAUSE = re.compile(r"\b[A-Z]\w*(Error|Exception): |^[\d.]+ E ")  # of vLLM, and of llama-server (after a timestamp)
_NOT_THE_CAUSE = re.compile(r"initialization failed|\b(WARNING|INFO)\b")
_COUNTER = re.compile(r"^\w+:spec_decode_num_(\w+)_total(?:\{(.*)\})?\s+([\d.eE+-]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_MEMORY_REMEDY = "Try data.server_arguments='--gpu-memory-utilization 0.8 --max-model-len 4096' (with your sizes)."
_OF_LAUNCHERS = re.compile(r"TORCHELASTIC_\w+|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)")
"""Rank variables of torchrun and accelerate; an engine must not join their job."""


@dataclass(frozen=True)
class EngineAnswer:
    """Generated token ids, their arrival times in milliseconds after the request, and the total seconds.

    `drafted` and `accepted` are the reply's counts of draft tokens; 0 if it has none.
    """

    tokens: tuple[int, ...]
    token_ms: tuple[float, ...]
    seconds: float
    drafted: int = 0
    accepted: int = 0

    @property
    def decoding_ms(self) -> float:
        """The time from the first token to the last, without reading the prompt."""
        return self.token_ms[-1] - self.token_ms[0] if self.token_ms else 0.0


class RunningEngine:
    """A client of a running engine; `remedy` is the user's remedy if it does not answer."""

    def __init__(self, engine: ServingEngine, endpoint: Endpoint, model: str, remedy: str) -> None:
        self.engine, self._endpoint, self._model, self._remedy = engine, endpoint, model, remedy
        self._dialect = engine.dialect

    @property
    def url(self) -> str:
        return self._endpoint.url

    def answer(self, request: CompletionRequest) -> EngineAnswer:
        """Return the streamed answer, with the engine's own end tokens unless the request names some."""
        path, body = self._dialect.request(request, self._model)
        tokens: list[int] = []
        token_ms: list[float] = []
        started = perf_counter()
        try:
            if not self._dialect.streams:
                return self._whole_answer(path, body)
            for event in self._endpoint.stream(path, {**body, "stream": True}):
                if error := event.get("error"):
                    raise RetryableError(str(error))
                tokens += (arrived := self._dialect.read(event).tokens)
                token_ms += [1e3 * (perf_counter() - started)] * len(arrived)
            return EngineAnswer(tuple(tokens), tuple(token_ms), perf_counter() - started)
        except UserError as error:
            problem = error.problem
        except (RetryableError, KeyError, IndexError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{self.engine.name} did not answer: {problem[:300]}", self._remedy)

    def _whole_answer(self, path: str, body: dict[str, Any]) -> EngineAnswer:
        """Return an answer that is not streamed: the server times the prefill, later tokens are spread evenly."""
        started = perf_counter()
        page = self._endpoint.fetch(path, body)
        seconds = perf_counter() - started
        tokens = self._dialect.read(page).tokens
        timings = page.get("timings") or {}
        first = min(float(timings.get("prompt_ms", 0.0)), 1e3 * seconds)
        step = (1e3 * seconds - first) / max(1, len(tokens) - 1)
        token_ms = tuple(first + step * number for number in range(len(tokens)))
        drafts = (int(timings.get(name, 0)) for name in ("draft_n", "draft_n_accepted"))
        return EngineAnswer(tuple(tokens), token_ms, seconds, *drafts)

    def answers(self, requests: Sequence[CompletionRequest]) -> list[EngineAnswer]:
        """Answer several requests concurrently."""
        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(self.answer, requests))

    def counters(self) -> Counter[str | int]:
        """Return its counters since the start; see `read_counters`."""
        try:
            return read_counters(self._endpoint.send("/metrics", seconds=_METRICS_SECONDS).text)
        except RetryableError as error:
            raise UserError(f"{self.engine.name} stopped unexpectedly: {error}", self._remedy) from None

    def chat_prompt(self, messages: Sequence[dict[str, Any]]) -> list[int] | None:
        """Return the token ids of chat messages as the engine renders them; None if it does not report them."""
        try:
            return self._dialect.chat_prompt(self._endpoint, messages, self._model)
        except RetryableError as error:
            raise UserError(f"{self.engine.name} did not answer: {error}", self._remedy) from None

    def version(self) -> str:
        """Return the version reported by the running engine, or an empty string."""
        path, key = self.engine.version_path
        try:
            return str(self._endpoint.fetch(path)[key])
        except (RetryableError, UserError, KeyError):
            return ""


class Recorded(RunningEngine):
    """Cache of an engine's answers: each batch of requests is sent once, and known batches need no running engine."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        self._known: dict[str, list[EngineAnswer]] = {}

    def answers(self, requests: Sequence[CompletionRequest]) -> list[EngineAnswer]:
        if (key := repr(requests)) not in self._known:
            self._known[key] = self._engine.answers(requests)
        return self._known[key]

    def counters(self) -> Counter[str | int]:
        return Counter()


def engine_at(url: str, spec: str, remedy: str) -> RunningEngine:
    """Connect to a running engine and its model `spec` (Hub id or path); an empty `spec` selects the first model."""
    endpoint = Endpoint(url)
    try:
        served = served_by(endpoint, spec)
    except RetryableError as problem:
        raise UserError(f"{url} does not answer: {problem}.", remedy) from None
    engine = next(each for each in ENGINES.values() if type(each.dialect) is type(served.dialect))
    return RunningEngine(engine, endpoint, served.model, remedy)


class Server(RunningEngine):
    """A context manager that runs an engine as a child process, with its output in `log`.

    `drafting` are the arguments that add heads, `options` further ones as a command line. `command` replaces the
    engine's own, `gpus` sets CUDA_VISIBLE_DEVICES, and `environment` adds variables. The engine gets its `measuring`
    options for this number of concurrent `requests`; with `many`, its `generating` options instead.

    Attributes:
        model: random name of the target in requests, which no other server on the port has.

    Raises:
        UserError: the command is missing, exited, or did not answer in time; quotes its log.
    """

    def __init__(
        self,
        engine: ServingEngine,
        target: str,
        drafting: Sequence[str],
        log: Path,
        *,
        command: str = "",
        options: str = "",
        gpus: str = "",
        environment: Mapping[str, str] | None = None,
        many: bool = False,
        requests: int = 1,
        start_seconds: float = 900.0,
    ) -> None:
        self.log, self._seconds, self._many = log, start_seconds, many
        self._environment = without_launcher() | dict(environment or {})
        if gpus:
            self._environment["CUDA_VISIBLE_DEVICES"] = gpus
        self.model = f"headstart-{token_hex(4)}"
        self.words = [
            *shlex.split(command or engine.command),
            *engine.target_option,
            target,
            *drafting,
            *(engine.generating if many else (word.format(requests=requests) for word in engine.measuring)),
            *shlex.split(options),
            engine.identity,
            self.model,
        ]
        self._port = 0  # chosen by the first start
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # of this process in the log, in bytes
        super().__init__(engine, Endpoint(f"http://{_HOST}"), self.model, f"Its log is {log}.")

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._endpoint.close()

    @property
    def has_died(self) -> bool:
        process = self._process
        return process is not None and process.poll() is not None

    def drafted_nothing(self) -> UserError:
        """Return the error of an engine that serves heads without drafting."""
        return UserError(f"{self.engine.name} loaded the heads and drafted nothing.", f"See its log: {self.log}")

    def start(self) -> None:
        """Start the engine without waiting until it answers."""
        check_command(self.engine, self.words, "data.server_command" if self._many else "--engine-command")
        try:
            port = _free_port(self._port)
        except OSError:
            raise UserError(
                f"{self.engine.name} cannot be started again: another program uses its port {self._port}.",
                "Run the same command again: it resumes from here, on another port.",
            ) from None
        if not self._port:
            self.words += "--host", _HOST, "--port", str(port)
            self._port, self._endpoint.url = port, f"http://{_HOST}:{port}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab" if self.has_died else "wb") as log:
            self._log_start = log.tell()
            self._process = guard.start(
                self.words, _TERM_SECONDS, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def stop(self) -> None:
        """End the engine and all processes that it started."""
        process, self._process = self._process, None
        if process is not None:
            guard.stop(process, _STOP_SECONDS)

    def wait(self) -> None:
        """Wait until the engine answers."""
        process = self._process
        assert process is not None, "started"
        until = monotonic() + self._seconds
        while monotonic() < until:
            if (code := process.poll()) is not None:
                cause = self.log_excerpt()
                remedy = self._remedy
                if (code == _KILLED or "memory" in cause.lower()) and self.engine.two_at_a_time:
                    remedy += f" {_MEMORY_REMEDY if self._many else self.engine.two_at_a_time}"
                raise UserError(f"{self.engine.name} ended with {code}: {cause}", remedy)
            with suppress(RetryableError):
                ready = self._endpoint.send("/health", seconds=_HEALTH_SECONDS).is_success
                if ready and self.model in self._endpoint.send("/v1/models", seconds=_HEALTH_SECONDS).text:
                    return  # a different server on this port would list other models
            sleep(_POLL_SECONDS)
        problem = f"did not answer within {self._seconds:.0f} seconds: {self.log_excerpt()}"
        raise UserError(f"{self.engine.name} {problem}", self._remedy)

    def log_excerpt(self) -> str:
        """Return the first error in its log, or else the last lines that are not routine."""
        text = self.log.read_bytes()[self._log_start :].decode("utf-8", "replace")
        lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
        if causes := [
            place for place, line in enumerate(lines) if _CAUSE.search(line) and not _NOT_THE_CAUSE.search(line)
        ]:
            more = 1 if "validation error" in lines[causes[0]] else 0  # pydantic's reason is on the next line
            return " ".join(lines[causes[0] : causes[0] + 1 + more])
        unusual = [line for line in lines if not _NOISE.match(line)]
        return " | ".join((unusual or lines or ["it printed nothing"])[-_LAST_LINES:])


def read_counters(text: str) -> Counter[str | int]:
    """Parse an engine's drafting counters from its Prometheus page.

    `drafts` counts verification passes, `draft_tokens` and `accepted_tokens` count tokens, and each chain position from
    0 on counts tokens accepted there.

    >>> page = 'llamacpp:spec_decode_num_drafts_total 4\\nllamacpp:spec_decode_num_accepted_tokens_total 3'
    >>> page += '\\nllamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3'
    >>> read_counters(page)
    Counter({'drafts': 4, 'accepted_tokens': 3, 0: 3})
    """
    sums: Counter[str | int] = Counter()
    for name, labels, value in _COUNTER.findall(text):
        position = _POSITION.search(labels)
        sums[int(position[1]) if position else name] += int(float(value))
    return sums


def drafts_per_round(counted: Counter[str | int], rounds: int = 0) -> int:
    """Return the number of drafts in a round, which is lower at the end of some answers.

    `counted` is as in `read_counters`; `rounds` is for engines that do not count them.
    """
    usual = -(-counted["draft_tokens"] // max(1, counted["drafts"] or rounds))
    return max([usual, *(key + 1 for key in counted if isinstance(key, int))])


def check_command(engine: ServingEngine, words: Sequence[str], setting: str) -> None:
    """Raise a UserError if this command line's program is missing; `setting` names the command in the remedy."""
    if shutil.which(words[0]) is None:
        raise UserError(
            f"{engine.name} cannot be started: {words[0]} is no command here.",
            "Install it in an environment of its own, and give its start command with "
            f"{setting} (default: {engine.command!r}).",
        )


def without_launcher() -> dict[str, str]:
    """Return the environment without torchrun's and accelerate's variables."""
    kept = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    if "TORCHELASTIC_RUN_ID" in os.environ and kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]  # torchrun's default
    return kept


def _free_port(port: int) -> int:
    """Return this port, or any for 0; OSError if another socket listens there."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore connections of an earlier engine
        free.bind((_HOST, port))
        return int(free.getsockname()[1])
