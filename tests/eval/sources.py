"""A stand-in for a decoder in evaluations: a target and its drafters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headstart.decode.costs import Costs
from headstart.decode.loop import Drafter
from headstart.model.model import Target


@dataclass
class Drafts:
    """A target that drafts with `tested` under every name not in `others`."""

    target: Target
    tested: Drafter | None = None
    others: dict[str, Drafter | None] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    costs: Costs | None = None

    def drafters(self, name: str = "heads", tree: str | None = None) -> tuple[Drafter, ...]:
        drafter = self.others.get(name, self.tested)
        return () if drafter is None else (drafter,)
