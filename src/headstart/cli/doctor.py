"""`headstart doctor`. Imports inside functions, as in `headstart.cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headstart.cli.options import JsonFile, RunDir, TargetOption, TrustOption
from headstart.errors import UserError
from headstart.support.files import check_writable, read_json
from headstart.support.terminal import tell


def doctor(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE_OR_HEADS", help="A recipe, the folder of a run, a folder of heads, or a Hub id of heads."
        ),
    ],
    run_dir: RunDir = None,
    questions: Annotated[
        Path | None, typer.Option(help="JSONL with questions from production: check acceptance on them, too.")
    ] = None,
    json: JsonFile = None,
    quick: Annotated[bool, typer.Option("--quick", help="Check only a sample.")] = False,
    target: TargetOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Diagnose low acceptance: check every stage and print the fixes. Exits with 1 if a check fails.

    Example: headstart doctor runs/quickstart
    """
    if json is not None:
        _check_json(json)
    console = Console()
    with console.status("") as status:

        def progress(doing: str) -> None:
            if console.is_terminal:
                status.update(doing)
            else:
                tell(console, doing)

        progress("loading the target")
        from headstart.doctor.examination import examine
        from headstart.doctor.findings import show, write
        from headstart.doctor.subject import find_subject

        subject = find_subject(path, run_dir, questions, target, quick, trust_remote_code)
        findings = list(examine(subject, lambda stage, name: progress(f"examining {stage}: {name}")))
    show(findings, console)
    if json is not None:
        write(findings, path, json)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(1)


def _check_json(file: Path) -> None:
    """Refuse (UserError) a file that is not writable, or holds anything but findings."""
    if file.is_dir():
        raise UserError(f"{file} is a folder.", "Name a file.")
    if file.exists() and not (isinstance(content := read_json(file), dict) and "findings" in content):
        raise UserError(f"{file} holds something other than findings, which would be lost.", "Name another file.")
    check_writable(file.parent)
