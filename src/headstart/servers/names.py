"""What users call formats and engines: all that recipes and `--help` need to know of them. A test holds them equal."""

from typing import Literal, get_args

FormatName = Literal["vllm", "sglang", "speculators", "gguf"]
"""Those of `headstart.hub.engines.export.FORMATS`."""
FORMATS = ", ".join(get_args(FormatName))
READERS = "vllm, sglang, speculators, llama.cpp"
"""Those of `headstart.hub.engines.base.READERS`."""
ENGINES = "vllm, llama.cpp"
"""Those of `headstart.servers.engines.ENGINES`."""
