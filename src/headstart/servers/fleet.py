"""Engines that serve one target side by side, one for each group of GPUs, and are started again if they die."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Self

import torch

from headstart.errors import UserError
from headstart.servers.names import option_values
from headstart.servers.process import Server

_RESTARTS = 5
"""Restarts of one engine before it counts as broken."""
ENGINE_GPUS = "HEADSTART_ENGINE_GPUS"
"""Environment variable with the GPUs that engines may use, in the form of CUDA_VISIBLE_DEVICES."""
_PARALLEL_SIZES = {f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "data")} | {"-tp", "-pp", "-dp"}
"""Options that multiply the number of GPUs vLLM uses."""


class Fleet:
    """A context manager that runs engines while their target is needed.

    Raises:
        UserError: an engine does not start, or dies again and again.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        self._servers = servers
        self._restarts = dict.fromkeys(servers, 0)
        self._lock = threading.Lock()
        self._is_closing = False

    def __enter__(self) -> Self:
        try:
            for server in self._servers:  # side by side: loading takes minutes
                server.start()
            for server in self._servers:
                server.wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._stop()  # a restart in another thread fails now
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        with ThreadPoolExecutor(len(self._servers)) as threads:
            list(threads.map(Server.__exit__, self._servers))

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def recover(self, url: str) -> bool:
        """Start the engine at an address again if it has died; returns whether it had. Other callers wait meanwhile."""
        with self._lock:
            server = next(server for server in self._servers if server.url == url)
            if self._is_closing or not server.has_died:
                return False
            if self._restarts[server] == _RESTARTS:
                raise UserError(
                    f"{server.engine.name} died {_RESTARTS + 1} times: {server.log_excerpt()}",
                    f"Its log is {server.log}. Run the same command again: it resumes from here.",
                )
            self._restarts[server] += 1
            server.start()
            if self._is_closing:  # __exit__ stops it, once the lock is free
                return False
            try:
                server.wait()
            except UserError:
                if not server.has_died:  # dead again, perhaps by a request: the next call restarts it
                    raise
            return True


def gpu_groups(arguments: str) -> list[str]:
    """Split `engine_gpus` into groups of the `parallel_size` of an engine's arguments.

    Returns values of CUDA_VISIBLE_DEVICES. If fewer than two groups fit, returns one; "" means all visible GPUs.
    """
    gpus, size = engine_gpus(), parallel_size(arguments)
    groups = [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
    if len(groups) < 2 and gpus == visible_gpus():
        return [""]
    return groups or [",".join(gpus)]


def parallel_size(arguments: str) -> int:
    """Return the number of GPUs that an engine with these arguments uses.

    >>> parallel_size("-tp 4 --pipeline-parallel-size=2"), parallel_size("")
    (8, 1)
    """
    counts = [int(count) for option, count in option_values(arguments) if option in _PARALLEL_SIZES and count.isdigit()]
    return prod(counts)


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    return (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))).split(",")[:count]


def engine_gpus() -> list[str]:
    """Return the GPUs for engines: HEADSTART_ENGINE_GPUS, by default all visible GPUs."""
    named = os.environ.get(ENGINE_GPUS, "")
    return named.split(",") if named else visible_gpus()
