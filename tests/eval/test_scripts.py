"""The scripts of a report, run in node if it is installed: what-if matches tuning, and the replay keeps time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headstart.decode.costs import Costs
from headstart.eval.replay import end_ms, races, state_at
from headstart.eval.report import template, write_report
from headstart.tuning.tune import likely_paths, path_prob
from tests.eval.test_replay import unit
from tests.eval.test_report import measured

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the scripts of a report need node to run")

_VOID = ("meta", "input", "br", "link")


class Elements(HTMLParser):
    """Parses a page into nested lists [tag, attributes, children]."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root: list[Any] = ["", {}, []]
        self._open = [self.root]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = [tag, {name: value or "" for name, value in attrs}, []]
        self._open[-1][2].append(element)
        if tag not in _VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self._open.pop()[0] == tag, "well-formed"


def run(page: str, begins: str, test: str) -> Any:
    """Run the page's script that contains `begins`, then `test`, a JavaScript function body; return its result."""
    (script,) = (each for each in re.findall("<script>(.*?)</script>", page, re.DOTALL) if f'"{begins}"' in each)
    asked = json.dumps({"page": Elements(page).root, "script": script, "test": test})
    node = ["node", str(Path(__file__).with_name("page.js"))]
    done = subprocess.run(node, input=asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# -- what-if sliders -------------------------------------------------------------------------------------------------

COSTS = Costs((1, 2, 4, 8, 16), (20.0, 21.0, 24.0, 33.0, 60.0), 4.0, 0.9, 3)
ACCEPTANCE = [[0.6, 0.15, 0.05], [0.5, 0.2, 0.06], [0.45, 0.15, 0.05]]
TUNED = {
    "tree": "dynamic",
    "chosen": 3,
    "nodes": [[[0], 0.6], [[0, 0], 0.3], [[1], 0.15]],
    "acceptance": ACCEPTANCE,
    "costs": {name: value for name, value in asdict(COSTS).items() if name != "read_ms"},
}
READ = """
const section = document.querySelector(".whatif"), read = {};
for (const element of section.querySelectorAll("[data-tree]")) read[element.dataset.tree] = element.textContent;
for (const element of section.querySelectorAll("[data-textbook]"))
  read[`chain ${element.dataset.textbook}`] = element.textContent;
read.best = section.querySelector("[data-best]").textContent;
read.hidden = section.hidden;
return read;
"""


def asked(page: str, **sliders: float) -> dict[str, Any]:
    """Return the figures on the page after moving its sliders."""
    moves = "".join(
        f"{{ const moved = document.querySelector('#whatif-{name}'); moved.value = '{value}'; moved.fire('input'); }}"
        for name, value in sliders.items()
    )
    shown: dict[str, Any] = run(page, ".whatif", moves + READ)
    return shown


def expected(depth: int, nodes: int, rows: int) -> dict[str, str]:
    """Compute the same figures with the tuning code: the best tree of this depth and size, and a chain."""
    paths = likely_paths(ACCEPTANCE[:depth], nodes - 1)
    chain = depth, depth + 1, (1 - 0.6 ** (depth + 1)) / (1 - 0.6)
    tree = max(map(len, paths), default=0), len(paths) + 1, 1 + sum(path_prob(path, ACCEPTANCE) for path in paths)
    said = {}
    for name, (deep, size, tau) in (("", tree), ("chain ", chain)):
        draft, verify = COSTS.draft(deep, rows), COSTS.verify(rows * size)
        said |= {
            f"{name}tau": f"{tau:.2f}",
            f"{name}round": f"{draft:.1f} + {verify:.1f}",
            f"{name}speedup": f"{tau * COSTS.verify(rows) / (draft + verify):.2f}x",
            f"{name}speed": f"{1e3 * tau * rows / (draft + verify):.1f}",
        }
    return said


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_report({**measured(), "tuned": TUNED}, tmp_path)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("depth", "nodes"), [(2, 4), (1, 4), (3, 9), (1, 1), (3, 16)])
def test_what_if_matches_tuning(page: str, depth: int, nodes: int, rows: int) -> None:
    said = asked(page, depth=depth, nodes=nodes, batch={1: 0, 8: 3}[rows])
    assert {name: said[name] for name in expected(depth, nodes, rows)} == expected(depth, nodes, rows)
    assert said["hidden"] is False


def test_what_if_finds_the_best_tree(page: str) -> None:
    speedups = [float(expected(3, nodes, 1)["speedup"][:-1]) for nodes in range(1, 17)]
    best = max(range(16), key=speedups.__getitem__)
    assert asked(page, depth=3)["best"] == f"Best here: {best + 1} nodes, {speedups[best]:.2f}x."
    assert asked(page, first=1)["best"] == "Here nothing pays: plain decoding is fastest."


def test_other_heads_and_machines(page: str) -> None:
    """Twice the cost of each further node; then drafts accepted two thirds as often."""
    said = asked(page, depth=1, nodes=2, growth=200)
    assert said["round"] == f"{4.0 - 2 * 0.9:.1f} + {20 + 2 * 1.0:.1f}"
    assert asked(page, depth=2, nodes=3, first=40)["tau"] == f"{1 + 0.4 + 0.4 * (0.5 * 2 / 3):.2f}"


# -- the replay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, 0.25, 2.0])
def test_replay_keeps_the_measured_time(rate: float) -> None:
    (race,) = races([unit(0, 1.6)], None, "heads")  # 1.6 seconds plainly
    page = template("race.html.j2").render(races=[race], shown=race)
    end = max(map(end_ms, race["answers"]))
    half = 0.45 * end
    seen = run(
        page,
        ".race",
        f"""
        const find = (name) => document.querySelector(name);
        const figures = (name) =>
          document.querySelectorAll(`[data-figure="${{name}}"]`).map((each) => each.textContent);
        const states = () => document.querySelectorAll(".race-text > span").map((span) => span.className);
        find(".race-speed").value = "{rate}";
        const before = figures("tokens");
        find(".race-play").fire("click");
        pass({half / rate});
        const middle = {{ tokens: figures("tokens"), seconds: figures("seconds"), states: states() }};
        let more = 0;
        while (find(".race-play").textContent === "Pause" && more < 1e5) {{ pass(1); more += 1; }}
        return {{ before, middle, more, after: figures("tokens"), rates: figures("rate"), states: states() }};
        """,
    )
    lengths = [str(len(answer["tokens"])) for answer in race["answers"]]
    assert seen["before"] == seen["after"] == lengths, "complete answers before and after"
    at = [state_at(answer, half) for answer in race["answers"]]
    assert seen["middle"]["tokens"] == [str(each.tokens) for each in at]
    assert half / rate + seen["more"] == pytest.approx(end / rate, rel=0.02)
    for text, answer in zip(seen["rates"], race["answers"], strict=True):
        assert float(text) == pytest.approx(1e3 * len(answer["tokens"]) / end_ms(answer), abs=0.05)
    assert set(seen["states"]) == {""}
