"""Who continues texts where data is written: the target in this process (`in_process`), or servers (`servers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headstart.data.writing.kept import RowStates, TurnCaches

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


class Writer(Protocol):
    """Continues rows of token ids."""

    @property
    def shareable(self) -> bool:
        """Whether several threads may ask at once, each for rows of its own."""

    def continue_rows(self, rows: Sequence[Sequence[int]], continuation: Continuation) -> list[list[int]]:
        """The tokens added to each row, at least one: until an end token, which is kept, or the longest addition."""
