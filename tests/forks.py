"""A fork server: imports torch and the commands once, and forks a child for each task.

    python tests/forks.py

It prints the port on which it waits for tasks, and exits when its stdin closes. A task is a connection and a line of
JSON: the `words` after `python` (`-m MODULE ...` or `-c CODE ...`), the environment `env`, the folder `cwd`, and the
files `out` and `err` for stdout and stderr. It replies with the process id, then with the exit code, negative for a
signal.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from select import select
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
IMPORTED = (
    *("headstart.cli.app", "headstart.pipeline.stages", "headstart.pipeline.together", "headstart.adapt.update"),
    "tests.train.ranks",
)
"""Modules that commands import lazily, and one that tests run in child processes."""
_LONGEST = 200  # seconds before a hanging process is killed


class Fork:
    """A running process with the parts of `subprocess.Popen`'s interface that tests use; `out` and `err` are files."""

    def __init__(self, connection: socket.socket, out: Path, err: Path) -> None:
        self._connection, self.out, self.err = connection, out, err
        self._answers = connection.makefile("rb", buffering=0)  # unbuffered, so that `select` sees all unread data
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self) -> int:
        code = self._look(None)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select([self._connection], [], [], seconds)[0]:
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode


class Forks:
    """A client of the fork server."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        words = [sys.executable, __file__]
        self._host = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._host.stdout is not None
        self._port = int(self._host.stdout.readline())

    def start(self, *words: str | Path, env: Mapping[str, str] | None = None, out: Path | None = None) -> Fork:
        """Start `python WORDS` in the current folder, by default with this process's environment."""
        self._count += 1
        name = self._folder / str(self._count)
        out, err = out or name.with_suffix(".out"), name.with_suffix(".err")
        task = {"words": [*map(str, words)], "env": dict(os.environ if env is None else env), "cwd": os.getcwd()}
        connection = socket.create_connection(("127.0.0.1", self._port))
        connection.sendall(json.dumps({**task, "out": str(out), "err": str(err)}).encode() + b"\n")
        return Fork(connection, out, err)

    def run(self, *words: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` to its end."""
        fork = self.start(*words, env=env)
        code = fork.wait()
        return subprocess.CompletedProcess([*words], code, fork.out.read_text(), fork.err.read_text())

    def close(self) -> None:
        self._host.communicate()
        assert self._host.returncode == 0


def main() -> None:
    del sys.path[0]  # this folder, with its train, data, eval ...
    sys.path.append(str(REPOSITORY))  # last: its links have such names, too
    for name in IMPORTED:
        import_module(name)
    gc.freeze()
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while sys.stdin not in select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            if os.fork() == 0:
                break
            connection.close()
            with suppress(ChildProcessError):  # reap helpers of finished tasks
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        else:
            return
    task = json.loads(connection.makefile("r").readline())
    written = [os.open(task[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
    child = os.fork()
    if child:
        connection.sendall(b"%d\n" % child)
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    connection.close()
    _become(task, [os.open(os.devnull, os.O_RDONLY), *written])
    _run(task["words"])


def _become(task: dict[str, Any], files: list[int]) -> None:
    """Set up a freshly started process."""
    signal.alarm(_LONGEST)
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["cwd"])
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _run(words: list[str]) -> None:
    kind, what, *rest = words
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
