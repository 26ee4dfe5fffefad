"""Findings of the checks, their display and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headstart.support.files import write_json

_MARKS = {True: Text("✓", "green"), False: Text("✗", "bold red"), None: Text("–", "dim")}


@dataclass(frozen=True)
class Finding:
    """The result of one check. The examination adds the check's name, and its stage unless the check sets another.

    Attributes:
        ok: None if there was nothing to check.
        remedy: empty unless something is wrong.
        figures: the numbers behind the sentence, for JSON.
        stage: the stage at fault.
    """

    ok: bool | None
    sentence: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    check: str = ""
    stage: str = ""


def good(sentence: str, **figures: Any) -> Finding:
    return Finding(True, sentence, "", figures)


def bad(sentence: str, remedy: str, stage: str = "", **figures: Any) -> Finding:
    return Finding(False, sentence, remedy, figures, stage=stage)


def unknown(sentence: str, **figures: Any) -> Finding:
    return Finding(None, sentence, "", figures)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table of all checks, then a paragraph with the fix for each problem."""
    table = Table("", "check", "stage", "finding", box=None, pad_edge=False)
    for finding in findings:
        short = finding.sentence if finding.ok is not False else "see below"
        table.add_row(_MARKS[finding.ok], Text(finding.check, "bold"), finding.stage, Text(short))
    console.print(table)
    checked = sum(finding.ok is not None for finding in findings)
    verdict = f"Nothing wrong in {checked} checks."
    problems = [finding for finding in findings if finding.ok is False]
    for finding in problems:
        console.print(Text("\n" + ": ".join(dict.fromkeys((finding.stage, finding.check))), "bold red"))
        console.print(Text(finding.sentence))
        console.print(Text.assemble(("Fix: ", "bold"), finding.remedy))
    if problems:
        first = f"{problems[0].check} ({problems[0].stage})"
        verdict = (
            f"{len(problems)} of {checked} checks found a problem. Start with {first}: it may cause later findings."
        )
    console.print(Text(f"\n{verdict}"))


def write(findings: Sequence[Finding], path: str, file: Path) -> None:
    """Write the findings as JSON: {"path", "ok", "findings": [{ok, sentence, remedy, figures, check, stage}]}."""
    healthy = all(finding.ok is not False for finding in findings)
    write_json(file, {"path": path, "ok": healthy, "findings": [asdict(finding) for finding in findings]})
