"""The table at the end of a run, from its results.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.drafters.catalog import DEFAULT
from headstart.eval.labels import LABELS, METHODS, PLAIN


def show_summary(results: Mapping[str, Any], title: str, console: Console) -> None:
    """Print what was measured: throughput, speed-ups with their intervals, τ, drafters that failed, how words compare.

    Args:
        results: content of results.json.
        title: above the table.
        console: where to.
    """
    summary = results["summary"]
    table = Table(title=title, title_justify="left")
    table.add_column("decoding")
    table.add_column("tokens/s", justify="right")
    table.add_column("heads over it", justify="right")
    table.add_column("95 % interval", justify="right")
    for method in METHODS:
        label = LABELS[method]
        speed = (summary.get("tokens_per_second") or {}).get(method)
        gain = summary.get(label.speedup)
        table.add_row(
            label.name,
            f"{speed:.1f}" if speed is not None else "–",
            f"{gain['mean']:.2f}x" if gain else "",
            _span(gain),
        )
    console.print(table)
    predicted = summary.get("predicted_speedup")
    expected = f"; tuning predicted {predicted:.2f}x over {LABELS[PLAIN].name}" if predicted else ""
    console.print(
        f"τ {summary['tokens_per_round']:.2f} tokens per forward of the target{expected}",
        highlight=False,
        soft_wrap=True,
    )
    for row in results.get("compare") or []:
        gain = row.get("speedup_vs_plain")
        if row["name"] == DEFAULT and gain:
            console.print(
                f"{DEFAULT}, what decoding uses when nothing else is said: {row['tokens_per_second']:.1f} tokens/s, "
                f"{gain['mean']:.2f}x{f' ({span})' if (span := _span(gain)) else ''} over {LABELS[PLAIN].name}",
                highlight=False,
                soft_wrap=True,
            )
        if row.get("drafter_error"):
            console.print(
                f"The drafter {row['name']} failed ({row['drafter_error']}): its figures are those of plain decoding.",
                style="bold red",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
    found = summary.get("divergences") or {}
    if found.get("count") is not None and found.get("prompts"):
        same = found["prompts"] - found["count"]
        rest = f"; {found['unexplained']} of the others not explained by rounding" if found["count"] else ""
        console.print(
            f"words as without drafts on {same} of {found['prompts']} prompts{rest}", highlight=False, soft_wrap=True
        )


def _span(gain: Mapping[str, float | None] | None) -> str:
    """The interval of a speed-up; empty where there is none, as of one prompt."""
    return "" if gain is None or gain["low"] is None else f"{gain['low']:.2f}–{gain['high']:.2f}"
