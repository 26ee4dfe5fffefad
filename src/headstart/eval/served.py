"""Decoding by a running engine, as a method of `evaluate`: HTTP requests, acceptance from the engine's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter

from headstart.decode.loop import Round
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.eval.methods import Run
from headstart.servers.completions import CompletionRequest
from headstart.servers.process import RunningEngine


class Served:
    """A `Method` that decodes a batch by an engine, as concurrent streamed requests.

    Prompts of a batch start together, and each row's seed is the run's plus its index, as in our loop.
    """

    def __init__(self, server: RunningEngine, options: DecodeOptions) -> None:
        self._server, self._options = server, options

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        """Answer the prompts concurrently and time them from the first request to the last token.

        Engines count rounds of all requests together: rows get equal shares of them.

        Raises:
            UserError: the engine does not answer.
        """
        options = self._options
        asks = [
            CompletionRequest(prompt, max_new_tokens, options.temperature, options.top_k, options.top_p, seed + row)
            for row, prompt in enumerate(prompts)
        ]
        before = self._server.counters()
        start = perf_counter()
        answers = self._server.answers(asks)
        seconds = perf_counter() - start
        rounds = rounds_of(self._server.counters() - before)
        return Run(
            [list(answer.tokens) for answer in answers],
            seconds,
            [list(answer.token_ms) for answer in answers],
            [rounds[row :: len(asks)] for row in range(len(asks))] if rounds else [],
        )


def rounds_of(counted: Counter[str | int]) -> list[Round]:
    """Return one untimed round for each that the engine counted; see `headstart.servers.process.read_counters`.

    >>> [(done.nodes, done.emitted) for done in rounds_of(Counter({"drafts": 3, "draft_tokens": 6, 0: 2, 1: 1}))]
    [(3, 1), (3, 2), (3, 3)]
    """
    if not counted["drafts"]:
        return []
    drafts = max(1, round(counted["draft_tokens"] / counted["drafts"]))
    reached = [counted["drafts"], *(counted[position] for position in range(drafts)), 0]
    if any(later > earlier for earlier, later in pairwise(reached)):
        raise UserError(f"The engine's counters contradict each other: {dict(counted)}.", "Try again while it is idle.")
    return [
        Round(1 + drafts, emitted, 0.0, 0.0, 0.0, depth=drafts)
        for emitted, (earlier, later) in enumerate(pairwise(reached), start=1)
        for _ in range(earlier - later)
    ]
