"""Measurements of a drafter against its baselines, the audit of losslessness, and reports."""

from headstart.eval.audit import AlwaysWrongDrafter, AuditResult, audit, plain_answers, random_weights, unused_tokens
from headstart.eval.measure import EvalOptions, evaluate, evaluate_decoder
from headstart.eval.report import show_compare, write_report

__all__ = [
    "AlwaysWrongDrafter",
    "AuditResult",
    "EvalOptions",
    "audit",
    "evaluate",
    "evaluate_decoder",
    "plain_answers",
    "random_weights",
    "show_compare",
    "unused_tokens",
    "write_report",
]
