"""A target and what drafts for it, in place of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headstart.decode.costs import Costs
from headstart.decode.loop import Drafter
from headstart.model.model import Target


@dataclass
class Drafts:
    """`tested` drafts under every name but those of `others`."""

    target: Target
    tested: Drafter | None = None
    others: dict[str, Drafter | None] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    costs: Costs | None = None

    def drafters(self, name: str = "heads", tree: str | None = None) -> tuple[Drafter, ...]:
        drafter = self.others.get(name, self.tested)
        return () if drafter is None else (drafter,)
