"""Targets with linear-attention layers (Qwen3-Next, Qwen3.5), which keep a running state instead of keys and values.

Takes a chain of draft tokens per row; gives logits and hidden states like a tree forward. Every token that is read
enters the one running state, so siblings cannot share it: these targets verify chains, not trees.

A state cannot be truncated, so each linear-attention layer snapshots its state before a chain. After a rejection the
snapshots are restored, and the accepted tokens are read again ahead of the next chain, in the same forward.
Full-attention layers are truncated as usual. Every row has its own cache and forward, since padding would enter the
state.

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

from headstart.replay.attention import CHUNK, ForwardContext, activate, current_forward
from headstart.support.uploads import upload

LINEAR_ATTENTION = "linear_attention"
"""Layer type in configs."""


class Row:
    """State of one row.

    Attributes:
        cached: number of tokens in the cache.
        pending: committed tokens that the next forward reads first.
        snapshots: states of linear-attention layers before the last chain.
    """

    def __init__(self, config: Any) -> None:
        self.cache = DynamicCache(config=config)
        self.cached = 0
        self.pending: list[int] = []
        self.snapshots: dict[int, Any] = {}

    def accept(self, chain: Sequence[int], count: int) -> None:
        """Keep the pending tokens and the first `count` tokens of the last chain, if one was read."""
        if not chain:
            return
        self.cached += len(self.pending)
        if count == len(chain):
            self.cached, self.pending, self.snapshots = self.cached + count, [], {}
            return
        for number, layer in enumerate(self.cache.layers):
            if number in self.snapshots:
                self.cache.layers[number] = self.snapshots[number]
            else:
                layer.keys, layer.values = layer.keys[:, :, : self.cached], layer.values[:, :, : self.cached]
        self.pending, self.snapshots = list(chain[:count]), {}


class ChainCache:
    """Counterpart of `TreeCache` for these targets, allocated on demand. `chains` has each row's uncommitted chain."""

    def __init__(self, config: Any, rows: int) -> None:
        self._config = config
        self.row_states = [Row(config) for _ in range(rows)]
        self._check: Callable[[], None] | None = None
        self.lengths = [0] * rows
        self.chains: list[list[int]] = [[] for _ in range(rows)]

    def watch(self, check: Callable[[], None] | None) -> None:
        """See `TreeCache.watch`; called before a batch is read, and after each prefill chunk of a row."""
        self._check = check

    def check(self) -> None:
        if self._check is not None:
            self._check()

    @property
    def rows(self) -> int:
        return len(self.row_states)

    def commit(
        self, paths: Sequence[Sequence[int]], paths_BP: Tensor | None = None, counts_B: Tensor | None = None
    ) -> None:
        """See `TreeCache.commit`."""
        for number, (row, path) in enumerate(zip(self.row_states, paths, strict=True)):
            assert list(path) == list(range(len(path))), "the target reads chains"
            row.accept(self.chains[number], len(path))
            self.lengths[number] += len(path)
            self.chains[number] = []

    def forget(self) -> None:
        """Drop uncommitted chains."""
        if any(self.chains):
            self.commit([[]] * self.rows)

    def reorder(self, rows: Sequence[int]) -> None:
        self.row_states = [self.row_states[row] for row in rows]
        self.lengths, self.chains = [self.lengths[row] for row in rows], [self.chains[row] for row in rows]

    def join(self, other: ChainCache, new_cache: object, capacity: int = 0) -> ChainCache:
        """See `TreeCache.join`; the other's rows are moved, not copied."""
        self.row_states += other.row_states
        self.lengths, self.chains = self.lengths + other.lengths, self.chains + other.chains
        return self

    def grown_rows(self, rows: int, capacity: int) -> int:
        """See `TreeCache.grown_rows`; rows are moved, not copied."""
        return 0

    def slice_rows(self, start: int, stop: int) -> ChainCache:
        part = copy.copy(self)
        part.row_states, part.lengths = self.row_states[start:stop], self.lengths[start:stop]
        part.chains = self.chains[start:stop]
        return part

    def copy_row(self, row: int, length: int) -> ChainCache:
        """Copy a row if it has exactly `length` tokens, else return an empty cache: a state cannot be truncated."""
        copied = ChainCache(self._config, 1)
        if self.lengths[row] == length:
            copied.load_row(0, self.slice_rows(row, row + 1))
        return copied

    def load_row(self, row: int, other: ChainCache) -> None:
        self.row_states[row], self.lengths[row] = copy.deepcopy(other.row_states[0]), other.lengths[0]


def read_chains(
    model: Any,
    cache: ChainCache,
    rows: Sequence[Sequence[int]],
    aux_layers: Sequence[int],
    last_only: bool,
    device: torch.device,
    max_length: int,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Read a chain per row, row by row: logits [B, N, V] and aux hidden states [B, N, E]. With `last_only` the rows are
    prompts: their tokens are committed, and only the last token gets logits."""
    cache.check()
    cache.forget()
    logits, states = [], []
    for number, (row, tokens) in enumerate(zip(cache.row_states, rows, strict=True)):
        chunks = []
        size = CHUNK if last_only else len(tokens)
        for start in range(0, len(tokens), size):
            chunk = list(tokens[start : start + size])
            forward = ForwardContext(None, frozenset(aux_layers), causal=True, row=row)
            if last_only:
                forward.logits_at = upload([[0], [len(row.pending) + len(chunk) - 1]], device)
            text_1T = torch.tensor([[*row.pending, *chunk]], device=device)
            index_1T = torch.arange(row.cached, row.cached + text_1T.shape[1], device=device)[None]
            with activate(forward):
                out = model(
                    input_ids=text_1T,
                    position_ids=index_1T.clamp(max=max_length - 1),
                    past_key_values=row.cache,
                    use_cache=True,
                )
            new = slice(len(row.pending), None)
            chunks.append({layer: state[0, new].to(device) for layer, state in forward.states.items()})
            logits_TV = out.logits[0].to(device)
            if last_only:
                cache.check()
                row.accept(chunk, len(chunk))
            else:
                logits_TV = logits_TV[new]
        logits.append(logits_TV)
        states.append({layer: torch.cat([chunk[layer] for chunk in chunks]) for layer in aux_layers})
        if last_only:
            cache.lengths[number] += len(tokens)
        else:
            cache.chains[number] = list(tokens)
    padded = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return padded(logits), {layer: padded([of_row[layer] for of_row in states]) for layer in aux_layers}


def has_linear_attention(config: Any) -> bool:
    return LINEAR_ATTENTION in (getattr(config, "layer_types", None) or ())


def is_linear_attention(module: nn.Module) -> bool:
    """Whether a module is a linear-attention layer, by its convolution and cache index."""
    return hasattr(module, "conv1d") and hasattr(module, "layer_idx")


def linear_attention_forward(module: Any, hidden_states: Tensor, **more: Any) -> Tensor:
    """Run a linear-attention layer on the pending tokens, snapshot its state, then run it on the chain."""
    forward = current_forward()
    row: Row | None = None if forward is None else forward.row
    class_forward: Callable[..., Tensor] = partial(type(module).forward, module)
    # The cache argument is named `cache_params` before transformers 5.24, `cache` since.
    if row is None or all(more.get(name) is None for name in ("cache_params", "cache")):
        return class_forward(hidden_states, **more)
    pending = len(row.pending)
    outputs = [class_forward(hidden_states[:, :pending], **more)] if pending else []
    row.snapshots[module.layer_idx] = copy.deepcopy(row.cache.layers[module.layer_idx])
    return torch.cat([*outputs, class_forward(hidden_states[:, pending:], **more)], dim=1)
