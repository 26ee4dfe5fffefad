"""Decoding by a running engine, as a method of `evaluate`: HTTP requests, acceptance from the engine's counters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter

from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Round
from headstart.errors import UserError
from headstart.eval.methods import Run
from headstart.servers.completions import CompletionRequest
from headstart.servers.process import RunningEngine, drafts_per_round


class Served:
    """A `Method` that decodes a batch by an engine, as concurrent streamed requests.

    Prompts of a batch start together, and each row's seed is the run's plus its index, as in our loop.

    Attributes:
        drafts: tokens that the engine has drafted so far.
    """

    def __init__(self, server: RunningEngine, options: DecodeOptions, has_heads: bool) -> None:
        self._server, self._options, self._has_heads = server, options, has_heads
        self.drafts = 0

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        """Answer the prompts concurrently and time them from the first request to the last token.

        Engines count rounds of all requests together: rows get equal shares of them.

        Raises:
            UserError: the engine does not answer, or its counters contradict each other.
        """
        options = self._options
        requests = [
            CompletionRequest(prompt, max_new_tokens, options.temperature, options.top_k, options.top_p, seed + row)
            for row, prompt in enumerate(prompts)
        ]
        before = self._server.counters()
        start = perf_counter()
        answers = self._server.answers(requests)
        seconds = perf_counter() - start
        counted = self._server.counters() - before
        self.drafts += counted["draft_tokens"]
        decoded = sum(max(0, len(answer.tokens) - 1) for answer in answers)  # the first token is of the prefill
        rounds = rounds_of(counted, decoded)
        return Run(
            [list(answer.tokens) for answer in answers],
            seconds,
            [list(answer.token_ms) for answer in answers],
            [rounds[row :: len(answers)] for row in range(len(answers))] if self._has_heads else [],
        )


def rounds_of(counted: Counter[str | int], decoded: int) -> list[Round]:
    """Return untimed rounds: one per drafted round that the engine counted, and one per remaining token of `decoded`,
    which came without drafts.

    `counted` is as in `headstart.servers.process.read_counters`.

    >>> rounds = rounds_of(Counter({"drafts": 3, "draft_tokens": 6, "accepted_tokens": 3, 0: 2, 1: 1}), decoded=7)
    >>> [(done.nodes, done.emitted) for done in rounds]
    [(3, 1), (3, 2), (3, 3), (1, 1)]
    """
    drafts = drafts_per_round(counted)
    reached = [counted["drafts"], *(counted[position] for position in range(drafts)), 0]
    if sum(reached[1:]) != counted["accepted_tokens"] or any(b > a for a, b in pairwise(reached)):
        raise UserError(f"The engine's counters contradict each other: {dict(counted)}.", "Try again while it is idle.")
    undrafted = decoded - counted["drafts"] - counted["accepted_tokens"]
    return [
        Round(1 + drafts, emitted, 0.0, 0.0, 0.0, depth=drafts)
        for emitted, (earlier, later) in enumerate(pairwise(reached), start=1)
        for _ in range(earlier - later)
    ] + [Round(1, 1, 0.0, 0.0, 0.0)] * undrafted
