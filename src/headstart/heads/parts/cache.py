"""KV cache of draft layers, and attention over it.

Shape suffixes: B rows, T tokens, W nodes, K further slots, F fields of an entry, S cache slots, N key heads, G query
heads per key head, d head size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.heads.parts.graphed import IntArray
from headstart.heads.parts.layer import LayerConfig
from headstart.kernels.draft_kernels import FIELDS
from headstart.replay.attention import causal_attention
from headstart.replay.cache import KVLayout, KVMemory
from headstart.support.uploads import upload

WriteKV = Callable[[int, Tensor, Tensor], None]
"""Function that writes a layer's new keys and values."""
_SPARE = 256
"""Initial cache slots beyond the prompt."""
_QUERIES = 512
"""Queries per chunk of masked attention: each mask row is as long as the text."""


@dataclass(frozen=True)
class Entries:
    """Slots and visible ranges of new cache entries: a draft level, or pending text.

    Attributes:
        fields: flat fields of each entry: row, cache slot (consecutive in a row), rotary position, length of the
            visible prefix, and K further visible slots.
        shape: (B, W, F) of `fields`.
        stop: required number of slots.
        last: the only entry of each row that the last layer queries; None for all.
    """

    fields: array[int]
    shape: tuple[int, int, int]
    stop: int
    last: array[int] | None = None

    @classmethod
    def of_text(cls, lengths: Sequence[int], width: int, last: Sequence[int] | None = None) -> Entries:
        """Return the next entries of each row, causally masked."""
        texts = (range(length, length + width) for length in lengths)
        entries = [[(row, slot, slot, slot + 1) for slot in text] for row, text in enumerate(texts)]
        return cls.of(entries, None if last is None else array("q", last))

    @classmethod
    def of(cls, entries: Sequence[Sequence[Sequence[int]]], last: array[int] | None = None) -> Entries:
        """Build from the fields of each entry, by row."""
        fields = array("q", chain.from_iterable(chain.from_iterable(entries)))
        shape = (len(entries), len(entries[0]), len(entries[0][0]))
        return cls(fields, shape, 1 + max(row[-1][1] for row in entries), last)

    @property
    def fields_BWF(self) -> IntArray:
        return np.frombuffer(self.fields, dtype=np.int64).reshape(self.shape)

    @property
    def slots_BW(self) -> IntArray:
        return self.fields_BWF[..., 1]

    @property
    def further_BWK(self) -> IntArray:
        return self.fields_BWF[..., FIELDS:]

    def allowed(self, device: torch.device) -> Tensor | None:
        """Return the mask of visible slots, bool [B, W, S]; None for all."""
        rows, width, further = self.further_BWK.shape
        if rows == width == 1 and int(self.fields_BWF[0, 0, 3]) + further == self.stop:
            return None
        visible_BWX = upload(torch.from_numpy(self.fields_BWF[..., 3:]), device)
        slots_S = torch.arange(self.stop, device=device)
        return (slots_S < visible_BWX[..., :1]).scatter_(2, visible_BWX[..., 1:], True)


class LayerCache:
    """Keys and values of committed tokens (`lengths` per row), followed by the current tree's, and by spare rows. The C
    kernels write no keys of own-position heads: zeros have a negligible score."""

    def __init__(self, config: LayerConfig, layers: int, rows: int, prompt: int, like: Tensor) -> None:
        shape = (rows, config.num_key_value_heads, prompt + _SPARE, config.head_dim)
        self.kv = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers)]
        self.lengths = [0] * rows

    @staticmethod
    def layers_like(config: LayerConfig, layers: int, like: Tensor) -> list[KVLayout]:
        """Return the layout for `KVMemory`."""
        kind = (config.num_key_value_heads, config.head_dim)
        return [KVLayout(kind, kind, like.dtype, like.device)] * layers

    @staticmethod
    def bytes_per_token(config: LayerConfig, layers: int, item: int) -> int:
        """Return the bytes per token of a row of `item`-byte elements, with `reserve`'s twofold over-allocation."""
        return 2 * 2 * layers * config.num_key_value_heads * config.head_dim * item

    def move(self, memory: KVMemory) -> None:
        """Move to this memory, which must be large enough."""
        used = slice(len(self.lengths)), slice(None), slice(max(self.lengths))
        moved = [memory.layer(number) for number in range(len(self.kv))]
        for store, own in zip(chain.from_iterable(moved), chain.from_iterable(self.kv), strict=True):
            store[used] = own[used]
        self.kv = moved

    def reserve(self, slots: int, rows: int = 0) -> bool:
        """Make room by doubling; return whether there was room."""
        sizes = zip((slots, rows), (self.kv[0][0].shape[2], self.kv[0][0].shape[0]), strict=True)
        more = [max(needed, 2 * size) - size if needed > size else 0 for needed, size in sizes]
        if any(more):
            padding = (0, 0, 0, more[0], 0, 0, 0, more[1])
            self.kv = [(F.pad(keys, padding), F.pad(values, padding)) for keys, values in self.kv]
        return not any(more)

    def put(self, starts: Sequence[int], layer: int, keys_BNTd: Tensor, values_BNTd: Tensor) -> None:
        """Write at each row's slots `starts`, `starts` + 1, ..."""
        (keys, values), width, device = self.kv[layer], keys_BNTd.shape[2], keys_BNTd.device
        if len(set(starts)) == 1:
            place = slice(len(starts)), slice(None), slice(starts[0], starts[0] + width)
            keys[place], values[place] = keys_BNTd, values_BNTd
            return
        rows_B1 = torch.arange(len(starts), device=device)[:, None]
        slots_BT = upload(starts, device)[:, None] + torch.arange(width, device=device)
        keys[rows_B1, :, slots_BT] = keys_BNTd.transpose(1, 2)
        values[rows_B1, :, slots_BT] = values_BNTd.transpose(1, 2)

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows (ascending), moved down in place as in `TreeCache.reorder`."""
        assert list(rows) == sorted(set(rows)), "rows move down, never up"
        for row, source in enumerate(rows):
            if row != source:
                self._take_row(row, self, source)
        del self.lengths[len(rows) :]

    def join(self, other: LayerCache) -> bool:
        """Append the rows of another cache; return whether there was room."""
        had_room = self.reserve(max(other.lengths), len(self.lengths) + len(other.lengths))
        for source in range(len(other.lengths)):
            self.lengths.append(0)
            self._take_row(len(self.lengths) - 1, other, source)
        return had_room

    def _take_row(self, row: int, other: LayerCache, source: int) -> None:
        """See `TreeCache._take_row`."""
        length = self.lengths[row] = other.lengths[source]
        for store, read in zip(chain.from_iterable(self.kv), chain.from_iterable(other.kv), strict=True):
            store[row, :, :length], store[row, :, length:] = read[source, :, :length], 0


def cached_attention(
    queries_BNGWd: Tensor, kv: tuple[Tensor, Tensor], slots: int, allowed_BWS: Tensor | None
) -> Tensor:
    """Attend over the first `slots` slots of a cache, which may have more rows, [B, N, G, W, d]. Queries that share a
    key head are rows of one attention, which avoids copies of keys and values."""
    shape = queries_BNGWd.shape
    mask = None
    if allowed_BWS is not None:
        if shape[3] > _QUERIES:
            parts = zip(torch.split(queries_BNGWd, _QUERIES, 3), torch.split(allowed_BWS, _QUERIES, 1), strict=True)
            return torch.cat([cached_attention(queries, kv, slots, allowed) for queries, allowed in parts], dim=3)
        mask = torch.zeros(allowed_BWS.shape, dtype=queries_BNGWd.dtype, device=allowed_BWS.device)
        mask = mask.masked_fill_(~allowed_BWS, float("-inf"))[:, None].repeat(1, 1, shape[2], 1)
    keys, values = (cached[: shape[0], :, :slots] for cached in kv)
    attention_output = F.scaled_dot_product_attention(queries_BNGWd.flatten(2, 3), keys, values, attn_mask=mask)
    return attention_output.view(shape)


def text_attention(
    queries_BNGWd: Tensor, kv: tuple[Tensor, Tensor], slots: int, index_BW: Tensor, starts: Sequence[int]
) -> Tensor:
    """Causal `cached_attention` of text entries, written from `starts` on and visible up to `index_BW`. Mask memory is
    linear in the text."""
    width = queries_BNGWd.shape[3]
    same_start = len(set(starts)) == 1
    if same_start and starts[0] + width == slots and width == 1:
        return cached_attention(queries_BNGWd, kv, slots, None)
    if same_start and width > _QUERIES:
        keys, values = (cached[: len(starts), :, :slots] for cached in kv)
        return causal_attention(queries_BNGWd.flatten(1, 2), keys, values).view(queries_BNGWd.shape)
    slots_S = torch.arange(slots, device=index_BW.device)
    parts = [
        cached_attention(queries, kv, slots, slots_S <= last_BC[:, :, None])
        for queries, last_BC in zip(
            torch.split(queries_BNGWd, _QUERIES, 3), torch.split(index_BW, _QUERIES, 1), strict=True
        )
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
