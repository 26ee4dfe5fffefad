"""The examination: every check in the order of the data flow, so that an early mistake explains later findings.

A check is a function `(subject) -> Finding`. It returns `good`, `bad` or `unknown`, and raises `Absent` if its input is
missing. Any other exception becomes a finding, because the doctor's input may be broken.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from headstart.doctor.data_checks import mask, states, teacher, template
from headstart.doctor.drafting_checks import acceptance, breadth, equality, vocabulary, weights
from headstart.doctor.findings import Finding, bad, unknown
from headstart.doctor.subject import Absent, Subject
from headstart.errors import UserError

Check = Callable[[Subject], Finding]

CHECKS: list[tuple[str, Check]] = [
    ("data", template),
    ("data", mask),
    ("states", states),
    ("states", teacher),
    ("heads", vocabulary),
    ("heads", weights),
    ("decoding", equality),
    ("decoding", acceptance),
    ("decoding", breadth),
]
"""(stage, check); the function's name is the check's name."""


def examine(
    subject: Subject,
    begin: Callable[[str, str], None] = lambda stage, name: None,
    checks: Sequence[tuple[str, Check]] = CHECKS,
) -> Iterator[Finding]:
    """Run the checks and yield each finding at once. No check ends the examination.

    `begin` is called with the stage and the name of each check before it runs.
    """
    reported: list[str] = []
    for stage, check in checks:
        name = getattr(check, "__name__", "")
        begin(stage, name)
        finding = _run(check, subject, reported)
        finding = replace(finding, check=name, stage=finding.stage or stage)
        if finding.ok is False:
            reported.append(finding.sentence)
        yield finding


def _run(check: Check, subject: Subject, reported: Sequence[str]) -> Finding:
    """Run a check and turn exceptions into findings; an error reported before is not repeated."""
    try:
        return check(subject)
    except Absent as absent:
        return unknown(f"Not checked: {absent}.")
    except UserError as error:
        if any(error.problem in sentence for sentence in reported):
            return unknown("Not checked, for a reason given above.")
        return bad(error.problem, error.remedy)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return bad(
            f"This check failed with {reason} ({Path(where.filename).name}, line {where.lineno}, {where.name}).",
            "Fix the findings above first. Otherwise the checked files are damaged or this head family has a bug: "
            "--json writes the full traceback.",
            traceback="".join(traceback.format_exception(error)),
        )
