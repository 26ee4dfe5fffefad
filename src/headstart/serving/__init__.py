"""Serving engines at work: they are started, asked and measured here, as servers on this machine.

What heads look like in an engine's files is the business of `headstart.hub.engines`.
"""

from headstart.serving.base import Engine, EngineAnswer, Server
from headstart.serving.llama_cpp import LlamaCpp
from headstart.serving.tune import DRAFTS, measure_drafts, tune_engine
from headstart.serving.vllm import Vllm

ENGINES: dict[str, Engine] = {one.name: one for one in (Vllm(), LlamaCpp())}

__all__ = [
    "DRAFTS",
    "ENGINES",
    "Engine",
    "EngineAnswer",
    "Server",
    "measure_drafts",
    "tune_engine",
]
