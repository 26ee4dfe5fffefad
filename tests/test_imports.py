"""No module imports another that imports it, by whatever way round; the rooms are held apart by `lint-imports`."""

from __future__ import annotations

import sys
import sysconfig
from graphlib import TopologicalSorter
from pathlib import Path

import grimp


def test_no_import_leads_back_to_where_it_started() -> None:
    """Imports inside functions and for type checkers count; a `CycleError` names the modules of a circle in turn."""
    graph = grimp.build_graph("headstart", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert "headstart.replay.cache" in imports["headstart.model.model"], "the graph is there"
    TopologicalSorter(imports).prepare()


def test_the_links_at_the_root_shadow_no_other_package() -> None:
    """`train`, `data` and `eval` are common names: whoever imports them must not get the links to our rooms."""
    root = Path(__file__).parents[1]
    before_packages = sys.path[: sys.path.index(sysconfig.get_path("purelib"))]
    assert root not in map(Path, before_packages), "start bin/pytest, which leaves the working folder off sys.path"
