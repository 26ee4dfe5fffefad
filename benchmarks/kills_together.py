"""Do two processes that write one run's data lose or repeat anything when they are killed at random moments?

    python benchmarks/kills_together.py --kills 20

Two processes give the same command: first one that writes conversations, then one that needs other hidden states of
them. One of the two, whichever chance picks, is killed (SIGKILL) when one to three more files are finished, and given
again, until the command has come to its end. After every kill each part of conversations and shard of hidden states
that was there before must be there unchanged. In the end nothing may have been made twice, and conversations and
states must be, as sets, those that a single process makes undisturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kills import CODE, by_command, made, missing, prepare, start
from record import record
from safetensors import safe_open

from headstart.eval.environment import environment
from headstart.target.loading import load_target

COMMANDS: tuple[tuple[str, ...], ...] = (
    ("data", "build", "RECIPE"),
    ("data", "build", "RECIPE", "heads.family=eagle3", "heads.draft_steps=2", "heads.aux_layers=[1,2,3]"),
)
PROCESSES = 2
_CODE = f"import headstart.data.states.shards as shards; shards.SHARD_BYTES = 60_000, 60_000; {CODE}"
"""Small shards, so that there are many."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/kills_together"), help="an empty folder")
    parser.add_argument("--kills", type=int, default=20, help="in all")
    parser.add_argument("--conversations", type=int, default=240, help="to write")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty")
    recipe = prepare(options.out, 2 * options.conversations, {"conversations": options.conversations})
    chance = random.Random(options.seed)
    kills: list[dict[str, Any]] = []
    for command in COMMANDS:
        alone = start(options.out / "alone", recipe, command, _CODE)
        if alone.wait():
            raise SystemExit(f"{' '.join(command)} failed; see {options.out / 'alone' / 'log'}")
    for number, command in enumerate(COMMANDS):
        wanted = options.kills * (number + 1) // len(COMMANDS) - options.kills * number // len(COMMANDS)
        kills += disturbed(options.out / "together", recipe, command, wanted, chance)
    found = compare(options.out / "alone", options.out / "together")
    losses = sum(len(kill["lost"]) for kill in kills)
    killed = sum(kill["killed"] for kill in kills)
    what = (
        f"{killed} kills of one of {PROCESSES} processes that write one run's data; {losses} files lost, "
        f"{found['twice']} things made twice, {found['different']} of {found['things']} conversations and states "
        "that are not those of one process."
    )
    rows = by_command(kills, COMMANDS)
    machine = environment(load_target(str(options.out / "target"), "float32", "cpu"))
    settings = {"seed": options.seed, "conversations": options.conversations, "processes": PROCESSES}
    record(options.out / "kills_together.json", what, rows, machine, __file__, arguments, settings, found)
    print(what)
    if losses or found["twice"] or found["different"] or not found["things"]:
        raise SystemExit(1)


def disturbed(
    folder: Path, recipe: Path, command: Sequence[str], wanted: int, chance: random.Random
) -> list[dict[str, Any]]:
    """Give a command to several processes, and kill one after the other; what each kill lost."""
    kills: list[dict[str, Any]] = []
    processes = [start(folder, recipe, command, _CODE) for _ in range(PROCESSES)]
    before = made(folder)
    try:
        while sum(kill["killed"] for kill in kills) < wanted:
            enough = progress(folder) + chance.randint(1, 3)
            while progress(folder) < enough and all(process.poll() is None for process in processes):
                time.sleep(0.01)
            if any(process.poll() is not None for process in processes):
                break  # done
            time.sleep(chance.uniform(0, 0.2))
            victim = chance.randrange(PROCESSES)
            processes[victim].send_signal(signal.SIGKILL)
            killed = processes[victim].wait() == -signal.SIGKILL
            lost, before = missing(before, made(folder))
            kills.append({"command": command, "killed": killed, "lost": lost, "files": len(before)})
            print(json.dumps(kills[-1]), flush=True)
            processes[victim] = start(folder, recipe, command, _CODE)
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"{' '.join(command)} ended with {codes}; see {folder / 'log'}")
    lost, _ = missing(before, made(folder))
    return [*kills, {"command": command, "killed": False, "lost": lost}]


def progress(folder: Path) -> int:
    """Files that are finished, results that wait for the planner among them."""
    return len(made(folder)) + len(list((folder / "runs" / "artifacts").glob("*/*/jobs/*/result.json")))


def compare(alone: Path, together: Path) -> dict[str, int]:
    """What was made twice, what there is, and what is not the same."""
    theirs, ours = (things(folder) for folder in (alone, together))
    return {
        "twice": sum(count > 1 for count in Counter(name for name, _ in ours).values()),
        "things": len(set(theirs)),
        "different": len(set(theirs) ^ set(ours)),
    }


def things(folder: Path) -> list[tuple[str, str]]:
    """Conversations and states of a folder of runs: their names, and a hash of what they are."""
    found = []
    for file in (folder / "runs" / "artifacts" / "conversations").glob("*/parts/[0-9]*.jsonl"):
        for line in file.read_text().splitlines()[1:]:
            found.append((f"{file.name} {json.loads(line)['id']}", hashlib.sha256(line.encode()).hexdigest()))
    for shard in (folder / "runs" / "artifacts" / "states").glob("*/shard-*.safetensors"):
        with safe_open(shard, framework="numpy") as handle:
            about = {name: json.loads(text) for name, text in handle.metadata().items() if name != "owner"}
            start = 0
            for key, length in zip(about["keys"], about["lengths"], strict=True):
                for layer in about["taps"]:
                    part = handle.get_slice(f"states.{layer}")[start : start + length]
                    found.append((f"{layer} {key}", hashlib.sha256(part.tobytes()).hexdigest()))
                start += length
    return found


if __name__ == "__main__":
    main()
