"""Is anything lost, or made twice, when runs that share their data are killed at random moments?

    python benchmarks/kills.py --kills 30

Runs of a tiny random target, on the commands that people give after a first run: longer training, more conversations,
another batch size, two other families. Each is killed (SIGKILL) at random moments and given again, until it ends. After
every kill each part of conversations, shard of hidden states and finished training that was there before must be there
unchanged; in the end nothing may have been made twice, every run has its report, and the heads must equal, bit for bit,
those of the same commands that nobody disturbed.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from record import record
from safetensors import safe_open
from safetensors.torch import load_file

from headstart.eval.environment import environment
from headstart.model.loading import load_target

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for the tests' tiny target
from tests.tiny import save_tiny_target

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("run", "RECIPE"),
    ("run", "RECIPE", "train.steps=60"),
    ("run", "RECIPE", "data.conversations=60"),
    ("run", "RECIPE", "data.batch_size=4"),
    ("run", "RECIPE", "name=hydra", "heads.family=hydra", "heads.num_heads=2"),
    ("run", "RECIPE", "name=eagle3", "heads.family=eagle3", "heads.draft_steps=2", "heads.aux_layers=[1,2,3]"),
)
RUNS = ("tiny", "hydra", "eagle3")
"""Those that the commands make."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/kills"), help="an empty folder")
    parser.add_argument("--kills", type=int, default=30, help="in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty")
    recipe = prepare(options.out)
    moments = random.Random(options.seed)
    longest = [undisturbed(options.out / "calm", recipe, command) for command in COMMANDS]
    kills: list[dict[str, Any]] = []
    before: dict[str, int] = {}
    for number, command in enumerate(COMMANDS):
        hits, tries = 0, 0
        wanted = options.kills * (number + 1) // len(COMMANDS) - options.kills * number // len(COMMANDS)
        while hits < wanted and tries < 4 * wanted:
            # Within the time that the whole command takes undisturbed; what is done already goes faster.
            moment = moments.uniform(0, longest[number])
            kills.append({"command": command, "moment": round(moment, 2)})
            kills[-1]["killed"] = disturbed(options.out / "killed", recipe, command, moment)
            kills[-1]["lost"], before = missing(before, made(options.out / "killed"))
            hits, tries = hits + kills[-1]["killed"], tries + 1
            print(json.dumps(kills[-1]), flush=True)
        undisturbed(options.out / "killed", recipe, command)
        lost, before = missing(before, made(options.out / "killed"))
        kills.append({"command": command, "moment": None, "killed": False, "lost": lost})
    compared = compare(options.out / "calm", options.out / "killed")
    losses = sum(len(kill["lost"]) for kill in kills)
    what = (
        f"{sum(kill['killed'] for kill in kills)} kills of a running command; {losses} files lost, "
        f"{compared['twice']} things made twice, {compared['reports']} reports, "
        f"{compared['different']} heads that differ."
    )
    rows = by_command(kills, COMMANDS)
    machine = environment(load_target(str(options.out / "target"), "float32", "cpu"))
    record(options.out / "kills.json", what, rows, machine, __file__, arguments, {"seed": options.seed}, compared)
    print(what)
    if losses or compared["twice"] or compared["different"] or compared["reports"] < len(RUNS):
        raise SystemExit(1)


def by_command(kills: Sequence[dict[str, Any]], commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """How often each command was killed, and what that lost."""
    return [
        {
            "command": " ".join(command),
            "kills": sum(kill["killed"] for kill in kills if kill["command"] == command),
            "files_lost": sum(len(kill["lost"]) for kill in kills if kill["command"] == command),
        }
        for command in commands
    ]


def missing(before: dict[str, int], after: dict[str, int]) -> tuple[list[str], dict[str, int]]:
    """(what was there and is not, or is another file; what is there now)."""
    return sorted(name for name, stamp in before.items() if after.get(name) != stamp), after


def prepare(out: Path, count: int = 200, data: Mapping[str, int] | None = None) -> Path:
    """A tiny random target, so many prompts for it and a recipe with these settings of data; the recipe's file."""
    out.mkdir(parents=True, exist_ok=True)
    save_tiny_target(out / "target")
    prompts = out / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"Tell me about number {i}."]}) + "\n" for i in range(count)))
    recipe = out / "tiny.yaml"
    settings = {
        "name": "tiny",
        "target": {"spec": str((out / "target").resolve()), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": str(prompts.resolve()),
            "conversations": 40,
            "heldout": 4,
            "validation": 6,
            "max_new_tokens": 32,
            "batch_size": 8,
            **(data or {}),
        },
        "heads": {"family": "medusa", "num_heads": 2},
        "train": {"steps": 40, "batch_tokens": 256, "eval_every": 10, "save_every": 5},
        "tune": {"widths": [1, 2, 4], "context": 32, "max_nodes": 4, "max_rank": 2},
        "eval": {"limit": 2, "max_new_tokens": 8},
    }
    recipe.write_text(yaml.safe_dump(settings))
    return recipe.resolve()


CODE = "import torch; torch.set_num_threads(1); from headstart.cli.app import main; main()"


def start(folder: Path, recipe: Path, command: Sequence[str], code: str = CODE) -> subprocess.Popen[bytes]:
    """One command of headstart in a folder of runs of its own, on one thread, so that sums have one order."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [str(recipe) if word == "RECIPE" else word for word in command]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-c", code, *words], cwd=folder, stdout=log, stderr=log)


def undisturbed(folder: Path, recipe: Path, command: Sequence[str]) -> float:
    """Let a command come to its end; returns its seconds."""
    began = time.perf_counter()
    code = start(folder, recipe, command).wait()
    if code:
        raise SystemExit(f"{' '.join(command)} ended with {code}; see {folder / 'log'}")
    return time.perf_counter() - began


def disturbed(folder: Path, recipe: Path, command: Sequence[str], moment: float) -> bool:
    """Kill a command after so many seconds; whether it was still running."""
    process = start(folder, recipe, command)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return True
    return False


def made(folder: Path) -> dict[str, int]:
    """What is finished of the artifacts: each file with its time. Checkpoints give way to newer ones by themselves."""
    root = folder / "runs" / "artifacts"
    kinds = ("conversations/*/batches/*.jsonl", "states/*/shard-*.safetensors", "heads/*/result.json")
    return {str(file.relative_to(root)): file.stat().st_mtime_ns for pattern in kinds for file in root.glob(pattern)}


def compare(calm: Path, killed: Path) -> dict[str, int]:
    """What was made twice under kills, the reports, and heads that are not those of the undisturbed runs."""
    twice = 0
    for folder in (killed / "runs" / "artifacts" / "conversations").iterdir():
        numbers = Counter(file.name.partition("-")[0] for file in (folder / "batches").glob("[0-9]*.jsonl"))
        asked = Counter(
            json.loads(line)["id"] for file in (folder / "batches").glob("[0-9]*.jsonl") for line in _rows(file)
        )
        twice += sum(count > 1 for count in [*numbers.values(), *asked.values()])
    held: Counter[tuple[str, str]] = Counter()
    for shard in (killed / "runs" / "artifacts" / "states").glob("*/shard-*.safetensors"):
        with safe_open(shard, framework="pt") as handle:
            about = handle.metadata()
        held.update((str(layer), key) for layer in json.loads(about["taps"]) for key in json.loads(about["keys"]))
    twice += sum(count > 1 for count in held.values())
    different = 0
    for run in RUNS:
        ours, theirs = (load_file(path / "runs" / run / "heads" / "heads.safetensors") for path in (killed, calm))
        different += any(not torch.equal(ours[name], theirs[name]) for name in theirs)
    reports = sum((killed / "runs" / run / "report" / "report.html").is_file() for run in RUNS)
    return {"twice": twice, "different": different, "reports": reports}


def _rows(part: Path) -> list[str]:
    """The conversations of a part; its first line says what it is."""
    return part.read_text().splitlines()[1:]


if __name__ == "__main__":
    main()
