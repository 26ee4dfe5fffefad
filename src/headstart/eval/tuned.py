"""The tuned tree of the heads in results.json and in reports, with the inputs of its choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from markupsafe import Markup

from headstart.decode.costs import Measured
from headstart.decode.options import TreeKind
from headstart.drafters.catalog import parts_of
from headstart.eval.methods import Source
from headstart.tree.tree import RankPath, TreeShape
from headstart.tuning.tune import Tuning, path_prob

_SHOWN = 15  # maximum nodes drawn: further ones are rarely accepted
_WIDE, _HIGH = 76, 30  # pixels from one node to the next


def tuned(source: Source, drafter: str, tree: TreeKind | None) -> dict[str, Any] | None:
    """Return tuning's measurements of the heads, at this machine's costs of drafting; None if no tuned heads draft.

    `nodes` are (path of ranks, probability that all of it is accepted), likeliest first; the first `chosen` are the
    best static tree. `acceptance`, by depth and rank after the best draft of each depth above, and `kinds` are as in
    `Tuning`; `costs` are milliseconds, see `Costs`.
    """
    costs = source.costs
    if costs is None or "heads" not in parts_of(drafter) or not source.calibration.get("acceptance"):
        return None
    tuning = Tuning.from_json(source.calibration)
    if costs != tuning.costs:
        tuning = tuning.at_costs(Measured(costs, tuning.packed))
    kind = tree or tuning.tree
    paths = TreeShape.chain(tuning.chain).paths if kind == "chain" else tuning.ranked_paths[:_SHOWN]
    return {
        "tree": kind,
        "chosen": min(len(paths), tuning.chain if kind == "chain" else len(tuning.paths)),
        "nodes": [[list(path), round(path_prob(path, tuning.acceptance), 4)] for path in paths],
        "kinds": tuning.kinds,
        "acceptance": [[round(share, 4) for share in ranks] for ranks in tuning.acceptance],
        "costs": {
            name: [round(ms, 3) for ms in value] if isinstance(value, tuple) else round(value, 3)
            for name, value in asdict(costs).items()
        },
    }


def tree_svg(kept: Mapping[str, Any]) -> Markup:
    """Draw the tree from left to right, a column per depth; the best child is in line with its parent."""
    probs: dict[RankPath, float] = {(): 1.0} | {tuple(path): prob for path, prob in kept["nodes"]}
    chosen = {tuple(path) for path, _ in kept["nodes"][: kept["chosen"]]} | {()}
    lines: dict[RankPath, int] = {}
    _stand((), sorted(probs), lines, count())
    width = _WIDE * (1 + max(map(len, probs)))
    height = _HIGH * (1 + max(lines.values()))
    edges, boxes = [], []
    for path in sorted(probs):
        kind = "chosen" if path in chosen else "next"
        x, y = _WIDE * len(path) + 2, _HIGH * lines[path] + 3
        if path:
            begin, from_y = x - _WIDE + 52, _HIGH * lines[path[:-1]] + 15
            edges.append(
                f'<path class="{kind}" d="M{begin} {from_y}C{x - 14} {from_y} {begin + 14} {y + 12} {x} {y + 12}"/>'
            )
        label = f"{100 * probs[path]:.0f} %" if path else "token"
        boxes.append(
            f'<g class="{kind}"><rect x="{x}" y="{y}" width="52" height="24" rx="6"/>'
            f'<text x="{x + 26}" y="{y + 16}">{label}</text></g>'
        )
    likely = ", ".join(f"{100 * probs[tuple(path)]:.0f} %" for path, _ in kept["nodes"][: kept["chosen"]])
    title = f"Tree of {kept['chosen']} drafts, accepted with probabilities {likely}" if likely else "No tree pays here"
    head = (
        f'<svg class="tree" role="img" aria-label="{title}" viewBox="0 0 {width - 20} {height}" width="{width - 20}">'
    )
    return Markup("".join([head, *edges, *boxes, "</svg>"]))


def _stand(path: RankPath, paths: Sequence[RankPath], lines: dict[RankPath, int], free: count[int]) -> None:
    """Assign a line to a node, its first child's, and to all nodes below it."""
    children = [child for child in paths if len(child) == len(path) + 1 and child[:-1] == path]
    for child in children:
        _stand(child, paths, lines, free)
    lines[path] = lines[children[0]] if children else next(free)
