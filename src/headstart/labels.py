"""The ways of decoding that every report compares, and what each is called: one table for reports, plots and cards."""

from __future__ import annotations

from dataclasses import dataclass

HEADS, PLAIN, STOCK, LOOKUP = "heads", "plain", "transformers", "transformers_prompt_lookup"
METHODS = (HEADS, PLAIN, STOCK, LOOKUP)
"""The methods of every report, as results.json names them; `HEADS` stands for the drafter that the report is about."""


@dataclass(frozen=True)
class Label:
    """What a method is called.

    Attributes:
        name: in tables and in sentences.
        short: where there is little room.
        colour: in plots.
        speedup: the figure of results.json that says how much faster the drafter is; empty for the drafter itself.
    """

    name: str
    short: str
    colour: str
    speedup: str = ""


LABELS = {
    HEADS: Label("the heads", "heads", "#0b6e4f"),
    PLAIN: Label("the plain loop", "plain", "#8a94a6", "speedup_vs_plain"),
    STOCK: Label("transformers generate", "transformers", "#b9c0cc", "speedup_vs_transformers"),
    LOOKUP: Label("transformers prompt lookup", "prompt lookup", "#c98a2b", "speedup_vs_prompt_lookup"),
}
BASELINES = {label.speedup: label for label in LABELS.values() if label.speedup}
"""What the drafter is compared with, by the figure of results.json that does."""
