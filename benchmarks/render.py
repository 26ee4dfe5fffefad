"""Fill in the figures of `benchmarks/results/*.json` on the pages that show them.

    python benchmarks/render.py            # after a results file has changed
    python benchmarks/render.py --check    # names the pages that differ, and exits with 1

A page marks each block; the script replaces everything up to `<!-- end -->`:

    <!-- table: mt_bench -->                                          all rows and columns of results/mt_bench.json
    <!-- table: mt_bench | name, tokens_per_round, round_ms.draft: drafting -->   some columns, one with a heading
    <!-- value: mt_bench | heads | speedup_vs_plain -->               one figure: the row, by its first key
    <!-- value: dial | 25, AVX2 alone | mean -->                      or by its first keys, and the column
    <!-- ranking: leaderboard | tokens_per_round, name -->             rows of all files in results/leaderboard,
                                                                      sorted by the first column, descending

A caption follows the first table of a file, with the machine and the date.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tables import at, figures, written

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "README.md",
    "BENCHMARKS.md",
    "docs/adapting.md",
    "docs/choosing.md",
    "docs/leaderboard.md",
    "docs/questions.md",
)
END = "<!-- end -->"
BLOCK = re.compile(
    r"(?P<mark><!-- (?P<kind>table|value|ranking): (?P<spec>[^>]*?) -->)(?P<body>.*?)<!-- end -->", re.DOTALL
)
MARK = re.compile(r"<!-- (table|value|ranking|end)\b")


class PageError(Exception):
    """A marker that cannot be rendered."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page differs")
    options = parser.parse_args(arguments)
    differing = []
    for name in PAGES:
        page = ROOT / name
        before = page.read_text(encoding="utf-8")
        after = rendered(before, page, RESULTS)
        if after != before:
            differing.append(name)
            if not options.check:
                page.write_text(after, encoding="utf-8")
    print(f"{'Differ' if options.check else 'Written'}: {', '.join(differing) or 'none'}")
    if options.check and differing:
        raise SystemExit(1)


def rendered(text: str, page: Path, results: Path = RESULTS) -> str:
    """Return the text of a page with every block filled in.

    Args:
        text: of the page.
        page: its path; links are relative to it.
        results: folder of the results files.

    Raises:
        PageError: a marker without an end, or an unknown file, row or column.
    """
    blocks = BLOCK.findall(text)
    if len(MARK.findall(text)) != 2 * len(blocks):
        raise PageError(f"{page.name}: a marker has no {END}, or blocks are nested.")
    captions: set[str] = set()

    def block(match: re.Match[str]) -> str:
        try:
            if match["kind"] == "value":
                body = _value(match["spec"], results)
            elif match["kind"] == "ranking":
                body = f"\n{_ranking(match['spec'], page, results)}\n"
            else:
                rows, caption = _table(match["spec"], page, results)
                body = f"\n{rows}\n" + (f"\n{caption}\n" if caption not in captions else "")
                captions.add(caption)
        except PageError as error:
            raise PageError(f"{page.name}, {match['mark']}: {error}") from None
        return f"{match['mark']}{body}{END}"

    return BLOCK.sub(block, text)


def read(name: str, results: Path = RESULTS) -> dict[str, Any]:
    """Read a results file.

    Raises:
        PageError: the file is missing.
    """
    file = results / f"{name}.json"
    if not file.is_file():
        raise PageError(f"no {file.name} in benchmarks/results.")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _table(spec: str, page: Path, results: Path) -> tuple[str, str]:
    name, _, chosen = (part.strip() for part in spec.partition("|"))
    content = read(name, results)
    link = os.path.relpath(results / f"{name}.json", page.parent)
    return _figures(content["rows"], _columns(chosen)), caption_of(content, link)


def _ranking(spec: str, page: Path, results: Path) -> str:
    name, _, chosen = (part.strip() for part in spec.partition("|"))
    columns, rows = _columns(chosen), list[dict[str, Any]]()
    for file in sorted((results / name).glob("*.json")):
        content = read(f"{name}/{file.stem}", results)
        link = f"[{file.stem}]({os.path.relpath(file, page.parent)})"
        rows += [{**row, "date": content["date"][:10], "entry": link} for row in content["rows"]]
    if not rows:
        return f"No entries yet: `python benchmarks/{name}.py` makes one."
    first = columns[0] if isinstance(columns[0], str) else columns[0][0]
    return _figures(sorted(rows, key=lambda row: at(row, first), reverse=True), columns)


def _columns(chosen: str) -> list[str | tuple[str, str]]:
    """Parse the columns of a marker: paths, or (path, heading)."""
    columns: list[str | tuple[str, str]] = []
    for column in re.split(r",\s*", chosen) if chosen else ():
        path, colon, heading = column.partition(": ")
        columns.append((path, heading) if colon else path)
    return columns


def _figures(rows: Sequence[Mapping[str, Any]], columns: Sequence[str | tuple[str, str]]) -> str:
    try:
        return figures(rows, columns)
    except KeyError as error:
        raise PageError(f"no row has {error}.") from None


def _value(spec: str, results: Path) -> str:
    parts = [part.strip() for part in spec.split("|")]
    if len(parts) != 3:
        raise PageError("a value needs FILE | ROW | COLUMN.")
    name, label, path = parts
    rows = [row for row in read(name, results)["rows"] if label in accumulate(map(str, row.values()), "{}, {}".format)]
    if len(rows) != 1:
        raise PageError(f"{len(rows)} rows are called {label!r}.")
    value = at(rows[0], path)
    if value is None:
        raise PageError(f"{label!r} has no {path}.")
    return written(value, path)


def caption_of(content: Mapping[str, Any], link: str) -> str:
    """Return the caption of a table: its subject, the machine, the date and a link to the figures.

    >>> print(caption_of({"what": "Two prompts.", "machine": {"cpu": "A", "cores": 2, "threads": 1}}, "a.json"))
    *Two prompts. 2 cores of A, 1 thread ([figures](a.json)).*
    """
    about: dict[str, Any] = content.get("machine") or {}
    parts = []
    if about.get("gpu"):
        parts.append(about["gpu"])
    elif about.get("cpu"):
        parts.append(f"{about['cores']} core{'s' * (about['cores'] != 1)} of {about['cpu']}")
    parts += [str(about["dtype"])] if about.get("dtype") else []
    parts += [f"{about['threads']} thread{'s' * (about['threads'] != 1)}"] if about.get("threads") else []
    parts += [str(content["date"])[:10]] if content.get("date") else []
    words = [content.get("what"), ", ".join(parts), f"([figures]({link}))."]
    return f"*{' '.join(word for word in words if word)}*"


if __name__ == "__main__":
    main()
