"""Who continues texts where data is written: the target in this process (`in_process`), or servers (`servers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
