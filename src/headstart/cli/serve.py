"""The command `headstart serve`. Imports inside functions, as in `headstart.cli.app`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial

from rich.console import Console

from headstart.cli.heads import load_decoder
from headstart.cli.options import Follow, Heads, Loading, Log, with_options
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.serve.options import ServeOptions
from headstart.support.terminal import tell

_QUESTION = "Why is the sky blue?"


@with_options()
def serve(
    heads: Heads,
    options: ServeOptions = ServeOptions(),
    log: Log = None,
    follow: Follow = False,
    loading: Loading = Loading(),
) -> None:
    """Serve OpenAI's API: chat completions, completions, models, and metrics for Prometheus.

    For one machine and a few users. SIGTERM and Ctrl-C finish running requests first.

    Example: headstart serve runs/quickstart
    """
    try:
        from headstart.serve.app import Service
        from headstart.serve.server import bind, run, warm_up
    except ModuleNotFoundError as error:
        problem = f"headstart serve needs the package {error.name}, which is not installed."
        raise UserError(problem, "Run: pip install fastapi uvicorn prometheus-client") from error
    options = replace(options, api_key=options.api_key or os.environ.get("HEADSTART_API_KEY", ""))
    with bind(options) as bound:
        loading = replace(loading, log=log, follow=follow)
        decoder = load_decoder(heads, loading, DecodeOptions(drafter=options.drafter))
        warm_up(decoder, options.drafter)
        service = Service(decoder, options)
        host, port = bound.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        run(bound, service, partial(_announce, heads, url, service.model, bool(options.api_key)))


def _announce(heads: str, url: str, model: str, has_key: bool) -> None:
    """Print the address and ready requests."""
    message = {"role": "user", "content": _QUESTION}
    body = json.dumps({"model": model, "messages": [message], "max_tokens": 64})
    key = ' -H "Authorization: Bearer $HEADSTART_API_KEY"' if has_key else ""
    tell(
        Console(),
        f"""Serving {model} from {heads} at {url}/v1. Ctrl-C stops it.
In production use vLLM or SGLang: headstart export {heads} --format vllm --out served

curl {url}/v1/chat/completions -H "Content-Type: application/json"{key} -d '{body}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={'os.environ["HEADSTART_API_KEY"]' if has_key else '"none"'})
reply = client.chat.completions.create(model={model!r}, messages=[{message!r}])
""",
    )
