"""Incremental detokenisation of answers, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""Errors that chat templates raise on messages they do not take."""
MARK = "\u2603headstart\u2603"
"""A text that no prompt contains, to locate content in a rendering."""


@dataclass(frozen=True)
class AnswerMarkup:
    """Special tokens that a chat template puts around the text of an answer.

    Attributes:
        opening: tokens between generation prompt and text, from a special one to a special one (a channel header, say);
            empty if the text comes first.
        end: token that ends the newest answer; the tokenizer's EOS if the template has none.
        special: all special tokens.
    """

    opening: tuple[int, ...] = ()
    end: int | None = None
    special: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any) -> AnswerMarkup:
        """Find the markup by rendering one answer."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = frozenset(number for number, token in added.items() if token.special)
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        try:
            prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
            lead, _, tail = tokenizer.apply_chat_template(messages, tokenize=False).partition(MARK)
        except TEMPLATE_ERRORS:  # without a template, too
            return cls(end=tokenizer.eos_token_id, special=special)
        opening, after = (tokenizer.encode(text, add_special_tokens=False) for text in (lead[len(prompt) :], tail))
        headed = lead.startswith(prompt) and opening and {opening[0], opening[-1]} <= special
        end = next((token for token in after if token in special), tokenizer.eos_token_id)
        return cls(tuple(opening) if headed else (), end, special)


class IncrementalDetokenizer:
    """Incremental text of a growing list of tokens, in complete characters and without the tokens `ends`.

    With a header before the text (`AnswerMarkup.opening`), messages under other headers are skipped; if the text never
    begins, `rest` returns the whole answer with its special tokens.

    Text ending in U+FFFD is held back, since the next token may complete its character. Only the newest piece and the
    held tokens are decoded again, so the cost per token is constant. Pieces do not depend on the tokens per call.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: frozenset[int] = frozenset(),
        markup: AnswerMarkup = AnswerMarkup(),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._markup = markup
        self._skips = skip_special_tokens
        self._read: list[int] = []  # tokens that are not text
        self._header = 0  # where the newest header starts in them
        self._in_text = self._has_text = not markup.opening
        self._context: list[int] = []  # tokens of the newest piece: they decide on the space after them
        self._held: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text they complete, possibly empty."""
        return "".join(self._push(token) for token in tokens if token not in self._ends and self._is_text(token))

    def rest(self) -> str:
        """Finish; return the text held back."""
        text = self.held if self._has_text else decode_text(self._tokenizer, self._read, skip_special_tokens=False)
        self._context, self._held = self._held, []
        return text

    @property
    def held(self) -> str:
        """The text held back, decoded as if it ended here."""
        if not self._held:
            return ""
        # Byte fallback decodes a run of bytes as a whole: one incomplete character changes the ones before it. Use
        # the longest context with unchanged text.
        for count in range(len(self._context), 0, -1):
            known = self._decode(self._context[:count])
            text = self._decode(self._context[:count] + self._held)
            if text.startswith(known):
                return text[len(known) :]
        return self._decode(self._held)

    def _is_text(self, token: int) -> bool:
        """Whether a token is between an answer header and the next special token."""
        opening = self._markup.opening
        if opening and not self._read and token != opening[0]:  # a text without headers
            self._markup, self._has_text, opening = AnswerMarkup(), True, ()
        if not opening or (self._in_text and token not in self._markup.special):
            return True
        if token == opening[0]:
            self._header = len(self._read)
        self._read.append(token)
        header = self._read[self._header : self._header + len(opening) - 1]  # which may say more, such as a format
        self._in_text = token == opening[-1] and (*header, token) == opening
        self._has_text |= self._in_text
        return False

    def _push(self, token: int) -> str:
        self._held.append(token)
        text = self.held
        if not text or text.endswith("\ufffd"):
            return ""
        self._context, self._held = self._held, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        return decode_text(self._tokenizer, tokens, self._skips)


class StopStrings:
    """Stop string detection; special tokens count only for stop strings that contain one."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], markup: AnswerMarkup = AnswerMarkup()) -> None:
        special = [token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special]
        raw = [stop for stop in stops if any(content in stop for content in special)]
        self._kinds = [(IncrementalDetokenizer(tokenizer, markup=markup), stops)]
        if raw:
            self._kinds.append((IncrementalDetokenizer(tokenizer, skip_special_tokens=False), raw))
        self._tails = ["", ""]
        self._longest = max(map(len, stops))

    def seen_after(self, token: int) -> bool:
        """Add a token; return whether the text now contains a stop string."""
        seen = False
        for kind, (detokenizer, stops) in enumerate(self._kinds):
            text = self._tails[kind] + detokenizer.push([token])
            ending = text + detokenizer.held
            seen = seen or any(stop in ending for stop in stops)
            self._tails[kind] = text[-self._longest :]
        return seen


def decode_text(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(tokens, **options))


def answer_text(tokens: Sequence[int], tokenizer: Any, ends: frozenset[int], markup: AnswerMarkup) -> str:
    """Decode a whole answer as `IncrementalDetokenizer` does piece by piece."""
    if not markup.opening:
        text = decode_text(tokenizer, [token for token in tokens if token not in ends])
        if "\ufffd" not in text:  # where each character is complete, the pieces add up to it
            return text
    pieces = IncrementalDetokenizer(tokenizer, ends, markup)
    return pieces.push(tokens) + pieces.rest()
