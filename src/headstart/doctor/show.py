"""Findings for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headstart.doctor.findings import Finding
from headstart.support.files import write_json

_MARKS = {True: Text("✓", "green"), False: Text("✗", "bold red"), None: Text("–", "dim")}


def show(findings: Sequence[Finding], console: Console) -> None:
    """A table of all checks, then a paragraph for each problem: what, where, and how to fix it."""
    table = Table(box=None, pad_edge=False)
    for title in ("", "check", "stage", "finding"):
        table.add_column(title)
    for finding in findings:
        short = finding.sentence if finding.ok is not False else "see below"
        table.add_row(_MARKS[finding.ok], Text(finding.check, "bold"), finding.stage, Text(short))
    console.print(table)
    problems = [finding for finding in findings if finding.ok is False]
    for finding in problems:
        console.print()
        console.print(Text(f"{finding.stage}: {finding.check}", "bold red"))
        console.print(Text(finding.sentence))
        console.print(Text.assemble(("Fix: ", "bold"), finding.remedy))
    console.print()
    looked = sum(finding.ok is not None for finding in findings)
    if problems:
        first = problems[0]
        advice = f"Begin with {first.check} ({first.stage}): what an early stage does wrong explains later findings."
        console.print(Text(f"{len(problems)} of {looked} checks found something. {advice}"))
    else:
        console.print(Text(f"Nothing wrong in {looked} checks."))


def write(findings: Sequence[Finding], path: str, file: Path) -> None:
    """The findings as JSON: {"path", "ok", "findings": [{check, stage, ok, sentence, remedy, figures}]}."""
    healthy = all(finding.ok is not False for finding in findings)
    write_json(file, {"path": path, "ok": healthy, "findings": [asdict(finding) for finding in findings]})
