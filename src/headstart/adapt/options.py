"""Options of an update, for the command line and Python. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.decode.options import explained, option

LEAST = 16
"""Minimum number of later requests that judge an update."""


@explained
@dataclass(frozen=True)
class AdaptOptions:
    """Options of an update, and of the gate that it must pass."""

    requests: int = option(256, "New requests that an update waits for.", minimum=4 * LEAST)
    recent: int = option(2048, "Most requests that an update is made of, the newest.", minimum=4 * LEAST)
    per_source: int = option(64, "Most requests of one source (the user that a request names) in it.", minimum=1)
    mix: float = option(0.5, "Share of the run's own conversations among those that are learnt; below 1.", minimum=0)
    fall: float = option(
        0.02, "Largest fall on the run's own validation texts, as a share, that the interval may reach.", minimum=0
    )
