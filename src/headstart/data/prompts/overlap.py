"""Deduplication of prompts, and decontamination against the questions of reports."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.data.prompts.questions import read_questions

OVERLAP_WORDS = 50
"""Consecutive words shared with a question that count as overlap."""
SAME = "equal to a question of data.exclude"
OVERLAPPING = f"with {OVERLAP_WORDS} words in a row from a question of data.exclude"

_CHARACTER_WORDS = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\u0e00-\u0e7f"
"""Scripts without spaces between words: kana, Chinese characters, Thai."""
_WORD = re.compile(rf"[{_CHARACTER_WORDS}]|[^\W{_CHARACTER_WORDS}]+")


def normalise(text: str) -> str:
    """Normalise case, whitespace and closing punctuation, to compare requests.

    >>> normalise("  What is\\n2 + 2 ?") == normalise("what is 2 + 2")
    True
    >>> normalise("2 + 2") == normalise("2 - 2")
    False
    """
    plain = re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()
    return plain.rstrip(" .!?…。！？") or plain


def prompt_key(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> str:
    """Hash a prompt's messages, with `normalise`d texts, and tools."""
    said = [{**message, "content": normalise(message["content"])} for message in messages]
    rendered = json.dumps([said, list(tools)], sort_keys=True, default=str)
    return hashlib.sha256(rendered.encode()).hexdigest()[:24]


class Excluded:
    """Evaluation questions, from report files, to exclude from prompts."""

    def __init__(self, files: Sequence[str]) -> None:
        questions = [question for file in files for question in read_questions(Path(file).expanduser())]
        self._first_turns = {normalise(question.turns[0]) for question in questions}
        self._ngrams = {ngram for question in questions for turn in question.turns for ngram in _ngrams(turn)}

    def reason(self, turns: Sequence[str]) -> str | None:
        """Return the reason to exclude a prompt, given its user turns and then its other texts, or None.

        The first turn equals a question's (see `normalise`), or a text shares `OVERLAP_WORDS` consecutive words with a
        turn of a question, ignoring punctuation and case. A shorter question inside a longer prompt is not found.
        """
        if turns and normalise(turns[0]) in self._first_turns:
            return SAME
        if self._ngrams and any(ngram in self._ngrams for turn in turns for ngram in _ngrams(turn)):
            return OVERLAPPING
        return None


def _ngrams(text: str) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    for start in range(len(words) - OVERLAP_WORDS + 1):
        yield tuple(words[start : start + OVERLAP_WORDS])
