"""What one forward of the target costs, replayed and through the model's modules; with heads, decoding both ways.

    python benchmarks/forward.py --out out/forward.json
    python benchmarks/forward.py --heads runs/quickstart/heads --questions mt_bench.jsonl --out out/replayed.json

The ways take turns. Forwards read the same trees after the same text, on a GPU as CUDA graphs, too; medians, and the
largest difference of logits as a share of their spread. Decoding answers the same questions with the default drafter,
with the heads alone and plainly, each with everything recorded and prepacked, and with neither: the target through its
modules (with prepacked weights all the same) and the heads with their weights as torch stores them. Costs are measured
for each way.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from record import record
from tables import table

import headstart
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.questions import read_questions
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.catalog import DEFAULT
from headstart.eval.environment import environment
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.replay.recorded import Recorded
from headstart.tree.tree import Tree, TreeBatch

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
GRAPHS, REPLAYED, MODULES = "graphs", "replayed", "modules"
WAYS = (REPLAYED, MODULES)
"""Of decoding, and of forwards on a CPU."""
DRAFTERS = (DEFAULT, "heads", "none")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="a folder, a Hub id or the packaged model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="rows")
    parser.add_argument("--widths", nargs="+", type=int, default=list(WIDTHS), help="nodes of a tree")
    parser.add_argument("--context", type=int, default=200, help="tokens before the tree")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--heads", help="a folder of heads: decode instead of timing forwards")
    parser.add_argument("--questions", type=Path, help="JSONL, as of `headstart eval`; needed with --heads")
    parser.add_argument("--limit", type=int, default=24, help="questions")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    if options.heads:
        target, rows = decoded(options)
        what = "Answers to the same questions, greedy, batch 1, replayed and through the modules, in turns."
        settings = {"questions": options.limit, "max_new_tokens": options.max_new_tokens}
    else:
        target = load_target(options.target, dtype=options.dtype)
        rows = forwards(target, options)
        what = "One forward of the target over a tree, replayed and through the modules, in turns; medians."
        settings = {"context": options.context, "repeats": options.repeats}
    print(table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    if options.out:
        settings = {"target": Path(target.name).name, **settings}
        record(options.out, what, rows, environment(target), __file__, arguments, settings)


@contextmanager
def running(target: Target, way: str) -> Iterator[None]:
    """The target, and heads, as they run in this way."""
    target.record()
    held = target._recorded
    with ExitStack() as stack:
        if way == MODULES:
            target._recorded = Recorded(refused="a benchmark compares the two")
            stack.enter_context(mock.patch("headstart.heads.int8_weights.multiplied", return_value=None))
        elif way == REPLAYED and held.replay is not None:
            replay = copy.copy(held.replay)
            replay.graphs = None
            target._recorded = Recorded(replay)
        try:
            yield
        finally:
            target._recorded = held


def forwards(target: Target, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each batch and width."""
    start = perf_counter()
    target.record()
    print(f"Recorded and checked in {perf_counter() - start:.2f} s.")
    assert target.eager is None, target.eager
    rows = []
    for batch in options.batches:
        for width in options.widths:
            row = compared(target, batch, width, options.context, options.repeats)
            rows.append({"width": width, "batch": batch, **row})
            print(rows[-1], flush=True)
    return rows


@torch.inference_mode()
def compared(target: Target, batch: int, width: int, context: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds in each way, and how far from the modules' the logits of the others are at most."""
    random = torch.Generator().manual_seed(width)
    cache = target.new_cache(batch, context + width)
    ways = WAYS if target._graphs is None else (GRAPHS, *WAYS)
    text_BT = torch.randint(target.vocab_size, (batch, context), generator=random)
    target.prefill(cache, text_BT.tolist())
    tokens_BN = torch.randint(target.vocab_size, (batch, width), generator=random)
    parents = [-1, *((node - 1) // 2 for node in range(1, width))]
    trees = TreeBatch.of([Tree(row, list(parents)) for row in tokens_BN.tolist()], target.device)
    spent: dict[str, list[float]] = {way: [] for way in ways}
    logits = {}
    for number in range(repeats + 1):
        for way in ways if number % 2 else reversed(ways):
            with running(target, way):
                start = clock(target)
                logits[way] = target.forward_tree(cache, trees).logits_BTV.float()
                if number:  # the first one warms up
                    spent[way].append(1e3 * (clock(target) - start))
    ms = {way: median(spent[way]) for way in ways}
    apart = [(logits[way] - logits[MODULES]).abs().max() / logits[MODULES].std() for way in ways if way != MODULES]
    return {
        **{f"{way}_ms": ms[way] for way in ways},
        "over_modules": ms[MODULES] / ms[ways[0]],
        "largest_difference": float(max(apart)),
    }


def clock(target: Target) -> float:
    """Seconds, once the device has done all that it was asked for."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return perf_counter()


def decoded(options: argparse.Namespace) -> tuple[Target, list[dict[str, Any]]]:
    """A row for each drafter."""
    decoders = {way: headstart.load(options.heads, dtype=options.dtype) for way in WAYS}
    prompts = [
        prompt_tokens([{"role": "user", "content": item.turns[0]}], decoders[MODULES].target.tokenizer)
        for item in read_questions(options.questions)[: options.limit]
    ]
    loops: dict[tuple[str, str], DecodeLoop] = {}
    seconds = dict.fromkeys([(drafter, way) for drafter in DRAFTERS for way in WAYS], 0.0)
    emitted, rounds = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0)
    decoding = DecodeOptions(options.max_new_tokens)
    for way, decoder in decoders.items():
        with running(decoder.target, way):
            for drafter in DRAFTERS:
                loops[drafter, way] = decoder.loop(drafter)
                loops[drafter, way].generate([prompts[0]], DecodeOptions(8))
    for number, prompt in enumerate(prompts):
        keys = list(loops)
        for drafter, way in keys[number % len(keys) :] + keys[: number % len(keys)]:
            with running(decoders[way].target, way):
                start = perf_counter()
                (answer,) = loops[drafter, way].generate([prompt], decoding)
                seconds[drafter, way] += perf_counter() - start
            emitted[drafter, way] += len(answer.tokens)
            rounds[drafter, way] += len(answer.rounds)
    rows = []
    for drafter in DRAFTERS:
        speeds = {way: emitted[drafter, way] / seconds[drafter, way] for way in WAYS}
        rows.append(
            {
                "name": drafter,
                "replayed_tokens_per_second": speeds[REPLAYED],
                "modules_tokens_per_second": speeds[MODULES],
                "over_modules": speeds[REPLAYED] / speeds[MODULES],
                "tokens_per_round": emitted[drafter, REPLAYED] / max(1, rounds[drafter, REPLAYED]),
            }
        )
    return decoders[REPLAYED].target, rows


if __name__ == "__main__":
    main()
