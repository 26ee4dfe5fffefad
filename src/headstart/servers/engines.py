"""Engines that headstart starts, to generate text or to measure them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headstart.servers.completions import Dialect, LlamaServer, OpenAI


@dataclass(frozen=True)
class ServingEngine:
    """Properties of an engine.

    Attributes:
        name: name on the command line, and in the table of engines of `headstart.hub.engines`.
        format: format of `headstart.hub.engines` that it loads.
        command: start command, followed by `target_option`, the target and further options.
        measuring: options for benchmarks: counters on, prefix caching off, a context that fits into memory.
        generating: options for many concurrent requests, with such a context.
        identity: option that sets the model's name in the API.
        version_path: path and JSON key of the running engine's version.
        needs_gguf: whether it loads only GGUF targets.
        drafts_by_load: whether the draft length depends on the number of concurrent requests.
        two_at_a_time: remedy if two of them do not fit in memory, as a sentence.
    """

    name: str
    format: str
    command: str
    dialect: Dialect
    measuring: tuple[str, ...]
    generating: tuple[str, ...]
    identity: str
    version_path: tuple[str, str]
    target_option: tuple[str, ...] = ()
    needs_gguf: bool = False
    drafts_by_load: bool = False
    two_at_a_time: str = ""

    def target_argument(self, folder: str, gguf: Path | None) -> str:
        """Return the path or Hub id that the engine loads; empty if it needs a GGUF file and there is none."""
        return str(gguf or "") if self.needs_gguf else folder


_FITTED = ("--max-model-len", "auto")  # vLLM exits if one request of the whole context does not fit into memory
_VLLM = ServingEngine(
    name="vllm",
    format="vllm",
    command="vllm serve",
    dialect=OpenAI(),
    measuring=("--no-enable-prefix-caching", *_FITTED),  # a hit would be timed as a full prefill
    generating=_FITTED,
    identity="--served-model-name",
    version_path=("/version", "version"),
    drafts_by_load=True,
    two_at_a_time="Two servers run at a time: leave memory for both with "
    '--engine-arguments "--gpu-memory-utilization 0.4" (on a CPU a fraction of main memory).',
)
_LLAMA_CPP = ServingEngine(
    name="llama.cpp",
    format="gguf",
    command="llama-server",
    dialect=LlamaServer(),
    measuring=("--metrics", "--parallel", "{requests}", "--kv-unified"),
    generating=("--parallel", "8", "--kv-unified"),
    identity="--alias",
    version_path=("/props", "build_info"),
    target_option=("-m",),
    needs_gguf=True,
)
ENGINES = {engine.name: engine for engine in (_VLLM, _LLAMA_CPP)}
