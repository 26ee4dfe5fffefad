"""A preallocated KV cache for token trees.

Takes the keys and values of each layer, and after verification the accepted path of each row; gives views of all
visible slots. Each row has its own committed length. A forward writes after it; `commit` moves the accepted tokens down
in place. Slots past the length hold garbage, which masks hide. There is no left padding: a committed token's slot is
its position.

Shape suffixes: B rows, H key-value heads, C capacity in tokens, D head size, T new tokens, P accepted nodes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.kernels.memory import Memory
from headstart.support.uploads import upload

_ONE_BY_ONE = 4
"""Move up to this many tokens one by one; building an index takes longer."""
Place = tuple[tuple[int, int], tuple[int, int]]
"""(store, index in the store) of a layer's keys, and of its values."""


@dataclass(frozen=True)
class KVLayout:
    """Layout of one layer's KV cache: (heads, head size) of keys and of values, dtype and device."""

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> KVLayout:
        return cls((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), keys.dtype, keys.device)

    @property
    def bytes_per_slot(self) -> int:
        return sum(heads * size for heads, size in (self.keys, self.values)) * self.dtype.itemsize


class KVMemory(Memory):
    """KV memory reused by successive caches."""

    def __init__(self, layers: Sequence[KVLayout], rows: int, capacity: int) -> None:
        super().__init__(rows, capacity)
        with torch.inference_mode(False):  # the next cache may be used outside inference mode
            self.stores, self.places = _allocate(layers, rows, capacity)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values, [B, H, C, D]."""
        keys, values = (self.stores[store][index] for store, index in self.places[number])
        return keys, values

    def write(self, number: int, rows_B1: Tensor, slots_BT: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor) -> None:
        for store, new_BHTD in zip(self.layer(number), (keys_BHTD, values_BHTD), strict=True):
            store[rows_B1, :, slots_BT] = new_BHTD.transpose(1, 2)

    def clear(self) -> None:
        for store in self.stores:
            store.zero_()


class TreeCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Keys and values of every layer, written in place.

    Args:
        capacity: in tokens per row, tree nodes included; reused memory may have more.
        keep_tokens: whether to store token ids, for targets that recompute their cache (see `Target.max_depth`).

    Attributes:
        stores: keys and values [count, B, H, C, D], one tensor per (heads, head size), dtype and device; with
            `keep_tokens`, the token ids last. Spare rows follow the rows in use.
        places: each layer's place in the stores.
    """

    def __init__(self, layers: Sequence[KVLayout], rows: int, capacity: int, keep_tokens: bool = False) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.lengths: list[int] = [0] * rows
        self.stores, self.places = _allocate(layers, rows, capacity)
        if keep_tokens:  # one more store, so that they are committed, moved and selected like keys
            where = self.stores[0].device
            self.stores.append(torch.zeros(1, rows, 1, capacity, 1, dtype=torch.long, device=where))
        self.memory: KVMemory | None = None
        self._new_tokens = 0
        self._check: Callable[[], None] | None = None
        self._ragged = False
        self._new: list[tuple[Tensor, ...]] = []
        self._visible: list[tuple[Tensor, ...]] = []
        self._slots: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._device_lengths: dict[torch.device, tuple[list[int], Tensor]] = {}

    @classmethod
    def of(cls, memory: KVMemory, rows: int) -> TreeCache:
        """Create a cache on reused memory."""
        cache = cls((), rows, memory.capacity)
        cache.memory, cache.places, cache.stores = memory, memory.places, memory.stores
        return cache

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def watch(self, check: Callable[[], None] | None) -> None:
        """Call `check` before each forward; its exception aborts the forward."""
        self._check = check

    def begin(self, new_tokens: int) -> None:
        """Prepare a forward of `new_tokens` per row."""
        if self._check is not None:
            self._check()
        seen = max(self.lengths) + new_tokens
        if seen > self.capacity:
            raise RuntimeError(f"KV cache of {self.capacity} tokens cannot take {seen}.")
        self._new_tokens = new_tokens
        self._seen = seen
        self._ragged, self._slots = len(set(self.lengths)) > 1, {}
        self._new, self._visible = [], []

    def begin_at(self, lengths_B1: Tensor, new_tokens: int, seen: int) -> None:
        """Prepare a forward after `lengths_B1` tokens of each row, with `seen` visible slots."""
        self._new_tokens, self._seen, self._ragged = new_tokens, seen, True
        slots_BT = lengths_B1 + torch.arange(new_tokens, device=lengths_B1.device)
        self._slots = {lengths_B1.device: (torch.arange(self.rows, device=lengths_B1.device)[:, None], slots_BT)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values [B, H, T, D]; return views of all visible slots."""
        (key_store, key_index), (value_store, value_index) = self.places[layer_idx]
        if not self._ragged:
            if not self._new:  # one view of all layers, unbound, is faster than views of each
                first, seen, rows = self._seen - self._new_tokens, self._seen, self.rows
                self._new = [store[:, :rows, :, first:seen].unbind() for store in self.stores]
                self._visible = [store[:, :rows, :, :seen].unbind() for store in self.stores]
            self._new[key_store][key_index].copy_(key_states)
            self._new[value_store][value_index].copy_(value_states)
            return self._visible[key_store][key_index], self._visible[value_store][value_index]
        keys = self.stores[key_store][key_index]
        values = self.stores[value_store][value_index]
        rows_B1, slots_BT = self._rows_and_slots(keys.device)
        keys[rows_B1, :, slots_BT] = key_states.transpose(1, 2)
        values[rows_B1, :, slots_BT] = value_states.transpose(1, 2)
        return keys[: self.rows, :, : self._seen], values[: self.rows, :, : self._seen]

    def write_tokens(self, tokens_BT: Tensor) -> None:
        """Write the token ids of this forward, for `committed_tokens`."""
        store_BC = self.stores[-1][0, :, 0, :, 0]
        rows_B1, slots_BT = self._rows_and_slots(store_BC.device)
        store_BC[rows_B1, slots_BT] = tokens_BT.to(store_BC.device)

    def committed_tokens(self, row: int) -> Tensor:
        """Return the committed tokens of a row, [1, T]."""
        return self.stores[-1][0, row, 0, : self.lengths[row], 0][None]

    def _rows_and_slots(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._slots:
            slots_BT = self.lengths_B1(device) + torch.arange(self._new_tokens, device=device)
            self._slots[device] = torch.arange(self.rows, device=device)[:, None], slots_BT
        return self._slots[device]

    def commit(
        self, paths: Sequence[Sequence[int]], paths_BP: Tensor | None = None, counts_B: Tensor | None = None
    ) -> None:
        """Keep each row's accepted path (node indices of the last forward, in order); an empty path drops them all.
        Optional device copies save uploads: `paths_BP`, padded with any node, and the path lengths `counts_B`."""
        moved = [
            (row, self.lengths[row] + node, self.lengths[row] + index)
            for row, path in enumerate(paths)
            for index, node in enumerate(path)
            if node != index
        ]
        if moved and paths_BP is not None and paths_BP.device.type != "cpu":
            # Padding moves garbage to slots past the new length.
            starts_B1 = self.lengths_B1(paths_BP.device)
            index_BP = starts_B1 + torch.arange(paths_BP.shape[1], device=paths_BP.device)
            for store in self.stores:
                sources = (starts_B1 + paths_BP).to(store.device)
                rows_B1 = torch.arange(self.rows, device=store.device)[:, None]
                store[:, rows_B1, :, index_BP.to(store.device)] = store[:, rows_B1, :, sources]
        elif 0 < len(moved) <= _ONE_BY_ONE:
            # In order, no move overwrites the source of a later one.
            for store in self.stores:
                for row, source, index in moved:
                    store[:, row, :, index] = store[:, row, :, source]
        elif moved:
            columns = torch.tensor(moved).T
            placed = {device: upload(columns, device) for device in {store.device for store in self.stores}}
            for store in self.stores:
                rows, sources, indices = placed[store.device]
                # Indexing gathers a copy before the write, so overlapping moves are safe.
                store[:, rows, :, indices] = store[:, rows, :, sources]
        known = None if counts_B is None else self._device_lengths.get(counts_B.device)
        device_lengths_valid = known is not None and known[0] == self.lengths
        for row, path in enumerate(paths):
            self.lengths[row] += len(path)
        if device_lengths_valid and known is not None and counts_B is not None:
            self._device_lengths[counts_B.device] = list(self.lengths), known[1] + counts_B[:, None]

    def lengths_B1(self, device: torch.device) -> Tensor:
        """Return committed lengths, int64 [B, 1], or [1, 1] if all are equal. They stay on the device across commits
        with `counts_B`."""
        if len(set(self.lengths)) == 1:
            return torch.full((1, 1), self.lengths[0], device=device)
        known = self._device_lengths.get(device)
        if known is None or known[0] != self.lengths:
            self._device_lengths[device] = known = list(self.lengths), upload(self.lengths, device)[:, None]
        return known[1]

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in ascending order. Moves them down in place, since memory is sized for one cache."""
        assert list(rows) == sorted(set(rows)), "rows move down, never up"
        for row, source in enumerate(rows):
            if row != source:
                self._take_row(row, self, source)
        del self.lengths[len(rows) :]

    def join(self, other: TreeCache, new_cache: Callable[[int, int], TreeCache], capacity: int = 0) -> TreeCache:
        """Return a cache of at least this capacity with the other's rows after its own: this cache if its memory has
        room, else a copy with at least twice the rows."""
        cache, rows, capacity = self, self.rows + other.rows, max(self.capacity, other.capacity, capacity)
        if grown := self.grown_rows(rows, capacity):
            cache = self._copy_into(new_cache(grown, capacity))
        cache.capacity = capacity
        for row in range(other.rows):
            cache.lengths.append(0)
            cache._take_row(cache.rows - 1, other, row)
        return cache

    def grown_rows(self, rows: int, capacity: int) -> int:
        """Return the rows of the copy that a join to this size allocates; 0 if the allocation has room."""
        has_room = rows <= self.stores[0].shape[1] and capacity <= self.stores[0].shape[3]
        return 0 if has_room else max(rows, 2 * self.rows)

    def _take_row(self, row: int, other: TreeCache, source: int) -> None:
        """Copy a row into the place of an ended one. A NaN that it left there would pass through masks, so zero it."""
        self.load_row(row, other, source)
        for store in self.stores:
            store[:, row, :, self.lengths[row] :] = 0

    def slice_rows(self, start: int, stop: int) -> TreeCache:
        """Return a view of some rows. It has its own lengths, which the caller copies back after a commit."""
        part = copy.copy(self)
        part.stores = [store[:, start:stop] for store in self.stores]
        part.lengths = self.lengths[start:stop]
        part._device_lengths, part.memory = {}, None
        return part

    def with_room(self, needed: int, new_cache: Callable[[int, int], TreeCache]) -> TreeCache:
        """Return this cache if it fits `needed` tokens, else a copy with a capacity of 2 * `needed`."""
        if needed <= self.stores[0].shape[3]:
            self.capacity = max(self.capacity, needed)
            return self
        return self._copy_into(new_cache(self.rows, 2 * needed))

    def _copy_into(self, larger: TreeCache) -> TreeCache:
        larger._check, larger.lengths = self._check, [0] * self.rows
        for row in range(self.rows):
            larger.load_row(row, self, row)
        return larger

    def copy_row(self, row: int, length: int) -> TreeCache:
        """Copy the first `length` tokens of a row into memory of its own."""
        copied = self.slice_rows(row, row + 1)
        copied.stores = [store[:, :, :, :length].clone() for store in copied.stores]
        copied.capacity, copied.lengths = length, [length]
        return copied

    def load_row(self, row: int, other: TreeCache, source: int = 0) -> None:
        """Copy a row of another cache into a row."""
        length = self.lengths[row] = other.lengths[source]
        for store, other_store in zip(self.stores, other.stores, strict=True):
            store[:, row, :, :length] = other_store[:, source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return (visible slots, offset), for transformers."""
        return max(self.lengths) + self._new_tokens, 0


def _allocate(layers: Sequence[KVLayout], rows: int, capacity: int) -> tuple[list[Tensor], list[Place]]:
    """Allocate one tensor [count, B, H, C, D] for all keys and values of equal (heads, head size), dtype and device, so
    that a commit is one operation for all of them."""
    counts: Counter[tuple[int, int, torch.dtype, torch.device]] = Counter()
    places = []
    for layer in layers:
        place = []
        for heads, size in (layer.keys, layer.values):
            kind = (heads, size, layer.dtype, layer.device)
            place.append((kind, counts[kind]))
            counts[kind] += 1
        places.append(place)
    order = list(counts)
    stores = [
        torch.zeros(count, rows, heads, capacity, size, dtype=dtype, device=device)
        for (heads, size, dtype, device), count in counts.items()
    ]
    return stores, [((order.index(keys[0]), keys[1]), (order.index(values[0]), values[1])) for keys, values in places]
