"""`headstart report`: compare existing reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headstart.errors import UserError
from headstart.support.terminal import Group, say

report_app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Compare reports of headstart eval.\n\nExample: headstart report diff runs/before runs/after",
)


@report_app.command("diff")
def diff(
    reports: Annotated[
        list[Path],
        typer.Argument(
            metavar="REPORT", help="Folders of reports or runs, or files results.json; the first is the baseline."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Also write a page to this file.", metavar="FILE.html")] = None,
    regression: Annotated[
        str,
        typer.Option(
            metavar="PERCENT",
            help="Exit with 1 if tokens per round or the speed-up over plain decoding falls by more than this, and "
            "the interval of the change excludes zero.",
        ),
    ] = "3%",
) -> None:
    """Compare reports with the first one, prompt by prompt. Exits with 1 for a regression.

    Compares ratios within each report, not tokens per second: machine speed varies between reports.

    Example: headstart report diff runs/before runs/after

    Example: headstart report diff before after another --out diff.html --regression 5%
    """
    if len(reports) < 2:
        raise UserError("One report is named.", "Name two or more: headstart report diff BASE OTHER.")
    limit = _fraction(regression)
    from headstart.eval.diff import diff as compare
    from headstart.eval.diff_report import show_diff, write_diff

    console, compared = Console(), compare(reports, limit)
    show_diff(compared, console)
    if out is not None:
        write_diff(compared, out)
        say(console, ("Page", out))
    if compared.regressed:
        raise typer.Exit(1)


def _fraction(percent: str) -> float:
    """Parse a percentage, with or without the sign.

    >>> _fraction("5%"), _fraction("2.5")
    (0.05, 0.025)
    """
    try:
        value = float(percent.removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UserError(f"--regression is {percent!r}.", "Give per cent from 0 to below 100, such as 3%.")
    return value
