"""What a forward of a target over a few tokens costs on a CPU, compiled and on torch.

    python benchmarks/forwards.py --out out/forwards.json

Tokens are trees after 256 tokens of text. Both ways take turns over all widths; lower quartiles of each turn, and of
the turns the median.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from record import record
from tables import table

from headstart.eval.environment import environment
from headstart.kernels import prepacked
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.tuning.stopwatch import Timing, measure_verify

COMPILED, TORCH = "compiled", "torch"
WIDTHS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Products, attention and the operators between them are torch's."""
    attention = mock.patch("headstart.kernels.cpu_attention.serves", return_value=False)
    with mock.patch.object(prepacked, "_compiled", return_value=None), attention:
        yield


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("out/forwards.json"), help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    ways: dict[str, Callable[[], Any]] = {COMPILED: nullcontext, TORCH: torch_alone}
    targets: dict[str, Target] = {}
    for way, setting in ways.items():
        with setting():
            targets[way] = load_target(options.target, options.dtype)
            measure_verify(targets[way], Timing(WIDTHS, repeats=1), ())  # packs, and records
    timing = Timing(WIDTHS).within(targets[COMPILED])
    turns: dict[str, list[list[float]]] = {COMPILED: [], TORCH: []}
    for turn in range(options.turns):
        for way in list(ways)[:: 1 if turn % 2 else -1]:
            with ways[way]():
                turns[way].append(measure_verify(targets[way], timing, ()))
    rows = []
    for index, width in enumerate(timing.widths):
        ms = {f"{way}_ms": median(times[index] for times in turns[way]) for way in ways}
        ratio = median(b[index] / a[index] for a, b in zip(turns[COMPILED], turns[TORCH], strict=True))
        rows.append({"tokens": width, **ms, "over_torch": ratio})
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    what = "A forward over a few tokens, its choice and its commit, compiled and on torch, in turns."
    settings = {"target": options.target, "turns": options.turns}
    record(options.out, what, rows, environment(targets[COMPILED]), __file__, arguments, settings)


if __name__ == "__main__":
    main()
