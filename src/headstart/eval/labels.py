"""Names of the compared ways of decoding: one table for reports, cards and the project's own pages."""

from __future__ import annotations

from dataclasses import dataclass

HEADS, PLAIN, STOCK, LOOKUP = "heads", "plain", "transformers", "transformers_prompt_lookup"
METHODS = (HEADS, PLAIN, STOCK, LOOKUP)
"""Methods of every report, by their names in results.json; `HEADS` is the tested drafter."""
OTHER = "other: "
"""Prefix of compared drafters among a unit's runs, so that their names do not clash with `METHODS`."""
HEADS_NGRAM = "heads+ngram"  # default drafter of decoding; most reports include it


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


BASELINES = {label.speedup: label for label in LABELS.values() if label.speedup}
"""Baselines of the tested drafter, by the figure of results.json that compares with them."""
