"""Token ids to text, without breaking a character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""Errors that chat templates raise on messages they do not take."""
MARK = "\u2603headstart\u2603"
"""Stands for a text whose place in a rendering is wanted."""


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
    """Token ids to text, a few at a time, without breaking a character; the tokens `ends` are not text.

    Where templates open the text of an answer with a header (`AnswerMarkup.opening`), and the tokens begin with such a
    header, those of other messages are not text either. An answer that ends before its text begins is given out at the
    end as a whole, with its special tokens.

    Bytes of a character that is not complete yet decode to U+FFFD; text that ends with it is held back. Only the last
    piece and the new tokens are decoded again, so that the work does not grow with the text.
    """

    def __init__(
        self, tokenizer: Any, ends: frozenset[int] = frozenset(), markup: AnswerMarkup = AnswerMarkup()
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._markup = markup
        self._read: list[int] = []  # of an answer with headers, all tokens
        self._in_text = self._has_text = not markup.opening
        self._tokens: list[int] = []
        self._start = 0  # the context that decides on spaces starts here
        self._shown = 0  # tokens whose text has been given out

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._tokens.extend(token for token in tokens if token not in self._ends and self._is_text(token))
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        text = (
            self._pending() if self._has_text else decode_text(self._tokenizer, self._read, skip_special_tokens=False)
        )
        self._start = self._shown = len(self._tokens)
        return text

    def _is_text(self, token: int) -> bool:
        """Whether a token is text: it stands between a header of answers and the next special token."""
        opening = self._markup.opening
        if not self._read and (token,) != opening[:1]:  # a text without headers
            self._markup, self._in_text, self._has_text = AnswerMarkup(), True, True
        if not self._markup.opening or (self._in_text and token not in self._markup.special):
            return True
        self._read.append(token)
        self._in_text = tuple(self._read[-len(opening) :]) == opening
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
