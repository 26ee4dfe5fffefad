"""The serving engines that are known here, by name."""

from __future__ import annotations

from pathlib import Path

from headstart.servers.completions import LlamaServer, OpenAI
from headstart.servers.process import HOST, Engine


class Vllm(Engine):
    """`vllm serve`: loads folders of the format of the same name."""

    name = "vllm"
    format = "vllm"
    command = "vllm serve"
    two_at_a_time = (
        "Two servers run at a time: leave memory for both with "
        '--engine-arguments "--gpu-memory-utilization 0.4" (which stands for main memory on a CPU).'
    )
    dialect = OpenAI()
    model = "target"
    version_page = "/version", "version"

    def own_target(self, folder: str, gguf: Path | None) -> str:
        return folder

    def target_arguments(self, target: str) -> list[str]:
        return [target]

    def server_arguments(self, port: int) -> list[str]:
        # What is found in a cache of prefixes would be timed as if it had been read.
        return ["--host", HOST, "--port", str(port), "--served-model-name", self.model, "--no-enable-prefix-caching"]


class LlamaCpp(Engine):
    """`llama-server`: loads GGUF files."""

    name = "llama.cpp"
    format = "gguf"
    command = "llama-server"
    dialect = LlamaServer()
    version_page = "/props", "build_info"

    def own_target(self, folder: str, gguf: Path | None) -> str:
        return "" if gguf is None else str(gguf)

    def target_arguments(self, target: str) -> list[str]:
        return ["-m", target]

    def server_arguments(self, port: int) -> list[str]:
        return ["--host", HOST, "--port", str(port), "--metrics", "--parallel", "1"]


ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Vllm(), LlamaCpp())}
