"""Targets with linear-attention layers (Qwen3-Next, Qwen3.5), which keep a running state instead of keys and values.

Such a state holds the whole text and cannot be cut back, so these targets verify chains, not trees. Before a chain is
read, each linear layer keeps a copy of its state. Where a part of the chain is rejected, the copies come back, and the
tokens that were accepted are read once more ahead of the next chain, in the same forward; the copies are then made
between the two. Full-attention layers are cut back as usual. Every row has a cache of its own and is read by itself,
since padding would run into the state.

Shape suffixes: B rows, N nodes of the longest chain, T tokens of one forward, V vocabulary, E hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from headstart.support.uploads import upload
from headstart.target.attention import PIECE, Running, run, running

LINEAR = "linear_attention"
"""Kind of the layers in question, as configs name it."""


class Row:
    """What one row of a batch has read: the cache of all layers, how many tokens of the text it holds, committed ones
    after these that it reads ahead of the next chain, and states of linear layers as before the last chain."""

    def __init__(self, config: Any) -> None:
        self.cache = DynamicCache(config=config)
        self.held = 0
        self.pending: list[int] = []
        self.copies: dict[int, Any] = {}
        self.check: Callable[[], None] | None = None

    def keep(self, layer: int) -> None:
        self.copies[layer] = copy.deepcopy(self.cache.layers[layer])

    def accept(self, chain: Sequence[int], count: int) -> None:
        """Keep the first tokens of the chain that was read last, after what was pending; nothing where none was."""
        if self.check is not None:
            self.check()
        if not chain:
            return
        self.held += len(self.pending)
        if count == len(chain):
            self.held, self.pending, self.copies = self.held + count, [], {}
            return
        for number, layer in enumerate(self.cache.layers):
            if number in self.copies:
                self.cache.layers[number] = self.copies[number]
            else:
                layer.keys, layer.values = layer.keys[:, :, : self.held], layer.values[:, :, : self.held]
        self.pending, self.copies = list(chain[:count]), {}


class ChainCache:
    """Caches of a batch; for the decode loop what `TreeCache` is for other targets. Nothing is allocated ahead.

    `chains` are what each row read last, to be committed.
    """

    def __init__(self, config: Any, rows: int) -> None:
        self._config = config
        self.rows_B = [Row(config) for _ in range(rows)]
        self._check: Callable[[], None] | None = None
        self.lengths = [0] * rows
        self.chains: list[list[int]] = [[] for _ in range(rows)]

    def watch(self, check: Callable[[], None]) -> None:
        """See `TreeCache.watch`; called after each piece of a text, which a row accepts, and before each chain."""
        self._check = check
        for row in self.rows_B:
            row.check = check

    @property
    def rows(self) -> int:
        return len(self.rows_B)

    def commit(
        self, paths: Sequence[Sequence[int]], paths_BP: Tensor | None = None, counts_B: Tensor | None = None
    ) -> None:
        """Keep so many tokens of each row's chain; see `TreeCache.commit`."""
        for number, (row, path) in enumerate(zip(self.rows_B, paths, strict=True)):
            assert list(path) == list(range(len(path))), "the target reads chains"
            row.accept(self.chains[number], len(path))
            self.lengths[number] += len(path)
            self.chains[number] = []

    def forget(self) -> None:
        """Drop what was read and never committed."""
        if self._check is not None:
            self._check()
        if any(self.chains):
            self.commit([[]] * self.rows)

    def reorder(self, rows: Sequence[int]) -> None:
        self.rows_B = [self.rows_B[row] for row in rows]
        self.lengths, self.chains = [self.lengths[row] for row in rows], [self.chains[row] for row in rows]

    def part(self, start: int, stop: int) -> ChainCache:
        part = copy.copy(self)
        part.rows_B, part.lengths = self.rows_B[start:stop], self.lengths[start:stop]
        part.chains = self.chains[start:stop]
        return part

    def kept(self, row: int, length: int) -> ChainCache:
        """What a row has committed, in memory of its own; nothing where that is more than `length` tokens."""
        alone = ChainCache(self._config, 1)
        if self.lengths[row] == length:
            alone.go_on_with(0, self.part(row, row + 1))
        return alone

    def go_on_with(self, row: int, other: ChainCache) -> None:
        kept = copy.copy(other.rows_B[0])
        kept.check = None  # it belongs to the call that read the row, and to what that call is part of
        self.rows_B[row], self.lengths[row] = copy.deepcopy(kept), other.lengths[0]
        self.rows_B[row].check = self._check


def read_chains(
    model: Any,
    cache: ChainCache,
    rows: Sequence[Sequence[int]],
    aux_layers: Sequence[int],
    last_only: bool,
    device: torch.device,
    max_length: int,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Read a chain for each row, one row after the other: logits [B, N, V] after each token, and aux hidden states
    [B, N, E]. With `last_only` these are texts: they are committed, and logits come after the last token of each
    alone."""
    cache.forget()
    logits, states = [], []
    for number, (row, tokens) in enumerate(zip(cache.rows_B, rows, strict=True)):
        pieces = []
        size = PIECE if last_only else len(tokens)
        for start in range(0, len(tokens), size):
            piece = list(tokens[start : start + size])
            forward = Running(None, frozenset(aux_layers), causal=True, row=row)
            if last_only:
                row_1, index_1 = upload([[0], [len(row.pending) + len(piece) - 1]], device)
                forward.wanted = row_1, index_1
            text_1T = torch.tensor([[*row.pending, *piece]], device=device)
            index_1T = torch.arange(row.held, row.held + text_1T.shape[1], device=device)[None]
            with run(forward):
                out = model(
                    input_ids=text_1T,
                    position_ids=index_1T.clamp(max=max_length - 1),
                    past_key_values=row.cache,
                    use_cache=True,
                )
            new = slice(len(row.pending), None)
            pieces.append({layer: state[0, new].to(device) for layer, state in forward.captured.items()})
            logits_TV = out.logits[0].to(device)
            if last_only:
                row.accept(piece, len(piece))
            else:
                logits_TV = logits_TV[new]
        logits.append(logits_TV)
        states.append({layer: torch.cat([piece[layer] for piece in pieces]) for layer in aux_layers})
        if last_only:
            cache.lengths[number] += len(tokens)
        else:
            cache.chains[number] = list(tokens)
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return padded(logits), {layer: padded([of_row[layer] for of_row in states]) for layer in aux_layers}


def has_running_states(config: Any) -> bool:
    """Whether layers of a model have linear attention."""
    return LINEAR in (getattr(config, "layer_types", None) or ())


def is_linear(module: nn.Module) -> bool:
    """Whether a module is the linear attention of a layer: it convolves and knows its place in the cache."""
    return hasattr(module, "conv1d") and hasattr(module, "layer_idx")


def read_in_turn(module: Any, hidden_states: Tensor, **more: Any) -> Tensor:
    """Linear attention in a forward of ours: first what is pending, then, with a copy of the state made, the chain."""
    forward = running()
    row: Row | None = None if forward is None else forward.row
    forward_of_class = type(module).forward
    # What transformers called the cache before 5.24, and since.
    cached = any(more.get(name) is not None for name in ("cache_params", "cache"))
    if row is None or not cached:
        out: Tensor = forward_of_class(module, hidden_states, **more)
        return out
    before = len(row.pending)
    parts = [part for part in (hidden_states[:, :before], hidden_states[:, before:]) if part.shape[1]]
    if before:
        parts[0] = forward_of_class(module, parts[0], **more)
    row.keep(module.layer_idx)
    parts[-1] = forward_of_class(module, parts[-1], **more)
    return torch.cat(parts, dim=1)
