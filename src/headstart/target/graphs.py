"""Forwards on a GPU as CUDA graphs: one launch runs all operators of a forward, over buffers at fixed addresses.

A small forward is over before the host has launched its next operator; a graph leaves that to the device. A graph has
fixed shapes, so there is one for each bucket: rows and slots in sight in powers of two, widths of `WIDTHS`, and the
layers whose states are wanted. Tokens, depths, visibility and lengths are filled into its buffers; positions, masks and
slots are computed from them inside of it. What fills a bucket up is read like a node, and never looked at.

Keys and values stay where a graph found them: a cache is lent memory, which comes back with its graphs, so that the
next call captures nothing. Some memories are kept, for requests that run at once and for lengths that alternate.
`Captures` is shared with graphs of other forwards, such as those of draft heads (see `drafters.captured`).

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
from headstart.target.cache import KeyMemory, LayerKeys, TreeCache
from headstart.target.memory import Memory, free_bytes
from headstart.tree.tree import TreeBatch

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
"""Nodes of a row that buckets have; wider trees run without a graph."""
_LEAST_SEEN = 128
"""Slots that the smallest bucket has in sight: a fresh text does not pass through many."""
_ROOMY = 0.25
"""Share of the free memory up to which a cache may be larger than asked for, so that it serves the next call."""
_KEPT, _KEPT_SHARE = 4, 0.1
"""Memories that are kept for later calls at most, and the share of the free memory that they may take with the next
call's. The least recently used one goes first."""
_TOO_LARGE = 4
"""How many times as large as asked for a memory may be that serves again."""

M = TypeVar("M", bound=Memory)
In = TypeVar("In")
T = TypeVar("T")

Outputs = tuple[Tensor, dict[int, Tensor]]
"""Logits [B, N, V] and states [B, N, E] by layer."""


@dataclass
class Inputs:
    """The buffers that a graph reads. Nodes that nobody filled see themselves; rows have a length of before, or 0."""

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
        """Put in a batch of at most as many rows and nodes. No node sees a later one, so that what a wider batch left
        behind is not seen."""
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
"""Runs the operators over `Inputs`, with a cache, so many slots in sight, and these layers' states wanted."""


_of_thread = threading.local()


def captured() -> int:
    """How many forwards this thread has captured: work that is done once, and no part of what a round takes."""
    return getattr(_of_thread, "captured", 0)


@dataclass
class Graph(Generic[In, T]):
    """A captured forward, the buffers that it reads, and what a replay gives."""

    graph: Any
    inputs: In
    outputs: T


class Captures(Generic[M]):
    """Forwards that are captured, and the memory that their graphs know.

    Args:
        slot_bytes: what one slot of a row takes.

    Attributes:
        refused: why nothing is captured any more; None while all went well.
    """

    def __init__(self, slot_bytes: int, device: torch.device) -> None:
        self._slot_bytes, self._device = slot_bytes, device
        self._spares: list[M] = []  # not in use, least recently used first
        self._lock = threading.RLock()
        self.refused: str | None = None

    def refuse(self, reason: str) -> None:
        """Capture nothing any more."""
        self.refused = reason
        self.forget()

    def forget(self) -> None:
        """Free the memories that are kept for later texts."""
        self._spares = []

    @property
    def spare_bytes(self) -> int:
        """Bytes of the memories that are kept for later texts, and freed where the next one needs them."""
        return sum(memory.bytes for memory in list(self._spares))

    def lend(self, make: Callable[[int, int], M], rows: int, capacity: int, weights: Iterable[Tensor]) -> M:
        """Return memory for at least these rows and slots, cleared; `make` allocates it if no kept one fits. Its graphs
        are dropped once any of these weights has moved."""
        roomy = power(capacity)
        with self._lock:
            spares, self._spares = self._spares, []  # a garbage collection in here may return others
            fitting = [
                memory
                for memory in spares
                if memory.rows >= rows
                and memory.capacity >= capacity
                and memory.rows * memory.capacity <= _TOO_LARGE * rows * roomy
            ]
            memory = min(fitting, key=lambda memory: memory.rows * memory.capacity, default=None)
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
        """Have memory come back when its user is gone, unless its `lent` is detached before."""
        memory.lent = weakref.finalize(user, self._keep, memory)

    def _keep(self, memory: M) -> None:
        with self._lock:
            self._spares = [*self._spares, memory][-_KEPT:] if self.refused is None else []

    def capture(self, memory: M, bucket: Any, inputs: In, forward: Callable[[], T]) -> Graph[In, T] | None:
        """The graph of a forward over these inputs, which is in the memory from then on; None where there can be none.
        The forward runs twice before, and must give the same again."""
        _of_thread.captured = captured() + 1
        try:
            # Kernels and libraries set themselves up at their first calls, which no graph can hold.
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch has no types
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                forward()
                forward()
            torch.cuda.current_stream(self._device).wait_stream(stream)
            if memory.pool is None:
                memory.pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
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
    """The CUDA graphs of one target, which they do not keep alive; `layers` is what its layers keep, all on one
    device."""

    def __init__(self, layers: Sequence[LayerKeys]) -> None:
        super().__init__(sum(layer.bytes for layer in layers), layers[0].device)
        self._new_memory = partial(KeyMemory, layers)

    def new_cache(self, rows: int, capacity: int, weights: Iterable[Tensor]) -> TreeCache:
        """An empty cache in memory that graphs can know; there is room to fill up the widest bucket."""
        memory = self.lend(self._new_memory, rows, capacity + WIDTHS[-1], weights)
        cache = TreeCache.of(memory, rows)
        self.until_gone(cache, memory)
        return cache

    def __call__(
        self, forward: Forward, cache: TreeCache, batch: TreeBatch, aux_layers: Sequence[int]
    ) -> Outputs | None:
        """Read a tree, as `Target.forward_tree` does; None where no graph can. What is captured is `forward`, which
        must neither wait for the device nor send it anything."""
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
        # The next replay of any graph of this memory writes over them.
        part = slice(cache.rows), slice(batch.size)
        return logits_BNV[part].clone(), {layer: state_BNE[part].clone() for layer, state_BNE in states.items()}


def slots_in_sight(slots: int, memory: Memory) -> int:
    """Of the bucket for so many."""
    return min(max(_LEAST_SEEN, power(slots)), memory.capacity)


def power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()
