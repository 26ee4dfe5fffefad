"""Statistics of a report, from timed runs. Each figure is defined here, once.

Shape suffixes: N resampled units (questions or batches of them), R resamples.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from headstart.decode.texts import Round
from headstart.eval.divergence import Judgement
from headstart.eval.labels import BASELINES, HEADS, LABELS, METHODS, OTHER, PLAIN
from headstart.eval.methods import Run

RESAMPLES = 10_000  # bootstrap resamples per interval
LEAST_UNITS = 5
"""Minimum units for an interval: with fewer, resamples are too similar and the interval too narrow."""


class Interval(TypedDict):
    """A point estimate ("mean") with its 95 % interval; None below `LEAST_UNITS` units."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Prompt:
    """One measured prompt: the tokens of a conversation up to the answer."""

    id: str  # the second turn of question 81 is "81/2"
    category: str
    tokens: list[int]
    question: str = ""  # the last user message


@dataclass(frozen=True)
class Unit:
    """Prompts decoded in one batch, and each method's run."""

    group: int  # unit of the bootstrap; turns of the same questions are dependent and share a group
    prompts: list[Prompt]
    runs: Mapping[str, Run]


def units_with(units: Sequence[Unit], *methods: str) -> list[Unit]:
    """Return the units that all these methods have run."""
    return [unit for unit in units if all(method in unit.runs for method in methods)]


def after_prefill(units: Sequence[Unit]) -> list[Unit]:
    """Return units of one prompt without the first token and the time to it; without answers that end there."""
    decoding = [replace(unit, runs={name: run.after_prefill() for name, run in unit.runs.items()}) for unit in units]
    return [unit for unit in decoding if all(run.count for run in unit.runs.values())]


# -- drafting --------------------------------------------------------------------------------------------------------


def drafting_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return τ and conditional acceptance by position, with the number of rounds behind each.

    τ is the number of tokens emitted per round, the target's own included; plain decoding has 1. Acceptance of draft k
    is the share of rounds that accepted it, among rounds that drafted k tokens ahead and accepted the first k - 1.

    >>> rounds = [Round(3, emitted, 0, 0, 0, depth=2) for emitted in (1, 3, 2)]
    >>> drafting_figures([*rounds, Round(2, 2, 0, 0, 0, depth=1)])["acceptance_by_position"]  # 3 of 4, then 1 of 2
    [0.75, 0.5]
    """
    counts = _counts_by_position(rounds)
    return {
        "rounds": len(rounds),
        "tokens_per_round": sum(done.emitted for done in rounds) / len(rounds) if rounds else 1.0,
        "acceptance_by_position": [accepted / reached for reached, accepted in counts],
        "rounds_by_position": [reached for reached, _ in counts],
    }


def _counts_by_position(rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """Count, for each position that any round reached, the rounds that reached and that accepted it."""
    counts: list[tuple[int, int]] = []
    for position in range(1, max((done.depth for done in rounds), default=0) + 1):
        reached = [done for done in rounds if done.depth >= position and done.emitted >= position]
        if not reached:
            break
        counts.append((len(reached), sum(done.emitted > position for done in reached)))
    return counts


def node_counts(rounds: Sequence[Round]) -> list[list[int]]:
    """Count rounds by verified nodes, the root included, ascending: [nodes, rounds]."""
    return [list(pair) for pair in sorted(Counter(done.nodes for done in rounds).items())]


def _mean_round_ms(runs: Sequence[Run]) -> dict[str, float] | None:
    """Return mean milliseconds of a round, by part. Rows of a batch share its rounds; the longest row has all."""
    rounds = [done for run in runs for done in max(run.rounds, key=len, default=[])]
    if not any(done.forward_ms for done in rounds):  # engines count rounds without timing them
        return None
    parts = {"draft": "draft_ms", "verify": "forward_ms", "host": "host_ms"}
    return {part: float(np.mean([getattr(done, name) for done in rounds])) for part, name in parts.items()}


# -- speed -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # consecutive figures are mostly of the same units
def _draws(size: int, seed: int) -> NDArray[np.float64]:
    """Return the weights of `size` units: all 1 as measured, then their counts in each resample."""
    rng = np.random.default_rng(seed)
    resamples = RESAMPLES if size >= LEAST_UNITS else 0
    return np.vstack([np.ones(size), rng.multinomial(size, np.full(size, 1 / size), resamples)])


class Totals(NamedTuple):
    """Tokens and seconds of a method in each unit, or any other counts and their divisors."""

    tokens_N: Sequence[float]
    seconds_N: Sequence[float]

    def rates(self, seed: int = 0) -> NDArray[np.float64]:
        """Return total tokens over total seconds: as measured, and of each bootstrap resample of the units, if any.

        Arithmetic on rates is paired: the resamples of equally many units are the same.
        """
        draws_RN = _draws(len(self.tokens_N), seed)
        with np.errstate(invalid="ignore"):  # 0 / 0 in a resample without any counts gives NaN
            rates_R: NDArray[np.float64] = (draws_RN @ self.tokens_N) / (draws_RN @ self.seconds_N)
        return rates_R


def interval(rates_R: NDArray[np.float64]) -> Interval:
    """Return a measured figure with the middle 95 % of its resamples.

    >>> interval(Totals([10] * 5, [1] * 5).rates() / Totals([10] * 5, [2] * 5).rates())
    {'mean': 2.0, 'low': 2.0, 'high': 2.0}
    """
    measured, resampled = float(rates_R[0]), rates_R[1:]
    if not len(resampled):
        return {"mean": measured, "low": None, "high": None}
    low, high = np.nanpercentile(resampled, [2.5, 97.5])
    return {"mean": measured, "low": float(low), "high": float(high)}


def _totals(units: Sequence[Unit], method: str) -> Totals:
    runs: dict[int, list[Run]] = {}
    for unit in units:
        runs.setdefault(unit.group, []).append(unit.runs[method])
    return Totals(
        [sum(run.count for run in group) for group in runs.values()],
        [sum(run.seconds for run in group) for group in runs.values()],
    )


def rate(units: Sequence[Unit], method: str, seed: int) -> Interval | None:
    """Return tokens per second of a method on the units that it ran on; None if there are none."""
    within = units_with(units, method)
    return interval(_totals(within, method).rates(seed)) if within else None


def speedups(units: Sequence[Unit], method: str, seed: int) -> dict[str, Interval | None]:
    """Return a method's speed-up over each other baseline on common units, by its name in results.json."""
    found: dict[str, Interval | None] = dict.fromkeys(BASELINES)
    for base, label in LABELS.items():
        within = units_with(units, method, base)
        if label.speedup and base != method and within:
            ratios_R = _totals(within, method).rates(seed) / _totals(within, base).rates(seed)
            found[label.speedup] = interval(ratios_R)
    return found


PERCENTILES = {"p50": 1, "p95": 20, "p99": 100}
"""Minimum number of values: with fewer, less than one value is expected above the percentile."""


def _percentiles(values: Sequence[float]) -> dict[str, float | None] | None:
    """Return the count and the percentiles of milliseconds; None for percentiles of too few."""
    if not values:
        return None
    found = {
        name: float(np.percentile(values, int(name[1:]))) if len(values) >= least else None
        for name, least in PERCENTILES.items()
    }
    return {"count": len(values), **found}


def _gaps_ms(run: Run) -> Iterable[float]:
    """Yield the time between tokens: the wait for each arrival, divided equally among its tokens."""
    for row in run.token_ms:
        arrivals = [(ms, len(list(together))) for ms, together in groupby(row)]
        for (before, _), (now, tokens) in pairwise(arrivals):
            yield from [(now - before) / tokens] * tokens


# -- tables ----------------------------------------------------------------------------------------------------------


def method_figures(units: Sequence[Unit], method: str, seed: int) -> dict[str, Any]:
    """Return a report's figures of a method; inapplicable ones are None."""
    within, speed = units_with(units, method), rate(units, method, seed)
    runs = [unit.runs[method] for unit in within]
    rows = [row for run in runs for row in run.rounds]
    rounds = [done for row in rows for done in row]
    # A prompt counts as undrafted only if drafting was paused, not if the drafter had nothing to propose.
    undrafted = [all(done.nodes == 1 for done in row) and any(done.paused for done in row) for row in rows]
    return {
        "prompts": sum(len(unit.prompts) for unit in within),
        "tokens_per_second": speed["mean"] if speed else None,
        "tokens_per_second_interval": speed,
        **speedups(units, method, seed),
        **drafting_figures(rounds),
        **({} if rounds else {"tokens_per_round": None}),
        "node_counts": node_counts(rounds),
        "nodes_per_round": sum(done.nodes for done in rounds) / len(rounds) if rounds else None,
        "round_ms": _mean_round_ms(runs),
        "ttft_ms": _percentiles([row[0] for run in runs for row in run.token_ms if row]),
        "inter_token_ms": _percentiles([ms for run in runs for ms in _gaps_ms(run)]),
        "undrafted_prompts": sum(undrafted) if rounds and method != PLAIN else None,
        "drafter_error": next((run.drafter_error for run in runs if run.drafter_error), None),
    }


def compare_rows(
    units: Sequence[Unit], judged: Mapping[str, Judgement], seed: int, drafter: str
) -> list[dict[str, Any]]:
    """Return one row per method that ran, the tested drafter first: `compare` of results.json."""
    return [
        {
            "name": drafter if method == HEADS else method.removeprefix(OTHER),
            **method_figures(units, method, seed),
            "divergences": judgement.to_json(),
        }
        for method, judgement in judged.items()
    ]


def summarise(units: Sequence[Unit], seed: int) -> dict[str, Any]:
    """Return the part of `summary` that is computed from the runs."""
    figures, speeds = method_figures(units, HEADS, seed), {name: rate(units, name, seed) for name in METHODS}
    return {
        **figures,
        "tokens_per_round": figures["tokens_per_round"] or 1.0,
        "tokens_per_second": {name: speed["mean"] if speed else None for name, speed in speeds.items()},
        "tokens_per_second_interval": speeds,
    }


def per_prompt(units: Sequence[Unit], drafter: str = HEADS) -> list[dict[str, Any]]:
    """Return one row per prompt. The seconds of a batch are divided equally among its prompts.

    `asked` hashes the last user message; prompts of the same `group` are dependent. `drafters` has every method that
    drafted through our loop, by its name in `compare`; the tested one has the name passed as `drafter`.
    """
    return [
        {
            "id": prompt.id,
            "asked": hashlib.sha256(prompt.question.encode()).hexdigest()[:12],
            "category": prompt.category,
            "unit": number,
            "group": unit.group,
            "prompt_tokens": len(prompt.tokens),
            "tokens": {name: len(unit.runs[name].tokens[row]) if name in unit.runs else None for name in METHODS},
            "seconds": {
                name: unit.runs[name].seconds / len(unit.prompts) if name in unit.runs else None for name in METHODS
            },
            "tokens_per_round": drafting_figures(unit.runs[HEADS].rounds[row])["tokens_per_round"],
            "drafters": {
                drafter if name == HEADS else name.removeprefix(OTHER): _row_counts(run, row)
                for name, run in unit.runs.items()
                if name == HEADS or name.startswith(OTHER)
            },
            "divergence": None,
        }
        for number, unit in enumerate(units)
        for row, prompt in enumerate(unit.prompts)
    ]


def _row_counts(run: Run, row: int) -> dict[str, Any]:
    """Count a row's tokens and rounds; `reached` and `accepted` are by position."""
    rounds = run.rounds[row]
    counts = _counts_by_position(rounds)
    return {
        "tokens": len(run.tokens[row]),
        "seconds": run.seconds / len(run.tokens),
        "rounds": len(rounds),
        "emitted": sum(done.emitted for done in rounds),
        "reached": [reached for reached, _ in counts],
        "accepted": [accepted for _, accepted in counts],
    }


# -- groups of prompts -----------------------------------------------------------------------------------------------


def categories(units: Sequence[Unit], seed: int) -> list[dict[str, Any]]:
    """Return one row per category, in order of appearance. Speeds are null if prompts were decoded in batches."""
    prompts = [prompt for unit in units for prompt in unit.prompts]
    return _grouped(units, seed, "category", prompts, lambda prompt: prompt.category)


def prompt_lengths(units: Sequence[Unit], seed: int) -> list[dict[str, Any]]:
    """Return the same rows by octave of the prompt's length in tokens."""
    prompts = sorted((prompt for unit in units for prompt in unit.prompts), key=lambda prompt: len(prompt.tokens))
    return _grouped(units, seed, "prompt_tokens", prompts, lambda prompt: octave(len(prompt.tokens), 32))


def _grouped(
    units: Sequence[Unit], seed: int, key: str, prompts: Sequence[Prompt], group_of: Callable[[Prompt], str]
) -> list[dict[str, Any]]:
    """Return the tested drafter's figures by group, in the order of `prompts`; `key` has the group's name."""
    single = all(len(unit.prompts) == 1 for unit in units)
    rows = []
    for name in dict.fromkeys(map(group_of, prompts)):
        within = [unit for unit in units if any(group_of(prompt) == name for prompt in unit.prompts)]
        pairs = [pair for unit in within for pair in zip(unit.prompts, unit.runs[HEADS].rounds, strict=True)]
        members = [rounds for prompt, rounds in pairs if group_of(prompt) == name]
        speeds = {method: rate(within, method, seed) if single else None for method in METHODS}
        rows.append(
            {
                key: name,
                "prompts": len(members),
                **drafting_figures([done for rounds in members for done in rounds]),
                "tokens_per_second": {method: speed["mean"] if speed else None for method, speed in speeds.items()},
                **(speedups(within, HEADS, seed) if single else dict.fromkeys(BASELINES)),
            }
        )
    return rows


def places(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Return drafting figures by octave of the position at which a round starts; the prefill's token is position 1."""
    within: dict[int, list[Round]] = {}
    for row in (row for unit in units for row in unit.runs[HEADS].rounds):
        for position, done in zip(accumulate((done.emitted for done in row), initial=2), row, strict=False):
            within.setdefault(_octave_end(position, 16), []).append(done)
    return [{"place": octave(end, 16), **drafting_figures(within[end])} for end in sorted(within)]


def _octave_end(count: int, least: int) -> int:
    """Return the end of a count's octave; the lowest octave is 1 to `least`."""
    return least << (-(-count // least) - 1).bit_length()


def octave(count: int, least: int = 1) -> str:
    """Format the octave of a count.

    >>> [octave(count) for count in (1, 2, 3, 9)], [octave(count, 32) for count in (5, 33, 129)]
    (['1', '2', '3–4', '9–16'], ['1–32', '33–64', '129–256'])
    """
    high = _octave_end(count, least)
    low = 1 if high == least else high // 2 + 1
    return f"{low}–{high}" if low < high else str(high)
