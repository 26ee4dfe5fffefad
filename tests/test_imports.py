"""No import cycles; `lint-imports` checks the layers."""

from __future__ import annotations

import sys
import sysconfig
from graphlib import TopologicalSorter
from pathlib import Path

import grimp


def test_there_are_no_import_cycles() -> None:
    """Count imports inside functions and for type checkers; a `CycleError` lists the modules of a cycle."""
    graph = grimp.build_graph("headstart", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "headstart.replay.cache" in imports["headstart.model.model"], "the graph is there"
    TopologicalSorter(imports).prepare()


def test_the_links_at_the_root_shadow_no_other_package() -> None:
    """Importing the common names `train`, `data` and `eval` must not find the links at the repository root."""
    root = Path(__file__).parents[1]
    before_packages = sys.path[: sys.path.index(sysconfig.get_path("purelib"))]
    assert root not in map(Path, before_packages), "start bin/pytest, which leaves the working folder off sys.path"
