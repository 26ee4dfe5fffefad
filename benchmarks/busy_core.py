"""Decoding speed while another program occupies a core, against fixed thread counts.

    python benchmarks/busy_core.py runs/quickstart/heads
    python benchmarks/busy_core.py runs/quickstart/heads --quick

One process decodes the same prompts in turns: with threads that follow the free cores (the default), with all threads,
and with one. A second process does so with all threads and OMP_WAIT_POLICY=passive, which OpenMP reads at start-up; two
equal processes differ by a few per cent. Everything runs once on a quiet machine and once beside a busy loop. The bar:
0.97 of the best fixed setting on a quiet machine, 0.85 beside a busy core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from never_slower import anew, prompts_of
from record import in_turn, record
from tables import figures

import headstart
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.catalog import DEFAULT
from headstart.eval.environment import environment
from headstart.eval.labels import label_of

BARS = {"quiet": 0.97, "one core busy": 0.85}
FOLLOWS = "free cores"
ALL, ONE, PASSIVE = "all threads", "one thread", "passive waiting"
SETTINGS = (FOLLOWS, ALL, ONE, PASSIVE)
METHODS = ("plain", "heads", DEFAULT)
WHAT = "Tokens/s by thread setting, on a quiet machine and beside a busy loop, settings in turns."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="a folder of heads")
    parser.add_argument("--out", type=Path, default=Path("out/busy_core.json"), help="file for the figures")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2, help="runs of every prompt in each cell")
    parser.add_argument("--quick", action="store_true", help="smoke test: one prompt, once, 8 tokens")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.max_new_tokens, options.repeats = 1, 8, 1
    if options.worker:
        work(options)
        return
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        active = stack.enter_context(worker(options, {}))
        machine = ask(active, {})  # one after the other: costs are measured on a quiet machine
        passive = stack.enter_context(worker(options, {"OMP_WAIT_POLICY": "passive"}))
        ask(passive, {})
        workers = {name: passive if name == PASSIVE else active for name in SETTINGS}
        for condition in BARS:
            with busy_loop() if condition != "quiet" else ExitStack():
                rows += measure(condition, workers, options)
    print(figures(rows))
    for row in rows:
        if row["over_best_fixed"] < BARS[row["condition"]]:
            print(f"Below {BARS[row['condition']]}: {row['method']}, {row['condition']}: {row['over_best_fixed']:.3f}.")
    settings = {"max_new_tokens": options.max_new_tokens, "prompts": options.prompts, "repeats": options.repeats}
    record(options.out, WHAT, rows, machine, __file__, arguments, settings)


def measure(
    condition: str, workers: Mapping[str, subprocess.Popen[str]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield a row for each method with its speed in each setting."""
    names = list(workers)
    for method in METHODS:
        seconds, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)
        for number in range(options.prompts * options.repeats):
            for name in in_turn(names, number):
                done = ask(workers[name], {"setting": name, "method": method, "prompt": number % options.prompts})
                seconds[name] += done["seconds"]
                tokens[name] += done["tokens"]
        speeds = {name: tokens[name] / seconds[name] for name in names}
        best = max(speed for name, speed in speeds.items() if name != FOLLOWS)
        yield {
            "name": f"{label_of(method)}, {condition}",
            "method": method,
            "condition": condition,
            "tokens_per_second": speeds,
            "over_best_fixed": speeds[FOLLOWS] / best,
        }


@contextmanager
def busy_loop() -> Iterator[None]:
    """Occupy one core until the block ends."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def worker(options: argparse.Namespace, variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process that decodes on request."""
    command = [sys.executable, __file__, options.heads, "--worker", "--dtype", options.dtype]
    command += ["--prompts", str(options.prompts), "--max-new-tokens", str(options.max_new_tokens)]
    pipe, environment = subprocess.PIPE, {**os.environ, **variables}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: subprocess.Popen[str], request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request to a worker and wait for its answer."""
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(request), file=process.stdin, flush=True)
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def work(options: argparse.Namespace) -> None:
    """Answer requests from standard input with the environment, or with seconds and tokens of one text."""
    decoder = headstart.load(options.heads, dtype=options.dtype)
    prompts = prompts_of(decoder.target, None, options.prompts)
    asked, threads = DecodeOptions(options.max_new_tokens), torch.get_num_threads()
    loops: dict[tuple[str, str], DecodeLoop] = {}
    for setting, method in product(SETTINGS, METHODS):
        loop = DecodeLoop(decoder.target) if method == "plain" else anew(decoder.loop(method))
        loop.free_cores = loop.free_cores if setting == FOLLOWS else None
        loops[setting, method] = loop
    for method in METHODS:
        loops[ALL, method].generate([prompts[0]], asked)  # records what later calls replay
    for line in sys.stdin:
        request, answer = json.loads(line), environment(decoder.target)
        if request:
            torch.set_num_threads(1 if request["setting"] == ONE else threads)
            start = perf_counter()
            (text,) = loops[request["setting"], request["method"]].generate([prompts[request["prompt"]]], asked)
            answer = {"seconds": perf_counter() - start, "tokens": len(text.tokens)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
