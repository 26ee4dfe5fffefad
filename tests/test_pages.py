"""Pages: figures are what the code draws, links lead somewhere, and Markdown means the same here and on the site."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
_CODE = re.compile(r"```.*?^```", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    """The script that draws the figures."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "tools" / "draw.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw"] = module
    spec.loader.exec_module(module)
    return module


def test_figures_are_what_the_code_draws(draw: ModuleType) -> None:
    for name, drawn in draw.FIGURES.items():
        text = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert text == drawn().svg(), f"draw it again: python docs/tools/draw.py ({name})"
        ElementTree.fromstring(text)


def test_the_caption_of_the_race_is_that_of_the_picture() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "images" / "race.svg")
    title = picture.findtext("{http://www.w3.org/2000/svg}title") or ""
    _, dtype, machine, _, date, _ = title.rpartition("in real time: ")[2].split(", ")
    (caption,) = re.findall(r"\*The picture: (.*?)\*", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for words in (dtype, machine, date):
        assert words in caption


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = _CODE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose):
        address, _, anchor = (link[0] or link[1]).partition("#")
        if re.match(r"\w+:", address):
            continue
        target = page.parent / address if address else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


def anchors(page: Path) -> set[str]:
    """What headings are called in addresses."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lists_and_tables_begin_a_paragraph(page: Path) -> None:
    """The site takes a list that follows a line of text for text, and indents by four spaces."""
    before = ""
    for line in _CODE.sub("", page.read_text(encoding="utf-8")).splitlines():
        begins = re.match(r"(?: *)(?:[-*]|\d+\.) ", line)
        inside = re.match(r"(?: +|[-*] |\d+\. )", before)
        assert not (begins and before.strip() and not inside), f"an empty line before: {line}"
        assert not line.lstrip().startswith("<!-- value"), f"GitHub takes this line for a block of HTML: {line}"
        before = line


def test_every_page_stands_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    own = (ROOT / "docs" / "tools" / "site.py").read_text(encoding="utf-8")
    for page in PAGES:
        assert page.name in site or f'"{name_of(page)}"' in own, f"name {name_of(page)} in mkdocs.yml"
