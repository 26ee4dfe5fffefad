"""Names of the compared methods and formatting of figures, shared by reports, model cards and the project's pages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

HEADS, PLAIN, STOCK, LOOKUP = "heads", "plain", "transformers", "transformers_prompt_lookup"
METHODS = (HEADS, PLAIN, STOCK, LOOKUP)
"""Methods of every report, by their names in results.json; `HEADS` is the tested drafter."""
OTHER = "other: "
"""Prefix of compared drafters among a unit's runs, so that their names do not clash with `METHODS`."""
HEADS_NGRAM = "heads+ngram"  # default drafter of decoding; most reports include it
LEAST_ROUNDS = 30  # minimum rounds behind a share that is shown on its own: 30 give ±18 points
_SHARES = 6  # maximum positions in one table cell


@dataclass(frozen=True)
class Label:
    """Names of a method."""

    name: str  # in tables and sentences
    short: str  # in narrow columns
    row: str  # start of a row of benchmarks, in Markdown
    speedup: str = ""  # figure of results.json with the speed-up over this method; empty for the drafter itself


LABELS = {
    HEADS: Label("the heads", "heads", "heads"),
    HEADS_NGRAM: Label("heads + n-gram", "heads + n-gram", "heads + n-gram (default)"),
    PLAIN: Label("the plain loop", "plain", "plain loop", "speedup_vs_plain"),
    STOCK: Label("transformers generate", "transformers", "`transformers.generate`", "speedup_vs_transformers"),
    LOOKUP: Label(
        "transformers prompt lookup", "prompt lookup", "`transformers` prompt lookup", "speedup_vs_prompt_lookup"
    ),
}
BASELINES = {label.speedup: label for label in LABELS.values() if label.speedup}
"""Baselines of the tested drafter, by the figure of results.json that compares with them."""


def label_of(name: str) -> str:
    """Return the short name of a compared method.

    >>> label_of("transformers_prompt_lookup"), label_of("ngram"), label_of("early-exit:4")
    ('prompt lookup', 'n-gram', 'early-exit:4')
    """
    return LABELS[name].short if name in LABELS else name.replace("ngram", "n-gram").replace("+", " + ")


def temperature_of(value: float) -> str:
    """Format a temperature.

    >>> temperature_of(0.0), temperature_of(0.7)
    ('greedy', 'temperature 0.7')
    """
    return f"temperature {value:g}" if value else "greedy"


def number(value: float | None, digits: int = 2) -> str:
    """Format a number, or a dash for None.

    >>> number(1.234), number(None)
    ('1.23', '–')
    """
    return "–" if value is None else f"{value:.{digits}f}"


def speedup_text(ratio: Mapping[str, float | None] | None, interval: bool = True) -> str:
    """Format a speed-up, by default with its interval, if there is one.

    >>> speedup_text({"mean": 1.5, "low": 1.4, "high": 1.6}), speedup_text({"mean": 1.5, "low": None, "high": None})
    ('1.50x (1.40–1.60)', '1.50x')
    >>> speedup_text(None)
    '–'
    """
    if ratio is None:
        return "–"
    shown = interval and ratio["low"] is not None
    return f"{ratio['mean']:.2f}x" + (f" ({ratio['low']:.2f}–{ratio['high']:.2f})" if shown else "")


def interval_text(speed: Mapping[str, float | None] | None) -> str:
    """Format the interval of a throughput.

    >>> interval_text({"mean": 20.0, "low": 19.0, "high": 21.0}), interval_text({"mean": 20.0, "low": None})
    ('19.0–21.0', '–')
    """
    return "–" if speed is None or speed["low"] is None else f"{speed['low']:.1f}–{speed['high']:.1f}"


def cell(value: Any) -> str:
    """Format a setting on one line of a table.

    >>> cell(0.0), cell([1, "a|b"]), cell(None), cell([]), cell(True)
    ('0', '1, a\\\\|b', '–', '–', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = f"{value:.12g}" if isinstance(value, float) else text
    return "–" if value is None or not text else text.replace("|", "\\|").replace("\n", " ")


def percent_of(value: float, most: float) -> str:
    """Format a width as CSS.

    >>> percent_of(1, 3), percent_of(0, 0)
    ('33.33%', '0%')
    """
    return f"{100 * value / most if most else 0:.4g}%"


def text_verdict(row: Mapping[str, Any]) -> str:
    """Say whether a method's text equals plain decoding's.

    >>> text_verdict({"divergences": {"prompts": 8, "count": 2, "unexplained": 0}})
    '2 of 8 differ, by rounding'
    """
    judged = row["divergences"]
    if not judged["prompts"]:
        return "sampled"
    if not judged["count"]:
        return "the same"
    differ = f"{judged['count']} of {judged['prompts']} differ"
    if judged["unexplained"] is None:
        return differ
    return f"{differ}, {judged['unexplained']} unexplained" if judged["unexplained"] else f"{differ}, by rounding"


# -- acceptance --------------------------------------------------------------------------------------------------------


def accepted(row: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return acceptance at each position, with the number of rounds behind it."""
    shares, rounds = row.get("acceptance_by_position") or (), row.get("rounds_by_position") or ()
    return list(zip(shares, rounds, strict=False))


def pool_rare_positions(row: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Return acceptance as (position, share, rounds). The first position with few rounds and all later ones share one
    entry.

    >>> pool_rare_positions({"acceptance_by_position": [0.5, 0.5, 1.0], "rounds_by_position": [90, 20, 10]})
    [('1', 0.5, 90), ('2–3', 0.6666666666666666, 30)]
    """
    pairs = accepted(row)
    enough = next((index for index, (_, rounds) in enumerate(pairs) if rounds < LEAST_ROUNDS), len(pairs))
    positions = [(str(position), *pair) for position, pair in enumerate(pairs[:enough], start=1)]
    rest = pairs[enough:]
    if not rest:
        return positions
    count = sum(rounds for _, rounds in rest)
    name = f"{enough + 1}–{len(pairs)}" if len(rest) > 1 else str(len(pairs))
    return [*positions, (name, sum(share * rounds for share, rounds in rest) / count, count)]


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` independent cases.

    >>> low, high = share_interval(1.0, 10)
    >>> round(low, 3), round(high, 3)
    (0.722, 1.0)
    """
    wide = 1.96**2 / count
    middle, half = share + wide / 2, 1.96 * math.sqrt(share * (1 - share) / count + wide / 4 / count)
    return max(0.0, (middle - half) / (1 + wide)), min(1.0, (middle + half) / (1 + wide))


def acceptance(share: float, rounds: int) -> str:
    """Format a share with its interval and rounds.

    >>> acceptance(7 / 9, 9)
    '78 % (45–94 %) of 9 rounds'
    """
    low, high = share_interval(share, rounds)
    return f"{100 * share:.0f} % ({100 * low:.0f}–{100 * high:.0f} %) of {rounds} round{'s' * (rounds > 1)}"


def first_acceptance(row: Mapping[str, Any]) -> str:
    return next((acceptance(*pair) for pair in accepted(row)), "–")


def shares(row: Mapping[str, Any]) -> str:
    """Format acceptance by position in per cent, for up to `_SHARES` positions with enough rounds.

    >>> shares({"acceptance_by_position": [0.5, 0.25, 0.7], "rounds_by_position": [90, 45, 9]})
    '50 / 25 …'
    >>> shares({"acceptance_by_position": [0.5], "rounds_by_position": [4]}), shares({"acceptance_by_position": []})
    ('…', '–')
    """
    pairs = accepted(row)
    texts = [f"{100 * share:.0f}" for share, rounds in pairs if rounds >= LEAST_ROUNDS][:_SHARES]
    more = "…" if len(texts) < len(pairs) else ""
    return " ".join(filter(None, (" / ".join(texts), more))) or "–"
