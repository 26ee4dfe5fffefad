"""A new family costs one file and one row: the worked example of CONTRIBUTING.md keeps the contract as it stands."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import headstart.heads
from headstart.heads import base, families
from headstart.target import Target
from tests.heads import test_contract
from tests.tiny import tiny_model

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example's file put beside the other families, and its row beside theirs; both gone afterwards."""
    file, row = (next(block for block in BLOCKS if mark in block) for mark in ("class LinearHead", '"linear": {'))
    (tmp_path / "linear.py").write_text(file, encoding="utf-8")
    monkeypatch.setattr(headstart.heads, "__path__", [*headstart.heads.__path__, str(tmp_path)])
    monkeypatch.setattr(base, "_FAMILIES", dict(base._FAMILIES))
    for name, case in eval(f"{{{row}}}").items():
        monkeypatch.setitem(test_contract.CASES, name, case)
    assert "linear" in families(), "the registry finds the file"
    yield "linear"
    sys.modules.pop("headstart.heads.linear")


def test_the_example_of_the_guide_keeps_the_contract(family: str) -> None:
    target = Target(tiny_model("llama", vocab_size=61))
    test_contract.test_every_family_has_a_case()
    for test in (
        test_contract.test_unroll_shapes_and_gradients,
        test_contract.test_drafting_equals_the_unrolled_training_forward,
        test_contract.test_observing_in_rounds_equals_opening_afresh,
        test_contract.test_rows_of_a_batch_are_independent,
        test_contract.test_greedy_output_is_the_targets_own,
        test_contract.test_siblings_are_distinct_and_inside_the_draft_vocabulary,
    ):
        test(family, target)


def test_the_example_is_gone_afterwards() -> None:
    assert "linear" not in families()
