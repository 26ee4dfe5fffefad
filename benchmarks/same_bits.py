"""Is greedy text in bfloat16 the plain loop's own, and what does that cost? Every drafter, batch by batch.

    python benchmarks/same_bits.py runs/quickstart/heads --questions data/mtbench.jsonl --out out/same_bits.json
    python benchmarks/same_bits.py runs/quickstart/heads --quick

Each method decodes the same batches as the plain loop, with `exact="bits"` and with `exact="tokens"`, in turns, another
one going first each time. Counted are outputs that differ from the plain loop's for the same batch, in any token (0 is
promised with bits), and rows of logits of trees that differ from single steps in any bit. Speeds are tokens a second,
over those of the plain loop with the same setting, and those with bits over those with tokens: the price of the bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from never_slower import prompts_of
from tables import table

import headstart
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.eval.audit import count_bits
from headstart.eval.environment import environment
from headstart.model.model import Exact
from headstart.support.files import write_json

PLAIN = "plain"
METHODS = ("heads", "heads+ngram", "ngram", "lookahead", "early-exit")
EXACT: tuple[Exact, ...] = ("bits", "tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="a folder of heads")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    parser.add_argument("--questions", type=Path, help="JSONL, as of `headstart eval`; by default a few of our own")
    parser.add_argument("--limit", type=int, default=240, help="questions at most")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="DRAFTER")
    parser.add_argument("--exact", nargs="+", choices=EXACT, default=list(EXACT), help="one alone counts, untimed")
    parser.add_argument("--draft", choices=("auto", "on"), default="auto", help="on drafts even where it does not pay")
    parser.add_argument("--target", help="where it is, when it is not where the heads say")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--quick", action="store_true", help="two questions, batches of 1 and 2, 8 tokens: does it run?"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.limit, options.batches, options.max_new_tokens = 2, [1, 2], 8

    decoder = headstart.load(options.heads, options.target, dtype=options.dtype, exact="bits")
    target = decoder.target
    prompts = prompts_of(target, options.questions, options.limit)
    # A loop each: what one learns of the costs of rounds must not serve the other setting.
    loops: dict[tuple[str, Exact], DecodeLoop] = {}
    for name, exact in product((PLAIN, *options.methods), options.exact):
        loop = decoder.loop(name) if name != PLAIN else None
        loops[name, exact] = DecodeLoop(target, *loop.drafters, costs=loop.costs) if loop else DecodeLoop(target)
    asked = DecodeOptions(options.max_new_tokens, draft=options.draft)
    rows: list[dict[str, Any]] = []
    results = {
        "dtype": options.dtype,
        "questions": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "draft": options.draft,
        "environment": environment(target),
        "rows": rows,
    }
    for batch in options.batches:
        rows += cell(loops, prompts, batch, asked)
        print(report([row for row in rows if row["batch"] == batch]), flush=True)
        if options.out:
            write_json(options.out, results)


def cell(
    loops: Mapping[tuple[str, Exact], DecodeLoop], prompts: Sequence[list[int]], batch: int, asked: DecodeOptions
) -> list[dict[str, Any]]:
    """All methods over all questions, so many at a time: a row for each."""
    names = list(loops)
    target = loops[names[0]].target
    outputs: dict[tuple[str, Exact], list[list[int]]] = {name: [] for name in names}
    seconds, rounds = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
    errors: dict[tuple[str, Exact], set[str]] = {name: set() for name in names}
    for name, loop in loops.items():
        target.exact = name[1]
        loop.generate([prompts[0]] * batch, replace(asked, max_new_tokens=2))
    for number, start in enumerate(range(0, len(prompts), batch)):
        texts = prompts[start : start + batch]
        first = number % len(names)
        for name in names[first:] + names[:first]:
            target.exact = name[1]
            began = perf_counter()
            generations = loops[name].generate(texts, asked)
            seconds[name] += perf_counter() - began
            outputs[name] += [output.tokens for output in generations]
            rounds[name] += sum(len(output.rounds) for output in generations)
            errors[name] |= {output.drafter_error for output in generations if output.drafter_error}
    speeds = {name: sum(map(len, outputs[name])) / seconds[name] for name in names}
    counted = {}
    for exact in dict.fromkeys(exact for _, exact in names):
        target.exact = exact
        counted[exact] = asdict(count_bits(target, list(zip(prompts, outputs[PLAIN, exact], strict=True))))
    rows = []
    for method, exact in names:
        ours, plain = outputs[method, exact], outputs[PLAIN, exact]
        rows.append(
            {
                "method": method,
                "exact": exact,
                "batch": batch,
                "outputs": len(ours),
                "outputs_that_differ": sum(output != expected for output, expected in zip(ours, plain, strict=True)),
                "tokens": sum(map(len, ours)),
                "logit_rows": counted[exact],
                "tokens_per_round": sum(map(len, ours)) / max(1, rounds[method, exact]),
                "tokens_per_second": speeds[method, exact],
                "over_plain": speeds[method, exact] / speeds[PLAIN, exact],
                "bits_over_tokens": speeds[method, "bits"] / speeds[method, "tokens"] if len(counted) > 1 else None,
                "drafter_errors": sorted(errors[method, exact]),
            }
        )
    return rows


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of one batch size."""
    head = ["method", "exact", "batch", "outputs that differ", "rows of logits that differ", "tokens a round"]
    head += ["tokens/s", "over plain", "bits over tokens"]
    lines = [
        [
            row["method"],
            row["exact"],
            row["batch"],
            f"{row['outputs_that_differ']} of {row['outputs']}",
            f"{row['logit_rows']['differ']} of {row['logit_rows']['rows']}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['over_plain']:.2f}x",
            f"{row['bits_over_tokens']:.2f}x" if row["bits_over_tokens"] else "–",
        ]
        for row in rows
    ]
    broken = [row for row in rows if row["exact"] == "bits" and row["outputs_that_differ"]]
    parts = [
        table(head, lines),
        *(f"Not the plain loop's words: {row['method']}, batch {row['batch']}." for row in broken),
        *(f"Failed: {row['method']}: {error}" for row in rows for error in row["drafter_errors"]),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
