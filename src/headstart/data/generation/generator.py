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


@dataclass
class TurnState:
    """State of a row's conversation between turns, so that no text is prefilled twice.

    Attributes:
        cache: KV cache of the earlier turns; None if they must be prefilled.
        states: hidden states [T, E] of the row with its added tokens, by layer; empty if they did not fit in memory.
        has_more: whether another turn may follow, so that the cache is worth keeping.
    """

    cache: TreeCache | None = None
    states: Mapping[int, Tensor] = field(default_factory=dict)
    has_more: bool = False

    def keep(self, target: Target, cache: TreeCache, index: int, length: int) -> None:
        """Copy a row of a cache if another turn may follow and the copy fits in memory."""
        size = length * target.kv_bytes_per_token
        if self.has_more and size <= _TURN_SHARE * free_bytes(target.device):
            self.cache = cache.copy_row(index, length)

    def drop(self) -> None:
        """Free the cache, and keep no other one in this turn."""
        self.cache, self.has_more = None, False


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
        turns: state of each row's conversation; empty if nothing needs it.
        refused: receives the reasons of servers that refused rows, by number.
    """

    max_new_tokens: int
    temperatures: Sequence[float]
    ends: frozenset[int]
    seed: int
    top_p: float = 1.0
    check: Callable[[], None] = lambda: None
    aux_layers: tuple[int, ...] = ()
    turns: Sequence[TurnState] = ()
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
