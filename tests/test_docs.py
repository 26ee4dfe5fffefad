"""The examples in docstrings give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import headstart

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
