"""What a check finds, the registry of checks, and the examination that runs them one after the other.

A check is one function `(subject) -> Finding` under `@check(stage)`; its name is the function's. It returns `good`,
`bad` or `unknown`, raises `Absent` when what it looks at is not there, and may break: whatever it raises becomes a
finding that names it, because broken input is what the doctor is for.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from headstart.doctor.subject import Absent, Subject
from headstart.errors import UserError

Stage = Literal["run", "data", "states", "heads", "decoding", "training"]
"""Where something can go wrong, in the order in which data flow: what an early stage does wrong explains later ones."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        check: its name.
        ok: true when all is well, false when something is wrong, None when there was nothing to look at.
        sentence: what was found and where, in words.
        remedy: what to do about it; empty unless something is wrong.
        figures: the numbers that the sentence is about, for JSON.
        stage: that the check looks at.
    """

    check: str
    ok: bool | None
    sentence: str
    remedy: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    stage: str = ""


Check = Callable[[Subject], Finding]

CHECKS: dict[str, tuple[Stage, Check]] = {}
"""Every check by its name."""


def check(stage: Stage) -> Callable[[Check], Check]:
    """Decorator: make a function a check of a stage, after those that the stage has already."""

    def add(run: Check) -> Check:
        name = getattr(run, "__name__", "")
        assert name not in CHECKS, f"two checks are called {name}"
        CHECKS[name] = (stage, run)
        return run

    return add


def good(sentence: str, **figures: Any) -> Finding:
    """All is well."""
    return Finding("", True, sentence, "", figures)


def bad(sentence: str, remedy: str, **figures: Any) -> Finding:
    """Something is wrong: what and where, and what to do about it."""
    return Finding("", False, sentence, remedy, figures)


def unknown(sentence: str, **figures: Any) -> Finding:
    """Neither can be said."""
    return Finding("", None, sentence, "", figures)


def examine(subject: Subject, begin: Callable[[str, str], None] = lambda stage, name: None) -> Iterator[Finding]:
    """Run every check; each finding comes as soon as it is there. No check ends the examination.

    Args:
        subject: what is examined.
        begin: told the stage and the name of each check before it runs.
    """
    reported: list[str] = []
    stages = get_args(Stage)
    for name, (stage, run) in sorted(CHECKS.items(), key=lambda item: stages.index(item[1][0])):
        begin(stage, name)
        finding = replace(_outcome(run, subject, reported), check=name, stage=stage)
        if finding.ok is False:
            reported.append(finding.sentence)
        yield finding


def _outcome(run: Check, subject: Subject, reported: Sequence[str]) -> Finding:
    """What a check says, or what its breaking says; an error that was reported already is not reported again."""
    try:
        return run(subject)
    except Absent as absent:
        return unknown(f"Not looked at: {absent}.")
    except UserError as error:
        if any(error.problem in sentence for sentence in reported):
            return unknown("Not looked at, for a reason given above.")
        return bad(error.problem, error.remedy)
    except Exception as error:  # whatever breaks a check is what the user came to hear about
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return bad(
            f"This check broke off with {reason} ({Path(where.filename).name}, line {where.lineno}, {where.name}).",
            "What it looked at is damaged, or the code of this head family is: fix the findings above first; the "
            "full traceback is in the file that --json writes.",
            traceback="".join(traceback.format_exception(error)),
        )
