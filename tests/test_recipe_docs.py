"""Every setting explained: on the page, in a table on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from headstart.heads.base import families
from headstart.recipes.docs import TARGETS_OWN, markdown, settings_of, show_settings
from headstart.recipes.recipe import Recipe, head_settings, load_recipe

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"


def test_the_page_matches_the_schema() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "make it again: headstart recipes docs > docs/recipes.md"


def test_the_page_has_every_family() -> None:
    assert all(f"### heads.family={name}\n" in markdown() for name in families())


@pytest.mark.parametrize("name", families())
def test_every_setting_says_what_it_means(name: str) -> None:
    settings = [*settings_of(Recipe), *settings_of(head_settings()[name], "heads.")]
    assert not [one.key for one in settings if not one.meaning]


def shown(name: str, terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=terminal, color_system=None)
    show_settings(load_recipe(name, ["train.minutes=7", "heads.draft_vocab_size=0"]), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_hold_value_default_and_meaning_of_every_setting() -> None:
    lines = dict(line.split("\t", 1) for line in shown("eagle", terminal=False).splitlines())
    assert lines["train.minutes"] == "7.0\tnull\tWall-clock budget; the schedule follows the clock."
    assert lines["heads.draft_vocab_size"].startswith("0\t0\tTokens the heads can draft")
    assert lines["heads.head_dim"].startswith(f"{TARGETS_OWN}\t{TARGETS_OWN}\t")
    assert not {"heads.hidden_size", "heads.num_heads", "heads.join"} & lines.keys(), "of no use here, or of others"
    of_family = settings_of(head_settings()["eagle"], "heads.")
    assert lines.keys() - {"setting"} == {one.key for one in [*settings_of(Recipe), *of_family]}


def test_a_terminal_gets_a_table() -> None:
    assert "\t" not in (table := shown("medusa", terminal=True))
    assert "Settings of medusa" in table
    assert "heads.see_root" in table and "Residual blocks in each head." in table
