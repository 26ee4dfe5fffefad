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
    drafts: Mapping[str, Mapping[int, int]],
) -> dict[str, list[str]]:
    """The words of the command that serves target and heads, for each engine that is a server.

    `drafts` are tokens of the chain by engine and by requests at a time, where they were measured.
    """
    makers = {engine: READERS[engine].command for engine in engines}
    return {
        engine: make(str(folder), published, facts, drafts.get(engine, {1: usual_drafts(published)}))
        for engine, make in makers.items()
        if make is not None
    }


def usual_drafts(published: Published) -> int:
    """Tokens of the chain that an engine drafts where nobody has measured: a few, later ones are seldom accepted."""
    return published.steps if published.layout in _WHOLE else min(3, published.steps)


def drafts_to_try(published: Published, usual: Sequence[int]) -> list[int]:
    """Numbers of drafts to measure in an engine: the usual ones as far as the heads reach, and a block as a whole."""
    whole = {published.steps} if published.layout in BLOCKS else set()
    return sorted({count for count in usual if count <= published.steps} | whole)
