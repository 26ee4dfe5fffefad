"""The ways of decoding that every report compares, and what each is called: one table for reports, cards and
the project's own pages."""

from __future__ import annotations

from dataclasses import dataclass

HEADS, PLAIN, STOCK, LOOKUP = "heads", "plain", "transformers", "transformers_prompt_lookup"
METHODS = (HEADS, PLAIN, STOCK, LOOKUP)
"""The methods of every report, as results.json names them; `HEADS` stands for the drafter that the report is about."""
OTHER = "other: "
"""Before the names of compared drafters among a unit's runs, so that none is taken for a method of every report."""
HEADS_NGRAM = "heads+ngram"
"""What decoding uses when nothing else is said; most reports compare it."""


@dataclass(frozen=True)
class Label:
    """What a method is called.

    Attributes:
        name: in tables and in sentences; `short` where there is little room.
        row: at the beginning of a row of benchmarks, in Markdown.
        speedup: the figure of results.json that says how much faster the drafter is; empty for the drafter itself.
    """

    name: str
    short: str
    row: str
    speedup: str = ""


LABELS = {
    HEADS: Label("the heads", "heads", "heads"),
    HEADS_NGRAM: Label("heads + n-gram", "heads + n-gram", "heads + n-gram (default)"),
    PLAIN: Label("the plain loop", "plain", "plain loop", "speedup_vs_plain"),
    STOCK: Label("transformers generate", "transformers", "`transformers.generate`", "speedup_vs_transformers"),
    LOOKUP: Label(
        "transformers prompt lookup",
        "prompt lookup",
        "`transformers` prompt lookup",
        "speedup_vs_prompt_lookup",
    ),
}


def label_of(name: str) -> str:
    """What a compared method is called where there is little room.

    >>> label_of("transformers_prompt_lookup"), label_of("ngram"), label_of("early-exit:4")
    ('prompt lookup', 'n-gram', 'early-exit:4')
    """
    return LABELS[name].short if name in LABELS else name.replace("ngram", "n-gram").replace("+", " + ")


def temperature_of(value: float) -> str:
    """A temperature in words.

    >>> temperature_of(0.0), temperature_of(0.7)
    ('greedy', 'temperature 0.7')
    """
    return f"temperature {value:g}" if value else "greedy"


BASELINES = {label.speedup: label for label in LABELS.values() if label.speedup}
"""What the drafter is compared with, by the figure of results.json that does."""
