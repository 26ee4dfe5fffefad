"""A stand-in for a decoder in evaluations, and heads to draft with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headstart.decode.costs import Costs
from headstart.decode.drafting import Drafter
from headstart.heads.base import DraftHead, family, make_config
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


def warm_heads(target: Target, **section: Any) -> DraftHead:
    """Return heads at their warm start, by default of a small family without attention."""
    config = make_config(section or {"family": "medusa", "num_heads": 2}, target)
    heads = family(config.family)(config)
    heads.warm_start(target)
    return heads
