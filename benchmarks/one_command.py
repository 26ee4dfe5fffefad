"""Prove that one command trains heads from nothing to an engine's report, and continues wherever it is killed.

    python benchmarks/one_command.py eagle3 data.conversations=200 train.steps=200 --engine vllm --processes 2 \\
        --engine-command "engines/vllm/bin/python -m vllm.entrypoints.openai.api_server --model" \\
        --engine-arguments "--dtype bfloat16 --max-model-len 2048 --gpu-memory-utilization 0.15"

Three runs of `headstart run`. The first streams hidden states from engines that it starts (llama.cpp has none to give:
there headstart computes them). The second, from nothing again, is killed with SIGKILL while it writes conversations,
trains, tunes and measures; its engines are killed as well, once while another program takes their port. The third
trains on the first one's conversations, with hidden states computed by headstart and kept on disk.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from record import here, record
from tables import figures

from headstart.pipeline.run import NAMES
from headstart.support.files import read_json

MARK = "HEADSTART_ONE_COMMAND"
"""Environment variable of all processes of a command."""
POLL_SECONDS = 0.2
PATIENCE, GONE_SECONDS = 1800.0, 60.0
"""Longest waits in seconds: for an event, and for the processes of a killed command to end."""


class Failed(Exception):
    """The command did not do what it promises."""


class Command:
    """A running command, to be closed; its log is beside the folder of the run, and `most_bytes` of it were written."""

    def __init__(self, words: Sequence[str], run: Path, patience: float) -> None:
        run.parent.mkdir(parents=True, exist_ok=True)
        self.run, self.patience, self.most_bytes, self._bytes = run, patience, 0, bytes_in(run.parent)
        self._mark, self._sessions = uuid4().hex, set[int]()
        self.log = run.with_name(f"{run.name}-{len(list(run.parent.glob('*.log'))):02}.log")
        environment = {**os.environ, MARK: self._mark}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)

    def close(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """Return its living processes: by the variable or by their session, since some overwrite their environment."""
        living = list[tuple[psutil.Process, int]]()
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    living.append((process, os.getsid(process.pid)))
                    if process.environ().get(MARK) == self._mark:
                        self._sessions.add(living[-1][1])
        return [process for process, session in living if session in self._sessions]

    def engines(self) -> dict[psutil.Process, int]:
        """Return its engines that answer, each with its port."""
        found = dict[psutil.Process, int]()
        for process in self.processes():
            with suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    port = connection.laddr.port
                    if connection.status == psutil.CONN_LISTEN and str(port) in process.cmdline():
                        found[process] = port
        return found

    def until(self, holds: Callable[[], object], event: str) -> None:
        """Wait for an event. Raises `Failed` if the command ends before it, or after `patience` seconds."""
        limit = time.monotonic() + self.patience
        while not holds():
            if self.process.poll() is not None or time.monotonic() > limit:
                raise Failed(f"{self.log} ends ({self.process.poll()}) without this: {event}. {self.last_lines()}")
            self.processes()  # notes the sessions
            self.most_bytes = max(self.most_bytes, bytes_in(self.run.parent) - self._bytes)
            time.sleep(POLL_SECONDS)

    def kill_engine(self) -> int:
        """Kill an engine with SIGKILL, once one answers; returns its port."""
        self.until(self.engines, "an engine answers")
        engine, port = next(iter(self.engines().items()))
        engine.kill()
        return port

    def check_gone(self) -> float:
        """Return the seconds until none of its processes is left. Raises `Failed` if some stay."""
        began = time.monotonic()
        while left := self.processes():
            if time.monotonic() - began > GONE_SECONDS:
                raise Failed(f"{self.log}: left running: {'; '.join(map(str, left))}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def last_lines(self) -> str:
        return " | ".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:])


@contextmanager
def occupied(port: int) -> Iterator[None]:
    """Listen at a port without answering, from the moment that it is free."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        while taken.getsockname()[1] != port:
            with suppress(OSError):
                taken.bind(("127.0.0.1", port))
        taken.listen()
        yield


def batches(run: Path) -> int:
    return len(list(run.parent.glob("artifacts/conversations/*/batches/*.jsonl")))


def steps(run: Path) -> int:
    file = run / "train" / "metrics.jsonl"
    return max(map(int, re.findall(r'"step": (\d+)', file.read_text())), default=0) if file.is_file() else 0


def has_begun(run: Path, stage: str) -> bool:
    file = run / "stages" / f"{stage}.json"
    return file.is_file() and not read_json(file)["is_complete"]


def bytes_in(folder: Path) -> int:
    sizes = [0]
    for file in folder.rglob("*"):
        with suppress(OSError):  # deleted meanwhile
            sizes.append(file.lstat().st_size)
    return sum(sizes)


def interrupted(start: Callable[[], Command], run: Path) -> list[dict[str, Any]]:
    """Kill a run in each phase, and its engines while they write and while it trains; returns what was killed."""
    events = list[dict[str, Any]]()

    def advance(command: Command, count: Callable[[Path], int]) -> None:
        before = count(run)
        command.until(lambda: count(run) > before, f"more {count.__name__} than {before}")

    def note(killed: str, command: Command) -> None:
        gone = command.check_gone()
        events.append({"killed": killed, "gone_after_seconds": gone, "batches": batches(run), "steps": steps(run)})
        print(f"  {events[-1]}", flush=True)

    with closing(start()) as command:
        advance(command, batches)
        with occupied(command.kill_engine()):
            command.process.wait(command.patience)
        if not command.process.returncode or "port" not in command.last_lines():
            raise Failed(f"{command.log} does not report the lost port: {command.last_lines()}")
        note("an engine that writes, while another program takes its port", command)
    for stage, count in {"conversations": batches, "train": steps, "tune": None, "eval": None}.items():
        killed = f"the command in its stage {stage}"
        with closing(start()) as command:
            if count is not None:
                advance(command, count)
                if command.engines():
                    command.kill_engine()
                    killed = f"an engine, then {killed}"
                advance(command, count)
            command.until(partial(has_begun, run, stage), f"{stage} begins")
            if stage == "eval":
                command.until(command.engines, "an engine answers")
            command.process.kill()  # alone, as the kernel does when memory runs out
            note(killed, command)
    return events


def row_of(name: str, command: Command) -> dict[str, Any]:
    """Return the figures of a finished run."""
    run = command.run
    trained, measured = read_json(run / "train/result.json"), read_json(run / "report/results.json")["summary"]
    return {
        "name": name,
        "conversations": len((run / "data/conversations/train.jsonl").read_text().splitlines()),
        "steps": trained["steps"],
        "predicted_tau": trained["best"]["tau"],
        "tokens_per_round": measured["tokens_per_round"],
        "speedup_vs_plain": measured["speedup_vs_plain"],
        "most_written_mb": command.most_bytes / 1e6,
        "seconds": {stage: read_json(run / "stages" / f"{stage}.json")["seconds"] for stage in NAMES},
        "files": len({file.relative_to(run) for name in ("heads", "report") for file in (run / name).rglob("*")}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a packaged recipe or a file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings, train.steps among them")
    parser.add_argument("--engine", choices=["vllm", "llama.cpp"], default="vllm")
    parser.add_argument("--engine-command", default="")
    parser.add_argument("--engine-arguments", default="")
    parser.add_argument("--processes", type=int, default=1, help="training processes")
    parser.add_argument("--out", type=Path, default=Path("out/one_command"), help="a new folder")
    options = parser.parse_intermixed_args(arguments)
    if options.out.exists():
        parser.error(f"{options.out} is there already: delete it, or choose another folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves the contexts, which end their commands
    words = [sys.executable, "-m", "headstart", "run", options.recipe, *options.overrides]
    words += [f"data.server={options.engine}", f"eval.engine={options.engine}", "--processes", str(options.processes)]
    given = {"data.server_command": options.engine_command, "data.server_arguments": options.engine_arguments}
    words += [f"{name}={value}" for name, value in given.items() if value]
    streamed = ["data.states=online", f"data.states_server={'vllm' if options.engine == 'vllm' else 'null'}"]

    def start(run: str, *settings: str) -> Command:
        folder = options.out.resolve() / run
        return Command([*words, *settings, "--run-dir", str(folder)], folder, PATIENCE)

    def row(name: str, run: str, *settings: str) -> dict[str, Any]:
        with closing(start(run, *settings)) as command:
            command.until(lambda: command.process.poll() is not None, "the end")
            command.check_gone()
        if command.process.returncode:
            raise Failed(f"{command.log} ends with an error: {command.last_lines()}")
        return row_of(name, command)

    rows = [row("online", "once/online", *streamed)]
    events = interrupted(lambda: start("killed/online", *streamed), options.out / "killed/online")
    rows.append(row(f"online, killed {len(events)} times", "killed/online", *streamed) | {"most_written_mb": None})
    if any(rows[0][key] != rows[1][key] for key in ("conversations", "steps", "files")):
        raise Failed(f"The killed run ends with other results: {rows}")
    rows.append(row("stored", "once/stored", "data.states=stored", "data.states_server=null"))
    what = f"One command ({options.recipe}) from nothing to a report by {options.engine}, alone and killed."
    record(options.out / "one_command.json", what, rows, here(), __file__, arguments, details={"killed": events})
    print(figures(rows))


if __name__ == "__main__":
    main()
