"""Where a text ends: end-of-turn token, token limit, stop strings, whatever the caller asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.decode.options import DecodeOptions
from headstart.target.model import Target


def extend(text: list[int], tokens: Sequence[int], row: int, options: DecodeOptions, target: Target) -> str | None:
    """Append tokens to a row's text as far as it goes, also in the middle of an accepted path.

    Args:
        text: the row's tokens so far, without the prompt.
        tokens: what was decided.
        row: its number, for the caller's own test.
        options: token limit, stop strings, the caller's own test, whether to ignore the end-of-turn token.
        target: whose end-of-turn tokens and tokenizer count.

    Returns:
        why the text ended; None when it goes on.
    """
    for token in tokens:
        text.append(token)
        stopped = options.stop_test is not None and options.stop_test(row, text)  # sees every token of the text
        if token in target.end_tokens and not options.ignore_end:
            return "end"
        if stopped or _at_stop_string(text, options.stop_strings, target.tokenizer):
            return "stop"
        if len(text) == options.max_new_tokens:
            return "length"
    return None


def _at_stop_string(text: list[int], stop_strings: Sequence[str], tokenizer: Any) -> bool:
    if not stop_strings:
        return False
    # A stop string is at most as many tokens long as it has bytes; the tail holds it whole.
    tail = text[-max(len(stop.encode()) for stop in stop_strings) - 8 :]
    decoded = tokenizer.decode(tail, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return any(stop in decoded for stop in stop_strings)
