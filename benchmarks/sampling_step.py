"""A sampling step of a batch: all rows side by side against one row after the other, in turns.

    python benchmarks/sampling_step.py [--rows 64] [--vocab 49152 128256] [--repeats 9] [--device cpu] [--out FILE.json]

What is timed is the verifier alone: from the logits of a round to its tokens. One row after the other decides each
as a batch of its own. On a CPU what counts is the time that the process had, so
neighbours on the machine disturb little; on a GPU it is the clock's, after all work is done.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from record import here, record

from headstart.decode.options import SamplingOptions
from headstart.decode.verify import DRAWS, SamplingVerifier
from headstart.model.model import TargetOutput
from headstart.tree.tree import Drawn, Tree, TreeBatch, TreeShape

SHAPES = {"no drafts": TreeShape.chain(0), "tree of 8": TreeShape.from_paths([(0, 0, 0), (0, 1), (1, 0), (2,)])}
SPREAD = 4.5
"""Standard deviation of the target's logits; the drafter's are these with noise."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", nargs="+", type=int, default=[49152, 128256])
    parser.add_argument("--rules", nargs="+", default=["greedy_draft"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", help="of the logits")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    results = []
    print(
        "| rule | drafts | vocabulary | row by row, ms | side by side, ms | times faster |\n|---|---|---|---|---|---|"
    )
    for vocab in options.vocab:
        for name, shape in SHAPES.items():
            for rule in options.rules:
                figures = compared(rule, shape, vocab, options)
                results.append({"rule": rule, "drafts": name, "vocab": vocab, "rows": options.rows, **figures})
                cells = f"{figures['row_by_row_ms']:.1f} | {figures['side_by_side_ms']:.1f} | {figures['times']:.1f}"
                print(f"| {rule} | {name} | {vocab} | {cells} |", flush=True)
    if options.out:
        settings = {"device": options.device, "dtype": options.dtype, "repeats": options.repeats}
        what = "Milliseconds of deciding a sampled round, all rows side by side against row by row, in turns."
        record(options.out, what, results, here(), __file__, arguments, settings)


def compared(rule: str, shape: TreeShape, vocab: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step in both forms, the median of rounds that take turns."""
    trees, logits_BNV = round_of(shape, options.rows, vocab, options)
    together = [TreeBatch.of(trees, options.device)], [TargetOutput(logits_BNV)]
    apart = [TreeBatch.of([tree], options.device) for tree in trees], [TargetOutput(row[None]) for row in logits_BNV]
    spent: dict[str, list[float]] = {"row_by_row_ms": [], "side_by_side_ms": []}
    for number in range(options.repeats + 1):
        for form in sorted(spent, reverse=bool(number % 2)):
            batches, outs = together if form == "side_by_side_ms" else apart
            verifiers = [
                SamplingVerifier(SamplingOptions(temperature=1.0), [[1]] * len(batch.trees), number + row, DRAWS[rule])
                for row, batch in enumerate(batches)
            ]

            def decide() -> None:
                for verifier, batch, out in zip(verifiers, batches, outs, strict=True):  # noqa: B023  # called at once
                    verifier.accept(batch, out)

            ms = timed(decide, options.device)
            if number:  # the first round warms up
                spent[form].append(ms)
    medians = {form: statistics.median(times) for form, times in spent.items()}
    return {**medians, "times": medians["row_by_row_ms"] / medians["side_by_side_ms"]}


def timed(work: Callable[[], object], device: str) -> float:
    clock = process_time if device == "cpu" else perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (clock() - start)


def round_of(shape: TreeShape, rows: int, vocab: int, options: argparse.Namespace) -> tuple[list[Tree], torch.Tensor]:
    """Drafts of every row, all but one of a node the likeliest and one drawn, and the target's logits."""
    noise = torch.Generator().manual_seed(0)
    trees, logits = [], []
    for _ in range(rows):
        own_NV = SPREAD * torch.randn(shape.size, vocab, generator=noise)
        q_draft_NV = (0.9 * own_NV + 2.0 * torch.randn(shape.size, vocab, generator=noise)).softmax(-1)
        tree = Tree([0] * shape.size, shape.parents)
        for node, below in enumerate(shape.children):
            if not below:
                continue
            top = q_draft_NV[node].topk(len(below) - 1).indices
            q_draft_V = q_draft_NV[node].index_fill(0, top, 0.0)
            q_draft_V /= q_draft_V.sum()
            tokens = [*top.tolist(), int(torch.multinomial(q_draft_V, 1, generator=noise))]
            for child, token in zip(below, tokens, strict=True):
                tree.tokens[child] = token
            tree.drawn[below[-1]] = Drawn(q_draft_V.to(options.device))
        trees.append(tree)
        logits.append(own_NV.to(getattr(torch, options.dtype)))
    return trees, torch.stack(logits).to(options.device)


if __name__ == "__main__":
    main()
