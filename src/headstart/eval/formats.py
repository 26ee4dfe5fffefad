"""Formatting of figures in the cells of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.eval.figures import LEAST_ROUNDS, acceptance, accepted


def number(value: float | None, digits: int = 2) -> str:
    """Format a number, or a dash for None.

    >>> number(1.234), number(None)
    ('1.23', '–')
    """
    return "–" if value is None else f"{value:.{digits}f}"


_SHARES = 6  # positions per cell


def shares(row: Mapping[str, Any]) -> str:
    """Format acceptance by position in per cent, up to `_SHARES` positions with enough rounds.

    >>> shares({"acceptance_by_position": [0.5, 0.25, 0.7], "rounds_by_position": [90, 45, 9]})
    '50 / 25 …'
    >>> shares({"acceptance_by_position": [0.5], "rounds_by_position": [4]}), shares({"acceptance_by_position": []})
    ('…', '–')
    """
    pairs = accepted(row)
    told = [f"{100 * share:.0f}" for share, rounds in pairs if rounds >= LEAST_ROUNDS][:_SHARES]
    parts = [" / ".join(told)] if told else []
    return " ".join([*parts, "…"] if len(told) < len(pairs) else parts) or "–"


def first_accepted(row: Mapping[str, Any]) -> str:
    return next((acceptance(*pair) for pair in accepted(row)), "–")


def words(row: Mapping[str, Any]) -> str:
    """Say whether a method's text equals plain decoding's.

    >>> words({"divergences": {"prompts": 8, "count": 2, "unexplained": 0}})
    '2 of 8 differ, by rounding'
    """
    judged = row["divergences"]
    if not judged["prompts"]:
        return "sampled"
    if not judged["count"]:
        return "the same"
    cause = f"{judged['unexplained']} unexplained" if judged["unexplained"] else "by rounding"
    return f"{judged['count']} of {judged['prompts']} differ, {cause}"


def times(ratio: Mapping[str, float | None] | None, interval: bool = True) -> str:
    """Format a speed-up, by default with its interval, if there is one.

    >>> times({"mean": 1.5, "low": 1.4, "high": 1.6}), times({"mean": 1.5, "low": None, "high": None}), times(None)
    ('1.50x (1.40–1.60)', '1.50x', '–')
    """
    if ratio is None:
        return "–"
    shown = interval and ratio["low"] is not None
    return f"{ratio['mean']:.2f}x" + (f" ({ratio['low']:.2f}–{ratio['high']:.2f})" if shown else "")


def span(speed: Mapping[str, float | None] | None) -> str:
    """Format the interval of a throughput.

    >>> span({"mean": 20.0, "low": 19.0, "high": 21.0}), span({"mean": 20.0, "low": None, "high": None}), span(None)
    ('19.0–21.0', '–', '–')
    """
    return "–" if speed is None or speed["low"] is None else f"{speed['low']:.1f}–{speed['high']:.1f}"


def cell(value: Any) -> str:
    """Format a setting on one line of a table.

    >>> cell(0.0), cell([1, "a|b"]), cell(None), cell(True)
    ('0', '1, a\\\\|b', '–', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = f"{value:.12g}" if isinstance(value, float) else text
    return "–" if value is None else text.replace("|", "\\|").replace("\n", " ")


def percent_of(value: float, most: float) -> str:
    """Format a width as CSS.

    >>> percent_of(1, 3), percent_of(0, 0)
    ('33.33%', '0%')
    """
    return f"{100 * value / most if most else 0:.4g}%"
