"""vLLM: `vllm serve`, asked by way of its OpenAI-compatible completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from headstart.servers.completions import Ask, OpenAI
from headstart.servers.process import HOST, Engine

_NAME = "target"


class Vllm(Engine):
    """Loads folders of the format of the same name."""

    name = "vllm"
    format = "vllm"
    command = "vllm serve"
    two_at_a_time = (
        "Two servers run at a time: leave memory for both with "
        '--engine-arguments "--gpu-memory-utilization 0.4" (which stands for main memory on a CPU).'
    )

    def own_target(self, folder: str, gguf: Path | None) -> str:
        return folder

    def target_arguments(self, target: str) -> list[str]:
        return [target]

    def server_arguments(self, port: int) -> list[str]:
        # What is found in a cache of prefixes would be timed as if it had been read.
        return ["--host", HOST, "--port", str(port), "--served-model-name", _NAME, "--no-enable-prefix-caching"]

    def request(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        return OpenAI().request(Ask(prompt, max_new_tokens), _NAME)

    def tokens(self, reply: dict[str, Any]) -> list[int]:
        return OpenAI().read(reply).tokens

    def version(self, client: httpx.Client) -> str:
        return str(client.get("/version").json()["version"])
