"""What a caller may ask of the decode loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from headstart.decode.sampling import Sampling
from headstart.options import LoopOptions, Processor, SamplingOptions


@dataclass(frozen=True)
class DecodeOptions(LoopOptions):
    """How to decode: `LoopOptions`, and what only callers of the loop itself may ask.

    Row b samples with seed + b. Greedy output, and samples without drafts, do not depend on the batch that a row is in.
    With drafts and measured costs the number of drafts does, and with it which text of the same distribution is drawn.

    Attributes:
        stop_strings: emission ends with the token that completes one of these; it is kept, as in transformers.
        ignore_end: go on past the end-of-turn token (for measuring).
        processors: see `Sampling`.
        stop: called with (row, tokens emitted so far) after each token; true ends the row's text with that token.
    """

    stop_strings: tuple[str, ...] = ()
    ignore_end: bool = False
    processors: tuple[Processor, ...] = ()
    stop: Callable[[int, list[int]], bool] | None = None

    @classmethod
    def of(cls, options: LoopOptions, **more: Any) -> DecodeOptions:
        """The same options for the loop; `more` are further fields."""
        return cls(**{one.name: getattr(options, one.name) for one in fields(LoopOptions)}, **more)

    @property
    def sampling(self) -> Sampling:
        """The distribution to draw from."""
        named = {one.name: getattr(self, one.name) for one in fields(SamplingOptions)}
        return Sampling(**named, processors=tuple(self.processors))
