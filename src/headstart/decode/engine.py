"""One running batch for requests that come and go, in a thread of its own.

Between two rounds the newest request reads a piece of its prompt, so that no other text waits for a long one. Requests
that do not fit into memory wait until others leave.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headstart.decode.batch import Batch, Lane, Row
from headstart.decode.drafting import Drafting
from headstart.decode.memory import memory_error
from headstart.decode.prefix_cache import CachedText, PrefixPool, common_prefix_length
from headstart.decode.texts import Generation
from headstart.errors import UserError, out_of_memory
from headstart.model.model import Target, TargetOutput
from headstart.replay.attention import CHUNK
from headstart.replay.cache import TreeCache

_PIECE = 256
"""Tokens of a prompt that are read between two rounds of other requests."""
_SHARED = 16
"""Fewest common tokens for which a waiting request makes the engine keep a prompt that was just read."""
_UNLIMITED = 1 << 30
_THREAD = "headstart-engine"
OnEnd = Callable[[Generation | BaseException | None], None]
"""Called with the finished text, with an error, or with None if the request was cancelled."""


@dataclass(eq=False)
class Ticket:
    """A submitted request."""

    loop: Drafting
    row: Row
    on_end: OnEnd
    left: threading.Event = field(default_factory=threading.Event)

    def end(self, outcome: Generation | BaseException | None) -> None:
        """Report the outcome, once."""
        if not self.left.is_set():
            try:
                self.on_end(outcome)
            finally:
                self.left.set()

    def cancel(self) -> None:
        """Let the request leave before the next round or piece; returns when it has left."""
        self.row.cancelled = True
        if threading.current_thread().name != _THREAD:  # where garbage may be collected, too
            self.left.wait()


class _Left(BaseException):
    """A request was cancelled while its prompt was read."""


class Reading:
    """A request whose prompt is read in pieces."""

    def __init__(self, ticket: Ticket, pool: PrefixPool) -> None:
        row = ticket.row
        row.cached = CachedText((), {})
        self.ticket, self._pool = ticket, pool
        self.lane = Lane(ticket.loop, [row], self._check, serves=True)
        cache = self.lane.new_cache()
        assert cache is not None, "a single row fits or raises"
        self.cache: TreeCache = cache
        self._aux_layers = self.lane.aux_layers
        length, states = pool.load(cache, row.tokens, self._aux_layers)
        self._states: dict[int, list[Tensor]] = {layer: [state_1TE] for layer, state_1TE in states.items()}
        self._left = row.tokens[length:]
        self._in_parts = self.lane.target.can_read_in_parts(len(row.tokens) + row.options.max_new_tokens)

    def read(self, most: int) -> Batch | None:
        """Read at most this many tokens, if the prompt can be read in parts; return the batch of the row once its
        prompt is whole."""
        count = most if self._in_parts else len(self._left)
        piece, self._left = self._left[:count], self._left[count:]
        out = self.lane.target.prefill(self.cache, [piece], self._aux_layers)
        for layer, state_1TE in out.aux_hidden_states.items():
            self._states.setdefault(layer, []).append(state_1TE)
        if self._left:
            return None
        states = {layer: torch.cat(pieces, dim=1) for layer, pieces in self._states.items()}
        (row,) = self.lane.rows
        row.cached = CachedText(row.tokens, states)
        self.lane.begin(TargetOutput(out.logits_BTV, states))
        self.lane.check = None
        self.cache.watch(None)
        return Batch(self.lane, self.cache)

    def _check(self) -> None:
        if self.ticket.row.cancelled:
            raise _Left


class Engine:
    """Decodes requests in one batch. Its thread runs while there are any."""

    def __init__(self, target: Target) -> None:
        self._work = _Work(target)
        # torch aborts the process if it is torn down under a thread.
        self.close = weakref.finalize(self, self._work.close)

    def submit(self, loop: Drafting, row: Row, on_end: OnEnd) -> Ticket:
        """Add a checked request. `on_end` and the row's `on_tokens` are called in the engine's thread."""
        ticket = Ticket(loop, row, on_end)
        self._work.submit(ticket)
        return ticket


class _Work:
    """The state of the engine's thread, which holds no reference to the engine."""

    def __init__(self, target: Target) -> None:
        self._target, self._pool = target, PrefixPool(target)
        self._lock = threading.Lock()
        self._arrived: deque[Ticket] = deque()
        self._thread: threading.Thread | None = None
        self._tickets: list[Ticket] = []  # not yet ended
        self._reading: Reading | None = None
        self._batch: Batch | None = None
        self._most_rows = _UNLIMITED  # fewer once memory has run out

    def submit(self, ticket: Ticket) -> None:
        with self._lock:
            self._arrived.append(ticket)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Cancel every request, and wait for the thread."""
        with self._lock:
            thread, tickets = self._thread, [*self._arrived, *self._tickets]
        for ticket in tickets:
            ticket.row.cancelled = True
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        with ExitStack() as threads:
            limited = False
            while self._take_arrived():  # once false, another thread may have started
                free_cores = self._tickets[0].loop.free_cores
                if free_cores is not None and not limited:
                    threads.enter_context(free_cores.limited())
                    limited = True
                self._step()

    def _take_arrived(self) -> bool:
        """Take new requests; return whether there are any, and end the thread if there are none."""
        with self._lock:
            self._tickets += self._arrived
            self._arrived.clear()
            if not self._tickets:
                self._thread, self._most_rows = None, _UNLIMITED
            return bool(self._tickets)

    def _step(self) -> None:
        """Read a piece of a prompt, then decode a round; let ended rows leave."""
        try:
            self._admit()
            if self._reading is not None:
                self._read()
            self._leave()
            if self._batch is not None:
                self._batch.round()
                self._leave()
        except Exception as error:
            self._recover(error)

    def _admit(self) -> None:
        """Begin to read the next waiting request."""
        running = [] if self._batch is None else self._batch.rows
        waiting = [ticket for ticket in self._tickets if not any(ticket.row is row for row in running)]
        for ticket in waiting:
            if ticket.row.cancelled and (self._reading is None or self._reading.ticket is not ticket):
                self._end(ticket, None)
            elif self._reading is None and len(running) < self._most_rows:
                try:
                    self._reading = Reading(ticket, self._pool)
                except Exception as error:
                    if running and (isinstance(error, UserError) or out_of_memory(error)):
                        return  # it waits for memory
                    self._end(ticket, memory_error(self._target) if out_of_memory(error) else error)

    def _read(self) -> None:
        reading = self._reading
        assert reading is not None
        try:
            arrived = reading.read(CHUNK if self._batch is None else _PIECE)
        except _Left:
            self._reading = None
            self._end(reading.ticket, None)
            return
        if arrived is None:
            return
        self._reading = None
        (row,) = arrived.rows
        others = [ticket.row.prompt for ticket in self._tickets if ticket.row is not row and not ticket.row.text.tokens]
        if row.cached is not None and any(common_prefix_length([other, row.prompt]) >= _SHARED for other in others):
            states = row.cached.states(reading.lane.aux_layers, len(row.cached.tokens))
            self._pool.add(CachedText(row.cached.tokens, states), arrived.cache, 0)
        if self._batch is None:
            self._batch = arrived
        else:
            self._batch.join(arrived)

    def _leave(self) -> None:
        """Drop ended rows from the batch, keep their texts, and report them."""
        if self._batch is not None and not self._batch.drop_ended(partial(self._report, self._batch)):
            self._batch = None

    def _report(self, batch: Batch, row: Row, place: int) -> None:
        if row.cached is not None and not row.cancelled:
            self._pool.add(row.cached, batch.cache, place)
        ticket = next(ticket for ticket in self._tickets if ticket.row is row)
        self._end(ticket, None if row.cancelled else row.text)

    def _end(self, ticket: Ticket, outcome: Generation | BaseException | None) -> None:
        self._tickets.remove(ticket)
        ticket.end(outcome)

    def _recover(self, error: Exception) -> None:
        """After an error: with several rows and no memory, read the texts so far again and decode fewer at once; fail
        the running requests otherwise."""
        running = [] if self._batch is None else self._batch.rows
        reading = [] if self._reading is None else [self._reading.ticket.row]
        rows, self._batch, self._reading = [*running, *reading], None, None
        if out_of_memory(error) and len(rows) > 1:
            self._most_rows = max(1, len(rows) // 2)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return
        outcome = memory_error(self._target) if out_of_memory(error) else error
        for ticket in [ticket for ticket in self._tickets if ticket.row in rows]:
            self._end(ticket, outcome)
