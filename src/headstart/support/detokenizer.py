"""Token ids to text, without breaking a character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""Errors that chat templates raise on messages they do not take."""
MARK = "\u2603headstart\u2603"
"""A text that no prompt holds, to find its place in a rendering."""


@dataclass(frozen=True)
class AnswerMarkup:
    """Special tokens that a chat template puts around the text of an answer.

    Attributes:
        opening: tokens between generation prompt and text that begin and end with a special one, such as the header of
            a channel; empty where the text comes first.
        end: token that ends the newest answer; the tokenizer's EOS where the template has none.
        special: all special tokens.
    """

    opening: tuple[int, ...] = ()
    end: int | None = None
    special: frozenset[int] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any) -> AnswerMarkup:
        """Find the markup by rendering one answer."""
        special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
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
    """A decoder of a few tokens at a time that never breaks a character and skips the tokens `ends`.

    A template may open the text of an answer with a header (`AnswerMarkup.opening`). Messages under other headers are
    then skipped, too. An answer that ends before its text begins is returned by `rest`, with its special tokens.

    Bytes of a character that is not complete yet decode to U+FFFD; text that ends with it is held back. Only the last
    piece and the new tokens are decoded again, so that the work does not grow with the text.
    """

    def __init__(
        self, tokenizer: Any, ends: frozenset[int] = frozenset(), markup: AnswerMarkup = AnswerMarkup()
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._markup = markup
        self._read: list[int] = []  # tokens that are not text
        self._header = 0  # where the newest header starts in them
        self._in_text = self._has_text = not markup.opening
        self._tokens: list[int] = []
        self._start = 0  # the context that decides on spaces starts here
        self._shown = 0  # tokens with text that was returned

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._tokens.extend(token for token in tokens if token not in self._ends and self._is_text(token))
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """Return the text that was held back."""
        whole = "" if self._has_text else decode_text(self._tokenizer, self._read, skip_special_tokens=False)
        text = self._pending() + whole
        self._start = self._shown = len(self._tokens)
        return text

    def _is_text(self, token: int) -> bool:
        """Whether a token stands between a header of answers and the next special token."""
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

    def _pending(self) -> str:
        known = decode_text(self._tokenizer, self._tokens[self._start : self._shown])
        return decode_text(self._tokenizer, self._tokens[self._start :])[len(known) :]


def decode_text(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(tokens, **options))


def answer_text(tokens: Sequence[int], tokenizer: Any, ends: frozenset[int], markup: AnswerMarkup) -> str:
    """Decode a whole answer as `IncrementalDetokenizer` does piece by piece."""
    pieces = IncrementalDetokenizer(tokenizer, ends, markup)
    return pieces.push(tokens) + pieces.rest()
