"""A sampling step of a batch: all rows side by side against one row after the other, in turns.

    python benchmarks/sampling_step.py [--rows 64] [--vocab 49152 128256] [--repeats 9] [--device cpu] [--out FILE.json]

What is timed is the verifier alone: from the logits of a round to its tokens. One row after the other is the form that
every rule has for single rows, the reference of the tests. On a CPU what counts is the time that the process had, so
neighbours on the machine disturb little; on a GPU it is the clock's, after all work is done.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from record import here, record

from headstart.decode.options import SamplingOptions
from headstart.decode.rules import RULES
from headstart.decode.verify import RuleVerifier, streams
from headstart.tree.proposal import Proposal, ProposedTree, SampledChildren
from headstart.tree.tree import TreeShape

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
                found = compared(rule, shape, vocab, options)
                results.append({"rule": rule, "drafts": name, "vocab": vocab, "rows": options.rows, **found})
                cells = f"{found['row_by_row_ms']:.1f} | {found['side_by_side_ms']:.1f} | {found['times']:.1f}"
                print(f"| {rule} | {name} | {vocab} | {cells} |", flush=True)
    if options.out:
        settings = {"device": options.device, "dtype": options.dtype, "repeats": options.repeats}
        what = "Milliseconds of deciding a sampled round, all rows side by side against row by row, in turns."
        record(options.out, what, results, here(), __file__, arguments, settings)


def compared(rule: str, shape: TreeShape, vocab: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step in both forms, the median of rounds that take turns."""
    tree, logits_BNV = round_of(shape, options.rows, vocab, options)
    spent: dict[str, list[float]] = {"row_by_row_ms": [], "side_by_side_ms": []}
    for number in range(options.repeats + 1):
        for form in sorted(spent, reverse=bool(number % 2)):
            own = RULES[rule] if form == "side_by_side_ms" else replace(RULES[rule], next_tokens=None)
            seeds = [streams(options.rows * number + row)[0] for row in range(options.rows)]
            verifier = RuleVerifier(own, SamplingOptions(temperature=1.0), [[1]] * options.rows, seeds)
            ms = timed(lambda verifier=verifier: verifier.accept(tree, logits_BNV), options.device)  # type: ignore[misc]  # a default's type
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


def round_of(shape: TreeShape, rows: int, vocab: int, options: argparse.Namespace) -> tuple[ProposedTree, torch.Tensor]:
    """Drafts of every row, all but one of a node the likeliest and one drawn, and the target's logits."""
    noise = torch.Generator().manual_seed(0)
    tokens, sampled, logits = [], [], []
    for _ in range(rows):
        own_NV = SPREAD * torch.randn(shape.size, vocab, generator=noise)
        q_draft_NV = (0.9 * own_NV + 2.0 * torch.randn(shape.size, vocab, generator=noise)).softmax(-1)
        row, kept = [0] * shape.size, {}
        for node, below in enumerate(shape.children):
            if not below:
                continue
            top = q_draft_NV[node].topk(len(below) - 1).indices
            q_draft_V = q_draft_NV[node].index_fill(0, top, 0.0)
            q_draft_V /= q_draft_V.sum()
            found = [*top.tolist(), int(torch.multinomial(q_draft_V, 1, generator=noise))]
            for child, token in zip(below, found, strict=True):
                row[child] = token
            kept[node] = SampledChildren([below[-1]], q_draft_V.to(options.device))
        tokens.append(row)
        sampled.append(kept)
        logits.append(own_NV.to(getattr(torch, options.dtype)))
    parents = [list(shape.parents)] * rows
    tree = Proposal(tokens, parents, sampled=sampled if shape.size > 1 else None).on(options.device)
    return tree, torch.stack(logits).to(options.device)


if __name__ == "__main__":
    main()
