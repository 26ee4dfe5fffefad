"""Names of formats and engines for recipes and `--help`; a test checks them against the tables in the comments."""

from typing import Literal, get_args

FormatName = Literal["vllm", "sglang", "speculators", "gguf"]  # headstart.hub.engines.export.FORMATS
FORMATS = ", ".join(get_args(FormatName))
KNOWN_ENGINES = "vllm, sglang, speculators, llama.cpp"  # headstart.hub.engines.known_engines.KNOWN_ENGINES
ENGINES = "vllm, llama.cpp"  # headstart.servers.engines.ENGINES
