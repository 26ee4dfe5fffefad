"""llama.cpp: `llama-server`, asked by way of its own completions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from headstart.servers.completions import Ask, LlamaServer
from headstart.servers.process import HOST, Engine


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
        return LlamaServer().request(Ask(prompt, max_new_tokens), "")

    def tokens(self, reply: dict[str, Any]) -> list[int]:
        return LlamaServer().read(reply).tokens

    def version(self, client: httpx.Client) -> str:
        return str(client.get("/props").json()["build_info"])
