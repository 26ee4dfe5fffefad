"""Every command that the pages print is run by the rehearsal, or by a named test, or has a reason not to be."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

from rehearsal import pages, table
from rehearsal.pages import Command, commands_in, printed
from rehearsal.rehearse import PARTS, named

COMMANDS = printed()
RUN = [begins for part in PARTS for begins in part.begins]


def test_every_printed_command_is_run_or_tested_or_excused() -> None:
    listed = [named(begins, COMMANDS) for begins in [*RUN, *table.TESTED, *table.NOT_RUN]]
    missing = [str(command) for command in COMMANDS if command not in listed]
    assert not missing, "give them to a part of rehearsal/rehearse.py, or a line to rehearsal/table.py"
    twice = {str(command) for command in listed if listed.count(command) > 1}
    assert not twice, "each has one place"


@pytest.mark.parametrize("named_test", sorted(set(table.TESTED.values())))
def test_the_tests_that_are_named_are_there(named_test: str) -> None:
    file, _, name = named_test.partition("::")
    tree = ast.parse((Path(__file__).parents[1] / file).read_text(encoding="utf-8"))
    assert name in [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_a_changed_page_changes_what_is_run() -> None:
    page = "```\nheadstart data build eagle3-8b --new-option 8  # as before\n```\nSee `make rehearsal  two`."
    (command, in_sentence) = commands_in("page.md", page)
    assert (command.text, command.line) == ("headstart data build eagle3-8b --new-option 8", 2)
    assert in_sentence == Command("page.md", 4, "make rehearsal two")
    assert named("headstart data build eagle3-8b", [command]) is command
    with pytest.raises(LookupError, match="0 printed commands begin with 'headstart train'"):
        named("headstart train", [command])


@pytest.mark.parametrize("module", [pages, table])
def test_examples(module: object) -> None:
    assert not doctest.testmod(module).failed  # type: ignore[arg-type]  # a module
