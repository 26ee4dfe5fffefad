"""Shared fixture of the evaluation tests: a drafter."""

from __future__ import annotations

import pytest

from headstart.drafters.heads import HeadDrafter
from headstart.heads.base import family, make_config
from headstart.model.model import Target
from headstart.tree.tree import TreeShape


@pytest.fixture(scope="module")
def drafter(tiny_target: Target) -> HeadDrafter:
    heads = family("medusa")(make_config({"family": "medusa", "num_heads": 2}, tiny_target))
    heads.warm_start(tiny_target)
    return HeadDrafter(heads, TreeShape.from_paths([(0, 0), (1,)]))
