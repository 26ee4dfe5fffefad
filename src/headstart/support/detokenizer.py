"""Token ids to text, token by token, without breaking a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\ufffd"
"""Decoded bytes that are no character, or not yet."""


class IncrementalDetokenizer:
    """Text of a growing list of tokens, without breaking a character; the tokens `ends` are not text.

    Text that ends with U+FFFD is held back, since the next token may complete its character. Only the newest piece and
    the tokens held back are decoded again, so the work does not grow with the text. The pieces do not depend on how
    many tokens each call adds.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int] = frozenset(), skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._skip_special = skip_special
        self._context: list[int] = []  # tokens of the newest piece: they decide on the space after them
        self._held: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that they complete, which may be empty."""
        return "".join(self._push(token) for token in tokens if token not in self._ends)

    def rest(self) -> str:
        """Return the text held back, at the end of the text."""
        text, self._context, self._held = self.held, self._held, []
        return text

    @property
    def held(self) -> str:
        """The text held back, as it would end now."""
        if not self._held:
            return ""
        # Byte fallback decodes a run of bytes as a whole: one cut character breaks the ones before it. The longest
        # context whose own text stays as it is ends before that run, or inside it.
        for count in range(len(self._context), 0, -1):
            known = self._decode(self._context[:count])
            text = self._decode(self._context[:count] + self._held)
            if text.startswith(known):
                return text[len(known) :]
        return self._decode(self._held)

    def _push(self, token: int) -> str:
        self._held.append(token)
        text = self.held
        if not text or text.endswith(_BROKEN):
            return ""
        self._context, self._held = self._held, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        return _decode(self._tokenizer, tokens, self._skip_special)


class StopStrings:
    """Finds stop strings in a growing text. Special tokens are not text, except for stop strings that contain one."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        raw = [stop for stop in stops if any(content in stop for content in special)]
        self._kinds = [
            (IncrementalDetokenizer(tokenizer, skip_special=skips), wanted)
            for skips, wanted in ((True, stops), (False, raw))
            if wanted
        ]
        self._tails = [""] * len(self._kinds)
        self._longest = max(map(len, stops))

    def seen_after(self, token: int) -> bool:
        """Add a token; returns whether the text contains a stop string now."""
        seen = False
        for kind, (detokenizer, stops) in enumerate(self._kinds):
            text = self._tails[kind] + detokenizer.push([token])
            ending = text + detokenizer.held
            seen = seen or any(stop in ending for stop in stops)
            self._tails[kind] = text[-self._longest :]
        return seen


def decode_text(tokenizer: Any, tokens: list[int]) -> str:
    """Decode a text, without special tokens: the pieces of an `IncrementalDetokenizer`, joined."""
    text = _decode(tokenizer, tokens, True)
    if _BROKEN not in text:
        return text
    pieces = IncrementalDetokenizer(tokenizer)
    return pieces.push(tokens) + pieces.rest()


def _decode(tokenizer: Any, tokens: list[int], skip_special: bool) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))
