"""Write the figures of `benchmarks/results/*.json` into the pages that show them.

    python benchmarks/render.py            # after a results file has changed
    python benchmarks/render.py --check    # says which page differs, and exits with 1

A page says what it wants between markers; what stands between them is written here and nowhere else:

    <!-- table: mt_bench -->                                          every row and column of results/mt_bench.json
    <!-- table: mt_bench | name, tokens_per_round, round_ms.draft: drafting -->   some columns, one with its own heading
    <!-- table: on_gpu? -->                                            the same; without the file, what would write it
    <!-- value: mt_bench | heads | speedup_vs_plain -->               one figure: the row, named by its first key
    <!-- value: never_slower | float32, 4 | over_plain.heads -->      or by its first keys, and the column
    <!-- ranking: leaderboard | tokens_per_round, name -->             the rows of all files in results/leaderboard,
                                                                      those with most of the first column first

each followed by `<!-- end -->`. Below the first table of a file stands what was measured, on what and when. How figures
are written is in `tables.py`.
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
    """A page asks for something that cannot be rendered."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page differs")
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
    """A page with every block as its results say.

    Args:
        text: of the page.
        page: where it lies; links are relative to it.
        results: folder of the results files.

    Raises:
        PageError: a marker without an end, a file that is not there, a row or column that it does not have.
    """
    blocks = BLOCK.findall(text)
    if len(MARK.findall(text)) != 2 * len(blocks):
        raise PageError(f"{page.name}: a marker has no {END}, or a block lies in another one.")

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
    """A results file.

    Raises:
        PageError: there is none of this name, or it has no rows.
    """
    file = results / f"{name}.json"
    if not file.is_file():
        raise PageError(f"no {file.name} in benchmarks/results.")
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if "rows" not in content:  # whatever else the only table is called
        lists = [
            value for value in content.values() if isinstance(value, list) and value and isinstance(value[0], dict)
        ]
        content["rows"] = lists[0] if len(lists) == 1 else []
    if not content["rows"]:
        raise PageError(f"{file.name} has no rows.")
    return content


def _table(spec: str, page: Path, results: Path) -> tuple[str, str]:
    name, _, chosen = (part.strip() for part in spec.partition("|"))
    if name.endswith("?"):
        name = name.removesuffix("?")
        if not (results / f"{name}.json").is_file():
            return "", f"Not measured yet: `python benchmarks/{name}.py` does it."
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
    """Columns as a page names them: paths, some with a heading of their own."""
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
    """What a table shows: what was measured, on what, when, and where the figures lie.

    >>> print(caption_of({"what": "Two prompts.", "machine": {"cpu": "A", "cores": 2, "threads": 1}}, "a.json"))
    *Two prompts. 2 cores of A, 1 thread ([figures](a.json)).*
    """
    machine = content.get("machine") or content.get("environment") or {}
    if isinstance(machine, str):
        machine = {"cpu": machine}
    about: dict[str, Any] = {**content, **(content.get("settings") or {}), **machine}
    parts = []
    if about.get("gpu"):
        parts.append(about["gpu"])
    elif about.get("cpu"):
        parts.append(f"{about['cores']} cores of {about['cpu']}" if about.get("cores") else about["cpu"])
    elif about.get("device"):
        parts.append(about["device"])
    parts += [str(about["dtype"])] if about.get("dtype") else []
    parts += [f"{about['threads']} thread{'s' * (about['threads'] != 1)}"] if about.get("threads") else []
    parts += [str(date)[:10]] if (date := content.get("date") or machine.get("date")) else []
    words = [content.get("what"), ", ".join(parts), f"([figures]({link}))."]
    return f"*{' '.join(word for word in words if word)}*"


if __name__ == "__main__":
    main()
