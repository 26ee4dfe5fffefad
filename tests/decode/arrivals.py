"""Requests to an engine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from headstart.decode.batch import Row
from headstart.decode.engine import Engine, Ticket
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation


class Arrival:
    """A request, cancelled after so many tokens if a number is given."""

    def __init__(
        self, loop: DecodeLoop, prompt: Sequence[int], options: DecodeOptions, cancel_after: int | None = None
    ) -> None:
        self.loop, self.outcome = loop, list[Generation | BaseException | None]()
        self.row = Row(prompt, replace(options, seed=options.seed or 0), perf_counter())
        self.row.on_tokens = self._read
        self.read: list[int] = []
        self._cancel_after = cancel_after

    def submit(self, engine: Engine) -> Ticket:
        self._engine = engine
        self.ticket = engine.submit(self.loop, self.row, self.outcome.append)
        return self.ticket

    def _read(self, _: int, tokens: list[int], drafted: int) -> None:
        assert 0 <= drafted <= len(tokens)
        assert threading.current_thread() is self._engine._work._thread, "a single thread decodes"
        self.read += tokens
        if self._cancel_after is not None and len(self.read) >= self._cancel_after:
            self.row.cancelled = True


def decode(
    engine: Engine,
    loop: DecodeLoop,
    prompt: Sequence[int],
    options: DecodeOptions,
    cancel_after: int | None = None,
) -> Generation | None:
    """Decode one request alone; return its text, or None if it was cancelled."""
    arrival = Arrival(loop, prompt, options, cancel_after)
    arrival.submit(engine).left.wait(60)
    (outcome,) = arrival.outcome
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
