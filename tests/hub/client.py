"""The real Hub client in a separate process, pointed at the fake Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hub.fake_hub import WRITE_TOKEN


class Client:
    """A client of the process `hub_client.py`."""

    def __init__(self, url: str, home: Path) -> None:
        self.errors = home / "errors"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        off = dict.fromkeys((f"HF_HUB_DISABLE_{name}" for name in ("XET", "PROGRESS_BARS", "TELEMETRY")), "1")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("hub_client.py"))],
            env={**kept, **off, "HF_ENDPOINT": url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )
        self._answer()

    def call(self, do: str, token: str | None = WRITE_TOKEN, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "token": token, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def refusal(self, do: str, token: str | None = WRITE_TOKEN, **arguments: Any) -> str:
        answer = self.call(do, token, **arguments)
        assert answer.get("problem"), answer
        assert answer["remedy"]
        return f"{answer['problem']} {answer['remedy']}"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the client process died: {self.errors.read_text()}"
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer
