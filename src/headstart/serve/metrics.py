"""Prometheus metrics of the server."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from headstart.serve.jobs import Jobs
from headstart.serve.replies import accepted_drafts
from headstart.streaming import Answer

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_SPEEDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of accepted requests.",
    "generated_tokens": "Generated tokens of complete answers.",
    "accepted_draft_tokens": "Accepted drafts in them.",
    "rounds": "Forwards of the target after the prompt.",
    "paused_rounds": "Rounds without drafts, because these would not have paid.",
}


class Metrics:
    """Counters, gauges and histograms in a registry of their own.

    Attributes:
        requests: by outcome: completed, cancelled (the client left, or the server stopped), failed, refused.
    """

    def __init__(self, jobs: Jobs) -> None:
        self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "headstart", "registry": self._registry}
        self.requests = Counter("requests", "Requests by outcome.", ["outcome"], **common)
        Gauge("running", "Choices that are decoded.", **common).set_function(lambda: len(jobs.running))
        Gauge("queued", "Choices that wait for their turn.", **common).set_function(lambda: len(jobs.waiting))
        self._counters = {name: Counter(name, text, **common) for name, text in _COUNTERS.items()}
        first_token = "Time to first token, queue included."
        self._first_token = Histogram("first_token_seconds", first_token, buckets=_SECONDS, **common)
        self._speed = Histogram("tokens_per_second", "Tokens per second of an answer.", buckets=_SPEEDS, **common)

    def count(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            self._counters[name].inc(amount)

    def count_answer(self, answer: Answer, waited: float) -> None:
        """Count a complete answer, after `waited` seconds in the queue."""
        self.count(generated_tokens=len(answer.tokens), accepted_draft_tokens=accepted_drafts(answer))
        self.count(rounds=answer.rounds, paused_rounds=answer.paused_rounds)
        self._first_token.observe(waited + answer.first_token_ms / 1000)
        self._speed.observe(answer.tokens_per_second)

    def text(self) -> bytes:
        return generate_latest(self._registry)
