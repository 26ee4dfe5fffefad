"""A serving engine as a process of its own on this machine: started, asked with token ids, stopped."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any, Self

from headstart.errors import UserError
from headstart.servers.client import Endpoint, Later
from headstart.servers.completions import Ask, Dialect

HOST = "127.0.0.1"
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
class Counters:
    """What an engine has counted of its drafting: passes of the target that verified drafts, and tokens drafted and
    accepted, the latter also by their position in the chain."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    by_position: tuple[int, ...] = ()

    def __add__(self, other: Counters) -> Counters:
        size = max(len(self.by_position), len(other.by_position))
        both = [(*counters.by_position, *[0] * size)[:size] for counters in (self, other)]
        added = tuple(map(sum, zip(*both, strict=True)))
        return Counters(self.rounds + other.rounds, self.drafted + other.drafted, self.accepted + other.accepted, added)

    def since(self, before: Counters) -> Counters:
        """What was added to an earlier count."""
        earlier = (*before.by_position, *[0] * len(self.by_position))
        added = tuple(now - then for now, then in zip(self.by_position, earlier, strict=False))
        return Counters(
            self.rounds - before.rounds, self.drafted - before.drafted, self.accepted - before.accepted, added
        )


@dataclass(frozen=True)
class EngineAnswer:
    """Token ids that an engine wrote, and seconds from the request to the whole answer."""

    tokens: tuple[int, ...]
    seconds: float


class Engine(ABC):
    """What is particular to an engine.

    Attributes:
        name: that users type, also among the engines of `format`.
        format: of `headstart.hub.engines` that it loads.
        command: that starts it; the target and options come after it.
        two_at_a_time: what to do where two of them do not fit into memory, as a sentence.
        dialect: how it is asked.
        model: what it is told to call its target; empty where it needs no name.
        version_page: path, and the key there, of what the running engine says of its version.
    """

    name: str
    format: str
    command: str
    two_at_a_time: str = ""
    dialect: Dialect
    model: str = ""
    version_page: tuple[str, str]

    @abstractmethod
    def own_target(self, folder: str, gguf: Path | None) -> str:
        """What it loads of a target in this folder (or with this Hub id), or in this GGUF file; empty when nothing."""

    @abstractmethod
    def target_arguments(self, target: str) -> list[str]:
        """That name the target."""

    @abstractmethod
    def server_arguments(self, port: int) -> list[str]:
        """Where it listens, and what makes its counts and answers whole."""


class Server:
    """A running engine; a context manager that stops it.

    Args:
        engine: which.
        target: as the engine takes it: a folder, a Hub id or a GGUF file.
        drafting: arguments that add heads; none for plain decoding.
        log: takes what the engine prints.
        command: in place of the engine's own.
        options: further arguments, as one would type them.
        start_seconds: after which an engine that does not answer has failed.

    Raises:
        UserError: the command is not there, it ended, or it did not answer in time; with the end of its log.
    """

    def __init__(
        self,
        engine: Engine,
        target: str,
        drafting: Sequence[str],
        log: Path,
        *,
        command: str = "",
        options: str = "",
        start_seconds: float = 900.0,
    ) -> None:
        self.engine, self.log, self._seconds = engine, log, start_seconds
        port = _free_port()
        self.words = [
            *shlex.split(command or engine.command),
            *engine.target_arguments(target),
            *drafting,
            *shlex.split(options),
            *engine.server_arguments(port),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._endpoint = Endpoint(f"http://{HOST}:{port}")

    def __enter__(self) -> Self:
        self._handlers = _ending_by_exception()
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

    @property
    def url(self) -> str:
        """Where it listens."""
        return self._endpoint.url

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> EngineAnswer:
        """The engine's greedy answer to token ids, which ends as the target ends it.

        Raises:
            UserError: it refused, or went away.
        """
        path, body = self.engine.dialect.request(Ask(prompt, max_new_tokens), self.engine.model)
        started = perf_counter()
        try:
            reply = self._endpoint.send("POST", path, body)
            seconds = perf_counter() - started
            return EngineAnswer(tuple(self.engine.dialect.read(self._endpoint.read(reply)).tokens), seconds)
        except UserError as error:
            problem = error.problem
        except (Later, KeyError, IndexError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise UserError(f"{self.engine.name} did not answer: {problem[:300]}", f"Its log is {self.log}.")

    def counters(self) -> Counters:
        """What it has counted since it was started."""
        try:
            return read_counters(self._endpoint.send("GET", "/metrics").text)
        except Later as error:
            raise UserError(f"{self.engine.name} went away: {error}", f"Its log is {self.log}.") from None

    def version(self) -> str:
        """What the running engine says of its version; empty when it does not say."""
        path, key = self.engine.version_page
        try:
            return str(self._endpoint.ask("GET", path)[key])
        except (Later, UserError, KeyError):
            return ""

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.words, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
                )
        except OSError as error:
            raise UserError(
                f"{self.engine.name} cannot be started: {self.words[0]}: {error.strerror or error}.",
                f"Install it in an environment of its own, and say how it is started with --engine-command; by default "
                f"that is {self.engine.command!r}.",
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
            with suppress(Later):
                if self._endpoint.send("GET", "/health", seconds=_HEALTH_SECONDS).is_success:
                    return
            if (code := self._process.poll()) is not None:
                cause = self._last_words()
                shared = f" {self.engine.two_at_a_time}" if "memory" in cause.lower() else ""
                raise UserError(f"{self.engine.name} ended with {code}: {cause}", f"Its log is {self.log}.{shared}")
            sleep(_POLL_SECONDS)
        raise UserError(
            f"{self.engine.name} did not answer within {self._seconds:.0f} seconds: {self._last_words()}",
            f"Its log is {self.log}.",
        )

    def _last_words(self) -> str:
        """The last of its log, without the lines that every start has."""
        lines = [line.strip() for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines()]
        lines = [line for line in lines if line]
        if causes := [line for line in lines if _CAUSE.search(line) and not _NOT_THE_CAUSE.search(line)]:
            return causes[0]
        telling = [line for line in lines if not _NOISE.match(line)]
        return " | ".join((telling or lines or ["it printed nothing"])[-_LAST_LINES:])


def read_counters(text: str) -> Counters:
    """From an engine's page of counters in the text format of Prometheus.

    >>> page = 'llamacpp:spec_decode_num_drafts_total 4\\nllamacpp:spec_decode_num_accepted_tokens_total 3'
    >>> page += '\\nllamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 3'
    >>> read_counters(page)
    Counters(rounds=4, drafted=0, accepted=3, by_position=(3,))
    """
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(text):
        if name == "accepted_tokens_per_pos":
            if position := _POSITION.search(labels):
                place = int(position[1])
                positions[place] = positions.get(place, 0) + int(float(value))
        else:
            sums[name] = sums.get(name, 0) + int(float(value))
    by_position = tuple(positions.get(place, 0) for place in range(max(positions, default=-1) + 1))
    return Counters(sums.get("drafts", 0), sums.get("draft_tokens", 0), sums.get("accepted_tokens", 0), by_position)


def _ending_by_exception() -> dict[signal.Signals, Any]:
    """Let a polite end of this process (a closed terminal, `kill`, a scheduler) go through `finally`: engines end
    with it. Returns the handlers of before; other threads than the main one leave them as they are."""
    if threading.current_thread() is not threading.main_thread():
        return {}

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    return {sent: signal.signal(sent, end) for sent in (signal.SIGTERM, signal.SIGHUP)}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])
