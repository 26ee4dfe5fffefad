"""How far off `headstart plan` is: small versions of four recipes are planned and then run, one after the other.

    python benchmarks/plan_accuracy.py --out out/plan                       # about ten minutes
    python benchmarks/plan_accuracy.py --prefix "taskset -c 1" --only medusa

Each case is planned in a process of its own; then conversations and states are made, heads are trained (one case on two
gloo processes under torchrun) and tuned, exported and measured. Compared are bytes by stage, the peak memory of each
command's processes and the seconds of each stage, as the run's own records have them. What the plan said divided by
what was measured stands in the table. Seconds count as far as the processes had a core: on a machine that others use
too, waiting for it says nothing about the plan.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil
from record import here, record

from headstart.data.prompts.seed_prompts import TOPICS, seed_prompt_list
from headstart.support.files import read_json, write_jsonl

SMALL = (
    *("data.minutes=null", "data.conversations=24", "data.heldout=4", "data.validation=6", "data.max_new_tokens=64"),
    *("data.batch_size=12", "train.minutes=null", "train.steps=10", "train.eval_every=5", "train.save_every=5"),
    *("eval.limit=2", "eval.max_new_tokens=32", "tune.widths=[1,2,4]", "tune.max_nodes=4"),
)
CASES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "quickstart": ("quickstart", 1, ()),
    "medusa, given prompts": ("medusa", 1, ("data.prompts={prompts}",)),
    "hydra, longer answers": ("hydra", 1, ("data.max_new_tokens=112", "data.conversations=16")),
    "eagle3, two processes": ("eagle3", 2, ("train.steps=6",)),
}
"""By name: the recipe, processes that train, what differs from `SMALL`."""
COMMANDS = {"data": ("target", "conversations", "states"), "train": ("train",), "rest": ("tune", "export", "eval")}
"""The commands that are run, each with its stages."""
ARTIFACTS = {"states": "states", "train": "heads", "export": "exports"}
"""Where stages leave their bytes."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/plan"))
    parser.add_argument("--prefix", default="", help="before each command, such as: taskset -c 1")
    parser.add_argument(
        "--only", nargs="*", help="beginnings of the names of cases, others stay as known; all by default"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides for all recipes")
    options = parser.parse_args(arguments)
    chosen = [name for name in CASES if not options.only or name.startswith(tuple(options.only))]
    out = options.out / "plan_accuracy.json"
    before = read_json(out) if out.is_file() else {"rows": [], "details": {}}
    known, details = {row["name"]: row for row in before["rows"]}, dict(before["details"])
    for name in chosen:
        row, detail = case(name, options.out / name.split(",")[0], shlex.split(options.prefix), options.set)
        known[name], details[name] = row, detail
        print(
            " ".join(f"{key} {value:.2f}" if isinstance(value, float) else str(value) for key, value in row.items()),
            flush=True,
        )
    record(
        out,
        "What the plan said divided by what was measured, for small versions of four recipes; each was planned just "
        "before it was run. Seconds are those in which processes had the core.",
        [known[name] for name in CASES if name in known],
        here(),
        __file__,
        arguments,
        {"small": list(SMALL), "prefix": options.prefix},
        details,
    )


def case(name: str, folder: Path, prefix: list[str], more: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plan and run one case; returns its row and all that was planned and measured."""
    recipe, processes, differs = CASES[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = folder / "prompts.jsonl"
    seeds = [seed for _, seed in seed_prompt_list("broad") if seed.endswith("{topic}")]
    asked = [seed.replace("{topic}", topic) for topic in TOPICS for seed in seeds]
    write_jsonl(prompts, [{"prompt": text} for text in asked[:: len(asked) // 100]])
    settings = [recipe, *SMALL, *(setting.format(prompts=prompts) for setting in differs), *more]
    run = folder / "runs" / "case"
    place = ["--run-dir", str(run)]
    headstart = [sys.executable, "-m", "headstart"]
    plan_file = folder / "plan.json"
    watched = {
        "plan": _watched(
            [*prefix, *headstart, "plan", *settings, *place, "--processes", str(processes), "--json", str(plan_file)],
            folder / "plan.txt",
        )
    }
    training = [*headstart, "train"]
    if processes > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        training = [*torchrun, "-m", "headstart.train"]
    commands = {"data": [*headstart, "data", "build"], "train": training, "rest": [*headstart, "run"]}
    for command, words in commands.items():
        watched[command] = _watched([*prefix, *words, *settings, *place], folder / f"{command}.txt")
    planned = read_json(plan_file)
    seconds = {stage: _seconds(run, stage, processes) for stages in COMMANDS.values() for stage in stages}
    measured: dict[str, dict[str, Any]] = {
        "seconds": seconds,
        "bytes": {stage: _size(folder / "runs" / "artifacts" / kind) for stage, kind in ARTIFACTS.items()}
        | {"conversations": _size(folder / "runs" / "artifacts" / "conversations") + _size(run / "data/conversations")},
        "memory": {command: watched[command]["bytes"] for command in COMMANDS},
        "busy": {command: usage["busy"] for command, usage in watched.items()},
    }
    memory = {
        command: max(planned["memory"][stage] for stage in stages if stage in planned["memory"])
        for command, stages in COMMANDS.items()
    }
    guess = {"seconds": planned["seconds"], "bytes": planned["disk"], "memory": memory}
    row: dict[str, Any] = {"name": name, "processes": processes}
    busy = {stage: watched[command]["busy"] for command, stages in COMMANDS.items() for stage in stages}
    worked = {stage: seconds[stage] * busy[stage] for stage in seconds}
    promised = {stage: planned["seconds"][stage] for stage in seconds}
    row["seconds"] = _ratio(math.fsum(promised.values()), math.fsum(worked.values()))
    for stage in ("conversations", "train", "tune", "eval"):
        row[f"of_{stage}"] = _ratio(promised[stage], worked[stage])
    for stage in ("conversations", "states", "train", "export"):
        row[f"bytes_of_{stage}"] = _ratio(planned["disk"][stage], measured["bytes"][stage])
    for command in COMMANDS:
        row[f"memory_of_{command}"] = _ratio(memory[command], measured["memory"][command])
    return row, {"planned": guess, "measured": measured}


def _ratio(planned: float, measured: float) -> float:
    return round(planned / measured, 3)


def _seconds(run: Path, stage: str, processes: int) -> float:
    if stage == "train" and processes > 1:  # the stage itself found it done
        return float(read_json(run / "train" / "result.json")["elapsed_seconds"])
    return float(read_json(run / "stages" / f"{stage}.json")["seconds"])


def _size(folder: Path) -> int:
    """Bytes of a folder's files, those with several names once."""
    files = [info for file in folder.rglob("*") if stat.S_ISREG((info := file.lstat()).st_mode)]
    sizes = {(info.st_dev, info.st_ino): info.st_size for info in files}
    return sum(sizes.values())


def _watched(command: list[str], log: Path) -> dict[str, float]:
    """Run a command; returns the bytes that one of its processes held at most, and how busy they kept a core.

    Raises:
        SystemExit: it failed; its last lines are printed.
    """
    most: dict[int, int] = {}
    start, before = perf_counter(), os.times()
    with log.open("w") as out:
        process = psutil.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for pid in _alive(process):
                most[pid] = max(most.get(pid, 0), _held(pid))
            sleep(0.1)
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)} failed:\n" + "\n".join(log.read_text().splitlines()[-12:]))
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return {"bytes": float(max(most.values())), "busy": round(used / (perf_counter() - start), 2)}


def _alive(process: psutil.Popen) -> list[int]:
    try:
        return [process.pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _held(pid: int) -> int:
    """What a process has held at most so far, as the system counts it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    fields: Mapping[str, str] = dict(line.split(":", 1) for line in lines)
    return 1024 * int(fields.get("VmHWM", "0").split()[0])


if __name__ == "__main__":
    main()
