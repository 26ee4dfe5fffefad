"""CUDA graphs of target forwards, which avoid launch overhead.

Takes a batch of trees, a cache and a capturable forward; gives its logits and hidden states. There is one graph per
memory and bucket. A bucket is a number of rows and of visible slots (powers of two, or the memory's own limits), a
width from `WIDTHS`, and a set of aux layers. Tokens, depths, visibility and lengths are copied to static buffers; the
graph computes positions, masks and slots. Padding nodes are computed and their outputs ignored.

Graphs need the KV cache at a fixed address, so caches borrow pooled memory and return it with its graphs. `GraphPool`
also serves the graphs of draft heads (see `drafters.draft_graphs`).

Shape suffixes: B rows and N nodes, of a bucket or a batch; V vocabulary, E hidden size.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from headstart.errors import out_of_memory
from headstart.kernels.memory import Memory, free_bytes
from headstart.replay.cache import KVLayout, KVMemory, TreeCache
from headstart.tree.tree import TreeBatch

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Bucket widths in nodes per row; wider trees run without a graph."""
_MIN_SLOTS = 128
"""Visible slots of the smallest bucket."""
_ROUND_UP_SHARE = 0.25
"""Maximum share of free memory that a cache takes after rounding up to a power of two."""
_MAX_SPARES, _SPARES_SHARE = 4, 0.1
"""Maximum number of spare memories (least recently used go first), and the maximum share of free memory that spares
plus the memory being lent may take."""
_MAX_EXCESS = 4
"""Maximum ratio of a reused memory's size to the requested one."""

M = TypeVar("M", bound=Memory)
Outputs = tuple[Tensor, dict[int, Tensor]]
"""Logits [B, N, V] and states [B, N, E] by layer."""


@dataclass
class Inputs:
    """Input buffers of a graph. Padding nodes see themselves; padding rows keep an earlier length, or 0."""

    tokens_BN: Tensor
    depths_BN: Tensor
    visible_BNN: Tensor
    lengths_B1: Tensor

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device) -> Inputs:
        tokens_BN = torch.zeros(rows, width, dtype=torch.long, device=device)
        visible_BNN = torch.eye(width, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        return cls(tokens_BN, torch.zeros_like(tokens_BN), visible_BNN, torch.zeros_like(tokens_BN[:, :1]))

    def fill(self, batch: TreeBatch, cache: TreeCache) -> None:
        """Copy a batch. Leftovers of a wider batch are hidden, since no node sees a later one."""
        rows, width = batch.tokens_BN.shape
        self.tokens_BN[:rows, :width] = batch.tokens_BN
        if self.tokens_BN.shape[1] > 1:
            self.depths_BN[:rows, :width] = batch.depths_BN
            self.visible_BNN[:rows, :width, :width] = batch.visible_BNN
        if len(set(cache.lengths)) == 1:
            self.lengths_B1[:rows].fill_(cache.lengths[0])
        else:
            self.lengths_B1[:rows] = cache.lengths_B1(self.lengths_B1.device)


Forward = Callable[[Inputs, TreeCache, int, frozenset[int]], Outputs]
"""Takes inputs, cache, visible slots and the aux layers."""

_of_thread = threading.local()


def capture_count() -> int:
    """Return the number of captures in this thread; timings leave out rounds with a capture."""
    return getattr(_of_thread, "capture_count", 0)


@dataclass
class Graph:
    """A captured forward and its input and output buffers."""

    graph: Any
    inputs: Any
    outputs: Any


class GraphPool(Generic[M]):
    """A pool of memories with the graphs captured over them; one slot of a row takes `slot_bytes`.

    Attributes:
        refused: why graphs are disabled; None if they are not.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes, self._device = slot_bytes, device
        self._spares: list[M] = []  # not in use, least recently used first
        self._lock = threading.RLock()
        self.refused: str | None = None

    def disable(self, reason: str) -> None:
        """Stop capturing, and free the spare memories."""
        self.refused = reason
        self._spares = []

    @property
    def spare_bytes(self) -> int:
        """Bytes of spare memories, which are freed on demand."""
        return sum(memory.bytes for memory in list(self._spares))

    def lend(self, make: Callable[[int, int], M], rows: int, capacity: int, weights: Iterable[Tensor]) -> M:
        """Return cleared memory for at least `rows` and `capacity`, a spare one or a new one. Its graphs are dropped if
        any of the weights has moved."""
        rounded = next_power_of_two(capacity)
        with self._lock:
            spares, self._spares = self._spares, []  # a garbage collection in here may return others
            fitting = [spare for spare in spares if spare.rows >= rows and spare.capacity >= capacity]
            memory = min(fitting, key=lambda memory: memory.rows * memory.capacity, default=None)
            if memory is not None and memory.rows * memory.capacity > _MAX_EXCESS * rows * rounded:
                memory = None
            if memory is not None:
                spares.remove(memory)
            size = sum(spare.bytes for spare in spares)
            limit = _SPARES_SHARE * (free_bytes(self._device) + size) - rows * rounded * self._slot_bytes
            while spares and size > limit:
                size -= spares.pop(0).bytes
            self._spares = [*spares, *self._spares]
        if memory is not None:
            memory.clear()
        else:
            if rows * rounded * self._slot_bytes > _ROUND_UP_SHARE * free_bytes(self._device):
                rounded = -(-capacity // _MIN_SLOTS) * _MIN_SLOTS
            memory = make(rows, rounded)
        addresses = tuple(weight.data_ptr() for weight in weights)
        if memory.weights != addresses:
            memory.graphs.clear()
            memory.weights = addresses
        return memory

    def return_when_collected(self, user: object, memory: M) -> None:
        """Return memory to the pool when its user is garbage-collected, unless its `lent` is detached before."""
        memory.lent = weakref.finalize(user, self._add_spare, memory)

    def _add_spare(self, memory: M) -> None:
        with self._lock:
            self._spares = [*self._spares, memory][-_MAX_SPARES:] if self.refused is None else []

    def capture(self, memory: M, bucket: Any, inputs: Any, forward: Callable[[], Any]) -> Graph | None:
        """Capture a forward over these inputs and store the graph in the memory. The forward must be repeatable: it
        runs twice before the capture. A RuntimeError disables graphs and returns None, unless memory ran out."""
        _of_thread.capture_count = capture_count() + 1
        try:
            # Warm-up: kernels and libraries initialise at their first calls, which cannot be captured.
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch has no types
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                forward()
                forward()
            torch.cuda.current_stream(self._device).wait_stream(stream)
            if memory.pool is None:
                memory.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory.pool, capture_error_mode="thread_local"):
                outputs = forward()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            self.disable(f"a forward could not be captured ({type(error).__name__}: {error})")
            return None
        captured = memory.graphs[bucket] = Graph(graph, inputs, outputs)
        return captured


class TargetGraphs(GraphPool[KVMemory]):
    """The CUDA graphs of one target, without a reference to it; all `layers` are on one device."""

    def __init__(self, layers: Sequence[KVLayout]) -> None:
        super().__init__(sum(layer.bytes_per_slot for layer in layers), layers[0].device)
        self._new_memory = partial(KVMemory, layers)

    def new_cache(self, rows: int, capacity: int, weights: Iterable[Tensor]) -> TreeCache:
        """Create an empty cache in pooled memory, with room for the padding of the widest bucket."""
        memory = self.lend(self._new_memory, rows, capacity + WIDTHS[-1], weights)
        cache = TreeCache.of(memory, rows)
        cache.capacity = capacity
        self.return_when_collected(cache, memory)
        return cache

    def __call__(
        self, forward: Forward, cache: TreeCache, batch: TreeBatch, aux_layers: Sequence[int]
    ) -> Outputs | None:
        """Run a tree forward as a graph; None if no bucket fits or graphs are disabled. `forward` is captured: it must
        neither synchronise nor upload."""
        memory, lengths = cache.memory, cache.lengths
        width = next((width for width in WIDTHS if width >= batch.size), None)
        if self.refused or memory is None or width is None or max(lengths) + width > memory.capacity:
            return None
        rows, seen = min(next_power_of_two(cache.rows), memory.rows), bucket_slots(max(lengths) + width, memory)
        bucket = (rows, width, seen, frozenset(aux_layers))
        cache.begin(batch.size)
        graph = memory.graphs.get(bucket)
        inputs = Inputs.empty(rows, width, self._device) if graph is None else graph.inputs
        inputs.fill(batch, cache)
        if graph is None:
            padded = TreeCache.of(memory, rows)

            def code() -> Outputs:
                padded.begin_at(inputs.lengths_B1, width, seen)
                return forward(inputs, padded, seen, frozenset(aux_layers))

            graph = self.capture(memory, bucket, inputs, code)
            if graph is None:
                return None
        graph.graph.replay()
        logits_BNV, states = graph.outputs
        # The next replay of any graph of this memory may overwrite the outputs.
        part = slice(cache.rows), slice(batch.size)
        return logits_BNV[part].clone(), {layer: state_BNE[part].clone() for layer, state_BNE in states.items()}


def bucket_slots(slots: int, memory: Memory) -> int:
    """Round visible slots up to a bucket, at most the memory's capacity."""
    return min(max(_MIN_SLOTS, next_power_of_two(slots)), memory.capacity)


def next_power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()
