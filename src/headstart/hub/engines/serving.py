"""How engines are started with heads, and how many drafts they are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from headstart.heads.exchange.published import BLOCKS, Layout, Published
from headstart.hub.engines.readers import READERS
from headstart.hub.target_facts import TargetFacts

_WHOLE = {*BLOCKS, Layout.MEDUSA}
"""Arrangements that are asked for every token they were trained to draft: one pass drafts all of them."""


def serve_commands(
    engines: Iterable[str],
    folder: Path | str,
    published: Published,
    facts: TargetFacts,
    drafts: Mapping[str, int],
) -> dict[str, list[str]]:
    """The words of the command that serves target and heads, for each engine that is a server.

    `drafts` are tokens of the chain by engine, where they were measured.
    """
    makers = {engine: READERS[engine].command for engine in engines}
    return {
        engine: make(str(folder), published, facts, drafts_of(published, drafts.get(engine, 0)))
        for engine, make in makers.items()
        if make is not None
    }


def drafts_of(published: Published, drafts: int = 0) -> int:
    """Tokens of the chain that an engine drafts: those measured to pay, else a few; later ones are seldom accepted."""
    return min(drafts or (published.steps if published.layout in _WHOLE else 3), published.steps)


def drafts_to_try(published: Published, usual: Sequence[int]) -> list[int]:
    """Numbers of drafts to measure in an engine: the usual ones as far as the heads reach, and a block as a whole."""
    whole = {published.steps} if published.layout in BLOCKS else set()
    return sorted({count for count in usual if count <= published.steps} | whole)
