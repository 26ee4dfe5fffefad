"""Drafters by name, as users write them."""

from __future__ import annotations

import re
from pathlib import Path

from headstart.decode.drafting import Drafter
from headstart.decode.options import DecodeOptions
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import SHIPPED_STEPS, ShippedDrafter
from headstart.drafters.lookahead import LookaheadDrafter
from headstart.drafters.memory import MemoryDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UserError, nearest
from headstart.model.model import Target
from headstart.support.answer_file import AnswerFile
from headstart.tree.calibration import DEEPEST

DRAFTERS = ("none", "heads", "ngram", "memory", "lookahead", "early-exit", "mtp")
"""Names, explained in `DecodeOptions.drafter`; + joins several, as in heads+ngram."""

DEFAULT = DecodeOptions.drafter
"""Default drafter: n-grams cost almost nothing and catch drafts that heads miss."""


def make_drafters(
    name: str,
    target: Target,
    heads: Drafter | None = None,
    answers: Path | None = None,
    models: dict[str, Drafter] | None = None,
) -> tuple[Drafter, ...]:
    """Make the drafters that a name joins; none for plain decoding.

    `heads` serve the name "heads". `answers` is the file of earlier answers for "memory"; without it a joined name
    drops "memory". `models` caches drafters that load or copy a model, by name, between calls.

    Raises:
        UserError: an unknown name or argument, no heads for "heads", an unsuitable target, or no answers.
    """
    check_drafter(name)
    names = [part for part in parts_of(name) if part != "none"]
    if answers is None and len(names) > 1:
        names = [part for part in names if part != "memory"]
    models = {} if models is None else models
    drafters = []
    for part in names:
        drafter = models.get(part) or _make_one(part, target, heads, answers)
        if part.partition(":")[0] in ("mtp", "early-exit"):
            models[part] = drafter
        drafters.append(drafter)
    return tuple(drafters)


def check_drafter(name: str) -> None:
    """Refuse (UserError) an unknown drafter; nothing is loaded."""
    names = parts_of(name)
    if "none" in names and len(names) > 1:
        raise UserError(f"The drafter {name!r} joins none (plain decoding) with another drafter.", "Leave out 'none'.")
    for part in names:
        kind, colon, argument = part.partition(":")
        if kind not in DRAFTERS:
            wrong = next((part for part in kind.split("+") if part not in DRAFTERS), kind)
            inside = f" in {name!r}" if wrong != name else ""
            raise UserError(f"Unknown drafter {wrong!r}{inside}.", nearest(wrong, DRAFTERS))
        if colon and kind not in ("memory", "early-exit", "mtp"):
            raise UserError(f"The drafter {kind} takes no argument, and {part!r} gives one.", f"Write {kind}.")
        if kind == "memory" and colon and not argument:
            raise UserError("The drafter memory: names no file.", "Write memory:FILE, or memory alone.")


def parts_of(name: str) -> list[str]:
    """Split a joined name. A path may hold a plus sign: only one before a known name joins.

    >>> parts_of("heads+memory:a+b/c+ngram")
    ['heads', 'memory:a+b/c', 'ngram']
    """
    return re.split(rf"\+(?=(?:{'|'.join(DRAFTERS)})(?:[:+]|$))", name)


def _make_one(name: str, target: Target, heads: Drafter | None, answers: Path | None) -> Drafter:
    kind, colon, argument = name.partition(":")
    match kind:
        case "ngram":
            return NgramDrafter()
        case "memory":
            if not colon and answers is None:
                raise UserError(
                    "The drafter memory has no earlier answers: none came with these heads.",
                    "Name a file for the answers to come: memory:FILE.",
                )
            served = AnswerFile(Path(argument).expanduser(), target.identity().fingerprint) if colon else None
            return MemoryDrafter(target.vocab_size, answers, served)
        case "lookahead":
            return LookaheadDrafter()
        case "early-exit":
            layers = _count(name, "layers", target.num_layers) if colon else max(1, target.num_layers // 6)
            return EarlyExitDrafter(target, layers)
        case "mtp":
            return ShippedDrafter(target, _count(name, "drafts", DEEPEST) if colon else SHIPPED_STEPS)
        case "heads":
            if heads is None:
                raise UserError(
                    f"The drafter {name!r} needs trained heads, and none were given.", "Name a heads folder."
                )
            return heads
    raise AssertionError(f"no case for {name}")


def _count(name: str, what: str, most: int) -> int:
    kind, _, argument = name.partition(":")
    if not argument.isdecimal() or not 1 <= int(argument) <= most:
        raise UserError(f"{name} names no number of {what}.", f"Use 1 to {most}, as in {kind}:{min(3, most)}.")
    return int(argument)
