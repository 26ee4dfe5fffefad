"""Engines that `tune --engine` starts and measures, by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headstart.servers.completions import Dialect, LlamaServer, OpenAI


@dataclass(frozen=True)
class ServingEngine:
    """What is particular to an engine.

    Attributes:
        name: that users type, also among the engines of `format`.
        format: of `headstart.hub.engines` that it loads.
        command: that starts it; the words of `target_option`, the target and options come after it.
        server_options: what makes its counts and answers whole.
        version_page: path, and the key there, of what the running engine says of its version.
        needs_gguf: whether it loads targets from GGUF files alone.
        model: what it calls its target; empty where it needs no name.
        drafts_by_load: whether it drafts another number of tokens with more requests at a time.
        two_at_a_time: what to do where two of them do not fit into memory, as a sentence.
    """

    name: str
    format: str
    command: str
    dialect: Dialect
    server_options: tuple[str, ...]
    version_page: tuple[str, str]
    target_option: tuple[str, ...] = ()
    needs_gguf: bool = False
    model: str = ""
    drafts_by_load: bool = False
    two_at_a_time: str = ""

    def own_target(self, folder: str, gguf: Path | None) -> str:
        """What it loads of a target in this folder (or with this Hub id), or in this GGUF file; empty when nothing."""
        return str(gguf or "") if self.needs_gguf else folder


_VLLM = ServingEngine(
    name="vllm",
    format="vllm",
    command="vllm serve",
    dialect=OpenAI(),
    # What is found in a cache of prefixes would be timed as if it had been read.
    server_options=("--served-model-name", "target", "--no-enable-prefix-caching"),
    version_page=("/version", "version"),
    model="target",
    drafts_by_load=True,
    two_at_a_time="Two servers run at a time: leave memory for both with "
    '--engine-arguments "--gpu-memory-utilization 0.4" (which stands for main memory on a CPU).',
)
_LLAMA_CPP = ServingEngine(
    name="llama.cpp",
    format="gguf",
    command="llama-server",
    dialect=LlamaServer(),
    server_options=("--metrics", "--parallel", "1"),
    version_page=("/props", "build_info"),
    target_option=("-m",),
    needs_gguf=True,
)
ENGINES = {engine.name: engine for engine in (_VLLM, _LLAMA_CPP)}
