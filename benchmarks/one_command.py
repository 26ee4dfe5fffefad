"""Prove that one command trains heads from nothing to an engine's report, and continues wherever it is killed.

    python benchmarks/one_command.py eagle3 train.steps=200 data.conversations=200 --engine vllm --processes 2 \\
        --engine-command "engines/vllm/bin/python -m vllm.entrypoints.openai.api_server --model" \\
        --engine-arguments "--dtype bfloat16 --max-model-len 2048 --gpu-memory-utilization 0.15"

Three runs of `headstart run`. The first streams hidden states from engines that it starts. The second, from nothing
again, is killed with SIGKILL while it writes conversations, trains, tunes and measures; its engines are killed as well,
once while another program takes their port. The third trains on the first one's conversations, with hidden states
computed by headstart and kept on disk. The rows compare time, disk space and acceptance.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import psutil
from record import here, record
from tables import figures

from headstart.servers.client import Endpoint, RetryableError
from headstart.support.files import read_json

MARK = "HEADSTART_ONE_COMMAND"
"""Environment variable that every process of a command inherits."""
STAGES = ("target", "conversations", "states", "train", "tune", "export", "eval")
POLL_SECONDS = 0.1
GONE_SECONDS = 60.0
"""Time for the processes of a killed command to end: engines get 20 seconds, and 10 more after SIGKILL."""


class Failed(Exception):
    """The command did not do what it promises."""


class Command:
    """A running `headstart run`, with all processes that it started; they are killed at the end of the context."""

    def __init__(self, words: Sequence[str], run: Path, patience: float) -> None:
        self.run, self.patience, self._mark, self._sessions = run, patience, uuid4().hex, set[int]()
        run.parent.mkdir(parents=True, exist_ok=True)
        self.log = run.with_name(f"{run.name}-{len(list(run.parent.glob('*.log'))):02}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headstart", "run", *words, "--run-dir", str(run)],
                env={**os.environ, MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return its living processes: by the variable, and by their session, for those that rename themselves."""
        marked, others = list[psutil.Process](), list[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    has_mark = process.environ().get(MARK) == self._mark
                    (marked if has_mark else others).append(process)
        for process in marked:
            with suppress(ProcessLookupError):
                self._sessions.add(os.getsid(process.pid))
        for process in others:
            with suppress(ProcessLookupError):
                if os.getsid(process.pid) in self._sessions:
                    marked.append(process)
        return marked

    def engines(self) -> dict[psutil.Process, int]:
        """Return its engines that answer, each with its port."""
        found = {}
        for process in self.processes():
            with suppress(psutil.Error, RetryableError, ValueError):
                words = process.cmdline()[::-1]
                port = int(words[words.index("--port") - 1])
                if not any(word.endswith("guard.py") for word in words):
                    if Endpoint(f"http://127.0.0.1:{port}").send("/health", seconds=5).is_success:
                        found[process] = port
        return found

    def until(self, holds: Callable[[], object], event: str) -> None:
        """Wait for an event; raises `Failed` if the command ends before it, or after `patience` seconds."""
        limit = time.monotonic() + self.patience
        while not holds():
            if self.process.poll() is not None:
                raise Failed(f"The command ended with {self.process.returncode} before {event}: {self.last_lines()}")
            if time.monotonic() > limit:
                raise Failed(f"Waited {self.patience:.0f} seconds for this: {event}. {self.last_lines()}")
            self.processes()  # notes the sessions
            time.sleep(POLL_SECONDS)

    def finish(self) -> float:
        """Wait for the command to succeed; returns the most bytes that its folder held."""
        most = 0.0

        def watch() -> bool:
            nonlocal most
            most = max(most, disk_bytes(self.run.parent))
            return self.process.poll() is not None

        with suppress(Failed):  # it ended, well or not
            self.until(watch, "the end")
        if self.process.returncode != 0:
            raise Failed(f"The command ended with {self.process.returncode}: {self.last_lines()}")
        self.check_gone()
        return most

    def kill_engine(self, occupy: bool = False) -> socket.socket | None:
        """Kill an engine with SIGKILL, once one answers; `occupy` takes its port at once."""
        self.until(self.engines, "an engine answers")
        engine, port = next(iter(self.engines().items()))
        taken = socket.socket() if occupy else None
        engine.kill()
        while taken is not None:
            with suppress(OSError):  # until its socket is closed
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(("127.0.0.1", port))
                taken.listen()
                break
        return taken

    def kill(self) -> float:
        """Kill the command alone, as the kernel does when memory runs out; returns `check_gone`."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return self.check_gone()

    def check_gone(self) -> float:
        """Return the seconds until none of its processes is left; raises `Failed` if some stay."""
        began = time.monotonic()
        while left := self.processes():
            if time.monotonic() - began > GONE_SECONDS:
                raise Failed(f"Left running: {'; '.join(shlex.join(each.cmdline()[:8]) for each in left)}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def last_lines(self) -> str:
        return " | ".join(self.log.read_text(encoding="utf-8", errors="replace").split("\n")[-8:])[-1500:]


# -- the state of a run ------------------------------------------------------------------------------------------------


def batches(run: Path) -> int:
    return len(list(run.parent.glob("artifacts/conversations/*/batches/*.jsonl")))


def steps(run: Path) -> int:
    """Return the last step in the training's log."""
    file = run / "train" / "metrics.jsonl"
    rows = file.read_text().splitlines() if file.is_file() else []
    return max((int(json.loads(row).get("step", 0)) for row in rows if row.endswith("}")), default=0)


def stage(run: Path, name: str) -> dict[str, Any]:
    file = run / "stages" / f"{name}.json"
    return read_json(file) if file.is_file() else {}


def is_at(run: Path, name: str) -> bool:
    return stage(run, name).get("is_complete") is False


def disk_bytes(folder: Path, pattern: str = "**/*") -> float:
    """Return the bytes of the files in a folder, each once."""
    sizes = {}
    for file in folder.glob(pattern):
        with suppress(OSError):
            known = file.lstat()
            sizes[known.st_ino] = known.st_size if file.is_file() else 0
    return sum(sizes.values())


# -- the three runs ----------------------------------------------------------------------------------------------------


def interrupted(start: Callable[[], Command], run: Path) -> list[dict[str, Any]]:
    """Kill a run in each phase, and its engines while they write and while it trains; returns what was killed."""
    events = list[dict[str, Any]]()

    def note(command: Command, killed: str, seconds: float) -> None:
        kept = {"batches": batches(run), "steps": steps(run)}
        events.append({"killed": killed, "seconds_until_no_process": seconds, **kept, "log": command.log.name})
        print(f"  killed: {killed}; no process left after {seconds:.1f} s; kept {kept}", flush=True)

    def advances(command: Command, count: Callable[[Path], int], event: str) -> None:
        before = count(run)
        command.until(lambda: count(run) > before, event)

    with start() as command:
        advances(command, batches, "conversations are written")
        command.kill_engine()
        advances(command, batches, "conversations are written after their engine was killed")
        note(command, "an engine, then the command, at conversations", command.kill())
    with start() as command:
        advances(command, batches, "writing continues")
        with command.kill_engine(occupy=True) or suppress():
            command.process.wait(command.patience)
            if command.process.returncode == 0 or "port" not in command.log.read_text():
                raise Failed(f"The command does not report its lost port: {command.last_lines()}")
            note(command, "an engine whose port another program takes", command.check_gone())
    with start() as command:
        advances(command, steps, "training begins")
        streams = bool(command.engines())
        if streams:
            command.kill_engine()
        advances(command, steps, "training goes on")
        note(command, f"{'an engine, then ' * streams}the command, at training", command.kill())
    with start() as command:
        command.until(lambda: is_at(run, "tune"), "tuning begins")
        note(command, "the command, at tuning", command.kill())
    with start() as command:
        command.until(lambda: is_at(run, "eval") and command.engines(), "the report begins")
        note(command, "the command, at the report", command.kill())
    return events


def row_of(name: str, run: Path, most: float) -> dict[str, Any]:
    """Return the figures of a finished run."""
    trained, report = read_json(run / "train" / "result.json"), read_json(run / "report" / "results.json")
    texts = (run / "data" / "conversations" / "train.jsonl").read_text().splitlines()
    speedup = report["summary"]["speedup_vs_plain"]
    return {
        "name": name,
        "conversations": len(texts),
        "steps": trained["steps"],
        "predicted_tau": trained["best"]["tau"],
        "tokens_per_round": report["summary"]["tokens_per_round"],
        "over_plain": speedup and speedup["mean"],
        "text_mb": disk_bytes(run.parent, "artifacts/conversations/**/*") / 1e6,
        "states_mb": disk_bytes(run.parent, "artifacts/states/**/*") / 1e6 if "stored" in name else 0.0,
        "most_on_disk_mb": most / 1e6,
        "seconds": {each: stage(run, each)["seconds"] for each in STAGES},
    }


def same_kind(run: Path, other: Path) -> None:
    """Raise `Failed` unless two runs have the same files of heads and reports, and equally many conversations."""
    kept = [
        [sorted(str(file.relative_to(each)) for name in ("heads", "report") for file in (each / name).rglob("*"))]
        + [len((each / "data/conversations" / f"{split}.jsonl").read_text().splitlines()) for split in ("train",)]
        for each in (run, other)
    ]
    if kept[0] != kept[1]:
        raise Failed(f"{run} and {other} differ: {kept[0]} and {kept[1]}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a packaged recipe or a file, with steps for its training")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--engine", choices=["vllm", "llama.cpp"], default="vllm")
    parser.add_argument("--engine-command", default="")
    parser.add_argument("--engine-arguments", default="")
    parser.add_argument("--processes", type=int, default=1, help="training processes")
    parser.add_argument("--patience", type=float, default=1800, help="longest wait for an event, in seconds")
    parser.add_argument("--out", type=Path, default=Path("out/one_command"), help="a new folder")
    options = parser.parse_intermixed_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} is there already: delete it, or choose another folder")
    served = [f"data.server={options.engine}", f"eval.engine={options.engine}"]
    served += [f"data.server_command={options.engine_command}"] if options.engine_command else []
    served += [f"data.server_arguments={options.engine_arguments}"] if options.engine_arguments else []
    words = [options.recipe, *options.overrides, *served, "--processes", str(options.processes)]
    online = ["data.states=online", f"data.states_server={'vllm' if options.engine == 'vllm' else 'null'}"]

    def finish(name: str, run: Path, *more: str) -> dict[str, Any]:
        print(f"{name}: {run}", flush=True)
        with Command([*words, *more], run, options.patience) as command:
            return row_of(name, run, command.finish())

    streamed, killed = options.out / "clean" / "streamed", options.out / "killed" / "run"
    rows = [finish("states streamed", streamed, *online)]
    print("killed in each phase:", flush=True)
    events = interrupted(lambda: Command([*words, *online], killed, options.patience), killed)
    rows.append(finish(f"the same, killed {len(events)} times", killed, *online))
    same_kind(streamed, killed)
    stored = options.out / "clean" / "stored"
    rows.append(finish("states stored here", stored, "data.states=stored", "data.states_server=null"))
    what = f"`headstart run {options.recipe}` from nothing to a report from {options.engine}."
    settings = {"overrides": options.overrides, "processes": options.processes, "arguments": options.engine_arguments}
    record(options.out / "one_command.json", what, rows, here(), __file__, arguments, settings, {"killed": events})
    print(figures(rows))


if __name__ == "__main__":
    main()
