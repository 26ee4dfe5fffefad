"""Training from an online target beside training on stored states, on several processes of this machine.

    python benchmarks/online.py                                   # the packaged target, two gloo processes
    python benchmarks/online.py --repeats 3 --steps 40 --set train.batch_tokens=1024

The same conversations and the same batches both ways: `data.states=stored` reads hidden states, `data.states=online`
computes them in each process. Runs take turns, each repeat with another seed. Bytes are those of the states on disk;
steps a second those of the second half of a training, with its validation; and what the heads are apart is a share of
the weights.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from record import here, record

from headstart.heads.io import load_heads
from headstart.support.artifacts import referred
from headstart.support.files import read_jsonl

DATA = (
    *("data.conversations=48", "data.validation=8", "data.heldout=4", "data.max_new_tokens=96", "data.minutes=null"),
    *("train.minutes=null", "train.epochs=1000", "train.keep_checkpoints=1"),
)
WAYS = ("stored", "online")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="eagle3")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of the recipe")
    parser.add_argument("--out", type=Path, default=Path("out/online"), help="a folder, for runs and online.json")
    options = parser.parse_args(arguments)
    half = max(1, options.steps // 2)
    common = [options.recipe, *DATA, f"train.steps={options.steps}", f"train.eval_every={half}", *options.set]
    speeds, apart = {way: list[float]() for way in WAYS}, list[float]()
    losses = {way: list[float]() for way in WAYS}
    for seed in range(options.repeats):
        for way in WAYS if seed % 2 else reversed(WAYS):
            folder = options.out / "runs" / way
            settings = [*common, f"data.states={way}", f"train.seed={seed}", "--run-dir", str(folder)]
            run([sys.executable, "-m", "headstart", "data", "build", *settings], folder)
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.processes)]
            run([sys.executable, *torchrun, "-m", "headstart.train", *settings], folder, options.processes)
            rows = [row for _, row in read_jsonl(folder / "train" / "metrics.jsonl")]
            middle = next(row for row in rows if row["step"] == half)
            seconds = rows[-1]["elapsed_seconds"] - middle["elapsed_seconds"]
            speeds[way].append((rows[-1]["step"] - half) / seconds)
            losses[way].append(rows[-1]["loss"])
            print(f"{way}, seed {seed}: {speeds[way][-1]:.3f} steps/s, loss {losses[way][-1]:.4f}", flush=True)
        one, other = (load_heads(options.out / "runs" / way / "train" / "last").state_dict() for way in WAYS)
        apart.append(share(one, other))
    rows_of_ways = [
        {
            "name": way,
            "megabytes_of_states": states_bytes(options.out / "runs" / way) / 1e6,
            "steps_per_second": round(mean(speeds[way]), 4),
            "over_stored": round(mean(speeds[way]) / mean(speeds["stored"]), 3),
            "loss": round(mean(losses[way]), 5),
            "heads_apart": max(apart) if way == "online" else None,
        }
        for way in WAYS
    ]
    what = (
        f"The recipe {options.recipe} on {options.processes} processes: {options.steps} steps on stored states, and "
        f"with the target's forward in each process; means of {options.repeats} runs each, in turns."
    )
    settings_kept = {"recipe": options.recipe, "processes": options.processes, "settings": [*DATA, *options.set]}
    details = {"steps_per_second": speeds, "heads_apart": apart, "losses": losses}
    record(options.out / "online.json", what, rows_of_ways, here(), __file__, arguments, settings_kept, details)


def run(words: Sequence[str], folder: Path, processes: int = 1) -> None:
    """A command of headstart on the CPU, with a share of its cores for each process; its log lies in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, len(os.sched_getaffinity(0)) // processes))
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": threads}
    with (folder / "benchmark.log").open("a") as log:
        done = subprocess.run(words, env=environment, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}; see {folder / 'benchmark.log'}")


def states_bytes(folder: Path) -> int:
    """Of the states that a run has on disk."""
    states = referred(folder, "states")
    return 0 if states is None else sum(file.stat().st_size for file in states.rglob("shard-*.safetensors"))


def share(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far two heads are apart, of the size of their weights."""
    pairs: list[tuple[Any, Any]] = [(one[name].double(), other[name].double()) for name in one]
    return float((sum((a - b).square().sum() for a, b in pairs) / sum(a.square().sum() for a, _ in pairs)).sqrt())


if __name__ == "__main__":
    main()
