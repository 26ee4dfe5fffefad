"""Pages show the figures of `benchmarks/results`."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
PAGES = (
    "README.md",
    "BENCHMARKS.md",
    "docs/adapting.md",
    "docs/choosing.md",
    "docs/leaderboard.md",
    "docs/questions.md",
)
BY_OTHERS = {"docs/choosing.md": {"1.89x", "1.28x"}}
"""Speed-ups quoted from other projects, with their source."""


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("render")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with results files that have nothing but rows."""
    rows = [{"name": "heads", "waits": 2, "over_plain": {"heads": 1.2}}, {"name": "plain", "waits": 1}]
    (tmp_path / "waits.json").write_text(json.dumps({"rows": rows}))
    (tmp_path / "same.json").write_text(json.dumps({"rows": [{"name": "ngram", "waits": 1}] * 2}))
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_its_results_say(page: str, render: ModuleType) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert page in render.PAGES
    assert render.rendered(text, ROOT / page) == text, (
        "run python benchmarks/render.py, and edit the results, not the page"
    )


@pytest.mark.parametrize("page", PAGES)
def test_no_speed_up_stands_outside_of_a_block(page: str, render: ModuleType) -> None:
    prose = render.BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found = set(re.findall(r"\b\d*\.\d+x", prose)) - BY_OTHERS.get(page, set())
    assert not found, "write <!-- value: FILE | ROW | COLUMN --><!-- end --> and run python benchmarks/render.py"


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda page: page.name)
def test_decimals_have_a_leading_zero(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"(?<![\w.\]/)])\.\d.{0,20}", prose)
    assert not found, f"write 0{found[0]}"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_says_where_it_comes_from(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["rows"] and all(isinstance(row, dict) for row in found["rows"])
    for key in ("machine", "date", "commit", "command"):
        assert found[key] or found["unknown"][key], f"{key} is not known, and {file.name} does not say why"
    assert not re.search(r'"[^"]*(?<![\w.:])/(home|root|tmp|work|Users)/', file.read_text(encoding="utf-8"))


def test_a_file_and_a_marker_make_a_table(render: ModuleType, results: Path) -> None:
    page = results / "PAGE.md"
    text = render.rendered("<!-- table: waits --><!-- end -->", page, results)
    assert "| heads | 2 | 1.20x |\n| plain loop | 1 |  |" in text
    assert "([figures](waits.json))" in text
    assert render.rendered(text, page, results) == text, "rendering again changes nothing"
    some = render.rendered("<!-- table: waits | name, over_plain.heads: gain -->old<!-- end -->", page, results)
    assert "|  | gain |\n| --- | --- |\n| heads | 1.20x |\n\n" in some, "a row with nothing in it is left out"
    assert "2" not in render.rendered("<!-- value: waits | plain | waits -->2<!-- end -->", page, results)


def test_a_caption_stands_once(render: ModuleType, results: Path) -> None:
    twice = "<!-- table: waits --><!-- end -->\n<!-- table: waits | name, waits --><!-- end -->"
    assert render.rendered(twice, results / "PAGE.md", results).count("[figures]") == 1


def test_a_ranking_has_every_file_the_best_first_or_says_that_there_is_none(render: ModuleType, results: Path) -> None:
    page, mark = results / "PAGE.md", "<!-- ranking: board | tau, name: who, entry, date --><!-- end -->"
    text = render.rendered(mark, page, results)
    assert "No entries yet: `python benchmarks/board.py` makes one." in text
    (results / "board").mkdir()
    for name, tau in (("first", 1.5), ("second", 2.25)):
        content = {"date": "2026-11-04T09:07:31+00:00", "rows": [{"name": name, "tau": tau}]}
        (results / "board" / f"{name}.json").write_text(json.dumps(content))
    text = render.rendered(text, page, results)
    assert "| τ | who | entry | date |" in text
    rows = [line for line in text.splitlines() if "2026-11-04" in line]
    assert rows[0] == "| 2.25 | second | [second](board/second.json) | 2026-11-04 |" and "| 1.50 | first |" in rows[1]
    assert render.rendered(text, page, results) == text


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("<!-- table: gone --><!-- end -->", "no gone.json"),
        ("<!-- table: waits | name, speed --><!-- end -->", "no row has 'speed'"),
        ("<!-- value: waits | heads | speed --><!-- end -->", "'heads' has no speed"),
        ("<!-- value: waits | eagle | waits --><!-- end -->", "0 rows are called 'eagle'"),
        ("<!-- value: waits | heads --><!-- end -->", "a value needs"),
        ("<!-- value: same | ngram | waits --><!-- end -->", "2 rows are called 'ngram'"),
        ("<!-- table: waits -->| a |", "a marker has no"),
        ("<!-- table: waits --><!-- value: waits | heads | waits -->2<!-- end -->", "blocks are nested"),
    ],
)
def test_what_has_no_results_is_refused(block: str, message: str, render: ModuleType, results: Path) -> None:
    with pytest.raises(render.PageError, match=message):
        render.rendered(block, results / "PAGE.md", results)


def test_a_page_that_differs_is_named(
    render: ModuleType, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("ROOT", results), ("RESULTS", results), ("PAGES", ("PAGE.md",))):
        monkeypatch.setattr(render, name, value)
    page = results / "PAGE.md"
    page.write_text("<!-- value: waits | heads | waits -->3<!-- end -->")
    with pytest.raises(SystemExit):
        render.main(["--check"])
    assert "PAGE.md" in capsys.readouterr().out and "-->3<!--" in page.read_text()
    render.main([])
    assert "-->2<!--" in page.read_text()


@pytest.mark.parametrize("name", ["tables", "render", "record"])
def test_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert not doctest.testmod(importlib.import_module(name)).failed
