"""Prometheus metrics of the server."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headstart.serve.jobs import Jobs
from headstart.serve.replies import accepted_drafts
from headstart.streaming import Answer

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_SPEEDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


class Metrics:
    """Counters, gauges and histograms in a registry of their own.

    Attributes:
        requests: by outcome: completed, cancelled (the client left, or the server stopped), failed, refused.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, namespace="headstart", registry=self._registry)
        gauge = partial(Gauge, namespace="headstart", registry=self._registry)
        histogram = partial(Histogram, namespace="headstart", registry=self._registry)
        self.requests = counter("requests", "Requests by outcome.", ["outcome"])
        gauge("running", "Choices that are decoded.").set_function(lambda: len(jobs.running))
        gauge("queued", "Choices that wait for their turn.").set_function(lambda: len(jobs.waiting))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generated = counter("generated_tokens", "Generated tokens of complete answers.")
        self._accepted = counter("accepted_draft_tokens", "Accepted drafts in them.")
        self._rounds = counter("rounds", "Forwards of the target after the prompt.")
        self._paused = counter("paused_rounds", "Rounds without drafts, because these would not have paid.")
        self._first_token = histogram("first_token_seconds", "Time to first token, queue included.", buckets=_SECONDS)
        self._speed = histogram("tokens_per_second", "Tokens per second of an answer.", buckets=_SPEEDS)

    def count(self, answer: Answer, waited: float) -> None:
        """Count a complete answer, after `waited` seconds in the queue."""
        self._generated.inc(len(answer.tokens))
        self._accepted.inc(accepted_drafts(answer))
        self._rounds.inc(answer.rounds)
        self._paused.inc(answer.paused_rounds)
        self._first_token.observe(waited + answer.first_token_ms / 1000)
        self._speed.observe(answer.tokens_per_second)

    def text(self) -> bytes:
        return generate_latest(self._registry)
