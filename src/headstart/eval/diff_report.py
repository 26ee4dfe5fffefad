"""A comparison of reports, on a terminal and as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headstart.eval.diff import Change, Comparison, Diff, Report, above, below
from headstart.eval.figures import Interval
from headstart.eval.labels import label_of
from headstart.eval.report import template
from headstart.support.files import write_text
from headstart.support.terminal import format_moment, tell


def write_diff(diff: Diff, out: Path) -> None:
    page = template("diff.html.j2").render(
        diff=diff, facts=facts(diff.reports), sentences=sentences(diff), tables=figure_tables(diff),
        value=value, change_text=change_text, verdict=verdict,
    )  # fmt: skip
    write_text(out, page)


def show_diff(diff: Diff, console: Console) -> None:
    """Print the reports, a table per comparison in 80 columns, and the conclusions."""
    for report in diff.reports:
        heads = report.results["settings"].get("heads", {})
        about = [heads.get("family"), heads.get("size"), format_moment(report.results["environment"]["date"])]
        tell(console, f"{report.letter}  {report.path} ({', '.join(filter(None, about))})")
    for other in diff.others:
        console.print(_table(diff, other))
    console.print()
    for sentence, bad in sentences(diff):
        tell(console, sentence, style="bold red" if bad else None)


def _table(diff: Diff, other: Comparison) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for heading in (diff.base.letter, other.report.letter, "change (95 % interval)"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, changes in other.drafters.items():
        table.add_row()
        table.add_row(name, style="bold")
        for change in changes:
            values = value(change, change.base), value(change, change.other)
            table.add_row(f"  {change.name}", *values, change_text(change), verdict(change, diff.limit))
    return table


def value(change: Change, figure: Interval) -> str:
    return f"{100 * figure['mean']:.0f} %" if change.unit == "%" else f"{figure['mean']:.2f}{change.unit}"


def change_text(change: Change) -> str:
    """Format a change with its interval.

    >>> interval = {"mean": -0.05, "low": -0.08, "high": 0.01}
    >>> change_text(Change("speed-up", "x", interval, interval, interval, False))
    '−5.0 % (−8.0 to +1.0)'
    """
    every = change.change["mean"], change.change["low"] or 0.0, change.change["high"] or 0.0
    mean, low, high = (f"{round(100 * each, 1) + 0.0:+.1f}".replace("-", "−") for each in every)
    return f"{mean} {'points' if change.unit == '%' else '%'} ({low} to {high})"


def verdict(change: Change, limit: float) -> str:
    if change.regressed(limit):
        return "regression"
    if change.unit == "x" and not change.judged:
        return "not judged"
    return "lower" if below(change.change) else "higher" if above(change.change) else ""


def sentences(diff: Diff) -> list[tuple[str, bool]]:
    """List the conclusions, each with whether it is a regression."""
    beyond = f"{100 * diff.limit:g} %"
    omitted = f"; {diff.left_out} more are not in all reports and left out" if diff.left_out else ""
    entries = [(f"Compared on {diff.prompts} prompts that all reports have{omitted}.", False)]
    for other in diff.others:
        letter, regressions = other.report.letter, other.regressions(diff.limit)
        for name, change in regressions:
            fall = f"{name}, {change.name}: {change_text(change)}"
            entries.append((f"{letter}: regression beyond {beyond}: {fall}.", True))
        if not regressions:
            entries.append((f"{letter}: no regression beyond {beyond}.", False))
        if possible := other.possible_fall(diff.limit):
            low, name, figure = possible
            fall = f"a fall of {-100 * low:.1f} % is not excluded ({name}, {figure})"
            entries.append((f"{letter}: on these prompts {fall}; measure more prompts to exclude it.", False))
        entries += [(caution, False) for caution in other.cautions]
    return entries


def facts(reports: Sequence[Report]) -> list[tuple[str, list[Any]]]:
    """Return table rows that describe each report."""
    settings = [report.results["settings"] for report in reports]
    environments = [report.results["environment"] for report in reports]
    heads = [each.get("heads", {}) for each in settings]
    of_heads = dict.fromkeys(name for each in heads for name in each)
    machine = ("dtype", "threads", "cpu", "gpu", "headstart")
    rows = [
        ("heads", [each["heads_name"] for each in settings]),
        *((name, [each.get(name) for each in heads]) for name in of_heads),
        ("drafter", [label_of(report.drafters[0]) for report in reports]),
        ("target", [each["target"] for each in settings]),
        ("new tokens, at most", [each["max_new_tokens"] for each in settings]),
        ("temperature", [each["temperature"] for each in settings]),
        ("batch", [each["batch_size"] for each in settings]),
        *((name, [each.get(name) for each in environments]) for name in machine),
        ("measured", [format_moment(each["date"]) for each in environments]),
    ]
    return [(name, values) for name, values in rows if any(value is not None for value in values)]


def figure_tables(diff: Diff) -> dict[str, list[dict[str, Any]]]:
    """Tabulate the figures of each drafter.

    A line has a name, `most` (value of the longest bar), and `cells`: the figure and change of each report, the base
    first; None if not compared.
    """
    tables: dict[str, list[dict[str, Any]]] = {}
    for drafter in dict.fromkeys(name for other in diff.others for name in other.drafters):
        compared = [{change.name: change for change in other.drafters.get(drafter, ())} for other in diff.others]
        names = max(compared, key=len)
        tables[drafter] = [_line(name, [changes.get(name) for changes in compared]) for name in names]
    return tables


def _line(name: str, changes: Sequence[Change | None]) -> dict[str, Any]:
    first = next(change for change in changes if change is not None)
    cells = [(first.base, first), *(change and (change.other, change) for change in changes)]
    most = 1.0 if first.unit == "%" else max(cell[0]["high"] or 0.0 for cell in cells if cell)
    return {"name": name, "most": most, "cells": cells}
