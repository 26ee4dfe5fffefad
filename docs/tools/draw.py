"""Draw the figures of the pages: what the code does with small examples, and what was measured, as SVG in docs/images.

    python docs/tools/draw.py

Trees, masks, accepted paths, acceptance when sampling and costs are those of the package; a test holds the files
against it. Words stand for tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import product
from math import ceil, floor
from pathlib import Path
from typing import Any

import torch

from headstart.decode.costs import Costs
from headstart.decode.verify import accept_or_draw, walk
from headstart.tree.tree import Tree, TreeBatch

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 480  # so that words can still be read at the width of a phone
_STYLE = """
:root{color-scheme:light dark}
svg{--page:#fff;--edge:#d5dbe5;--ink:#1c2430;--soft:#5a6475;--kept:#0a4b9c;--gone:#a23b00;--fill:#e3edfb;--bar:#2f7de1;--warm:#f2a679}
@media(prefers-color-scheme:dark){
svg{--page:#10151d;--edge:#3a4556;--ink:#e4e9f1;--soft:#a3adbd;--kept:#a9cdff;--gone:#ffa871;--fill:#1b2f4d;--bar:#5aa2ff;--warm:#a5623a}}
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:var(--ink)}
.b{font-weight:600}.s{fill:var(--soft);font-size:12px}.k{fill:var(--kept);font-weight:600}
.r{fill:var(--gone);text-decoration:line-through}.m{text-anchor:middle}.e{text-anchor:end}
"""
WORDS = ["the", "cat", "dog", "bird", "sat", "ran", "is", "down", "up", "away"]
TREE = Tree.joined(0, [[1, 4, 7], [1, 4, 8], [1, 5], [2, 5], [2, 6]])
"""Drafts after "the"."""
CHOICES = {0: 1, 1: 4, 4: 7, 5: 9, 2: 6, 6: 3, 7: 6, 8: 6}
"""What the target would say after each word."""


@dataclass
class Drawing:
    """A picture under way; `y` is how far down it reaches."""

    title: str
    y: float = 24.0
    elements: list[str] = field(default_factory=list)

    def text(self, words: str, x: float, y: float, kind: str = "") -> None:
        self.elements.append(f'<text x="{x:.5g}" y="{y:.5g}" class="{kind}">{escape(words)}</text>')

    def line_of(self, parts: Sequence[tuple[str, str]], x: float, y: float) -> None:
        """Words of several kinds, one after the other."""
        spans = " ".join(f'<tspan class="{kind}">{escape(words)}</tspan>' for words, kind in parts)
        self.elements.append(f'<text x="{x:.5g}" y="{y:.5g}">{spans}</text>')

    def line(self, points: Sequence[tuple[float, float]], color: str = "edge", width: float = 1.5) -> None:
        where = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
        self.elements.append(
            f'<polyline points="{where}" fill="none" stroke="var(--{color})" stroke-width="{width:g}"/>'
        )

    def box(self, at: tuple[float, float], size: tuple[float, float], fill: str, edge: str = "none") -> None:
        self.elements.append(
            f'<rect x="{at[0]:.5g}" y="{at[1]:.5g}" width="{size[0]:.5g}" height="{size[1]:.5g}" rx="3" '
            f'fill="{fill and f"var(--{fill})"}" stroke="{edge if edge == "none" else f"var(--{edge})"}"/>'
        )

    def dot(self, x: float, y: float, color: str, radius: float = 3) -> None:
        self.elements.append(f'<circle cx="{x:.5g}" cy="{y:.5g}" r="{radius:g}" fill="var(--{color})"/>')

    def svg(self) -> str:
        height = self.y + 16
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
                f'viewBox="0 0 {WIDTH} {height:g}" role="img">',
                "<!-- drawn by docs/tools/draw.py -->",
                f"<title>{escape(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="10" '
                'fill="var(--page)" stroke="var(--edge)"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def places(tree: Tree) -> list[tuple[int, float]]:
    """Of each node its depth and its row, leaves one below the other and parents beside their first child.

    >>> places(Tree([0, 1, 2, 3], [-1, 0, 0, 1]))
    [(0, 0), (1, 0), (1, 1), (2, 0)]
    """
    rows, free = [0] * tree.size, 0
    below = [[0]]
    while below:
        node = below[-1].pop(0)
        rows[node] = free
        if tree.children[node]:
            below.append(list(tree.children[node]))
            continue
        free += 1
        while below and not below[-1]:
            below.pop()
    return list(zip(tree.depths, rows, strict=True))


def draw_tree(
    drawing: Drawing, tree: Tree, at: tuple[float, float], label: Callable[[int], list[tuple[str, str]]]
) -> None:
    """A tree from left to right; `label` gives the lines below each word with their kind, the word's own first."""
    spots = [(at[0] + 96 * depth, at[1] + 38 * row) for depth, row in places(tree)]
    for node in range(1, tree.size):
        (x, y), (to_x, to_y) = spots[tree.parents[node]], spots[node]
        drawing.line([(x + 46, y - 4), (to_x - 28, y - 4), (to_x - 20, to_y - 4), (to_x - 8, to_y - 4)])
    for node, (x, y) in enumerate(spots):
        for number, (words, kind) in enumerate(label(node)):
            drawing.text(words, x, y + 14 * number, kind)
    drawing.y = max(y for _, y in spots) + 14


def a_round() -> Drawing:
    """Draft, verify, accept, commit, with the words of `WORDS`."""
    drawing = Drawing("One round: heads draft a tree, the target verifies it in one forward, a path is accepted.")
    choices = [CHOICES[token] for token in TREE.tokens]
    (path,), (following,) = walk([TREE], [choices])
    drawing.text("1 Draft", 20, 30, "b")
    drawing.text("the heads guess how the text goes on", 120, 30, "s")
    draw_tree(drawing, TREE, (40, 62), lambda node: [(WORDS[TREE.tokens[node]], "b" if node == 0 else "")])
    top = drawing.y + 34
    drawing.text("2 Verify", 20, top, "b")
    drawing.text("one forward: what would the target say after each word?", 120, top, "s")

    def checked(node: int) -> list[tuple[str, str]]:
        kind = "k" if node in path else "r"
        said = f"→ {WORDS[choices[node]]}" if node in path else ""
        return [(WORDS[TREE.tokens[node]], kind), (said, "s")]

    draw_tree(drawing, TREE, (40, top + 32), checked)
    top = drawing.y + 38
    accepted = " ".join(WORDS[TREE.tokens[node]] for node in path[1:])
    drawing.text("3 Accept", 20, top, "b")
    drawing.text("as long as the target agrees; its last word is free", 120, top, "s")
    drawing.line_of([("the", ""), (accepted, "k"), (WORDS[following], "b")], 40, top + 28)
    drawing.text(f"{len(path)} tokens from one forward", 220, top + 28, "s")
    drawing.text("4 Commit", 20, top + 62, "b")
    drawing.text(f"keep the path's keys and values; “{WORDS[following]}” is the next root", 120, top + 62, "s")
    drawing.y = top + 62
    return drawing


def a_tree() -> Drawing:
    """A tree with probabilities, and which tokens each of its nodes may see."""
    drawing = Drawing("A token tree, how probably each path is accepted, and which nodes each node sees.")
    own = {0: 1.0, 1: 0.6, 2: 0.3, 4: 0.7, 5: 0.2, 6: 0.3, 7: 0.5, 8: 0.2}
    probs: list[float] = []
    for node, token in enumerate(TREE.tokens):
        probs.append(own[token] * (probs[TREE.parents[node]] if node else 1.0))
    tree = Tree(list(TREE.tokens), list(TREE.parents), probs)
    kept = tree.best(6)
    drawing.text("Probability that the whole path is accepted; the six best are verified", 20, 28, "s")

    def probable(node: int) -> list[tuple[str, str]]:
        words = f"{node} {WORDS[tree.tokens[node]]}"
        return [(words, "k" if node in kept else "s"), (f"{probs[node]:.2f}" if node else "root", "s")]

    draw_tree(drawing, tree, (40, 58), probable)
    numbers = tree.keep(kept)
    old = {new: before for before, new in numbers.items()}
    visible_NN = TreeBatch.of([tree]).visible_BNN[0].tolist()
    top, left, cell = drawing.y + 58, 190.0, 26.0
    drawing.text("The forward reads them as one row; each sees", 20, top - 26, "s")
    drawing.text("the text and its own ancestors", 20, top - 10, "s")
    for row, seen in enumerate(visible_NN):
        y = top + 26 + cell * row
        drawing.text(f"{old[row]} {WORDS[tree.tokens[row]]}", left - 12, y + 17, "e")
        drawing.text(str(old[row]), left + cell * row + cell / 2, top + 16, "s m")
        for column, sees in enumerate(seen):
            drawing.box((left + cell * column + 1, y + 1), (cell - 2, cell - 2), "bar" if sees else "page", "edge")
    drawing.y = top + 26 + cell * len(visible_NN)
    return drawing


def verification() -> Drawing:
    """What becomes of a sampled draft: kept or drawn again, and together the target's distribution."""
    drawing = Drawing("Sampling: kept drafts and tokens drawn anew add up to the target's own distribution.")
    p_target, q_draft, words = (0.5, 0.3, 0.15, 0.05), (0.3, 0.5, 0.1, 0.1), ("sat", "ran", "slept", "ate")
    steps = 20
    numbers = [(index + 0.5) / steps for index in range(steps)]
    cases = list(product(range(4), numbers, numbers))
    next_M = accept_or_draw(
        torch.tensor([p_target] * len(cases), dtype=torch.float64),
        torch.tensor([accept for _, accept, _ in cases], dtype=torch.float64),
        torch.tensor([residual for _, _, residual in cases], dtype=torch.float64),
        torch.tensor([draft for draft, _, _ in cases]),
        torch.tensor([q_draft] * len(cases), dtype=torch.float64),
    )
    kept, anew = [0.0] * 4, [0.0] * 4
    for (draft, _, _), token in zip(cases, next_M.tolist(), strict=True):
        (kept if token == draft else anew)[token] += q_draft[draft] / steps**2
    drawing.text("A draft is drawn from the heads, kept with probability min(1, p/q), and", 20, 28, "s")
    drawing.text("otherwise replaced by a draw from what p has above q", 20, 44, "s")
    base, tall = 220.0, 300.0
    for number, word in enumerate(words):
        x = 28 + 110 * number
        drawing.box((x, base - tall * q_draft[number]), (22, tall * q_draft[number]), "edge")
        drawing.box((x + 32, base - tall * p_target[number]), (22, tall * p_target[number]), "page", "ink")
        drawing.box((x + 64, base - tall * kept[number]), (22, tall * kept[number]), "bar")
        drawing.box((x + 64, base - tall * (kept[number] + anew[number])), (22, tall * anew[number]), "warm")
        drawing.text(word, x + 43, base + 18, "m b")
        for share, middle in ((q_draft[number], 11), (p_target[number], 43), (kept[number] + anew[number], 75)):
            drawing.text(f"{share:.2f}", x + middle, base - tall * share - 5, "s m")
    for number, (color, edge, said) in enumerate(
        (
            ("edge", "none", "q: what the heads draft from"),
            ("page", "ink", "p: what the target says"),
            ("bar", "none", f"what comes out: drafts that were kept ({sum(kept):.0%})"),
            ("warm", "none", f"and tokens drawn anew ({sum(anew):.0%})"),
        )
    ):
        drawing.box((40, base + 34 + 20 * number), (12, 12), color, edge)
        drawing.text(said, 60, base + 45 + 20 * number, "s")
    drawing.y = base + 34 + 20 * 4
    return drawing


def budget() -> Drawing:
    """How many nodes pay, with the same tree on two measured machines."""
    drawing = Drawing("Speed over plain decoding by the number of nodes, at costs measured in two programs.")
    probs = [1.0, 0.62, 0.36, 0.22, 0.19, 0.13, 0.12, 0.08, 0.08, 0.06, 0.05, 0.05, 0.04, 0.04, 0.03, 0.03]
    expected = [sum(probs[: nodes + 1]) for nodes in range(len(probs))]
    left, right, base, tall = 56.0, 440.0, 300.0, 130.0
    drawing.text("Speed over plain decoding, by nodes of the tree (1 is the root alone)", 20, 28, "s")
    for mark in (0.5, 1.0, 1.5):
        y = base - tall * mark
        drawing.line([(left, y), (right, y)], "edge", 1)
        drawing.text(f"{mark:.1f}x", left - 8, y + 4, "s e")
    for number, (costs, color, name) in enumerate(_measured()):
        speeds = []
        for nodes in range(1, len(probs) + 1):
            took = costs.verify(nodes) + (costs.draft_ms if nodes > 1 else 0)
            speeds.append(expected[nodes - 1] * costs.verify(1) / took)
        points = [(left + (right - left) * nodes / (len(probs) - 1), base - tall * s) for nodes, s in enumerate(speeds)]
        drawing.line(points, color, 2)
        best = max(range(len(speeds)), key=speeds.__getitem__)
        for node, (x, y) in enumerate(points):
            drawing.dot(x, y, color, 5 if node == best else 2.5)
        drawing.box((left, base + 28 + 20 * number), (12, 12), color)
        chosen = "plain decoding" if best == 0 else f"{best + 1} nodes, {speeds[best]:.2f}x"
        drawing.text(f"{name}: best is {chosen}", left + 20, base + 38 + 20 * number, "s")
    for nodes in (1, 4, 8, 12, 16):
        drawing.text(str(nodes), left + (right - left) * (nodes - 1) / (len(probs) - 1), base + 16, "s m")
    drawing.y = base + 28 + 20 * 2
    return drawing


def shift() -> Drawing:
    """Draw the tokens per round of heads while traffic shifts and shifts back, from `results/adapting.json`."""
    drawing = Drawing("Tokens per round while requests shift to a kind that training never saw, and back again.")
    results, updates = _results("adapting"), _results("adapting_updates")["rows"]
    rows, end = results["rows"], sum(results["settings"]["phases"]) / results["settings"]["rate"]
    left, right, top, base = 56.0, 440.0, 84.0, 284.0
    lines = (
        ("frozen", "soft", "frozen: the heads of the run"),
        ("offline", "warm", "trained offline on all that was learnt, with hindsight"),
        ("served", "bar", "adapting: the heads in service"),
    )
    values = [row[name] for row in rows for name, _, _ in lines]
    low, high = floor(5 * min(values)) / 5, ceil(5 * max(values)) / 5

    def at(hours: float, value: float) -> tuple[float, float]:
        return left + (right - left) * hours / end, base - (base - top) * (value - low) / (high - low)

    drawing.text("Tokens per round, by hours of simulated time", 20, 28, "s")
    shifted = next(row["hours"] for row in rows if row["name"].startswith("shifted"))
    back = next(row["hours"] for row in rows if row["name"].startswith("after"))
    begins, ends = at(shifted, low)[0], at(back, low)[0]
    drawing.box((begins, top - 24), (ends - begins, base - top + 24), "fill")
    drawing.text("requests of a new kind", (begins + ends) / 2, top - 10, "s m")
    for step in range(round(5 * (high - low)) + 1):
        x, y = at(0, low + step / 5)
        drawing.line([(x, y), (right, y)], "edge", 1)
        drawing.text(f"{low + step / 5:.1f}", x - 8, y + 4, "s e")
    until = [*(row["hours"] for row in rows[1:]), end]
    for number, (name, color, words) in enumerate(lines):
        steps = [at(hours, row[name]) for row, last in zip(rows, until, strict=True) for hours in (row["hours"], last)]
        drawing.line(steps, color, 2.5 if name == "served" else 1.5)
        drawing.box((left, base + 50 + 20 * number), (12, 12), color)
        drawing.text(words, left + 20, base + 60 + 20 * number, "s")
    for hour in range(floor(4 * end) + 1):
        drawing.text(f"{hour / 4:g} h", at(hour / 4, low)[0], base + 16, "s m")
    for update in updates:
        x, _ = at(update["hours"] + update["cpu_seconds"] / 3600, low)
        if x <= right:
            drawing.dot(x, base + 28, "bar" if update["accepted"] else "soft", 5)
    drawing.dot(left + 6, base + 116, "bar", 5)
    drawing.text("an update that the gate let serve; grey: refused", left + 20, base + 120, "s")
    drawing.y = base + 120
    return drawing


def _results(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))


def _measured() -> list[tuple[Costs, str, str]]:
    """Costs from results files, with a color and a name: verification by width, and what a draft takes."""

    def rows(name: str) -> list[dict[str, Any]]:
        return list(_results(name)["rows"])

    forwards, heads = rows("forwards"), rows("quickstart")[0]
    verify_ms = tuple(row["compiled_ms"] for row in forwards)
    ours = Costs(tuple(row["tokens"] for row in forwards), verify_ms, heads["round_ms"]["draft"])
    (widths,) = (row for row in rows("llama_cpp_widths") if row["name"] == "BF16")
    names = {"one_ms": 1, "two_ms": 2, "three_ms": 3, "four_ms": 4, "six_ms": 6, "eight_ms": 8}
    single = next(row for row in rows("engines") if row["served"] == "BF16" and row["drafts"] == 1)
    theirs = Costs(tuple(names.values()), tuple(widths[name] for name in names), single["round_ms"] - widths["two_ms"])
    return [(ours, "bar", "headstart, bfloat16"), (theirs, "warm", "llama.cpp, BF16, same cores")]


FIGURES: dict[str, Callable[[], Drawing]] = {
    "round": a_round, "tree": a_tree, "verification": verification, "budget": budget,
    "shift": shift,
}  # fmt: skip
"""By name of the file."""


def main() -> None:
    for name, draw in FIGURES.items():
        (IMAGES / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
