"""The plots of a report, each an SVG string that stands inside the page. Every axis says its unit."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from headstart.eval.figures import share_interval
from headstart.eval.labels import HEADS, HEADS_NGRAM, LABELS, label_of

_STYLE = {
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ef",
    "axes.edgecolor": "#8a94a6",
}


def plots(results: Mapping[str, Any]) -> list[dict[str, str]]:
    """Every plot whose numbers are there, as {"title", "note", "svg"}."""
    summary = results["summary"]
    shares, rounds = summary["acceptance_by_position"], summary.get("rounds_by_position")
    return [_speeds(results["compare"]), *([_acceptance(shares, rounds)] if shares and rounds else [])]


def _speeds(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Every method, the fastest first. The drafter under test stands out; baselines keep their colours."""
    tested = rows[0]["name"]
    rows = sorted(rows, key=lambda row: -row["tokens_per_second_interval"]["mean"])
    speeds = [row["tokens_per_second_interval"] for row in rows]
    colours = [LABELS.get(HEADS if row["name"] == tested else row["name"], LABELS[HEADS_NGRAM]).colour for row in rows]
    figure, axes = _figure(1.0 + 0.3 * len(rows))
    means = [speed["mean"] for speed in speeds]
    whiskers, note = None, "Bars: all tokens over all seconds, same prompts in turn."
    if all(speed["low"] is not None for speed in speeds):
        note += " Whiskers: 95 % interval over prompts."
        whiskers = [
            [max(0.0, speed["mean"] - speed["low"]) for speed in speeds],
            [max(0.0, speed["high"] - speed["mean"]) for speed in speeds],
        ]
    names = [label_of(row["name"]) for row in rows]
    drawn = axes.barh(names, means, height=0.62, xerr=whiskers, capsize=3, color=colours)
    axes.bar_label(drawn, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
    return _plot(figure, "Speed of each method", note)


def _acceptance(shares: Sequence[float], rounds: Sequence[int]) -> dict[str, str]:
    figure, axes = _figure()
    spans = [(share, *share_interval(share, count)) for share, count in zip(shares, rounds, strict=True)]
    whiskers = [[100 * (share - low) for share, low, _ in spans], [100 * (high - share) for share, _, high in spans]]
    positions, heights = range(1, len(shares) + 1), [100 * share for share in shares]
    bars = axes.bar(positions, heights, width=0.62, color=LABELS[HEADS].colour, yerr=whiskers, capsize=3)
    axes.bar_label(bars, labels=[f"{100 * share:.0f}\nof {count}" for share, count in zip(shares, rounds, strict=True)])
    axes.set_xlabel("position (tokens drafted ahead)")
    axes.set_ylabel("accepted, % of rounds that got there")
    axes.set_ylim(0, 125)
    axes.set_yticks(range(0, 101, 20))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="x", visible=False)
    note = (
        "Of the rounds whose earlier drafts were all accepted, how many accepted the next one too. Whiskers: 95 % "
        "interval."
    )
    return _plot(figure, "Acceptance by position", note)


def _figure(height: float = 3.2) -> tuple[Any, Any]:
    """A figure of about a phone's width, so that its text stays readable there."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        return figure, figure.subplots()


def _plot(figure: Any, title: str, note: str) -> dict[str, str]:
    buffer = io.StringIO()
    # A salt per plot keeps ids apart when all of them stand in one page; with it the file is also reproducible.
    with matplotlib.rc_context({**_STYLE, "svg.fonttype": "path", "svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    return {"title": title, "note": note, "svg": f'<svg role="img" aria-label="{title}"' + svg[len("<svg") :]}
