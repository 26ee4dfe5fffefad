"""The tree of a report: its nodes, their probabilities, and its drawing."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from headstart.decode.costs import Costs
from headstart.eval.evaluate import tuning_record
from headstart.eval.report import tree_svg
from headstart.model.model import Target
from headstart.tuning.tune import Tuning
from tests.eval.sources import Drafts

TUNING = Tuning(
    paths=((0,), (1,), (0, 0)),
    node_counts=(1, 4),
    verify_ms=(10.0, 12.0),
    draft_ms=2.0,
    acceptance=[[0.5, 0.2, 0.1], [0.6, 0.1, 0.1]],
    predicted={},
    tree="dynamic",
    chain=2,
    kinds=[{"kind": "", "texts": 2, "positions": 90, "tau": 1.5, "entropy": 2.0}],
)


@pytest.fixture
def source(tiny_target: Target) -> Drafts:
    return Drafts(tiny_target, calibration=TUNING.to_json(), costs=TUNING.costs)


def test_tree_includes_the_next_candidates(source: Drafts) -> None:
    kept = tuning_record(source, "heads+ngram", None)
    assert kept and (kept["tree"], kept["chosen"]) == ("dynamic", 3)
    assert kept["nodes"][:4] == [[[0], 0.5], [[0, 0], 0.3], [[1], 0.2], [[1, 0], 0.12]]
    assert kept["costs"]["verify_ms"] == [10.0, 12.0] and kept["acceptance"] == TUNING.acceptance
    assert kept["kinds"] == TUNING.kinds


def test_other_kind_of_tree(source: Drafts) -> None:
    kept = tuning_record(source, "heads", "chain")
    assert kept and (kept["chosen"], kept["nodes"]) == (2, [[[0], 0.5], [[0, 0], 0.3]])


def test_costs_are_the_local_ones(source: Drafts) -> None:
    source.costs = Costs((1, 4), (10.0, 400.0), 2.0, 0.0, 2)
    kept = tuning_record(source, "heads", "static")
    assert kept and kept["chosen"] == 0 and "No tree pays here" in tree_svg(kept)


def test_other_drafters_have_no_tree(source: Drafts) -> None:
    assert tuning_record(source, "ngram", None) is None
    source.costs = None
    assert tuning_record(source, "heads", None) is None


def test_nodes_do_not_overlap(source: Drafts) -> None:
    kept: Any = tuning_record(source, "heads", None)
    drawing = ElementTree.fromstring(tree_svg(kept))
    width, height = map(float, re.findall(r"[\d.]+", drawing.get("viewBox") or "")[2:])
    boxes = {(float(box.get("x") or 0), float(box.get("y") or 0)) for box in drawing.iter("rect")}
    assert len(boxes) == 1 + len(kept["nodes"])
    assert all(0 <= x <= width - 52 and 0 <= y <= height - 24 for x, y in boxes)
    labels = [group.findtext("text") for group in drawing.iter("g") if group.get("class") == "chosen"]
    assert labels == ["token", "50 %", "30 %", "20 %"]
