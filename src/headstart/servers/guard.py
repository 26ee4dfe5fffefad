"""Run a command, and end its process group when standard input closes, even if the caller is killed.

    python guard.py SECONDS COMMAND ARGUMENTS...

A byte on standard input, SIGTERM, SIGINT and SIGHUP also end it. The group gets SIGTERM, then SIGKILL after SECONDS or
on another signal. Exits with the command's code once the group is gone, or after `KILL_SECONDS`. Needs only the
standard library.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

KILL_SECONDS = 10.0
"""Longest wait for killed processes, which free GPU memory as they exit."""
_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def start(words: Sequence[str], seconds: float, **options: Any) -> subprocess.Popen[bytes]:
    """Start a guarded command that ends with this process; `options` go to `subprocess.Popen`."""
    guarded = [sys.executable, __file__, str(seconds), *words]
    return subprocess.Popen(guarded, stdin=subprocess.PIPE, start_new_session=True, **options)


def ask(process: subprocess.Popen[bytes]) -> None:
    """Ask a guarded command to end, without waiting for it."""
    assert process.stdin is not None
    with suppress(OSError):
        os.write(process.stdin.fileno(), b"\n")  # nothing stays in a buffer if the guard has ended


def stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a guarded command, with SIGKILL after these seconds."""
    try:
        process.communicate(b"\n", seconds)  # closing is not enough: a forked child may keep the pipe open
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for child in children.split():
                os.killpg(int(child), signal.SIGKILL)
        process.kill()
        process.wait()


def main(words: list[str]) -> int:
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.append(number))
    # Adopt workers that outlive the command: the first process of a container often reaps none.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    command = subprocess.Popen(
        words[1:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),  # against SIGKILL of the guard
    )
    while command.poll() is None and not received and not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        pass
    _send(command.pid, signal.SIGTERM)
    begun, until = len(received), monotonic() + float(words[0])
    while command.poll() is None and len(received) == begun and monotonic() < until:
        sleep(_POLL_SECONDS)
    _send(command.pid, signal.SIGKILL)
    code, until = command.wait(), monotonic() + KILL_SECONDS
    while _send(command.pid, signal.SIGKILL) and monotonic() < until:
        with suppress(ChildProcessError):
            os.waitpid(-command.pid, os.WNOHANG)
        sleep(_POLL_SECONDS)
    return code if code >= 0 else 128 - code  # 128 + signal number, as in shells


def _send(group: int, number: signal.Signals) -> bool:
    """Signal a process group; returns whether it exists."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS refuses to signal a group of zombies
        return False
    return True


def _prctl(option: int, value: int) -> None:
    """Set an attribute of this process; does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
