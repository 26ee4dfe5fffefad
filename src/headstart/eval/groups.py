"""Drafting figures by group of prompts, and by position in the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from headstart.decode.loop import Round
from headstart.eval.figures import Prompt, Unit, drafting_figures, rate, speedups
from headstart.eval.labels import HEADS, METHODS


def categories(units: Sequence[Unit], seed: int) -> list[dict[str, Any]]:
    """Return one row per category, in order of appearance. Speeds are null if prompts were decoded in batches."""
    names = dict.fromkeys(prompt.category for unit in units for prompt in unit.prompts)
    return [{"category": name, **_share(units, seed, lambda prompt: prompt.category, name)} for name in names]


def prompt_lengths(units: Sequence[Unit], seed: int) -> list[dict[str, Any]]:
    """Return the same rows by octave of the prompt's tokens."""

    def length(prompt: Prompt) -> str:
        return octave(len(prompt.tokens), 32)

    longest = sorted((prompt for unit in units for prompt in unit.prompts), key=lambda prompt: len(prompt.tokens))
    names = dict.fromkeys(map(length, longest))
    return [{"prompt_tokens": name, **_share(units, seed, length, name)} for name in names]


def places(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Return drafting figures by octave of the position at which a round starts; the prefill's token is position 1."""
    within: dict[int, list[Round]] = {}
    for row in (row for unit in units for row in unit.runs[HEADS].rounds):
        for place, done in zip(accumulate((done.emitted for done in row), initial=2), row, strict=False):
            within.setdefault(top(place, 16), []).append(done)
    return [{"place": octave(place, 16), **drafting_figures(within[place])} for place in sorted(within)]


def top(count: int, least: int) -> int:
    """Return the end of a count's octave; the lowest octave is 1 to `least`."""
    return least << (-(-count // least) - 1).bit_length()


def octave(count: int, least: int = 1) -> str:
    """Format the octave of a count.

    >>> [octave(count) for count in (1, 2, 3, 9)], [octave(count, 32) for count in (5, 33, 129)]
    (['1', '2', '3–4', '9–16'], ['1–32', '33–64', '129–256'])
    """
    high = top(count, least)
    low = 1 if high == least else high // 2 + 1
    return f"{low}–{high}" if low < high else str(high)


def merged(counts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    """Sum `node_counts` by octave.

    >>> merged([[1, 5], [3, 1], [4, 2]])
    [('1', 5), ('3–4', 3)]
    """
    rows: dict[str, int] = {}
    for nodes, rounds in counts:
        rows[octave(nodes)] = rows.get(octave(nodes), 0) + rounds
    return list(rows.items())


def _share(units: Sequence[Unit], seed: int, name_of: Callable[[Prompt], str], name: str) -> dict[str, Any]:
    """Return the figures of the prompts with a name."""
    alone = all(len(unit.prompts) == 1 for unit in units)
    within = [unit for unit in units if any(name_of(prompt) == name for prompt in unit.prompts)]
    pairs = [pair for unit in within for pair in zip(unit.prompts, unit.runs[HEADS].rounds, strict=True)]
    of_prompts = [row for prompt, row in pairs if name_of(prompt) == name]
    speeds = {method: rate(within, method, seed) if alone else None for method in METHODS}
    ratios = speedups(within, HEADS, seed)
    return {
        "prompts": len(of_prompts),
        **drafting_figures([done for row in of_prompts for done in row]),
        "tokens_per_second": {method: speed["mean"] if speed else None for method, speed in speeds.items()},
        **(ratios if alone else dict.fromkeys(ratios)),
    }
