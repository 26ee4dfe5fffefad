"""Token ids to text, without breaking a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class IncrementalDetokenizer:
    """Token ids to text, a few at a time, without breaking a character; the tokens `ends` are not text.

    Bytes of a character that is not complete yet decode to U+FFFD; text that ends with it is held back. Only the last
    piece and the new tokens are decoded again, so that the work does not grow with the text.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._tokens: list[int] = []
        self._start = 0  # the context that decides on spaces starts here
        self._shown = 0  # tokens whose text has been given out

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._tokens.extend(token for token in tokens if token not in self._ends)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        text = self._pending()
        self._start = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        known = decode_text(self._tokenizer, self._tokens[self._start : self._shown])
        return decode_text(self._tokenizer, self._tokens[self._start :])[len(known) :]


def decode_text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
