"""Run a command and end it, with all processes it started, when standard input closes: also if the caller is killed.

    python guard.py COMMAND ARGUMENTS...

Needs nothing but Python. Exits with the command's code.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

STOP_SECONDS = 20.0


def main(words: list[str]) -> int:
    command = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        _send(command.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            command.wait(STOP_SECONDS)
        _send(command.pid, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    code = command.wait()
    _send(command.pid, signal.SIGKILL)  # workers that outlived it
    return code


def _send(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
