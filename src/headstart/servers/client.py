"""HTTP client with retries and load balancing over servers.

A transient failure (no connection, 429, 5xx, truncated reply) is retried with exponential backoff, on another server if
there is one. Concurrent requests that fail together count as one failure. A permanent failure raises a `UserError` with
the server's address, or `Refused` if only this request is at fault.
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
from time import monotonic
from typing import Any, TypeVar, cast

import httpx

from headstart.errors import UserError

T = TypeVar("T")

KEY = "HEADSTART_API_KEY"
"""Environment variable with the API key, sent to the servers in use; other services' keys are never sent there."""
REQUESTS = 512
"""Default concurrent requests per address: an address may front many GPUs, and engines queue."""
_OTHER_FILES = 512
"""Allowance for open files other than connections."""
TRIES = 10
"""Attempts of a request, per server."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
"""Backoff in seconds: the first, doubled with each consecutive failure, and the longest."""
_LONGEST_RETRY_AFTER = 600.0
"""Upper limit of Retry-After, in seconds."""
ANSWER_SECONDS = 1800.0
"""Timeout of an answer; a busy server queues requests."""
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 2.0
"""Idle time before a connection is closed; servers close theirs after five seconds."""
_KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]
"""TCP keep-alive, to notice a dead machine in minutes: connections are silent while an answer is generated."""
_CHECK_SECONDS = 0.1
_TRANSIENT = {408, 409, 425, 429}
"""Transient statuses below 500."""
_REFUSED = {400, 413, 422}
"""Statuses of a faulty request."""
_ABSENT = {400, 404, 405, 422, 501}
"""Statuses of a page that the server lacks or defines differently."""


class Stopped(Exception):
    """Raised by cancelled work."""


class RetryableError(Exception):
    """A transient failure; a `busy` server (429) may request a retry after `seconds`."""

    def __init__(self, problem: str, busy: bool = False, seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.busy, self.seconds = busy, seconds


class Refused(UserError):
    """A server rejected this request permanently."""


class Endpoint:
    """One server; a trailing `/v1` of the URL is dropped.

    The lock of the `Pool` guards requests `in_flight`, consecutive `failures`, `last_used` and `retry_at`.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.in_flight = self.failures = 0
        self.last_used = self.retry_at = self._failed_at = 0.0
        self._cached: Any = None
        self._key = _key()
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            transport=httpx.HTTPTransport(limits=limits, trust_env=False, socket_options=_KEEP_ALIVE),
            trust_env=False,
        )

    def close(self) -> None:
        self._client.close()

    def send(self, path: str, body: dict[str, Any] | None = None, seconds: float = ANSWER_SECONDS) -> httpx.Response:
        """GET a page, or POST a JSON body; return the reply with any status. No reply raises RetryableError."""
        method, timeout = "GET" if body is None else "POST", httpx.Timeout(seconds, connect=_CONNECT_SECONDS)
        try:
            return self._client.request(method, self.url + path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise RetryableError(f"{type(error).__name__}: {error}") from None

    def fetch(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        absent: dict[str, Any] | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> dict[str, Any]:
        """Return the JSON object of the reply, or `absent` (unless None) if the server lacks the page.

        Raises `RetryableError` for a transient failure, a UserError for a permanent one.
        """
        return self.read(self.send(path, body, seconds), absent)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """POST, and yield the JSON object of each server-sent event as it arrives; raises like `fetch`."""
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
        """Return the JSON object of a reply; see `fetch`."""
        status, text = reply.status_code, " ".join(reply.text.split())
        words = (text.replace(self._key, "***") if self._key else text)[:300]  # some servers repeat a key
        if status in _ABSENT and absent is not None:
            return absent
        if status in _TRANSIENT or status >= 500:
            seconds = _retry_seconds(reply.headers.get("retry-after", ""))
            raise RetryableError(f"{status} {words}".strip(), status == 429, seconds)
        if not reply.is_success:
            remedy = "Serve the recipe's target there, with room for the longest conversation and one token more."
            if status in (401, 403):
                remedy = f"Put its key into the environment: export {KEY}=..., which is sent to no other service."
            kind = Refused if status in _REFUSED else UserError
            raise kind(f"{self.url}{reply.url.path} answered {status}: {words or 'nothing'}.", remedy)
        return _object(reply.text)

    def cached(self, find: Callable[[Endpoint], T]) -> T:
        """Return `find(self)`, computed once (concurrent first calls may each compute it), for one `find` only."""
        if self._cached is None:
            self._cached = find(self)
        return cast(T, self._cached)

    def record_failure(self, problem: RetryableError, began: float, jitter: float) -> None:
        """Back off after a failure of a request started at `began`; concurrent failures count once."""
        now, seconds = monotonic(), problem.seconds
        if began >= self._failed_at:
            self._failed_at = now
            self.failures += 1
            seconds = max(seconds, jitter * min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self.failures - 1, 30)))
        self.retry_at = max(self.retry_at, now + seconds)

    def record_success(self, began: float) -> None:
        """End the backoff after an answer to a request started at `began`, unless a later one failed."""
        if began >= self._failed_at:
            self.failures, self.retry_at = 0, 0.0


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
        self._queue = deque[Callable[[], None]]()
        self._threads = self._answered = 0
        self._lock = threading.Lock()

    def run(
        self, jobs: int, send: Callable[[int, Endpoint], T], check: Callable[[], None] = lambda: None
    ) -> Generator[tuple[int, T | Refused], None, None]:
        """Yield (job number, answer or refusal) in order of arrival; close the generator to cancel the other jobs.

        `send` sends a job's request to a server, and raises `RetryableError` for a retry. `check` is polled and aborts
        by raising. Jobs of several threads share one first-in, first-out queue.

        Raises:
            UserError: retries are exhausted.
        """
        done = queue.SimpleQueue[tuple[int, T | BaseException]]()
        stop = threading.Event()

        def put(number: int) -> None:
            if not stop.is_set():
                try:
                    done.put((number, self._retry(partial(send, number), stop)))
                except BaseException as error:
                    done.put((number, error))

        try:
            self._enqueue([partial(put, number) for number in range(jobs)])
            remaining = jobs
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

    def query(self, find: Callable[[Endpoint], T]) -> list[T]:
        """Query every server once; if none answers, return the first answer after retries."""
        answers = []
        for endpoint in self._endpoints:
            with suppress(RetryableError):
                answers.append(find(endpoint))
        for _, answer in self.run(0 if answers else 1, lambda _, endpoint: find(endpoint)):
            if isinstance(answer, Refused):
                raise answer
            answers.append(answer)
        return answers

    def restart_dead(self) -> None:
        """Restart dead servers now: requests to a dead server hang if another program takes its port."""
        for endpoint in self._endpoints:
            self._recover(endpoint.url)

    def _enqueue(self, jobs: Sequence[Callable[[], None]]) -> None:
        with self._lock:
            self._queue.extend(jobs)
            new = min(self.requests - self._threads, len(self._queue))
            self._threads += new
        _raise_file_limit(self._threads + _OTHER_FILES)
        for _ in range(new):
            # Daemon, so that a cancelled request does not delay the program's exit.
            threading.Thread(target=self._work, name="request", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._threads -= 1
                    return
                job = self._queue.popleft()
            job()

    def _retry(self, send: Callable[[Endpoint], T], stop: threading.Event) -> T | Refused:
        """Send a request until it is answered; a UserError after `TRIES` per server."""
        tries, max_tries = 0, TRIES * len(self._endpoints)
        while True:
            answered_before, endpoint, began = self._answered, self._next(stop), monotonic()
            answer: T | Refused
            try:
                answer = send(endpoint)
            except Refused as refusal:  # an answer of a working server
                answer = refusal
            except RetryableError as problem:
                tries += 1
                with self._lock:
                    endpoint.record_failure(problem, began, random.uniform(0.5, 1.0))
                    if problem.busy and self._answered > answered_before:
                        tries = 1  # the server is answering others: this one is only queued
                if self._recover(endpoint.url):
                    tries = 0
                if tries >= max_tries:
                    raise UserError(
                        f"{endpoint.url} did not answer: {str(problem).rstrip('.')} ({tries} tries).", self._remedy
                    ) from None
                continue
            finally:
                with self._lock:
                    endpoint.in_flight -= 1
            with self._lock:
                endpoint.record_success(began)
                self._answered += 1
            return answer

    def _next(self, stop: threading.Event) -> Endpoint:
        """Return the least busy server; wait while all are backing off."""
        while not stop.is_set():
            with self._lock:
                now = monotonic()
                working = any(not endpoint.failures for endpoint in self._endpoints)
                # While other servers work, a failed one receives one probe at a time.
                ready = [
                    endpoint
                    for endpoint in self._endpoints
                    if endpoint.retry_at <= now and not (endpoint.failures and endpoint.in_flight and working)
                ]
                if ready:
                    chosen = min(ready, key=lambda endpoint: (endpoint.in_flight, endpoint.last_used))
                    chosen.in_flight, chosen.last_used = chosen.in_flight + 1, now
                    return chosen
                seconds = min(endpoint.retry_at for endpoint in self._endpoints) - now
                seconds *= random.uniform(1.0, 1.2)  # against synchronised retries
            stop.wait(max(0.001, seconds))
        raise Stopped


def _raise_file_limit(count: int) -> None:
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


def _retry_seconds(retry_after: str) -> float:
    """Parse Retry-After in seconds; 0 if absent or a date."""
    try:
        return min(max(0.0, float(retry_after)), _LONGEST_RETRY_AFTER)
    except ValueError:
        return 0.0
