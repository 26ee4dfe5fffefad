"""Who continues texts where data is written: the target in this process, or servers (`headstart.data.conversations.from_server`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NotRequired, Protocol, TypedDict, Unpack

from headstart.data.conversations.sampling import Room, RowStates, Turns, sample_rows
from headstart.target.model import Target


class Asked(TypedDict):
    """How rows are continued.

    Attributes:
        max_new_tokens: most tokens to add to a row.
        temperatures: one per row; 0 is greedy.
        top_p: nucleus for rows with a temperature, taken among the 64 likeliest tokens.
        ends: tokens that end a row.
        seed: of the draws, which each row has of its own.
        check: called now and then; what it raises ends the work.
        states: takes the hidden states of rows and added tokens, of those rows that they are known of.
        turns: of the conversations that rows belong to, for whoever can go on from what was read before.
    """

    max_new_tokens: int
    temperatures: Sequence[float]
    top_p: float
    ends: frozenset[int]
    seed: int
    check: NotRequired[Callable[[], None] | None]
    states: NotRequired[RowStates | None]
    turns: NotRequired[Turns | None]


class Generator(Protocol):
    """Continues rows of token ids."""

    @property
    def shareable(self) -> bool:
        """Whether several threads may ask at once, each for rows of its own."""

    def continue_rows(self, rows: Sequence[Sequence[int]], **asked: Unpack[Asked]) -> list[list[int]]:
        """Continue each row until an end token (kept) or `max_new_tokens`.

        Args:
            rows: token ids; any lengths.
            **asked: see `Asked`.

        Returns:
            The added tokens of each row, at least one.

        Raises:
            UserError: a row cannot be continued.
        """


class InProcess:
    """The target itself continues rows.

    Args:
        target: the model.
        room: what is known of memory, shared by all rows.
    """

    def __init__(self, target: Target, room: Room | None = None) -> None:
        self._target = target
        self._room = room or Room()

    @property
    def shareable(self) -> bool:
        """Some rotary tables change with the text that is read."""
        return not any(
            kind in str(getattr(self._target.config, "rope_parameters", "")) for kind in ("dynamic", "longrope")
        )

    def continue_rows(self, rows: Sequence[Sequence[int]], **asked: Unpack[Asked]) -> list[list[int]]:
        """See `Generator` and `sample_rows`."""
        if not self.shareable:
            asked["turns"] = None
        return sample_rows(self._target, rows, room=self._room, **asked)
