"""The server's process: its socket, start and end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from types import FrameType

import uvicorn

from headstart.decoder import Decoder
from headstart.errors import UserError
from headstart.serve.app import Service, make_app
from headstart.serve.options import ServeOptions


def bind(options: ServeOptions) -> socket.socket:
    """Reserve the address. Raises UserError if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise UserError(
            f"Cannot listen on {options.host}:{options.port} ({error.strerror}).",
            "Choose another --port (0 takes a free one) or --host.",
        ) from error
    return bound


def warm_up(decoder: Decoder, drafter: str) -> None:
    """Decode a few tokens, greedily and sampled, so that the first request neither compiles nor measures."""
    log, decoder.log = decoder.log, None
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": 8, "min_new_tokens": 8}
        for _ in decoder.stream([1] * 16, drafter=drafter, **options):  # type: ignore[arg-type]  # of their types
            pass
    decoder.log = log


class Server(uvicorn.Server):
    """uvicorn with an end that finishes running requests.

    After a signal new requests get the status 503 and running ones go on for `drain` seconds; a second signal ends them
    at once.
    """

    def __init__(self, service: Service, announce: Callable[[], None]) -> None:
        config = uvicorn.Config(
            make_app(service), log_level="warning", lifespan="off", ws="none", timeout_graceful_shutdown=5
        )
        super().__init__(config)
        self._service, self._announce = service, announce
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; uvicorn calls this from its signal handlers."""
        self._captured_signals.append(sig)
        self._deadline = monotonic() + (0 if self._service.jobs.draining else self._service.options.drain)
        self._service.jobs.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None:
            jobs = self._service.jobs
            if monotonic() >= self._deadline:
                jobs.close_all()
                await asyncio.sleep(0)
            self.should_exit = not jobs.running and not jobs.waiting
        return await super().on_tick(counter)


def run(bound: socket.socket, service: Service, announce: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; `announce` is called once the server listens."""
    # uvicorn raises the signals again at its end, which is the ordinary one here.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        Server(service, announce).run([bound])
