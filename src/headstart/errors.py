"""Errors that a user can fix, as a problem and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input, with its remedy, each as one sentence; the command line prints it and exits with code 2."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem} {remedy}".strip())
        self.problem = problem
        self.remedy = remedy


def check_text(text: str, name: str) -> None:
    """Refuse (UserError) text with lone surrogates, which input that is not UTF-8 leaves."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} is not UTF-8: character {error.start + 1} is {text[error.start]!r}.",
            "Leave out that character, or convert the text to UTF-8.",
        ) from None


def close(name: object, known: Iterable[str]) -> str | None:
    """The most similar known word; None if none is close."""
    return next(iter(difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.6)), None)


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint naming the closest known word, or the list of known words when none is close.

    >>> nearest("lrr", ["lr", "epochs"])
    "Did you mean 'lr'?"
    >>> nearest("zzz", ["b", "a"])
    'Known: a, b.'
    """
    words = sorted(known)
    meant = close(name, words)
    return f"Did you mean '{meant}'?" if meant else f"Known: {', '.join(words)}."


def out_of_memory(error: BaseException) -> bool:
    """Whether PyTorch or Python raised this for a failed allocation, on any device.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."))
    True
    >>> out_of_memory(RuntimeError("shapes differ"))
    False
    """
    message = str(error).lower()
    words = ("out of memory", "can't allocate memory", "not enough memory")
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, which this module does not import
        or (isinstance(error, RuntimeError) and any(word in message for word in words))
    )
