"""Docstring examples run, and the page on a round names every type of the decode loop."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import headstart
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.hub.helpers import make_heads

SOURCE = Path(headstart.__file__).parent
MODULES = [
    module.name
    for module in pkgutil.walk_packages(headstart.__path__, "headstart.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert not found.failed, "see the difference above"


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    found = [case for name in MODULES for case in finder.find(importlib.import_module(name)) if case.examples]
    assert len(found) > 20


PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
ROUND = PAGE[PAGE.index("## One token through one round") :].partition("\nMore to read")[0]


def test_one_round_needs_the_types_that_the_page_names() -> None:
    types = dict(re.findall(r"\*\*`(\w+)`\*\*\s+\(`([\w/]+\.py)`", ROUND))
    assert len(types) == len(set(re.findall(r"\*\*`(\w+)`", ROUND))), "each with its file"
    assert 10 < len(types) <= 18 and len(set(types.values())) <= 10
    for name, file in types.items():
        assert re.search(rf"^class {name}\b", (SOURCE / file).read_text(encoding="utf-8"), re.M), f"{name} in {file}"


def test_what_passes_between_rooms_in_a_round_is_named_there(tiny_target: Target) -> None:
    """Collects the types of all values that `Batch` and `Lane` hold, pass or return while they decode."""
    seen: set[type] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code.co_qualname.startswith(("Batch.", "Lane.")) and "self" in frame.f_locals:
            for value in (*frame.f_locals.values(), *vars(frame.f_locals["self"]).values()):
                seen.update(type(part) for part in (value, *(value if isinstance(value, list) else ())))

    heads = HeadDrafter(make_heads(tiny_target), TreeShape.chain(2), "dynamic")
    sys.setprofile(watch)
    try:
        DecodeLoop(tiny_target, heads, NgramDrafter()).generate([[3, 4, 3]], DecodeOptions(8, ignore_end=True))
    finally:
        sys.setprofile(None)
    ours = {kind.__name__ for kind in seen if kind.__module__.startswith("headstart.")}
    assert {"DecodeLoop", "Target", "Budget", "GreedyVerifier", "TreeBatch", "Committed"} <= ours, "it was watched"
    opaque = {"TreeCache", "FinalSession", "_Row"}  # what target and drafters remember, which the loop hands on
    assert {name for name in ours if f"`{name}`" not in ROUND} <= opaque
