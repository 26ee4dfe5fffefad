"""Hidden states asked for from vLLM servers that write them to a folder which both sides see; see `extraction`."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

from headstart.data.states.vllm_files import Import, Imported, Unusable
from headstart.errors import UserError
from headstart.servers.at_once import answered

TRIES = 8
"""For a conversation, each on the next of the servers, before giving up."""
FIRST_WAIT = 0.5
"""Seconds before the second try; doubled with each up to half a minute."""
_LONGEST_WAIT = 30.0
_ANSWER_SECONDS = 1800.0
_AGAIN = {408, 409, 425, 429}
_RESTART = "Start it as headstart data import-states RECIPE shows; then the same command goes on from there."


class _Later(Exception):
    """It may work another time."""


def take_from_servers(
    urls: Sequence[str],
    work: Import,
    requests: int,
    advance: Callable[[int, int], None] | None = None,
) -> Imported:
    """Let servers read every conversation that is waiting and take what they write; their files are removed.

    Args:
        urls: of the servers, with or without `/v1`, used in turns.
        work: what takes the files.
        requests: most that are under way, over all servers.
        advance: called with (tokens done, tokens in all) after each conversation.

    Raises:
        UserError: a server refuses, does not answer for long, writes no states or other ones than asked for.
    """
    waiting = work.waiting
    total, done = sum(len(item.tokens) for item in waiting), 0
    servers = [_Server(url) for url in urls]

    def ask(number: int, stop: threading.Event) -> Path:
        return _ask(servers, number, waiting[number].tokens, stop)

    try:
        with closing(answered(len(waiting), requests, ask)) as written:
            for number, file in written:
                try:
                    work.take(file, waiting[number].tokens)
                except Unusable as problem:
                    raise UserError(f"{file}, which vLLM wrote: {problem}.", _RESTART) from None
                for path in (file, _lock_of(file)):
                    with suppress(OSError):
                        path.unlink()
                done += len(waiting[number].tokens)
                if advance is not None:
                    advance(done, total)
    finally:
        work.close()  # what was taken before a failure as well: its files are gone
    return work.found


def _ask(servers: Sequence[_Server], number: int, tokens: Sequence[int], stop: threading.Event) -> Path:
    """The file of one conversation's states, whole."""
    for attempt in range(TRIES):
        server = servers[(number + attempt) % len(servers)]
        try:
            return server.states(tokens)
        except _Later as problem:
            said, asked = str(problem), server.url
        if stop.wait(min(_LONGEST_WAIT, FIRST_WAIT * 2**attempt)):
            break
    raise UserError(f"{asked} gave no states: {said.rstrip('.')} ({TRIES} tries).", _RESTART)


class _Server:
    """One vLLM server that writes hidden states.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.Client(
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=10.0), limits=limits, trust_env=False
        )
        self._model: str | None = None
        self._meeting = threading.Lock()

    def states(self, tokens: Sequence[int]) -> Path:
        """Let it read token ids; returns the file that it has written their states to.

        Raises:
            _Later: it may work another time.
            UserError: it will not.
        """
        with self._meeting:
            if self._model is None:
                listed = self._object("GET", "/v1/models").get("data") or [{}]
                self._model = str(listed[0].get("id", ""))
        body = {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}
        reply = self._object("POST", "/v1/completions", {**body, "return_token_ids": True})
        try:
            written = (reply.get("kv_transfer_params") or {})["hidden_states_path"]
            read = reply["choices"][0].get("prompt_token_ids")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise UserError(f"{self.url} answers, and writes no hidden states.", _RESTART) from None
        if read not in (None, list(tokens)):
            raise UserError(
                f"{self.url} read other token ids than those it was sent: {len(read)} for {len(tokens)}.",
                "It may add or cut tokens: give it a longer context.",
            )
        return self._whole(Path(written))

    def _whole(self, file: Path) -> Path:
        """The file, once vLLM lets go of the lock that it holds while it writes."""
        if _lock_of(file).is_file():
            with _lock_of(file).open("rb") as lock, suppress(OSError):  # no locks here: it is whole or refused below
                fcntl.flock(lock, fcntl.LOCK_SH)
        elif not file.is_file():
            raise UserError(
                f"{self.url} says it wrote {file}, and there is no such file here.",
                "shared_storage_path has to be a folder that the server and this machine both see under this name.",
            )
        if not file.is_file():
            raise _Later(f"it did not write {file}")
        return file

    def _object(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._client.request(method, self.url + path, json=body)
            said = " ".join(reply.text.split())[:300]
        except httpx.HTTPError as error:
            raise _Later(f"{type(error).__name__}: {error}") from None
        if reply.status_code in _AGAIN or reply.status_code >= 500:
            raise _Later(f"{reply.status_code} {said}".strip())
        if not reply.is_success:
            raise UserError(
                f"{self.url}{path} answered {reply.status_code}: {said or 'nothing'}.",
                "Serve the recipe's target there, with room for the longest conversation and one token more.",
            )
        try:
            found = reply.json()
        except ValueError:
            raise _Later(f"a reply that is no JSON: {said[:100]!r}") from None
        if not isinstance(found, dict):
            raise _Later(f"a reply that is none: {said[:100]!r}")
        return found


def _lock_of(file: Path) -> Path:
    return file.with_name(file.name + ".lock")
