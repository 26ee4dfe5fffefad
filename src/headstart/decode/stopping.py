"""Where a text ends: end-of-turn token, token limit, stop strings, whatever the caller asks."""

from __future__ import annotations

from typing import Any

from headstart.decode.options import DecodeOptions
from headstart.errors import UserError


class Stopper:
    """Cuts one row's tokens where its text ends, also in the middle of an accepted path.

    Args:
        tokenizer: needed for stop strings only.
        options: token limit, stop strings, the caller's own test, whether to ignore the end-of-turn token.
        ends: ids of end-of-turn tokens.
        row: number of the row, for the caller's own test.

    Raises:
        UserError: stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Any, options: DecodeOptions, ends: frozenset[int], row: int = 0) -> None:
        if options.stop_strings and tokenizer is None:
            raise UserError("Stop strings need a tokenizer.", "Load the target with its tokenizer.")
        self._tokenizer = tokenizer
        self._ends = frozenset() if options.ignore_end else ends
        self._left = options.max_new_tokens
        self._stops = options.stop_strings
        self._stop = options.stop_test
        self._row = row
        self._tokens: list[int] = []

    def take(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """(the tokens that belong to the text, why it ended or None when it goes on)."""
        for count, token in enumerate(tokens, start=1):
            self._tokens.append(token)
            self._left -= 1
            stopped = self._stop is not None and self._stop(self._row, self._tokens)  # sees every token of the text
            if token in self._ends:
                return tokens[:count], "end"
            if stopped or (self._stops and self._at_stop()):
                return tokens[:count], "stop"
            if self._left == 0:
                return tokens[:count], "length"
        return tokens, None

    def _at_stop(self) -> bool:
        # A stop string is at most as many tokens long as it has bytes; the tail holds it whole.
        tail = self._tokens[-max(len(stop.encode()) for stop in self._stops) - 8 :]
        text = self._tokenizer.decode(tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(stop in text for stop in self._stops)
