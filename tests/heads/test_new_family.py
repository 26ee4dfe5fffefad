"""A new family costs one file and one row: two toy families keep the whole contract, each from nothing else.

One drafts all depths in one forward: examples/linear.py, with the row that CONTRIBUTING.md says. The other drafts level
by level.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart.heads
from headstart.heads import base
from headstart.heads.base import families
from headstart.model.model import Target
from tests.heads import test_contract, test_trees
from tests.tiny import tiny_model

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
EXAMPLE = (GUIDE.parent / "examples" / "linear.py").read_text(encoding="utf-8")
LEVELWISE = Path(__file__).with_name("toy_levelwise.py").read_text(encoding="utf-8")
TOYS = {
    "linear": (EXAMPLE, next(block for block in BLOCKS if '"linear": {' in block)),
    "toy-levelwise": (LEVELWISE, '"toy-levelwise": {"family": "toy-levelwise", "num_steps": 3}'),
}
"""By name of the family: its file and its row."""


def suite() -> list[tuple[str, Callable[..., None], dict[str, Any]]]:
    """Every test of the contract that takes a case's name, with all values of its other parameters."""
    found = []
    for module in (test_contract, test_trees):
        for name, test in inspect.getmembers(module, inspect.isfunction):
            marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
            if not any(mark.args[0] == "name" and mark.args[1] is test_contract.CASES for mark in marks):
                continue
            others = []
            for mark in (mark for mark in marks if mark.args[0] != "name"):
                keys = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
                values = [[value] if len(keys) == 1 else value for value in mark.args[1]]
                others.append([dict(zip(keys, value, strict=True)) for value in values])
            for chosen in itertools.product(*others):
                found.append((f"{module.__name__}.{name}", test, {k: v for part in chosen for k, v in part.items()}))
    return found


@pytest.fixture(params=TOYS)
def toy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add the family's file and row to the package, and remove them afterwards."""
    file, row = TOYS[request.param]
    known = families()  # all of the package, whatever ran before
    module = request.param.replace("-", "_")
    (tmp_path / f"{module}.py").write_text(file, encoding="utf-8")
    monkeypatch.setattr(headstart.heads, "__path__", [*headstart.heads.__path__, str(tmp_path)])
    monkeypatch.setattr(base, "_FAMILIES", known)
    for name, case in eval(f"{{{row}}}").items():
        monkeypatch.setitem(test_contract.CASES, name, case)
    assert request.param in families(), "the registry finds the file"
    yield request.param
    sys.modules.pop(f"headstart.heads.{module}")


def test_a_toy_family_keeps_the_whole_contract(toy: str, tmp_path: Path) -> None:
    test_contract.test_every_family_has_a_case()
    model = tiny_model("llama", vocab_size=61)
    given = {"target": Target(model), "exact": Target(tiny_model("llama", vocab_size=61).double())}
    ran = set()
    for name, test, parameters in suite():
        wanted = inspect.signature(test).parameters
        with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
            offered = {**given, **parameters, "name": toy, "monkeypatch": patch, "tmp_path": tmp_path}
            test(**{key: offered[key] for key in wanted})
        ran.add(name)
    assert len(ran) >= 10, "the suite is found by how its tests are marked"


def test_the_toys_are_gone_afterwards() -> None:
    assert not TOYS.keys() & families().keys()
