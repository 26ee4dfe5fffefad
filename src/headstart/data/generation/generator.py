"""Interface of text generation for data, with the target in this process (`in_process`) or on servers (`servers`).

Shape suffixes: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from headstart.kernels.memory import free_bytes
from headstart.model.model import Target
from headstart.replay.cache import TreeCache

_TURN_SHARE = 0.01
"""Largest fraction of free memory for one conversation's KV cache between turns."""


class TurnCaches:
    """KV caches of conversations between turns, so that no text is prefilled twice."""

    def __init__(self) -> None:
        self._conversations: list[int] = []
        self._unfinished: set[int] = set()
        self._caches: dict[int, TreeCache] = {}
        self._states: dict[int, Mapping[int, Tensor]] = {}

    def begin(self, rows: Sequence[tuple[int, bool, Mapping[int, Tensor]]]) -> None:
        """Start a turn with (conversation number, may another turn follow, hidden states so far or empty) per row."""
        self._conversations = [number for number, _, _ in rows]
        self._unfinished = {number for number, more, _ in rows if more}
        self._states = {number: states for number, _, states in rows if states}
        self._caches = {number: self._caches[number] for number in self._conversations if number in self._caches}

    def take(self, row: int, with_states: bool) -> tuple[TreeCache, Mapping[int, Tensor]] | None:
        """Hand over the cache and states of a row's conversation; None if it must be prefilled."""
        number = self._conversations[row]
        states = self._states.get(number, {})
        if number not in self._caches or (with_states and not states):
            return None
        return self._caches.pop(number), states

    def keep(self, target: Target, row: int, cache: TreeCache, *, index: int, length: int) -> None:
        """Copy the cache of an ended row if another turn may follow and the copy fits in memory."""
        number, size = self._conversations[row], length * target.kv_bytes_per_token
        if number in self._unfinished and size <= _TURN_SHARE * free_bytes(target.device):
            self._caches[number] = cache.kept(index, length)

    def clear(self) -> None:
        """Drop all caches to free memory."""
        self._caches.clear()
        self._unfinished.clear()


CANDIDATES = 64
"""Top-k of sampling."""


@dataclass(frozen=True)
class Continuation:
    """Settings for continuing a batch of rows, and outputs other than the tokens.

    Attributes:
        temperatures: one per row; 0 is greedy.
        ends: tokens that end a row.
        top_p: nucleus for sampled rows, within the top `CANDIDATES`.
        check: polled; aborts by raising.
        aux_layers: layers of the hidden states to return, if memory allows.
        turns: caches from earlier turns of the rows' conversations.
        states: receives hidden states [T, E] of rows with their added tokens, by number and layer.
        refused: receives the reasons of servers that refused rows, by number.
    """

    max_new_tokens: int
    temperatures: Sequence[float]
    ends: frozenset[int]
    seed: int
    top_p: float = 1.0
    check: Callable[[], None] = lambda: None
    aux_layers: tuple[int, ...] = ()
    turns: TurnCaches | None = None
    states: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)


class TextGenerator(Protocol):
    """Continues rows of token ids."""

    @property
    def window(self) -> int:
        """Maximum length of a row with its added tokens."""

    def concurrent_batches(self, rows: int) -> int | None:
        """Maximum number of concurrent batches of `rows` rows; None leaves it to the target's device."""

    def continue_rows(self, rows: Sequence[Sequence[int]], continuation: Continuation) -> list[list[int]]:
        """Return the tokens added to each row, up to and including an end token; at least one unless `refused`."""
