"""HTTP client with retries and load balancing over servers.

A transient failure (no connection, 429, 5xx, truncated reply) is retried with exponential backoff, on another server if
there is one; requests that fail together count as one failure. A permanent failure raises a `UserError` with the
server's address, or `Refused` if only this request is at fault.
"""

from __future__ import annotations

import json
import os
import queue
import random
import resource
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from time import monotonic
from typing import Any, TypeVar, cast

import httpx

from headstart.errors import UserError

T = TypeVar("T")

KEY = "HEADSTART_API_KEY"
"""Environment variable with the API key for a recipe's servers; other services' keys are never sent there."""
REQUESTS = 512
"""Default concurrent requests per address: an address may front many GPUs, and engines queue."""
_OTHER_FILES = 512
"""Allowance for open files other than connections."""
TRIES = 10
"""Attempts of a request, per server."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
"""Backoff in seconds: the first, doubled with each consecutive failure, and the longest."""
_LONGEST_ASKED_WAIT = 600.0
"""Upper limit of Retry-After, in seconds."""
ANSWER_SECONDS = 1800.0
"""Timeout of an answer; a busy server queues requests."""
_CONNECT_SECONDS = 10.0
_KEPT_SECONDS = 2.0
"""Idle time before a connection is closed; servers close theirs after five seconds."""
_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]
"""TCP keep-alive: connections are silent while an answer is generated, and a dead machine should show in minutes."""
_CHECK_SECONDS = 0.1
_WAITING = {408, 409, 425, 429}
"""Transient statuses below 500."""
_REFUSED = {400, 413, 422}
"""Statuses for a faulty request."""
_ABSENT = {400, 404, 405, 422, 501}
"""Statuses for a page the server lacks or defines differently."""


class Stopped(Exception):
    """Raised by cancelled work."""


class RetryableError(Exception):
    """A transient failure; the server may be `busy` (429) and ask for a retry after `seconds`."""

    def __init__(self, problem: str, busy: bool = False, seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.busy, self.seconds = busy, seconds


class Refused(UserError):
    """A server rejected this request permanently."""


class Endpoint:
    """One server; a trailing `/v1` of the URL is dropped.

    The lock of the `Pool` guards requests `under_way`, number of the `last` one, consecutive `failures`, `rests_until`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.under_way = self.last = self.failures = 0
        self.rests_until = self._failed_at = 0.0
        self._known: Any = None
        self._key = _key()
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_SECONDS)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            transport=httpx.HTTPTransport(limits=limits, trust_env=False, socket_options=_ALIVE),
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def send(
        self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float = ANSWER_SECONDS
    ) -> httpx.Response:
        """Send a request with a JSON body; return the reply with any status; no reply raises `RetryableError`."""
        timeout = httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        try:
            return self._client.request(method, self.url + path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise RetryableError(f"{type(error).__name__}: {error}") from None

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        absent: dict[str, Any] | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> dict[str, Any]:
        """Return the JSON object of the reply, or `absent` (unless None) if the server lacks the page.

        Raises `RetryableError` for a transient failure, a UserError for a permanent one.
        """
        return self.read(self.send(method, path, body, seconds), absent)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of a reply to a POST as they arrive, as server-sent events; errors as for `ask`."""
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=_CONNECT_SECONDS)
        try:
            with self._client.stream("POST", self.url + path, json=body, timeout=timeout) as reply:
                if not reply.headers.get("content-type", "").startswith("text/event-stream"):
                    reply.read()
                    yield self.read(reply)  # an error, or a server that does not stream
                    return
                for line in reply.iter_lines():
                    if line.startswith("data:") and (event := line[5:].strip()) != "[DONE]":
                        yield _object(event)
        except httpx.HTTPError as error:
            raise RetryableError(f"{type(error).__name__}: {error}") from None

    def read(self, reply: httpx.Response, absent: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object of a reply; see `ask`."""
        status, text = reply.status_code, " ".join(reply.text.split())
        words = (text.replace(self._key, "***") if self._key else text)[:300]  # some servers repeat a key
        if status in _ABSENT and absent is not None:
            return absent
        if status in _WAITING or status >= 500:
            after = _seconds_asked(reply.headers.get("retry-after", ""))
            raise RetryableError(f"{status} {words}".strip(), status == 429, after)
        if not reply.is_success:
            remedy = "Serve the recipe's target there, with room for the longest conversation and one token more."
            if status in (401, 403):
                remedy = f"Put its key into the environment: export {KEY}=..., which goes to no other address."
            kind = Refused if status in _REFUSED else UserError
            raise kind(f"{self.url}{reply.url.path} answered {status}: {words or 'nothing'}.", remedy)
        return _object(reply.text)

    def once(self, find: Callable[[Endpoint], T]) -> T:
        """Return the cached result of `find`, which concurrent first requests may each compute."""
        if self._known is None:
            self._known = find(self)
        return cast(T, self._known)

    def failed(self, problem: RetryableError, began: float, jitter: float) -> None:
        """Record a failure of a request started at `began`; concurrent failures count once."""
        now = monotonic()
        seconds = problem.seconds
        if began >= self._failed_at:
            self._failed_at = now
            self.failures += 1
            seconds = max(seconds, jitter * min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self.failures - 1, 30)))
        self.rests_until = max(self.rests_until, now + seconds)

    def worked(self, began: float) -> None:
        """Record an answer to a request started at `began`."""
        if began >= self._failed_at:
            self.failures, self.rests_until = 0, 0.0


class Pool:
    """Interchangeable servers with a limit on concurrent requests (None: `REQUESTS` each).

    `remedy` is the user's remedy if none answers. `recover` restarts the server of an address if it has died.
    """

    def __init__(
        self,
        urls: Sequence[str],
        requests: int | None,
        remedy: str,
        recover: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._recover = recover
        self._endpoints = [Endpoint(url) for url in urls]
        self.requests, self._remedy = requests or REQUESTS * len(urls), remedy
        self._waiting = deque[Callable[[], None]]()
        self._threads = 0
        self._lock = threading.Lock()
        self._jitter = random.Random()
        self._answered = 0
        self._numbers = count(1)

    def answers(
        self, questions: int, ask: Callable[[int, Endpoint], T], check: Callable[[], None] = lambda: None
    ) -> Generator[tuple[int, T | Refused], None, None]:
        """Yield (question number, answer or refusal) as they arrive; close the generator to cancel the other questions.

        `ask` sends a question to a server and raises `RetryableError` for a retry. `check` is polled while waiting and
        aborts by raising. Questions of several threads share one first-in, first-out queue.

        Raises:
            UserError: retries are exhausted.
        """
        done = queue.SimpleQueue[tuple[int, T | BaseException]]()
        stop = threading.Event()

        def put(number: int) -> None:
            if not stop.is_set():
                try:
                    done.put((number, self._answer(partial(ask, number), stop)))
                except BaseException as error:
                    done.put((number, error))

        try:
            self._begin([partial(put, number) for number in range(questions)])
            remaining = questions
            while remaining:
                check()
                with suppress(queue.Empty):
                    number, answer = done.get(timeout=_CHECK_SECONDS)
                    if isinstance(answer, BaseException) and not isinstance(answer, Refused):
                        raise answer
                    remaining -= 1
                    yield number, answer
        finally:
            stop.set()

    def each(self, ask: Callable[[Endpoint], T]) -> list[T]:
        """Return the answers of all servers that answer at once, or the first answer after retries."""
        answers = []
        for endpoint in self._endpoints:
            with suppress(RetryableError):
                answers.append(ask(endpoint))
        for _, answer in self.answers(0 if answers else 1, lambda _, endpoint: ask(endpoint)):
            if isinstance(answer, Refused):
                raise answer
            answers.append(answer)
        return answers

    def _begin(self, questions: Sequence[Callable[[], None]]) -> None:
        with self._lock:
            self._waiting.extend(questions)
            new = min(self.requests - self._threads, len(self._waiting))
            self._threads += new
        _allow_files(self._threads + _OTHER_FILES)
        for _ in range(new):
            # Daemon: a cancelled request does not keep the program from exiting.
            threading.Thread(target=self._work, name="request", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                question = self._waiting.popleft()
            question()

    def _answer(self, ask: Callable[[Endpoint], T], stop: threading.Event) -> T | Refused:
        tries, most = 0, TRIES * len(self._endpoints)
        while True:
            answered_before = self._answered
            endpoint = self._next(stop)
            began = monotonic()
            answer: T | Refused
            try:
                try:
                    answer = ask(endpoint)
                except Refused as refusal:  # an answer of a working server
                    answer = refusal
            except RetryableError as problem:
                tries += 1
                with self._lock:
                    endpoint.failed(problem, began, self._jitter.uniform(0.5, 1.0))
                    if problem.busy and self._answered > answered_before:
                        tries = 1  # the server is answering others: this one is only queued
                if self._recover(endpoint.url):
                    tries = 0
                if tries >= most:
                    raise UserError(
                        f"{endpoint.url} did not answer: {str(problem).rstrip('.')} ({tries} tries).", self._remedy
                    ) from None
            else:
                with self._lock:
                    endpoint.worked(began)
                    self._answered += 1
                return answer
            finally:
                with self._lock:
                    endpoint.under_way -= 1

    def _next(self, stop: threading.Event) -> Endpoint:
        """Return the least busy server; wait while all are backing off."""
        while not stop.is_set():
            with self._lock:
                now = monotonic()
                working = any(not endpoint.failures for endpoint in self._endpoints)
                # While other servers work, a failed one gets one probe at a time.
                ready = [
                    endpoint
                    for endpoint in self._endpoints
                    if endpoint.rests_until <= now and not (endpoint.failures and endpoint.under_way and working)
                ]
                if ready:
                    chosen = min(ready, key=lambda endpoint: (endpoint.under_way, endpoint.last))
                    chosen.under_way, chosen.last = chosen.under_way + 1, next(self._numbers)
                    return chosen
                seconds = min(endpoint.rests_until for endpoint in self._endpoints) - now
                seconds *= self._jitter.uniform(1.0, 1.2)  # jitter against synchronised retries
            stop.wait(max(0.001, seconds))
        raise Stopped


def _allow_files(count: int) -> None:
    """Raise the soft limit of open files (often 1024), up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        with suppress(ValueError, OSError):  # a system may allow less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _key() -> str:
    """Return the API key from the environment, or an empty string."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{KEY} holds characters that no key has.", "Set it again, or unset it.")
    return key


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; anything else is a `RetryableError`."""
    try:
        page = json.loads(text)
    except ValueError:
        raise RetryableError(f"a reply that is no JSON: {text[:100]!r}") from None
    if not isinstance(page, dict):
        raise RetryableError(f"a reply that is no JSON object: {text[:100]!r}")
    return page


def _seconds_asked(retry_after: str) -> float:
    """Parse Retry-After in seconds; 0 if absent or a date."""
    try:
        return min(max(0.0, float(retry_after)), _LONGEST_ASKED_WAIT)
    except ValueError:
        return 0.0
