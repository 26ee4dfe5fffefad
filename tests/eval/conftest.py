"""Shared fixture of the evaluation tests: a drafter."""

from __future__ import annotations

import pytest

from headstart.drafters.heads import HeadDrafter
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.eval.sources import warm_heads


@pytest.fixture(scope="module")
def drafter(tiny_target: Target) -> HeadDrafter:
    return HeadDrafter(warm_heads(tiny_target), TreeShape.from_paths([(0, 0), (1,)]))
