"""Names of formats and engines for recipes and `--help`, and the words of an engine's command line.

A test checks the names against the tables in the comments.
"""

import shlex
from itertools import pairwise
from typing import Literal, get_args

from headstart.errors import UserError

FormatName = Literal["vllm", "sglang", "speculators", "gguf"]  # headstart.hub.engines.export.FORMATS
FORMATS = ", ".join(get_args(FormatName))
KNOWN_ENGINES = "vllm, sglang, speculators, llama.cpp"  # headstart.hub.engines.known_engines.KNOWN_ENGINES
ENGINES = "vllm, llama.cpp"  # headstart.servers.engines.ENGINES
STATES_ENGINES = "vllm"  # engines that extract hidden states
MEMORY_SHARE = "--gpu-memory-utilization"  # vLLM's option


def split_words(typed: str, name: str) -> list[str]:
    """Split a command line of this setting or option into words.

    >>> split_words("--dtype float16 --name 'a b'", "--engine-arguments")
    ['--dtype', 'float16', '--name', 'a b']
    """
    try:
        return shlex.split(typed)
    except ValueError as error:
        raise UserError(f"{name} cannot be split into words: {error}.", "Close its quotes.") from None


def option_values(arguments: str) -> list[tuple[str, str]]:
    """Pair each word of an engine's arguments with the next one: options with their values.

    Values may follow a space or `=`. Options may be typed with `_` for `-`, as vLLM allows.

    >>> option_values("-tp 2 --kv_cache_dtype=fp8_e5m2")
    [('-tp', '2'), ('2', '--kv-cache-dtype'), ('--kv-cache-dtype', 'fp8_e5m2')]
    """
    words = shlex.split(arguments.replace("=", " "))
    return list(pairwise(word.replace("_", "-") if word.startswith("--") else word for word in words))
