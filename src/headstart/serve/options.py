"""Options of `headstart serve`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.decode.options import DecodeOptions, document_options, meaning, option


@document_options
@dataclass(frozen=True)
class ServeOptions:
    """Address, limits and defaults of the server."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines connect.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    api_key: str = option("", "Key that requests must send.", default_text="HEADSTART_API_KEY, if it is set")
    model_name: str = option("", "Name of the model in requests and replies.", default_text="the target's name")
    max_requests: int = option(8, "Choices that are decoded at once.", minimum=1)
    max_queue: int = option(64, "Choices that may wait; a request beyond them gets the status 429.", minimum=0)
    max_tokens: int = option(1024, "Longest answer of a request that gives no max_tokens.", minimum=1)
    drain: float = option(30.0, "Seconds that running requests have after SIGTERM or Ctrl-C.", minimum=0)
    drafter: str = option(DecodeOptions.drafter, meaning(DecodeOptions, "drafter").text, metavar="NAME")
