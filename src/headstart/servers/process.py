"""A client for a running serving engine, and a child process that runs one."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, Self

from headstart.errors import UserError
from headstart.servers.client import Endpoint, RetryableError
from headstart.servers.completions import CompletionRequest, Dialect
from headstart.servers.engines import ServingEngine

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.25
_HEALTH_SECONDS = 5.0
_STOP_SECONDS = 20.0
_LAST_LINES = 6
_NOISE = re.compile(r"^\s*(\(.*?\)\s*)?(INFO|WARNING|srv|slot|que)\b")
_CAUSE = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
_NOT_THE_CAUSE = re.compile(r"initialization failed|\b(WARNING|INFO)\b")
_COUNTER = re.compile(r"^\w+:spec_decode_num_(\w+)_total(?:\{(.*)\})?\s+([\d.eE+-]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class EngineAnswer:
    """Generated token ids and the latency of the whole answer."""

    tokens: tuple[int, ...]
    seconds: float


class RunningEngine:
    """A client of a running engine; `remedy` is the user's remedy if it does not answer."""

    def __init__(self, name: str, endpoint: Endpoint, dialect: Dialect, model: str, remedy: str) -> None:
        self._name, self._endpoint, self._dialect, self._model, self._remedy = name, endpoint, dialect, model, remedy

    @property
    def url(self) -> str:
        return self._endpoint.url

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> EngineAnswer:
        """Return the greedy answer to token ids, with the engine's own end tokens."""
        path, body = self._dialect.request(CompletionRequest(prompt, max_new_tokens), self._model)
        started = perf_counter()
        try:
            reply = self._endpoint.send(path, body)
            seconds = perf_counter() - started
            return EngineAnswer(tuple(self._dialect.read(self._endpoint.read(reply)).tokens), seconds)
        except UserError as error:
            problem = error.problem
        except (RetryableError, KeyError, IndexError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{self._name} did not answer: {problem[:300]}", self._remedy)

    def answers(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[EngineAnswer]:
        """Answer several prompts concurrently."""
        with ThreadPoolExecutor(len(prompts)) as requests:
            return list(requests.map(lambda prompt: self.answer(prompt, max_new_tokens), prompts))

    def counters(self) -> Counter[str | int]:
        """Return its counters since the start; see `read_counters`."""
        try:
            return read_counters(self._endpoint.send("/metrics").text)
        except RetryableError as error:
            raise UserError(f"{self._name} stopped unexpectedly: {error}", self._remedy) from None


class Server(RunningEngine):
    """A context manager that runs an engine as a child process, with its output in `log`.

    `drafting` are the arguments that add heads, `options` further ones as a command line. `command` replaces the
    engine's own, and `gpus` sets CUDA_VISIBLE_DEVICES.

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
        start_seconds: float = 900.0,
    ) -> None:
        self.engine, self.log, self._seconds = engine, log, start_seconds
        self._environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
        port = _free_port()
        self.words = [
            *shlex.split(command or engine.command),
            *engine.target_option,
            target,
            *drafting,
            *shlex.split(options),
            *("--host", _HOST, "--port", str(port), *engine.server_options),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        endpoint = Endpoint(f"http://{_HOST}:{port}")
        super().__init__(engine.name, endpoint, engine.dialect, engine.model, f"Its log is {log}.")

    def __enter__(self) -> Self:
        self._handlers = _raise_on_signals()
        try:
            self._start()
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._endpoint.close()
        try:
            self._stop()
        finally:
            for sent, handler in self._handlers.items():
                signal.signal(sent, handler)

    def version(self) -> str:
        """Return the version reported by the running engine, or an empty string."""
        path, key = self.engine.version_page
        try:
            return str(self._endpoint.fetch(path)[key])
        except (RetryableError, UserError, KeyError):
            return ""

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.words,
                    env=self._environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            raise UserError(
                f"{self.engine.name} cannot be started: {self.words[0]}: {error.strerror or error}.",
                f"Install it in an environment of its own, and give its start command with --engine-command (default: "
                f"{self.engine.command!r}).",
            ) from None

    def _stop(self) -> None:
        if self._process is None:
            return
        try:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it, or workers that outlived it
            self._process.wait()
            self._process = None

    def _wait(self) -> None:
        assert self._process is not None
        until = monotonic() + self._seconds
        while monotonic() < until:
            with suppress(RetryableError):
                if self._endpoint.send("/health", seconds=_HEALTH_SECONDS).is_success:
                    return
            if (code := self._process.poll()) is not None:
                cause = self._log_excerpt()
                shared = f" {self.engine.two_at_a_time}" if "memory" in cause.lower() else ""
                raise UserError(f"{self.engine.name} ended with {code}: {cause}", f"{self._remedy}{shared}")
            sleep(_POLL_SECONDS)
        problem = f"did not answer within {self._seconds:.0f} seconds: {self._log_excerpt()}"
        raise UserError(f"{self.engine.name} {problem}", self._remedy)

    def _log_excerpt(self) -> str:
        """Return the first error in its log, or else the last lines that are not routine."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [stripped for line in text.splitlines() if (stripped := line.strip())]
        if causes := [line for line in lines if _CAUSE.search(line) and not _NOT_THE_CAUSE.search(line)]:
            return causes[0]
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


def _raise_on_signals() -> dict[signal.Signals, Any]:
    """Make SIGTERM and SIGHUP raise SystemExit, so that `finally` stops the engines; return the previous handlers.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return {sent: signal.signal(sent, end) for sent in (signal.SIGTERM, signal.SIGHUP)}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((_HOST, 0))
        return int(free.getsockname()[1])
