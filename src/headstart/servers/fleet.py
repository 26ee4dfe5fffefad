"""Engines that serve one target side by side, one for each group of GPUs, and are started again if they die."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch

from headstart.errors import UserError
from headstart.servers.names import option_values
from headstart.servers.process import Server

_RESTARTS = 5
"""Restarts of one engine before it counts as broken."""
_PARALLEL_SIZE_OPTIONS = {f"--{kind}-parallel-size" for kind in ("tensor", "pipeline", "data")} | {"-tp", "-pp", "-dp"}
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
    """Split the visible GPUs into a group for each engine, of the size that its arguments ask for.

    Returns the groups as values of CUDA_VISIBLE_DEVICES; [""] (one engine sees all GPUs) if fewer than two fit.
    """
    size = 1
    for option, count in option_values(arguments):
        size *= int(count) if option in _PARALLEL_SIZE_OPTIONS and count.isdigit() else 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = visible.split(",")[: torch.cuda.device_count()]
    groups = [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
    return groups if len(groups) > 1 else [""]
