"""A preallocated KV cache that takes token trees.

Each row of a batch has its own committed length. A forward writes its tokens behind that length; `commit` keeps the
accepted ones by moving them down in place, and whatever lies behind the new length is garbage that the masks hide and
the next forward overwrites. Nothing is ever padded on the left, so slot number equals position for committed tokens.

Shape suffixes: B rows, H key-value heads, C capacity in tokens, D head size, T new tokens, P accepted nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class TreeCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Keys and values of every layer, written in place.

    Args:
        shapes: per layer ((key heads, key head size), (value heads, value head size)).
        rows: batch size B.
        capacity: tokens C that a row can hold, tree nodes included.
        dtype: of keys and values.
        device: where they live.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        self.capacity = capacity
        self.lengths: list[int] = [0] * rows
        self._stores, self._places = _allocate(shapes, rows, capacity, dtype, device)
        self._new_tokens = 0

    @property
    def rows(self) -> int:
        """Batch size."""
        return len(self.lengths)

    def begin(self, new_tokens: int) -> int:
        """Announce a forward of `new_tokens` per row; returns how many slots that forward sees.

        Raises:
            RuntimeError: when a row would run over the capacity.
        """
        seen = max(self.lengths) + new_tokens
        if seen > self.capacity:
            raise RuntimeError(f"KV cache of {self.capacity} tokens cannot take {seen}.")
        self._new_tokens = new_tokens
        self._seen = seen
        self._slots_BT: Tensor | None = None
        if len(set(self.lengths)) > 1:
            lengths_B = torch.tensor(self.lengths, device=self._stores[0].device)
            self._slots_BT = lengths_B[:, None] + torch.arange(new_tokens, device=lengths_B.device)
            self._rows_B1 = torch.arange(self.rows, device=lengths_B.device)[:, None]
        return seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values [B, H, T, D]; return views of all slots in sight."""
        (key_store, key_index), (value_store, value_index) = self._places[layer_idx]
        keys = self._stores[key_store][key_index]
        values = self._stores[value_store][value_index]
        if self._slots_BT is None:
            start = self.lengths[0]
            keys[:, :, start : start + self._new_tokens] = key_states
            values[:, :, start : start + self._new_tokens] = value_states
        else:
            keys[self._rows_B1, :, self._slots_BT] = key_states.transpose(1, 2)
            values[self._rows_B1, :, self._slots_BT] = value_states.transpose(1, 2)
        return keys[:, :, : self._seen], values[:, :, : self._seen]

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, for each row, the nodes on its accepted path (indices into the last forward), in order.

        Row b grows by `len(paths[b])`; an empty path drops everything the last forward wrote for that row.
        """
        moved = [
            (row, self.lengths[row] + node, self.lengths[row] + place)
            for row, path in enumerate(paths)
            for place, node in enumerate(path)
            if node != place
        ]
        if moved:
            device = self._stores[0].device
            rows, sources, places = (torch.tensor(column, device=device) for column in zip(*moved, strict=True))
            for store in self._stores:
                # Indexing gathers a copy before the write, so overlapping moves are safe.
                store[:, rows, :, places] = store[:, rows, :, sources]
        for row, path in enumerate(paths):
            self.lengths[row] += len(path)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order: rows that have ended stop costing anything."""
        index = torch.tensor(list(rows), device=self._stores[0].device)
        self._stores = [store.index_select(1, index) for store in self._stores]
        self.lengths = [self.lengths[row] for row in rows]

    def begin_with(self, prefix: TreeCache) -> None:
        """Start every row with what the only row of another cache has committed; this one holds nothing yet."""
        (length,) = prefix.lengths
        assert not any(self.lengths) and length <= self.capacity, "an empty cache with room"
        for store, read in zip(self._stores, prefix._stores, strict=True):
            store[:, :, :, :length] = read[:, :, :, :length]
        self.lengths = [length] * self.rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens of the longest row; transformers asks, positions are always given explicitly."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """(slots in sight, offset), in the form transformers' own mask code asks for."""
        return max(self.lengths) + self._new_tokens, 0


def _allocate(
    shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]],
    rows: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[list[Tensor], list[tuple[tuple[int, int], tuple[int, int]]]]:
    """One tensor [count, B, H, C, D] per distinct shape, so that a commit is one operation for all layers."""
    order: list[tuple[int, int]] = []
    counts: dict[tuple[int, int], int] = {}
    places = []
    for pair in shapes:
        spots = []
        for shape in pair:
            if shape not in counts:
                counts[shape] = 0
                order.append(shape)
            spots.append((order.index(shape), counts[shape]))
            counts[shape] += 1
        places.append((spots[0], spots[1]))
    stores = [
        torch.zeros(counts[heads, size], rows, heads, capacity, size, dtype=dtype, device=device)
        for heads, size in order
    ]
    return stores, places
