"""Who continues texts where data is written: the target in this process (`in_process`), or servers (`servers`).

What is kept of their rows: hidden states for training, and KV caches for the next turn.

Shape suffixes: B rows, T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from headstart.target.cache import TreeCache
from headstart.target.memory import free_bytes
from headstart.target.model import Target

_TURN_SHARE = 0.01
"""Of free memory, what the keys and values of one conversation may take that waits for its next turn."""
_STATES_SHARE = 0.05
"""Of free memory, what the hidden states of a batch may take."""


class RowStates:
    """Hidden states of rows that are written, kept as they are computed: `of_row` has them by row and layer, [T, E]."""

    def __init__(self, aux_layers: Sequence[int]) -> None:
        self.aux_layers = tuple(aux_layers)
        self.of_row: dict[int, dict[int, Tensor]] = {}
        self._batch: dict[int, Tensor] = {}

    def fit(self, target: Target, rows: int, length: int) -> bool:
        """Whether memory has room for those of a batch. On a GPU each step would wait for them to be copied."""
        if target.device.type != "cpu":
            return False
        size = rows * length * len(self.aux_layers) * target.hidden_size * target.dtype.itemsize
        return size <= _STATES_SHARE * free_bytes(target.device)

    def begin(self, target: Target, rows: int, length: int) -> None:
        shape = (rows, length, target.hidden_size)
        self._batch = {layer: torch.zeros(shape, dtype=target.dtype) for layer in self.aux_layers}

    def add(self, rows: Sequence[int], starts: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Note states [B, T, E] of rows of the batch, from an index of each on."""
        width = next(iter(states.values())).shape[1]
        rows_B1 = torch.tensor(list(rows))[:, None]
        index_BT = torch.tensor(list(starts))[:, None] + torch.arange(width)
        for layer, batch_BTE in self._batch.items():
            batch_BTE[rows_B1, index_BT] = states[layer].to(batch_BTE)

    def end(self, numbers: Sequence[int], lengths: Sequence[int]) -> None:
        """Take over what the batch has given, of rows with these numbers among all."""
        for row, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            self.of_row[number] = {layer: batch_BTE[row, :length] for layer, batch_BTE in self._batch.items()}
        self._batch = {}


class TurnCaches:
    """KV caches of conversations, kept from one turn to the next, so that no text is read twice."""

    def __init__(self) -> None:
        self._conversations: list[int] = []
        self._wanted: set[int] = set()
        self._caches: dict[int, TreeCache] = {}
        self._states: dict[int, Mapping[int, Tensor]] = {}

    def begin(self, rows: Sequence[tuple[int, bool, Mapping[int, Tensor]]]) -> None:
        """The next turn: for each row the number of its conversation, whether another turn may follow, and the hidden
        states of its text so far, empty where they are not known."""
        self._conversations = [number for number, _, _ in rows]
        self._wanted = {number for number, more, _ in rows if more}
        self._states = {number: states for number, _, states in rows if states}
        self._caches = {number: self._caches[number] for number in self._conversations if number in self._caches}

    def take(self, row: int, with_states: bool) -> tuple[TreeCache, Mapping[int, Tensor]] | None:
        """What was read of a row's conversation, which is then kept no longer; None where it has to be read."""
        number = self._conversations[row]
        states = self._states.get(number, {})
        if number not in self._caches or (with_states and not states):
            return None
        return self._caches.pop(number), states

    def keep(self, target: Target, row: int, cache: TreeCache, *, index: int, length: int) -> None:
        """Keep what a cache holds of a row that has ended, if another turn may follow and memory has room."""
        number, size = self._conversations[row], length * target.kv_bytes_per_token
        if number in self._wanted and size <= _TURN_SHARE * free_bytes(target.device):
            self._caches[number] = cache.kept(index, length)

    def forget(self) -> None:
        """Keep nothing: memory is short."""
        self._caches.clear()
        self._wanted.clear()


CANDIDATES = 64
"""Likeliest tokens that are drawn from."""


@dataclass(frozen=True)
class Continuation:
    """How rows are continued.

    Attributes:
        temperatures: one per row; 0 is greedy.
        ends: tokens that end a row.
        top_p: nucleus for rows with a temperature, taken among the likeliest tokens (`CANDIDATES`).
        check: called now and then; what it raises ends the work.
        states: takes the hidden states of rows and added tokens, of those rows whose states are known.
        refused: takes why servers refused rows, by number.
        turns: of the conversations that rows belong to, for whoever can go on from what was read before.
    """

    max_new_tokens: int
    temperatures: Sequence[float]
    ends: frozenset[int]
    seed: int
    top_p: float = 1.0
    check: Callable[[], None] = lambda: None
    states: RowStates | None = None
    turns: TurnCaches | None = None
    refused: dict[int, str] = field(default_factory=dict)


class Writer(Protocol):
    """Continues rows of token ids."""

    @property
    def window(self) -> int:
        """Tokens of the longest row with what is added."""

    def batches(self, rows: int) -> int | None:
        """How many batches of so many rows several threads may have continued at once; None: as many as the device of
        the target does side by side."""

    def continue_rows(self, rows: Sequence[Sequence[int]], continuation: Continuation) -> list[list[int]]:
        """The tokens added to each row: until an end token, which is kept, or the longest addition. At least one,
        unless the row is `refused`."""
