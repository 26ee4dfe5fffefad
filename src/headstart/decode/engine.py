"""One running batch for requests that come and go, in a thread of its own.

Between two rounds the newest request reads a piece of its prompt, so that no other text waits for a long one. Requests
that do not fit into memory wait until others leave.

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from headstart.decode.batch import Batch, Lane, Row
from headstart.decode.drafting import Drafting
from headstart.decode.memory import free_garbage, memory_error
from headstart.decode.prefix_cache import CachedText, PrefixPool, common_prefix_length
from headstart.decode.texts import Generation
from headstart.errors import UserError, out_of_memory
from headstart.kernels.memory import free_bytes
from headstart.model.model import Target, TargetOutput
from headstart.replay.attention import CHUNK
from headstart.replay.cache import TreeCache
from headstart.support.cores import FreeCores

_PIECE = 256
"""Tokens of a prompt that are read between two rounds of other requests."""
_SHARED = 16
"""Fewest common tokens for which a waiting request makes the engine keep a prompt that was just read."""
_UNLIMITED = 1 << 30
OnEnd = Callable[[Generation | BaseException | None], None]
"""Called with the finished text, with an error, or with None if the request was cancelled."""


@dataclass(eq=False)
class Ticket:
    """A submitted request. `left` is set once its outcome was reported."""

    loop: Drafting
    row: Row
    on_end: OnEnd
    left: threading.Event = field(default_factory=threading.Event)

    def end(self, outcome: Generation | BaseException | None) -> None:
        """Report the outcome. Exceptions of `on_end` do not reach other requests."""
        with suppress(Exception):
            self.on_end(outcome)
        self.left.set()

    def cancel(self) -> None:
        """Let the request leave before the next round or piece, without waiting for it."""
        self.row.cancelled = True


class _Left(BaseException):
    """A request was cancelled while its prompt was read."""


class Reading:
    """A request whose prompt is read in pieces."""

    def __init__(self, ticket: Ticket, pool: PrefixPool, batch: Batch | None) -> None:
        row = ticket.row
        row.cached = CachedText((), {})
        self.ticket, self._pool = ticket, pool
        self.lane = Lane(ticket.loop, [row], self._check, serves=True)
        if batch is not None and batch.join_bytes(self.lane) > free_bytes(batch.target.device):
            raise memory_error(batch.target)
        cache = self.lane.new_cache()
        assert cache is not None, "a single row fits or raises"
        self.cache: TreeCache = cache
        self._aux_layers = self.lane.aux_layers
        length, states = pool.load(cache, row.tokens, self._aux_layers)
        self._states: dict[int, list[Tensor]] = {layer: [state_1TE] for layer, state_1TE in states.items()}
        self._left = row.tokens[length:]
        self._in_parts = self.lane.target.can_read_in_parts(len(row.tokens) + row.options.max_new_tokens)

    def read(self, most: int, free_cores: FreeCores | None) -> Batch | None:
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
        return Batch(self.lane, self.cache, free_cores)

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
        self._free_cores = FreeCores() if target.device.type == "cpu" else None
        self._lock = threading.RLock()  # the garbage collector may call `close` anywhere
        self._arrived: deque[Ticket] = deque()
        self._thread: threading.Thread | None = None
        self._tickets: list[Ticket] = []  # not yet ended
        self._reading: Reading | None = None
        self._batch: Batch | None = None
        self._most_rows = _UNLIMITED  # fewer after a failure
        self._waits = False  # for memory, until a row leaves

    def submit(self, ticket: Ticket) -> None:
        with self._lock:
            self._arrived.append(ticket)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="headstart-engine", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Cancel every request, and wait for the thread."""
        with self._lock:
            thread, tickets = self._thread, [*self._arrived, *self._tickets]
        for ticket in tickets:
            ticket.cancel()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    @torch.inference_mode()
    def _run(self) -> None:
        with self._free_cores.limited() if self._free_cores else nullcontext():
            try:
                while self._take_arrived():  # once false, another thread may have started
                    self._step()
            except BaseException as error:  # such as SystemExit, raised by a logits processor
                with self._lock:
                    tickets, self._tickets, self._thread = [*self._tickets, *self._arrived], [], None
                    self._arrived.clear()
                    self._batch = self._reading = None
                for ticket in tickets:
                    ticket.end(error)

    def _take_arrived(self) -> bool:
        """Take new requests; return whether there are any, and end the thread if there are none."""
        with self._lock:
            self._tickets += self._arrived
            self._arrived.clear()
            if not self._tickets:
                self._thread, self._most_rows, self._waits = None, _UNLIMITED, False
            return bool(self._tickets)

    def _step(self) -> None:
        """Read a piece of a prompt, then decode a round; let ended rows leave."""
        try:
            self._admit()
            if self._reading is not None:
                self._read(self._reading)
            self._leave()
            if self._batch is not None:
                self._batch.round()
                self._leave()
        except Exception as error:
            self._recover(error)

    def _admit(self) -> None:
        """Begin to read the first waiting request."""
        running = {id(row) for row in self._running}
        waiting = [ticket for ticket in self._tickets if id(ticket.row) not in running]
        for ticket in [ticket for ticket in waiting if ticket.row.cancelled]:
            if self._reading is None or self._reading.ticket is not ticket:
                self._end(ticket, None)
                waiting.remove(ticket)
        if self._reading is not None or self._waits or not waiting or len(running) >= self._most_rows:
            return
        try:
            try:
                self._reading = Reading(waiting[0], self._pool, self._batch)
            except Exception as error:
                if not _lacks_memory(error):
                    raise
                self._pool.clear()
                self._reading = Reading(waiting[0], self._pool, self._batch)
        except Exception as error:
            if self._batch is not None and _lacks_memory(error):
                self._waits = True
            else:
                self._fail(waiting[0], error)

    def _read(self, reading: Reading) -> None:
        """Read a piece of a prompt; the row joins the batch after the last one."""
        try:
            arrived = reading.read(CHUNK if self._batch is None else _PIECE, self._free_cores)
        except BaseException as error:
            if isinstance(error, Exception) and out_of_memory(error):
                raise
            self._reading = None
            self._end(reading.ticket, None if isinstance(error, _Left) else error)
            if not isinstance(error, (Exception, _Left)):
                raise
            return
        if arrived is None:
            return
        (row,) = arrived.rows
        others = [ticket.row.prompt for ticket in self._tickets if ticket.row is not row and not ticket.row.text.tokens]
        if row.cached is not None and any(common_prefix_length([other, row.prompt]) >= _SHARED for other in others):
            states = row.cached.states(reading.lane.aux_layers, len(row.cached.tokens))
            self._pool.add(CachedText(row.cached.tokens, states), arrived.cache, 0)
        if self._batch is None:
            self._batch = arrived
        else:
            self._batch.join(arrived)
        self._reading = None

    @property
    def _running(self) -> list[Row]:
        return [] if self._batch is None else self._batch.rows

    def _leave(self) -> None:
        """Drop ended rows from the batch, report them, and keep their texts."""
        if self._batch is not None and not self._batch.drop_ended(partial(self._report, self._batch)):
            self._batch = None

    def _report(self, batch: Batch, row: Row, place: int) -> None:
        ticket = next(ticket for ticket in self._tickets if ticket.row is row)
        self._end(ticket, None if row.cancelled else row.text)
        self._waits, self._most_rows = False, self._most_rows + 1
        if row.cached is not None and not row.cancelled:
            self._pool.add(row.cached, batch.cache, place)

    def _end(self, ticket: Ticket, outcome: Generation | BaseException | None) -> None:
        self._tickets.remove(ticket)
        ticket.end(outcome)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self._end(ticket, memory_error(self._target) if out_of_memory(error) else error)

    def _recover(self, error: Exception) -> None:
        """After an error with several rows: read the texts so far again, and decode fewer at once, so that only rows
        that fail alone fail."""
        reading = [] if self._reading is None else [self._reading.ticket.row]
        rows = {id(row) for row in [*self._running, *reading]}
        self._batch = self._reading = None
        failed = [ticket for ticket in self._tickets if id(ticket.row) in rows]
        for ticket in failed:
            if ticket.row.text.finish_reason:
                self._end(ticket, ticket.row.text)
            elif len(failed) == 1:
                self._fail(ticket, error)
        if len(failed) > 1:
            self._most_rows = max(1, len(failed) // 2) if out_of_memory(error) else 1
        if out_of_memory(error):
            self._pool.clear()
            free_garbage()


def _lacks_memory(error: Exception) -> bool:
    """Whether a request may fit once others have left; `reserve` raises UserError."""
    return isinstance(error, UserError) or out_of_memory(error)
