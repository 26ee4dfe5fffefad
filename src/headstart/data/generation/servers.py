"""Generation on servers, token ids in and out, with checked replies.

A refused row stays unchanged. A reply that the target cannot have written raises a UserError with the server's name.
Retries are in `headstart.servers.client`.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any

from headstart.data.generation.generator import CANDIDATES, Continuation
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.servers.client import REQUESTS, Endpoint, Pool, Refused, RetryableError
from headstart.servers.completions import CompletionRequest, NoTokenIds, ServedModel, served_by

_PROBE = "A bicycle stays upright while it moves, and nobody has to think about it."
"""Text to compare tokenizers on."""

_MAX_REFUSED = 64, 8
"""Maximum consecutive refused rows and batches once some rows were answered."""


class Servers:
    """A `TextGenerator` on servers of the target: vLLM-compatible ones or llama-server.

    `urls` may be a function that starts the servers and returns their addresses, called on first use. `requests` bounds
    the concurrent requests over all servers; None derives it from them. `recover` restarts the server at an address if
    it has died (see `headstart.servers.fleet`).
    """

    def __init__(
        self,
        urls: Sequence[str] | Callable[[], Sequence[str]],
        target: Target,
        requests: int | None = None,
        recover: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._answered = False
        self._refused = (0, 0)  # consecutive refused rows and batches since the last answer
        self._requests = requests
        self._urls, self._recover = urls, recover
        if not callable(urls):
            self._pool = self._connect(urls)

    @cached_property
    def _pool(self) -> Pool:
        assert callable(self._urls), "else it is connected at once"
        return self._connect(self._urls())

    def _connect(self, urls: Sequence[str]) -> Pool:
        remedy = (
            "Check that the server runs and that data.server is its address. Then run the same command again: it keeps "
            "the finished batches."
        )
        return Pool(urls, self._requests, remedy, self._recover)

    @cached_property
    def window(self) -> int:
        """Smallest context length of the target and the servers that report one."""
        return min([self._target.max_length, *filter(None, (served.window for served in self._models))])

    @cached_property
    def requests(self) -> int:
        """Concurrent requests over all servers: by default twice the slots of a llama-server, `REQUESTS` for others."""
        pool = self._pool
        if self._requests is None:
            per_server = max(2 * served.slots if served.slots else REQUESTS for served in self._models)
            pool.requests = pool.requests // REQUESTS * per_server
        return pool.requests

    @cached_property
    def _models(self) -> list[ServedModel]:
        return self._pool.query(lambda endpoint: endpoint.cached(self._find_model))

    def concurrent_batches(self, rows: int) -> int:
        """Return enough batches to keep all requests busy while some batches wait for their last answers."""
        return 1 + -(-2 * self.requests // rows)

    def continue_rows(self, rows: Sequence[Sequence[int]], continuation: Continuation) -> list[list[int]]:
        """See `TextGenerator`; returns no hidden states. Raises a UserError if the servers refuse everything."""

        def answer(number: int, endpoint: Endpoint) -> list[int]:
            request = CompletionRequest(
                rows[number],
                continuation.max_new_tokens,
                continuation.temperatures[number],
                top_k=CANDIDATES,
                top_p=continuation.top_p,
                seed=random.Random(f"{continuation.seed} {number}").getrandbits(31),  # a range servers accept
                ends=continuation.ends,
            )
            return self._answer(endpoint, request)

        def check() -> None:
            continuation.check()
            self._pool.restart_dead()

        with closing(self._pool.run(len(rows), answer, check)) as answers:
            replies = dict(answers)
        refused = {number: reply for number, reply in replies.items() if isinstance(reply, Refused)}
        with self._lock:
            if len(refused) < max(1, len(rows)):
                self._answered, self._refused = True, (0, 0)
            else:
                self._refused = self._refused[0] + len(refused), self._refused[1] + 1
            if not self._answered or (self._refused[0] > _MAX_REFUSED[0] and self._refused[1] > _MAX_REFUSED[1]):
                raise next(iter(refused.values()))
        continuation.refused.update((number, refusal.problem) for number, refusal in refused.items())
        return [[] if isinstance(reply := replies[number], Refused) else reply for number in range(len(rows))]

    def _answer(self, endpoint: Endpoint, request: CompletionRequest) -> list[int]:
        """Return the added tokens; raises as `Endpoint.fetch`, and a UserError for an answer of another model."""
        assert request.ends is not None and request.seed is not None
        served = endpoint.cached(self._find_model)
        added: list[int] = []
        while True:
            rest = replace(
                request,
                prompt=[*request.prompt, *added],
                max_new_tokens=request.max_new_tokens - len(added),
                seed=request.seed + len(added),
            )
            tokens, at_own_end = self._complete(endpoint, served, rest)
            added += tokens
            if len(added) == request.max_new_tokens or (added and added[-1] in request.ends):
                return added
            # llama-server also stops at tokens that do not end the target's answers (other templates' end tokens, say).
            if not (tokens and at_own_end):
                raise UserError(
                    f"{endpoint.url} ended an answer after {len(added)} of {request.max_new_tokens} tokens, but not at "
                    f"an end-of-turn token of {self._target.name}.",
                    "Its context may be shorter than data.max_prompt_tokens + data.max_new_tokens, or it serves "
                    "another model.",
                )

    def _complete(self, endpoint: Endpoint, served: ServedModel, request: CompletionRequest) -> tuple[list[int], bool]:
        """Return one request's tokens up to the first end token, and whether an end token stopped the server."""
        path, body = served.dialect.request(request, served.model)
        page = endpoint.fetch(path, body)
        try:
            reply = served.dialect.read(page)
        except NoTokenIds:
            raise UserError(
                f"{endpoint.url} returns no token ids, and its text may tokenize to other ids.",
                "Use vLLM (0.10.2 or newer) or llama-server.",
            ) from None
        except (KeyError, IndexError, TypeError, AttributeError):
            raise RetryableError(f"a reply that is none: {str(page)[:200]}") from None
        prompt = list(request.prompt)
        if reply.prompt not in (None, prompt) or reply.prompt_length not in (None, len(prompt)):
            length = len(reply.prompt) if reply.prompt is not None else reply.prompt_length
            raise UserError(
                f"{endpoint.url} did not read the token ids that it was asked to continue: {length} token ids for "
                f"{len(prompt)}.",
                "It may add or cut tokens: give it a longer context, and no prompt template of its own.",
            )
        self._check(endpoint, reply.tokens, request.max_new_tokens)
        assert request.ends is not None
        first = next((index for index, token in enumerate(reply.tokens) if token in request.ends), None)
        return (reply.tokens, reply.at_own_end) if first is None else (reply.tokens[: first + 1], True)

    def _check(self, endpoint: Endpoint, tokens: Sequence[Any], max_tokens: int) -> None:
        size = self._target.vocab_size
        invalid = [token for token in tokens if type(token) is not int or not 0 <= token < size]
        if invalid:
            raise UserError(
                f"{endpoint.url} wrote token id {invalid[0]!r}, and {self._target.name} has ids from 0 to {size - 1}.",
                "Serve the recipe's target there.",
            )
        if len(tokens) > max_tokens:
            raise UserError(
                f"{endpoint.url} wrote {len(tokens)} tokens where {max_tokens} were asked for.",
                "It ignores max_tokens: use vLLM or llama-server.",
            )

    def _find_model(self, endpoint: Endpoint) -> ServedModel:
        served = served_by(endpoint, self._target.spec)
        path, body = served.dialect.tokenize(_PROBE, served.model)
        theirs = endpoint.fetch(path, body, absent={}).get("tokens")
        if isinstance(theirs, list) and theirs != self._target.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:
            raise UserError(
                f"{endpoint.url} serves {served.model or 'a model'} with another tokenizer than that of "
                f"{self._target.name}.",
                "Serve the recipe's target there.",
            )
        return served
