"""Options of an update, for the command line and Python. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.decode.options import document_options, option

LEAST = 16
"""Minimum number of later requests that judge an update."""


@document_options
@dataclass(frozen=True)
class AdaptOptions:
    """Options of an update, and of the gate that it must pass."""

    requests: int = option(256, "Minimum number of new requests for an update.", minimum=4 * LEAST)
    recent: int = option(2048, "Maximum number of requests in an update, newest first.", minimum=4 * LEAST)
    per_source: int = option(64, "Maximum number of requests of one source (the request's user).", minimum=1)
    mix: float = option(0.5, "Fraction of the run's own conversations in the training texts; below 1.", minimum=0)
    fall: float = option(
        0.02, "Largest relative fall on the run's validation texts that the interval may include.", minimum=0
    )
