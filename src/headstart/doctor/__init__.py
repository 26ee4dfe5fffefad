"""The doctor: says in words which stage of a run disagrees with which, and how to fix it."""

from headstart.doctor import decoding, overfit, rendering, states, weights  # noqa: F401  they register their checks
from headstart.doctor.findings import CHECKS, Finding, bad, check, examine, good, unknown
from headstart.doctor.show import show, write
from headstart.doctor.subject import Absent, Subject, find_subject

__all__ = [
    "CHECKS",
    "Absent",
    "Finding",
    "Subject",
    "bad",
    "check",
    "examine",
    "find_subject",
    "good",
    "show",
    "unknown",
    "write",
]
