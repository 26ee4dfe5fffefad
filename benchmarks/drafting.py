"""What a draft of trained heads costs on a CPU, compiled and on torch.

    python benchmarks/drafting.py runs/quickstart/heads --out out/drafting.json

A draft goes to the full depth, in a tree of 16 nodes or in a chain; the target runs between two drafts, so that their
weights come from memory. Both ways take turns, with weights in full and in 8 bits; lower quartiles of each turn, and of
the turns the median.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from record import record
from tables import table

import headstart
from headstart.eval.environment import environment
from headstart.heads.int8_weights import drop_int8, to_int8
from headstart.tree.tree import RankPath
from headstart.tuning.stopwatch import Drafting, Timing, draft_ms

COMPILED, TORCH = "compiled", "torch"
SHAPES: dict[str, list[RankPath]] = {
    "chain": [(0,) * depth for depth in range(1, 17)],
    "tree": [(*(0,) * depth, rank) for depth in range(3) for rank in range(5)],
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="a folder of heads")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    decoder = headstart.load(options.heads, dtype=options.dtype)
    target, heads = decoder.target, decoder.heads
    rows: list[dict[str, Any]] = []
    for shape, every in SHAPES.items():
        paths = [path for path in every if len(path) <= heads.draft_steps]
        for weights, prepare in (("full", drop_int8), ("8 bits", to_int8)):
            turns: dict[str, list[Drafting]] = {COMPILED: [], TORCH: []}
            for turn in range(options.turns):
                for way in list(turns)[:: 1 if turn % 2 else -1]:
                    off = mock.patch("headstart.kernels.draft_kernels.compiled", return_value=None)
                    drop_int8(heads)  # how weights in 8 bits lie depends on who multiplies them
                    with off if way == TORCH else nullcontext():
                        prepare(heads)
                        turns[way].append(draft_ms(target, heads, paths, Timing()))
            ms = {
                f"{way}_{part}": median(getattr(found, part) for found in turns[way])
                for part in ("draft_ms", "level_ms")
                for way in turns
            }
            ratio = median(b.draft_ms / a.draft_ms for a, b in zip(turns[COMPILED], turns[TORCH], strict=True))
            rows.append({"shape": shape, "weights": weights, **ms, "over_torch": ratio})
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    if options.out:
        what = "A draft of heads to the full depth, compiled and on torch, in turns."
        settings = {"heads": heads.family, "draft_steps": heads.draft_steps, "turns": options.turns}
        record(options.out, what, rows, environment(target), __file__, arguments, settings)


if __name__ == "__main__":
    main()
