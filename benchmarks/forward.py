"""What one forward of the target over a tree costs, with prepacked weights and without, by batch and width.

    python benchmarks/forward.py --out out/forward.json
    python benchmarks/forward.py --target USER/NAME --dtype float32 --batches 1 4

Two copies of the target, of which one has no prepacked weights, read the same trees in turns; medians. `same bits` says
whether all logits of the two were equal in every bit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from record import record
from tables import table
from torch import Tensor

from headstart.eval.environment import environment
from headstart.target.cache import TreeCache
from headstart.target.loading import load_target
from headstart.target.model import Target
from headstart.tree.tree import Tree, TreeBatch

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 64)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="a folder, a Hub id or the packaged model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="rows")
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), help="nodes of a tree")
    parser.add_argument("--context", type=int, default=256, help="tokens before the tree")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    prepacked = load_target(options.target, dtype=options.dtype)
    with mock.patch("headstart.target.fitting.fits", return_value=False):
        plain = load_target(options.target, dtype=options.dtype)
        assert not plain.prepacked
    rows = []
    for batch in options.batches:
        caches = [read(target, batch, options.context, max(options.widths)) for target in (prepacked, plain)]
        for width in options.widths:
            ms, same = compared([prepacked, plain], caches, width, options.repeats)
            rows.append(
                {
                    "width": width,
                    "batch": batch,
                    "verify_ms": ms[0],
                    "not_prepacked_ms": ms[1],
                    "over_not_prepacked": ms[1] / ms[0],
                    "same_bits": same,
                }
            )
            print(rows[-1], flush=True)
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    if options.out:
        what = "One forward of the target over a tree, with prepacked weights and without, in turns; medians."
        settings = {"target": Path(prepacked.name).name, "context": options.context, "repeats": options.repeats}
        record(options.out, what, rows, environment(prepacked), __file__, arguments, settings)


def read(target: Target, batch: int, context: int, width: int) -> TreeCache:
    """A cache of random texts."""
    random = torch.Generator().manual_seed(0)
    cache = target.new_cache(batch, context + width)
    target.prefill(cache, torch.randint(target.vocab_size, (batch, context), generator=random).tolist())
    return cache


@torch.inference_mode()
def compared(
    targets: Sequence[Target], caches: Sequence[TreeCache], width: int, repeats: int
) -> tuple[list[float], bool]:
    """Median milliseconds of each target, and whether their logits are equal in every bit."""
    random = torch.Generator().manual_seed(width)
    tokens_BN = torch.randint(targets[0].vocab_size, (caches[0].rows, width), generator=random)
    batch = TreeBatch.of([Tree.chain_of(row) for row in tokens_BN.tolist()])
    seconds: list[list[float]] = [[] for _ in targets]
    logits: list[Any] = [None] * len(targets)
    for number in range(repeats + 1):
        for index in sorted(range(len(targets)), key=lambda index: (index + number) % len(targets)):
            start = perf_counter()
            read: Tensor = targets[index].forward_tree(caches[index], batch).logits_BTV
            if number:  # the first one warms up
                seconds[index].append(perf_counter() - start)
            logits[index] = read
    same = all(torch.equal(logits_BNV, logits[0]) for logits_BNV in logits)
    return [1000 * median(times) for times in seconds], same


if __name__ == "__main__":
    main()
