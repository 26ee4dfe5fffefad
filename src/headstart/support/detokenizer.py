"""Incremental detokenisation of answers, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jinja2 import TemplateError

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)
"""Errors that chat templates raise on messages they do not take."""
MARK = "\u2603headstart\u2603"
"""A text that no prompt contains, to find the content in a rendering."""


@dataclass(frozen=True)
class AnswerMarkup:
    """Special tokens that a chat template puts around the text of an answer.

    Attributes:
        opening: header between generation prompt and text (of a channel, say), which begins and ends with a special
            token; empty if the text comes first.
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
        is_header = lead.startswith(prompt) and opening and {opening[0], opening[-1]} <= special
        end = next((token for token in after if token in special), tokenizer.eos_token_id)
        return cls(tuple(opening) if is_header else (), end, special)


class IncrementalDetokenizer:
    """Incremental text of a growing list of tokens, in complete characters and without the tokens `ends`.

    With a header before the text (`AnswerMarkup.opening`), messages under other headers are skipped. If the text never
    begins, `flush` returns the whole answer with its special tokens.

    Text ending in U+FFFD is held back, since the next token may complete its character. Only the newest piece and the
    pending tokens are decoded again, so the cost per token is constant. Pieces do not depend on the tokens per call.
    """

    def __init__(
        self,
        tokenizer: Any,
        ends: frozenset[int] = frozenset(),
        markup: AnswerMarkup = AnswerMarkup(),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._decode = partial(decode_text, tokenizer, skip_special_tokens=skip_special_tokens)
        self._ends = ends
        self._markup = markup
        self._outside: list[int] = []  # tokens that are not text
        self._header = 0  # start of the newest header in them
        self._in_text = self._has_text = not markup.opening
        self._context: list[int] = []  # tokens of the newest piece: they decide on the space after them
        self._pending: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text they complete, possibly empty."""
        pieces = []
        for token in tokens:
            if token not in self._ends and self._is_text(token):
                self._pending.append(token)
                text = self.pending_text
                if text and not text.endswith("\ufffd"):
                    pieces.append(text)
                    self._context, self._pending = self._pending, []
        return "".join(pieces)

    def flush(self) -> str:
        """Finish; return the text held back."""
        if self._has_text:
            text = self.pending_text
        else:
            text = decode_text(self._tokenizer, self._outside, skip_special_tokens=False)
        self._context, self._pending = self._pending, []
        return text

    @property
    def pending_text(self) -> str:
        """The text held back, decoded as if it ended here."""
        if not self._pending:
            return ""
        # Byte fallback decodes a run of bytes as a whole: one incomplete character changes the ones before it. Use
        # the longest context with unchanged text.
        for count in range(len(self._context), 0, -1):
            known = self._decode(self._context[:count])
            text = self._decode(self._context[:count] + self._pending)
            if text.startswith(known):
                return text[len(known) :]
        return self._decode(self._pending)

    def _is_text(self, token: int) -> bool:
        """Whether a token is between an answer header and the next special token."""
        opening = self._markup.opening
        if opening and not self._outside and token != opening[0]:  # a text without headers
            self._markup, self._has_text, opening = AnswerMarkup(), True, ()
        if not opening or (self._in_text and token not in self._markup.special):
            return True
        if token == opening[0]:
            self._header = len(self._outside)
        self._outside.append(token)
        # A header may hold more tokens before its last one, such as a format.
        begin = self._outside[self._header : self._header + len(opening) - 1]
        self._in_text = token == opening[-1] and (*begin, token) == opening
        self._has_text |= self._in_text
        return False


class StopStrings:
    """Stop string detection; special tokens count only for stop strings that contain one."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], markup: AnswerMarkup = AnswerMarkup()) -> None:
        special = [token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special]
        with_special = [stop for stop in stops if any(content in stop for content in special)]
        self._searches = [(IncrementalDetokenizer(tokenizer, markup=markup), stops)]
        if with_special:
            self._searches.append((IncrementalDetokenizer(tokenizer, skip_special_tokens=False), with_special))
        self._tails = ["", ""]
        self._longest = max(map(len, stops))

    def seen_after(self, token: int) -> bool:
        """Add a token; return whether the text now contains a stop string."""
        seen = False
        for number, (detokenizer, stops) in enumerate(self._searches):
            text = self._tails[number] + detokenizer.push([token])
            ending = text + detokenizer.pending_text
            seen = seen or any(stop in ending for stop in stops)
            self._tails[number] = text[-self._longest :]
        return seen


def decode_text(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return str(tokenizer.decode(tokens, **options))


def answer_text(tokens: Sequence[int], tokenizer: Any, ends: frozenset[int], markup: AnswerMarkup) -> str:
    """Decode a whole answer as `IncrementalDetokenizer` does piece by piece."""
    if not markup.opening:
        text = decode_text(tokenizer, [token for token in tokens if token not in ends])
        if "\ufffd" not in text:  # if each character is complete, the pieces add up to it
            return text
    pieces = IncrementalDetokenizer(tokenizer, ends, markup)
    return pieces.push(tokens) + pieces.flush()
