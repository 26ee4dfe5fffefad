"""CUDA graphs of target forwards, which avoid launch overhead.

There is one graph per bucket: rows and visible slots in powers of two, widths of `WIDTHS`, and the captured layers.
Tokens, depths, visibility and lengths are copied to static buffers; the graph computes positions, masks and slots.
Padding nodes are computed and their outputs ignored.

Graphs need the KV cache at a fixed address, so caches borrow pooled memory and return it with its graphs. `Captures`
also serves the graphs of draft heads (see `drafters.draft_graphs`).

Shape suffixes: B rows, N nodes, of a bucket; V vocabulary, E hidden size.
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
from headstart.replay.cache import KeyMemory, LayerKeys, TreeCache
from headstart.tree.tree import TreeBatch

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Bucket widths in nodes per row; wider trees run without a graph."""
_LEAST_SEEN = 128
"""Visible slots of the smallest bucket."""
_ROOMY = 0.25
"""Round a cache up to a power of two while it takes at most this share of free memory."""
_KEPT, _KEPT_SHARE = 4, 0.1
"""Maximum spare memories (LRU), and their maximum share of free memory together with the next call's."""
_TOO_LARGE = 4
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
    def of(cls, rows: int, width: int, device: torch.device) -> Inputs:
        tokens_BN = torch.zeros(rows, width, dtype=torch.long, device=device)
        visible_BNN = torch.eye(width, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        return cls(tokens_BN, torch.zeros_like(tokens_BN), visible_BNN, torch.zeros_like(tokens_BN[:, :1]))

    def fill(self, batch: TreeBatch, cache: TreeCache) -> None:
        """Copy in a batch that fits. Leftovers of a wider batch are hidden, since no node sees a later one."""
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


def captured() -> int:
    """Captures of this thread; one-off work that round timings leave out."""
    return getattr(_of_thread, "captured", 0)


@dataclass
class Graph:
    """A captured forward with its input and output buffers."""

    graph: Any
    inputs: Any
    outputs: Any


class Captures(Generic[M]):
    """A pool of memories with their captured forwards; one slot of a row takes `slot_bytes`.

    Attributes:
        refused: why capturing has stopped, if it has.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes, self._device = slot_bytes, device
        self._spares: list[M] = []  # not in use, least recently used first
        self._lock = threading.RLock()
        self.refused: str | None = None

    def refuse(self, reason: str) -> None:
        """Stop capturing."""
        self.refused = reason
        self.forget()

    def forget(self) -> None:
        """Free the spare memories."""
        self._spares = []

    @property
    def spare_bytes(self) -> int:
        """Bytes of spare memories, which are freed on demand."""
        return sum(memory.bytes for memory in list(self._spares))

    def lend(self, make: Callable[[int, int], M], rows: int, capacity: int, weights: Iterable[Tensor]) -> M:
        """Return cleared memory for at least `rows` and `capacity`; makes it if no spare one fits. Drops its graphs if
        any of the weights has moved."""
        roomy = power(capacity)
        with self._lock:
            spares, self._spares = self._spares, []  # a garbage collection in here may return others
            fitting = [spare for spare in spares if spare.rows >= rows and spare.capacity >= capacity]
            memory = min(fitting, key=lambda memory: memory.rows * memory.capacity, default=None)
            if memory is not None and memory.rows * memory.capacity > _TOO_LARGE * rows * roomy:
                memory = None
            if memory is not None:
                spares.remove(memory)
            kept = sum(memory.bytes for memory in spares)
            most = _KEPT_SHARE * (free_bytes(self._device) + kept) - rows * roomy * self._slot_bytes
            while spares and kept > most:
                kept -= spares.pop(0).bytes
            self._spares = [*spares, *self._spares]
        if memory is not None:
            memory.clear()
        else:
            if rows * roomy * self._slot_bytes > _ROOMY * free_bytes(self._device):
                roomy = -(-capacity // _LEAST_SEEN) * _LEAST_SEEN
            memory = make(rows, roomy)
        places = tuple(weight.data_ptr() for weight in weights)
        if memory.weights != places:
            memory.graphs.clear()
            memory.weights = places
        return memory

    def until_gone(self, user: object, memory: M) -> None:
        """Return memory to the pool when its user is collected, unless its `lent` is detached before."""
        memory.lent = weakref.finalize(user, self._keep, memory)

    def _keep(self, memory: M) -> None:
        with self._lock:
            self._spares = [*self._spares, memory][-_KEPT:] if self.refused is None else []

    def capture(self, memory: M, bucket: Any, inputs: Any, forward: Callable[[], Any]) -> Graph | None:
        """Capture a forward over these inputs and keep the graph in the memory; None on failure. The forward runs twice
        before, so it must be repeatable."""
        _of_thread.captured = captured() + 1
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
            self.refuse(f"a forward could not be captured ({type(error).__name__}: {error})")
            return None
        memory.graphs[bucket] = made = Graph(graph, inputs, outputs)
        return made


class Graphs(Captures[KeyMemory]):
    """The CUDA graphs of one target, without a reference to it; all `layers` are on one device."""

    def __init__(self, layers: Sequence[LayerKeys]) -> None:
        super().__init__(sum(layer.bytes for layer in layers), layers[0].device)
        self._new_memory = partial(KeyMemory, layers)

    def new_cache(self, rows: int, capacity: int, weights: Iterable[Tensor]) -> TreeCache:
        """Create an empty cache in pooled memory, with room for the padding of the widest bucket."""
        memory = self.lend(self._new_memory, rows, capacity + WIDTHS[-1], weights)
        cache = TreeCache.of(memory, rows)
        self.until_gone(cache, memory)
        return cache

    def __call__(
        self, forward: Forward, cache: TreeCache, batch: TreeBatch, aux_layers: Sequence[int]
    ) -> Outputs | None:
        """Run `Target.forward_tree` as a graph; None if that is impossible. `forward` is captured, so it must neither
        synchronise nor upload."""
        memory, lengths = cache.memory, cache.lengths
        width = next((width for width in WIDTHS if width >= batch.size), None)
        if self.refused or memory is None or width is None or max(lengths) + width > memory.capacity:
            return None
        rows, seen = min(power(cache.rows), memory.rows), slots_in_sight(max(lengths) + width, memory)
        bucket = (rows, width, seen, frozenset(aux_layers))
        cache.begin(batch.size)
        graph = memory.graphs.get(bucket)
        inputs = Inputs.of(rows, width, self._device) if graph is None else graph.inputs
        inputs.fill(batch, cache)
        if graph is None:
            keys = TreeCache.of(memory, rows)

            def code() -> Outputs:
                keys.begin_at(inputs.lengths_B1, width, seen)
                return forward(inputs, keys, seen, frozenset(aux_layers))

            graph = self.capture(memory, bucket, inputs, code)
            if graph is None:
                return None
        graph.graph.replay()
        logits_BNV, states = graph.outputs
        # The next replay of any graph of this memory overwrites the outputs.
        part = slice(cache.rows), slice(batch.size)
        return logits_BNV[part].clone(), {layer: state_BNE[part].clone() for layer, state_BNE in states.items()}


def slots_in_sight(slots: int, memory: Memory) -> int:
    """Round up to a bucket."""
    return min(max(_LEAST_SEEN, power(slots)), memory.capacity)


def power(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()
