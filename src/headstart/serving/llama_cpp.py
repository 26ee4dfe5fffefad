"""llama.cpp: `llama-server`, asked by way of its own completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from headstart.serving.base import HOST, Engine


class LlamaCpp(Engine):
    """Loads GGUF files."""

    name = "llama.cpp"
    format = "gguf"
    command = "llama-server"

    def own_target(self, folder: str, gguf: Path | None) -> str:
        return "" if gguf is None else str(gguf)

    def target_arguments(self, target: str) -> list[str]:
        return ["-m", target]

    def server_arguments(self, port: int) -> list[str]:
        return ["--host", HOST, "--port", str(port), "--metrics", "--parallel", "1"]

    def request(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"prompt": list(prompt), "n_predict": max_new_tokens, "temperature": 0}
        # What is left out is taken from the file of the target, penalties too.
        plain = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return "/completion", {**body, **plain, "return_tokens": True, "cache_prompt": False}

    def tokens(self, reply: dict[str, Any]) -> list[int]:
        return list(reply["tokens"])

    def version(self, client: httpx.Client) -> str:
        return str(client.get("/props").json()["build_info"])
