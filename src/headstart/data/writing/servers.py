"""Servers continue texts where data is written: asked for token ids with token ids, patiently, and with checks.

A request that may succeed later (no connection, 429, 5xx, a reply that is cut) is sent again after a while, to another
server if there is one. A reply that the target cannot have written ends the work, with the server's name.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from time import monotonic
from typing import Any

import httpx

from headstart.data.writing.writer import CANDIDATES, Continuation
from headstart.errors import UserError
from headstart.servers.at_once import Stopped, answered
from headstart.servers.completions import Ask, Dialect, LlamaServer, NoTokenIds, OpenAI
from headstart.target.model import Target

TRIES = 10
"""For a request and each server, before it is given up."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
"""Seconds until a server that failed is asked again: the first, doubled with each failure in a row, and the longest."""
_LONGEST_ASKED_WAIT = 600.0
"""Of a server that says itself when to come back."""
_ANSWER_SECONDS = 600.0
_CONNECT_SECONDS = 10.0
_KEPT_SECONDS = 2.0
"""An idle connection is used again: servers close theirs after five."""
_WAITING = {408, 409, 425, 429}
"""Statuses below 500 that may pass."""
_ABSENT = {400, 404, 405, 422, 501}
"""Statuses that say that a server has no such page, or another one."""
_PROBE = "A bicycle stays upright while it moves, and nobody has to think about it."
"""Words of every day: one tokenizer reads them the same way everywhere, and another one does not."""


class _Later(Exception):
    """A request failed in a way that may pass.

    Args:
        problem: what happened.
        busy: whether the server has too much to do.
        seconds: after which the server wants to be asked again, if it said so.
    """

    def __init__(self, problem: str, busy: bool = False, seconds: float = 0.0) -> None:
        super().__init__(problem)
        self.busy, self.seconds = busy, seconds


class Servers:
    """Continues rows on servers: vLLM and others with its completions, or llama-server.

    Args:
        urls: of the servers, with or without the `/v1` of OpenAI's paths; they are used in turns.
        target: the model that they serve.
        requests: most that are under way, over all servers.
    """

    shareable = False
    """All requests may be under way for the rows of one thread."""

    def __init__(self, urls: Sequence[str], target: Target, requests: int) -> None:
        client = httpx.Client(
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_SECONDS),
            trust_env=False,
        )
        self._endpoints = [_Endpoint(url, target, client) for url in urls]
        self._requests = requests
        self._lock = threading.Lock()
        self._jitter = random.Random()
        self._answered = 0
        self._turns = count(1)

    def continue_rows(self, rows: Sequence[Sequence[int]], continuation: Continuation) -> list[list[int]]:
        """See `Writer`; of hidden states a server says nothing.

        Raises:
            UserError: no server answered for long, or one gave what the target cannot have written.
        """
        most, top_p, seed, ends = (
            continuation.max_new_tokens,
            continuation.top_p,
            continuation.seed,
            continuation.ends,
        )
        asks = [
            Ask(row, most, temperature, CANDIDATES, top_p, _seed(seed, number), ends)
            for number, (row, temperature) in enumerate(zip(rows, continuation.temperatures, strict=True))
        ]

        def ask(number: int, stop: threading.Event) -> list[int]:
            return self._continue(asks[number], stop)

        with closing(answered(len(asks), self._requests, ask, continuation.check)) as found:
            added = dict(found)
        return [added[number] for number in range(len(asks))]

    def _continue(self, ask: Ask, stop: threading.Event) -> list[int]:
        """One row, asked for until there is an answer or no more patience."""
        tries, most = 0, TRIES * len(self._endpoints)
        while True:
            answered = self._answered
            endpoint = self._next(stop)
            began = monotonic()
            try:
                added = endpoint.answer(ask)
            except _Later as problem:
                tries += 1
                with self._lock:
                    endpoint.failed(problem, began, self._jitter.uniform(0.5, 1.0))
                    if problem.busy and self._answered > answered:
                        tries = 1  # others are answered: the turn of this one comes
                if tries >= most:
                    raise UserError(
                        f"{endpoint.url} did not answer: {str(problem).rstrip('.')} ({tries} tries).",
                        "See whether the server runs and data.server is its address; then the same command goes on "
                        "from there: finished parts are kept.",
                    ) from None
            else:
                with self._lock:
                    endpoint.worked(began)
                    self._answered += 1
                return added
            finally:
                with self._lock:
                    endpoint.asked -= 1

    def _next(self, stop: threading.Event) -> _Endpoint:
        """The server to ask now, waited for if all of them are left alone for a while."""
        while not stop.is_set():
            with self._lock:
                now = monotonic()
                working = any(not one.failures for one in self._endpoints)
                # While others work, one that failed is tried with one request at a time.
                ready = [
                    one
                    for one in self._endpoints
                    if one.rests_until <= now and not (one.failures and one.asked and working)
                ]
                if ready:
                    chosen = min(ready, key=lambda one: (one.asked, one.turn))
                    chosen.asked, chosen.turn = chosen.asked + 1, next(self._turns)
                    return chosen
                seconds = min(one.rests_until for one in self._endpoints) - now
                seconds *= self._jitter.uniform(1.0, 1.2)  # those that wait together do not come back together
            stop.wait(max(0.001, seconds))
        raise Stopped


class _Endpoint:
    """One server; its counts belong to whoever holds the lock of `Servers`.

    Args:
        url: of the server.
        target: the model that it serves.
        client: that asks.

    Attributes:
        url: as messages name it.
        asked: requests under way.
        turn: number of the last of them.
        failures: in a row.
        rests_until: the moment before which it is not asked again.
    """

    def __init__(self, url: str, target: Target, client: httpx.Client) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.asked = self.turn = self.failures = 0
        self.rests_until = self._failed_at = 0.0
        self._target, self._client = target, client
        self._meeting = threading.Lock()
        self._known: tuple[Dialect, str] | None = None
        self._unmet: tuple[float, _Later] | None = None

    def failed(self, problem: _Later, began: float, jitter: float) -> None:
        """Note that a request which began at this moment came to nothing; those sent together fail together."""
        now = monotonic()
        seconds = min(problem.seconds, _LONGEST_ASKED_WAIT)
        if began >= self._failed_at:
            self._failed_at = now
            self.failures += 1
            seconds = max(seconds, jitter * min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self.failures - 1, 30)))
        self.rests_until = max(self.rests_until, now + seconds)

    def worked(self, began: float) -> None:
        """Note that a request which began at this moment was answered."""
        if began >= self._failed_at:
            self.failures, self.rests_until = 0, 0.0

    def answer(self, ask: Ask) -> list[int]:
        """The added tokens.

        Raises:
            _Later: it may work another time.
            UserError: it will not, or the answer cannot be the target's.
        """
        assert ask.ends is not None
        dialect, model = self._meet()
        added: list[int] = []
        while True:
            rest = replace(ask, prompt=[*ask.prompt, *added], max_new_tokens=ask.max_new_tokens - len(added))
            if added and ask.seed is not None:
                rest = replace(rest, seed=ask.seed + len(added))
            tokens, at_own_end = self._once(dialect, model, rest)
            added += tokens
            if len(added) == ask.max_new_tokens or (added and added[-1] in ask.ends):
                return added
            # llama-server also ends at tokens that the target reads on from (those of other templates, say).
            if not (tokens and at_own_end):
                raise UserError(
                    f"{self.url} ended an answer after {len(added)} of {ask.max_new_tokens} tokens, and not at one "
                    f"that ends a turn of {self._target.name}.",
                    "Its context may be shorter than data.max_prompt_tokens + data.max_new_tokens, or it serves "
                    "another model.",
                )

    def _once(self, dialect: Dialect, model: str, ask: Ask) -> tuple[list[int], bool]:
        """What one request adds, up to the first end token, and whether the server's own end ended it."""
        path, body = dialect.request(ask, model)
        found = self._object("POST", path, body)
        try:
            reply = dialect.read(found)
        except NoTokenIds:
            raise UserError(
                f"{self.url} returns no token ids, and text alone does not say which were written.",
                "Use vLLM (0.10.2 or newer) or llama-server.",
            ) from None
        except (KeyError, IndexError, TypeError, AttributeError):
            raise _Later(f"a reply that is none: {str(found)[:200]}") from None
        if reply.aborted:
            raise _Later("the server gave up in the middle of an answer")
        prompt = list(ask.prompt)
        if reply.prompt not in (None, prompt) or reply.prompt_length not in (None, len(prompt)):
            read = f"{len(reply.prompt)} token ids" if reply.prompt is not None else f"{reply.prompt_length} token ids"
            raise UserError(
                f"{self.url} read other token ids than those it was asked to continue: {read} for {len(prompt)}.",
                "It may add or cut tokens: give it a longer context, and no prompt template of its own.",
            )
        self._check(reply.tokens, ask.max_new_tokens)
        assert ask.ends is not None
        first = next((index for index, token in enumerate(reply.tokens) if token in ask.ends), None)
        return (reply.tokens, reply.at_own_end) if first is None else (reply.tokens[: first + 1], True)

    def _check(self, tokens: Sequence[Any], most: int) -> None:
        size = self._target.vocab_size
        strange = [one for one in tokens if not isinstance(one, int) or isinstance(one, bool) or not 0 <= one < size]
        if strange:
            raise UserError(
                f"{self.url} wrote token id {strange[0]!r}, and {self._target.name} has ids from 0 to {size - 1}.",
                "Serve the recipe's target there.",
            )
        if len(tokens) > most:
            raise UserError(
                f"{self.url} wrote {len(tokens)} tokens where {most} were asked for.",
                "It does not keep to OpenAI's max_tokens: use vLLM or llama-server.",
            )

    def _meet(self) -> tuple[Dialect, str]:
        """How the server is asked and what it calls its model; found out, and its tokenizer checked, once."""
        came = monotonic()
        with self._meeting:
            if self._known is None:
                if self._unmet is not None and self._unmet[0] >= came:
                    raise self._unmet[1]  # found out while this request waited
                try:
                    self._known = self._ask_who()
                except _Later as problem:
                    self._unmet = monotonic(), problem
                    raise
        return self._known

    def _ask_who(self) -> tuple[Dialect, str]:
        listed = self._object("GET", "/v1/models", absent={"data": []}).get("data")
        models = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        spec = self._target.spec
        model = next((one for one in models if spec in (one.get("id"), one.get("root"))), (models or [{}])[0])
        dialect = LlamaServer() if model.get("owned_by") == "llamacpp" else OpenAI()
        self._compare(dialect, str(model.get("id", "")))
        return dialect, str(model.get("id", ""))

    def _compare(self, dialect: Dialect, model: str) -> None:
        """Refuse a server whose tokenizer is not the target's, where it lets anyone ask."""
        path, body = dialect.tokenize(_PROBE, model)
        theirs = self._object("POST", path, body, absent={}).get("tokens")
        own = self._target.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        if isinstance(theirs, list) and theirs != own:
            raise UserError(
                f"{self.url} serves {model or 'a model'} with another tokenizer than that of {self._target.name}.",
                "Serve the recipe's target there.",
            )

    def _object(
        self, method: str, path: str, body: dict[str, Any] | None = None, absent: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The JSON object that a request is answered with.

        Args:
            method: of HTTP.
            path: after the server's address.
            body: sent as JSON.
            absent: what comes back where the server has no such page; None is an error then.
        """
        try:
            reply = self._client.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise _Later(f"{type(error).__name__}: {error}") from None
        status = reply.status_code
        if status in _ABSENT and absent is not None:
            return absent
        said = " ".join(reply.text.split())[:300]
        if status in _WAITING or status >= 500:
            raise _Later(f"{status} {said}".strip(), status == 429, _retry_after(reply.headers.get("retry-after", "")))
        if not reply.is_success:
            remedy = "Serve the recipe's target there, with room for data.max_prompt_tokens + data.max_new_tokens."
            if status in (401, 403):
                remedy = "Let it answer without a key: headstart sends none."
            raise UserError(f"{self.url}{path} answered {status}: {said or 'nothing'}.", remedy)
        try:
            found = reply.json()
        except ValueError:
            raise _Later(f"a reply that is no JSON: {said[:100]!r}") from None
        if not isinstance(found, dict):
            raise _Later(f"a reply that is none: {said[:100]!r}")
        return found


def _seed(seed: int, row: int) -> int:
    """Of one row, as servers take it."""
    return random.Random(f"{seed} {row}").getrandbits(31)


def _retry_after(text: str) -> float:
    """Seconds that a server asks for: as a number or a date; 0 when it asks for none.

    >>> _retry_after("7"), _retry_after(""), _retry_after("soon"), _retry_after("Wed, 21 Oct 2015 07:28:00 GMT")
    (7.0, 0.0, 0.0, 0.0)
    """
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):
            return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
