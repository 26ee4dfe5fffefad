"""The table at the end of a run, from its results.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.drafters.catalog import DEFAULT
from headstart.eval.labels import LABELS, METHODS, PLAIN


def show_summary(results: Mapping[str, Any], title: str, console: Console) -> None:
    """Print what was measured, the content of results.json: throughput, speed-ups with their intervals, τ, drafters
    that failed, how words compare."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    summary = results["summary"]
    table = Table(title=title, title_justify="left")
    table.add_column("decoding")
    for name in ("tokens/s", "heads over it", "95 % interval"):
        table.add_column(name, justify="right")
    for method in METHODS:
        label = LABELS[method]
        speed, gain = (summary.get("tokens_per_second") or {}).get(method), summary.get(label.speedup)
        shown = "–" if speed is None else f"{speed:.1f}"
        table.add_row(label.name, shown, f"{gain['mean']:.2f}x" if gain else "", _interval(gain))
    console.print(table)
    predicted = summary.get("predicted_speedup")
    expected = f"; tuning predicted {predicted:.2f}x over {LABELS[PLAIN].name}" if predicted else ""
    say(f"τ {summary['tokens_per_round']:.2f} tokens per forward of the target{expected}")
    for row in results.get("compare") or []:
        gain = row.get("speedup_vs_plain")
        if row["name"] == DEFAULT and gain:
            interval = f" ({_interval(gain)})" if _interval(gain) else ""
            say(
                f"{DEFAULT}, what decoding uses when nothing else is said: {row['tokens_per_second']:.1f} tokens/s, "
                f"{gain['mean']:.2f}x{interval} over {LABELS[PLAIN].name}"
            )
        if row.get("drafter_error"):
            failed = f"The drafter {row['name']} failed ({row['drafter_error']})"
            say(f"{failed}: its figures are those of plain decoding.", style="bold red")
    differing = summary.get("divergences") or {}
    if differing.get("count") is not None and differing.get("prompts"):
        same, count = differing["prompts"] - differing["count"], differing["prompts"]
        rest = f"; {differing['unexplained']} of the others not explained by rounding" if differing["count"] else ""
        say(f"words as without drafts on {same} of {count} prompts{rest}")


def _interval(gain: Mapping[str, float | None] | None) -> str:
    """The interval of a speed-up; empty where there is none, as of one prompt."""
    return "" if gain is None or gain["low"] is None else f"{gain['low']:.2f}–{gain['high']:.2f}"
