"""The serving engines that are known here, by name."""

from __future__ import annotations

from headstart.servers.llama_cpp import LlamaCpp
from headstart.servers.process import Engine
from headstart.servers.vllm import Vllm

ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Vllm(), LlamaCpp())}
