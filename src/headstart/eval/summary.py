"""From timed runs to the numbers of a report. Each number is defined here, once.

Shape suffixes: N resampled units (questions or batches of them), R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from headstart.decode.loop import Round
from headstart.eval.labels import HEADS, LOOKUP, METHODS, PLAIN, STOCK
from headstart.eval.methods import Run

RESAMPLES = 10_000
"""Bootstrap resamples for each interval."""


class Interval(TypedDict):
    """A point estimate ("mean") with its 95 % interval; without one where there is a single unit to draw from."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Prompt:
    """One measured prompt.

    Attributes:
        id: of its question; the second turn of question 81 is "81/2".
        category: of its question.
        tokens: token ids of the whole conversation up to the answer.
    """

    id: str
    category: str
    tokens: list[int]


@dataclass(frozen=True)
class Unit:
    """Prompts that were decoded together, and what each method did with them.

    Attributes:
        group: what the bootstrap draws: turns of the same questions are not independent, so they share a group.
        prompts: as many as the batch size.
        runs: by method.
    """

    group: int
    prompts: list[Prompt]
    runs: Mapping[str, Run]


@dataclass(frozen=True)
class Step:
    """One draft-verify round of one row: depth of the drafted tree, its nodes (root included), tokens emitted."""

    depth: int
    nodes: int
    emitted: int


def steps(run: Run) -> list[list[Step]]:
    """Rounds of each row of a run."""
    return [
        [Step(depth, one.nodes, one.emitted) for depth, one in zip(depths, rounds, strict=True)]
        for depths, rounds in zip(run.depths, run.rounds, strict=True)
    ]


def tokens_per_round(rounds: Sequence[Step]) -> float:
    """τ: tokens emitted per round, the target's own included; plain decoding is 1.

    >>> tokens_per_round([Step(2, 3, 1), Step(2, 3, 3), Step(2, 3, 1)])  # (1 + 3 + 1) / 3
    1.6666666666666667
    """
    return sum(one.emitted for one in rounds) / len(rounds) if rounds else 1.0


def acceptance_by_position(rounds: Sequence[Step]) -> list[float]:
    """Conditional acceptance: of the rounds that drafted k tokens ahead or more and whose first k - 1 drafts were
    accepted, the share whose k-th was accepted too. It ends at the last position that any round reached.

    >>> acceptance_by_position([Step(2, 3, 1), Step(2, 3, 3), Step(2, 3, 2), Step(1, 2, 2)])  # 3 of 4, then 1 of 2
    [0.75, 0.5]
    """
    shares = []
    for position in range(1, max((one.depth for one in rounds), default=0) + 1):
        reached = [one for one in rounds if one.depth >= position and one.emitted >= position]
        if not reached:
            break
        shares.append(sum(one.emitted > position for one in reached) / len(reached))
    return shares


def rate_interval(tokens_N: Sequence[float], seconds_N: Sequence[float], seed: int) -> Interval:
    """Total tokens over total seconds, with its 95 % bootstrap interval over units; one unit has none."""
    counts_RN = _resamples(len(tokens_N), seed)
    tokens, seconds = np.asarray(tokens_N, float), np.asarray(seconds_N, float)
    return _interval(tokens.sum() / seconds.sum(), (counts_RN @ tokens) / (counts_RN @ seconds), len(tokens) < 2)


def ratio_interval(
    tokens_N: Sequence[float],
    seconds_N: Sequence[float],
    base_tokens_N: Sequence[float],
    base_seconds_N: Sequence[float],
    seed: int,
) -> Interval:
    """Speed-up: the ratio of two throughputs (total tokens over total seconds), with its 95 % interval.

    Paired bootstrap: a resample draws units, and takes both methods' runs of each unit drawn. One unit has none.

    >>> ratio_interval([10, 20], [1, 2], [10, 20], [2, 4], seed=0)
    {'mean': 2.0, 'low': 2.0, 'high': 2.0}
    """
    counts_RN = _resamples(len(tokens_N), seed)
    rates = []
    for tokens, seconds in ((tokens_N, seconds_N), (base_tokens_N, base_seconds_N)):
        totals = np.asarray(tokens, float), np.asarray(seconds, float)
        rates.append((totals[0].sum() / totals[1].sum(), (counts_RN @ totals[0]) / (counts_RN @ totals[1])))
    return _interval(rates[0][0] / rates[1][0], rates[0][1] / rates[1][1], len(tokens_N) < 2)


def summarise(units: Sequence[Unit], seed: int) -> dict[str, Any]:
    """The part of `summary` that follows from the runs."""
    drafted = all_steps(units, HEADS)
    emitted = sum(one.emitted for one in drafted)
    nodes = sum(one.nodes for one in drafted)
    speeds = {name: rate(units, name, seed) for name in METHODS}
    proposed, accepted = nodes - len(drafted), emitted - len(drafted)
    histogram = [0] * (max((one.emitted for one in drafted), default=1) + 1)
    for one in drafted:
        histogram[one.emitted] += 1
    return {
        "tokens_per_round": tokens_per_round(drafted),
        "acceptance_by_position": acceptance_by_position(drafted),
        "tokens_per_second": {name: speed["mean"] if speed else None for name, speed in speeds.items()},
        "tokens_per_second_interval": speeds,
        "speedup_vs_plain": speedup(units, PLAIN, seed),
        "speedup_vs_transformers": speedup(units, STOCK, seed),
        "speedup_vs_prompt_lookup": speedup(units, LOOKUP, seed),
        "plain_vs_transformers": speedup(units, STOCK, seed, PLAIN),
        "rounds": len(drafted),
        "tokens_per_round_histogram": histogram,
        "nodes_per_round": nodes / len(drafted) if drafted else None,
        "drafts_proposed": proposed,
        "drafts_accepted": accepted,
        "accepted_per_proposed": accepted / proposed if proposed else None,
        "wasted_per_token": (nodes - emitted) / emitted if emitted else None,
        "round_ms": mean_round_ms(units, HEADS),
        "host_share": host_share(mean_round_ms(units, HEADS)),
        "plain_round_ms": mean_round_ms(units, PLAIN),
        "ttft_ms": _by_method(units, _first_ms),
        "inter_token_ms": _by_method(units, _gaps_ms),
        "drafter_error": drafter_error(units, HEADS),
    }


def categories(units: Sequence[Unit], seed: int) -> list[dict[str, Any]]:
    """One row per category, in order of appearance. Speeds are null where prompts of several were decoded together."""
    names = list(dict.fromkeys(prompt.category for unit in units for prompt in unit.prompts))
    alone = all(len(unit.prompts) == 1 for unit in units)
    rows = []
    for name in names:
        own = [unit for unit in units if any(prompt.category == name for prompt in unit.prompts)]
        drafted = [
            step
            for unit in own
            for prompt, row in zip(unit.prompts, steps(unit.runs[HEADS]), strict=True)
            if prompt.category == name
            for step in row
        ]
        rows.append(
            {
                "category": name,
                "prompts": sum(prompt.category == name for unit in own for prompt in unit.prompts),
                "tokens_per_round": tokens_per_round(drafted),
                "acceptance_by_position": acceptance_by_position(drafted),
                "tokens_per_second": {
                    method: found["mean"] if alone and (found := rate(own, method, seed)) else None
                    for method in METHODS
                },
                "speedup_vs_plain": speedup(own, PLAIN, seed) if alone else None,
                "speedup_vs_transformers": speedup(own, STOCK, seed) if alone else None,
                "speedup_vs_prompt_lookup": speedup(own, LOOKUP, seed) if alone else None,
            }
        )
    return rows


def per_prompt(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """One row per prompt. In a batch each prompt is given an equal share of the batch's seconds."""
    rows = []
    for number, unit in enumerate(units):
        for index, prompt in enumerate(unit.prompts):
            runs = {name: unit.runs.get(name) for name in METHODS}
            rows.append(
                {
                    "id": prompt.id,
                    "category": prompt.category,
                    "unit": number,
                    "prompt_tokens": len(prompt.tokens),
                    "tokens": {name: len(run.tokens[index]) if run else None for name, run in runs.items()},
                    "seconds": {name: run.seconds / len(unit.prompts) if run else None for name, run in runs.items()},
                    "tokens_per_round": tokens_per_round(steps(unit.runs[HEADS])[index]),
                    "divergence": None,
                }
            )
    return rows


def _totals(units: Sequence[Unit], method: str) -> tuple[list[float], list[float]] | None:
    """Tokens and seconds of a method, per group; None when it did not run."""
    tokens: dict[int, float] = {}
    seconds: dict[int, float] = {}
    for unit in units:
        if method not in unit.runs:
            return None
        run = unit.runs[method]
        tokens[unit.group] = tokens.get(unit.group, 0.0) + run.count
        seconds[unit.group] = seconds.get(unit.group, 0.0) + run.seconds
    return list(tokens.values()), list(seconds.values())


def all_steps(units: Sequence[Unit], method: str) -> list[Step]:
    """Rounds of all rows that a method decoded."""
    return [step for unit in units if method in unit.runs for row in steps(unit.runs[method]) for step in row]


def rate(units: Sequence[Unit], method: str, seed: int) -> Interval | None:
    """Tokens per second of a method; None when it did not run."""
    totals = _totals(units, method)
    return rate_interval(*totals, seed) if totals else None


def speedup(units: Sequence[Unit], base: str, seed: int, method: str = HEADS) -> Interval | None:
    """A method's tokens per second over another's; None when one of them did not run."""
    ours, theirs = _totals(units, method), _totals(units, base)
    return ratio_interval(*ours, *theirs, seed) if ours and theirs else None


def mean_round_ms(units: Sequence[Unit], method: str) -> dict[str, float] | None:
    """Mean milliseconds of a round, by part. The rows of a batch share its rounds: the longest row has them all."""
    rounds: list[Round] = [
        one for unit in units if method in unit.runs for one in max(unit.runs[method].rounds, key=len, default=[])
    ]
    if not rounds:
        return None
    return {
        "draft": float(np.mean([one.draft_ms for one in rounds])),
        "verify": float(np.mean([one.verify_ms for one in rounds])),
        "host": float(np.mean([one.host_ms for one in rounds])),
    }


def host_share(round_ms: Mapping[str, float] | None) -> float | None:
    """Share of a round that is neither drafting nor verifying: accepting, committing, bookkeeping.

    >>> host_share({"draft": 1.0, "verify": 18.0, "host": 1.0})
    0.05
    """
    return round_ms["host"] / sum(round_ms.values()) if round_ms else None


def drafter_error(units: Sequence[Unit], method: str) -> str | None:
    """What a method's drafter raised first, if it ever did; the loop went on plainly."""
    found = (unit.runs[method].drafter_error for unit in units if method in unit.runs)
    return next((error for error in found if error), None)


def _first_ms(run: Run) -> Iterable[float]:
    """Time to the first token of each row, prefill included."""
    return (row[0][0] for row in run.arrivals if row)


def _gaps_ms(run: Run) -> Iterable[float]:
    """Time between tokens: the wait for an arrival, shared evenly by the tokens that came with it."""
    for row in run.arrivals:
        for (before, _), (now, tokens) in pairwise(row):
            yield from [(now - before) / tokens] * tokens


def _by_method(units: Sequence[Unit], values: Callable[[Run], Iterable[float]]) -> dict[str, dict[str, float] | None]:
    """Median and 95th percentile per method."""
    table: dict[str, dict[str, float] | None] = {}
    for name in METHODS:
        seen = [value for unit in units if name in unit.runs for value in values(unit.runs[name])]
        table[name] = {"p50": float(np.percentile(seen, 50)), "p95": float(np.percentile(seen, 95))} if seen else None
    return table


def _resamples(size: int, seed: int) -> NDArray[np.float64]:
    """How often each unit is drawn, for each resample [R, N]."""
    return np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), RESAMPLES).astype(float)


def _interval(point: float, resampled_R: NDArray[np.float64], alone: bool) -> Interval:
    if alone:
        return {"mean": float(point), "low": None, "high": None}
    low, high = np.percentile(resampled_R, [2.5, 97.5])
    return {"mean": float(point), "low": float(low), "high": float(high)}
