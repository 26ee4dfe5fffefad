"""Figures of a report, from timed runs. Each is defined here, once.

Shape suffixes: N resampled units (questions or batches of them), R resamples.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from headstart.decode.loop import Round
from headstart.eval.divergence import Judgement
from headstart.eval.labels import HEADS, LABELS, METHODS, OTHER, PLAIN
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


def of_methods(units: Sequence[Unit], *methods: str) -> list[Unit]:
    """Return the units that all these methods have run."""
    return [unit for unit in units if all(method in unit.runs for method in methods)]


def method_rounds(units: Sequence[Unit], method: str) -> list[Round]:
    """Return the rounds of all rows of a method; empty if it did not draft through our loop."""
    return [done for unit in of_methods(units, method) for row in unit.runs[method].rounds for done in row]


def undrafted_prompts(units: Sequence[Unit], method: str) -> int:
    """Count prompts without any drafts, because drafting would not have paid."""
    rows = [row for unit in of_methods(units, method) for row in unit.runs[method].rounds]
    return sum(all(done.nodes == 1 for done in row) and any(done.paused for done in row) for row in rows)


# -- drafting --------------------------------------------------------------------------------------------------------


def tokens_per_round(rounds: Sequence[Round]) -> float:
    """Return τ: tokens emitted per round, the target's own included; plain decoding is 1.

    >>> tokens_per_round([Round(3, emitted, 0, 0, 0) for emitted in (1, 3, 1)])  # (1 + 3 + 1) / 3
    1.6666666666666667
    """
    return sum(done.emitted for done in rounds) / len(rounds) if rounds else 1.0


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """Return conditional acceptance: the share of rounds that accepted draft k, among rounds that drafted k tokens
    ahead and accepted the first k - 1. The list ends at the last position that any round reached.

    >>> rounds = [Round(3, emitted, 0, 0, 0, depth=2) for emitted in (1, 3, 2)]
    >>> acceptance_by_position([*rounds, Round(2, 2, 0, 0, 0, depth=1)])  # 3 of 4, then 1 of 2
    [0.75, 0.5]
    """
    return [
        sum(done.emitted > position for done in reached) / len(reached)
        for position, reached in enumerate(_reached(rounds), start=1)
    ]


def drafting_figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return τ and acceptance by position; `rounds_by_position` counts the rounds behind each share of acceptance."""
    return {
        "rounds": len(rounds),
        "tokens_per_round": tokens_per_round(rounds),
        "acceptance_by_position": acceptance_by_position(rounds),
        "rounds_by_position": [len(reached) for reached in _reached(rounds)],
    }


def _reached(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """Yield, by position, the rounds that drafted it after accepting all before it, as long as there are any."""
    for position in range(1, max((done.depth for done in rounds), default=0) + 1):
        reached = [done for done in rounds if done.depth >= position and done.emitted >= position]
        if not reached:
            return
        yield reached


def _drafting(run: Run, row: int) -> dict[str, Any]:
    """Count a row's tokens and rounds, with `reached` and `accepted` by position, see `acceptance_by_position`."""
    rounds = run.rounds[row]
    reached = list(_reached(rounds))
    return {
        "tokens": len(run.tokens[row]),
        "seconds": run.seconds / len(run.tokens),
        "rounds": len(rounds),
        "emitted": sum(done.emitted for done in rounds),
        "reached": [len(these) for these in reached],
        "accepted": [sum(done.emitted > k for done in these) for k, these in enumerate(reached, start=1)],
    }


def share_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` independent cases.

    >>> low, high = share_interval(1.0, 10)
    >>> round(low, 3), round(high, 3)
    (0.722, 1.0)
    """
    wide = 1.96**2 / count
    middle, half = share + wide / 2, 1.96 * math.sqrt(share * (1 - share) / count + wide / 4 / count)
    return max(0.0, (middle - half) / (1 + wide)), min(1.0, (middle + half) / (1 + wide))


def accepted(row: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Return acceptance at each position, with the number of rounds behind it."""
    shares, rounds = row.get("acceptance_by_position") or (), row.get("rounds_by_position") or ()
    return list(zip(shares, rounds, strict=False))


LEAST_ROUNDS = 30  # minimum rounds of a share that is shown on its own: 30 give ±18 points


def folded(row: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Return acceptance as (position, share, rounds), with all positions from the first with few rounds pooled.

    >>> folded({"acceptance_by_position": [0.5, 0.5, 1.0], "rounds_by_position": [90, 20, 10]})
    [('1', 0.5, 90), ('2–3', 0.6666666666666666, 30)]
    """
    pairs = accepted(row)
    enough = next((place for place, (_, rounds) in enumerate(pairs) if rounds < LEAST_ROUNDS), len(pairs))
    shown = [(str(place), *pair) for place, pair in enumerate(pairs[:enough], start=1)]
    rest = pairs[enough:]
    if not rest:
        return shown
    count = sum(rounds for _, rounds in rest)
    name = f"{enough + 1}–{len(pairs)}" if len(rest) > 1 else str(len(pairs))
    return [*shown, (name, sum(share * rounds for share, rounds in rest) / count, count)]


def acceptance(share: float, rounds: int) -> str:
    """Format a share with its interval and rounds.

    >>> acceptance(7 / 9, 9)
    '78 % (45–94 %) of 9 rounds'
    """
    low, high = share_interval(share, rounds)
    return f"{100 * share:.0f} % ({100 * low:.0f}–{100 * high:.0f} %) of {rounds} round{'s' * (rounds > 1)}"


def node_counts(rounds: Sequence[Round]) -> list[list[int]]:
    """Count rounds by verified nodes, the root included, ascending: [nodes, rounds]."""
    return [list(pair) for pair in sorted(Counter(done.nodes for done in rounds).items())]


def mean_round_ms(units: Sequence[Unit], method: str) -> dict[str, float] | None:
    """Return mean milliseconds of a round, by part. Rows of a batch share its rounds; the longest row has all."""
    runs = [unit.runs[method] for unit in of_methods(units, method)]
    rounds = [done for run in runs for done in max(run.rounds, key=len, default=[])]
    if not rounds:
        return None
    parts = {"draft": "draft_ms", "verify": "forward_ms", "host": "host_ms"}
    return {part: float(np.mean([getattr(done, name) for done in rounds])) for part, name in parts.items()}


# -- speed -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # consecutive figures are mostly of the same units
def _resamples(size: int, seed: int) -> NDArray[np.float64]:
    """Return how often each of `size` units is drawn, by resample."""
    return np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), RESAMPLES).astype(float)


class Totals(NamedTuple):
    """Tokens and seconds of a method in each unit."""

    tokens_N: Sequence[float]
    seconds_N: Sequence[float]

    def rates(self, seed: int) -> tuple[float, NDArray[np.float64]]:
        """Return total tokens over total seconds: as measured, and of each resample."""
        counts_RN = _resamples(len(self.tokens_N), seed)
        tokens_N, seconds_N = np.asarray(self.tokens_N, float), np.asarray(self.seconds_N, float)
        with np.errstate(invalid="ignore"):  # 0 / 0 in a resample without any counts gives NaN
            return tokens_N.sum() / seconds_N.sum(), (counts_RN @ tokens_N) / (counts_RN @ seconds_N)


def rate_interval(totals: Totals, seed: int) -> Interval:
    """Return total tokens over total seconds, with its 95 % bootstrap interval over units."""
    return _interval(*totals.rates(seed), len(totals.tokens_N))


def ratio_interval(above: Sequence[Totals], below: Sequence[Totals], seed: int) -> Interval:
    """Return a product of rates over another, with its 95 % paired bootstrap interval: each resample draws units, and
    takes all rates of these units.

    >>> ratio_interval([Totals([10] * 5, [1] * 5)], [Totals([10] * 5, [2] * 5)], seed=0)
    {'mean': 2.0, 'low': 2.0, 'high': 2.0}
    """
    point, resampled_R = 1.0, np.ones(RESAMPLES)
    for rate, rate_R in (totals.rates(seed) for totals in above):
        point, resampled_R = point * rate, resampled_R * rate_R
    for rate, rate_R in (totals.rates(seed) for totals in below):
        point, resampled_R = point / rate, resampled_R / rate_R
    return _interval(point, resampled_R, len(above[0].tokens_N))


def relative_interval(above: Sequence[Totals], below: Sequence[Totals], seed: int) -> Interval:
    """Return a relative change: `ratio_interval` less 1."""
    ratio = ratio_interval(above, below, seed)
    mean, low, high = ratio["mean"], ratio["low"], ratio["high"]
    return {"mean": mean - 1, "low": None if low is None else low - 1, "high": None if high is None else high - 1}


def difference_interval(totals: Totals, base: Totals, seed: int) -> Interval:
    """Return the difference of two rates of the same units, with its 95 % interval by paired bootstrap."""
    (rate, rate_R), (base_rate, base_rate_R) = totals.rates(seed), base.rates(seed)
    return _interval(rate - base_rate, rate_R - base_rate_R, len(totals.tokens_N))


def _interval(point: float, resampled_R: NDArray[np.float64], units: int) -> Interval:
    if units < LEAST_UNITS:
        return {"mean": float(point), "low": None, "high": None}
    low, high = np.nanpercentile(resampled_R, [2.5, 97.5])
    return {"mean": float(point), "low": float(low), "high": float(high)}


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
    within = of_methods(units, method)
    return rate_interval(_totals(within, method), seed) if within else None


def speedup(units: Sequence[Unit], base: str, seed: int, method: str = HEADS) -> Interval | None:
    """Return a method's tokens per second over another's, on common units; None without any, or for the same method."""
    within = of_methods(units, method, base)
    if method == base or not within:
        return None
    return ratio_interval([_totals(within, method)], [_totals(within, base)], seed)


def speedups(units: Sequence[Unit], method: str, seed: int) -> dict[str, Interval | None]:
    """Return speed-ups over each baseline, by their names in results.json."""
    return {label.speedup: speedup(units, base, seed, method) for base, label in LABELS.items() if label.speedup}


# -- tables ----------------------------------------------------------------------------------------------------------


def method_figures(units: Sequence[Unit], method: str, seed: int) -> dict[str, Any]:
    """Return a report's figures of a method; inapplicable ones are None."""
    rounds, speed = method_rounds(units, method), rate(units, method, seed)
    within = of_methods(units, method)
    return {
        "prompts": sum(len(unit.prompts) for unit in within),
        "tokens_per_second": speed["mean"] if speed else None,
        "tokens_per_second_interval": speed,
        **speedups(units, method, seed),
        **drafting_figures(rounds),
        **({} if rounds else {"tokens_per_round": None}),
        "node_counts": node_counts(rounds),
        "nodes_per_round": sum(done.nodes for done in rounds) / len(rounds) if rounds else None,
        "round_ms": mean_round_ms(units, method),
        "ttft_ms": _percentiles(units, method, _first_ms),
        "inter_token_ms": _percentiles(units, method, _gaps_ms),
        "undrafted_prompts": undrafted_prompts(units, method) if rounds and method != PLAIN else None,
        "drafter_error": next((error for unit in within if (error := unit.runs[method].drafter_error)), None),
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
    rounds = method_rounds(units, HEADS)
    speeds = {name: rate(units, name, seed) for name in METHODS}
    return {
        **method_figures(units, HEADS, seed),
        "tokens_per_round": tokens_per_round(rounds),
        "tokens_per_second": {name: speed["mean"] if speed else None for name, speed in speeds.items()},
        "tokens_per_second_interval": speeds,
    }


def per_prompt(units: Sequence[Unit], drafter: str = HEADS) -> list[dict[str, Any]]:
    """Return one row per prompt. The seconds of a batch are divided equally among its prompts.

    `asked` hashes the last user message; prompts of the same `group` are dependent. `drafters` has every method that
    drafted through our loop, by its name in `compare`; the tested one is called `drafter` there.
    """
    rows = []
    for number, unit in enumerate(units):
        runs = {name: unit.runs.get(name) for name in METHODS}
        for index, prompt in enumerate(unit.prompts):
            rows.append(
                {
                    "id": prompt.id,
                    "asked": hashlib.sha256(prompt.question.encode()).hexdigest()[:12],
                    "category": prompt.category,
                    "unit": number,
                    "group": unit.group,
                    "prompt_tokens": len(prompt.tokens),
                    "tokens": {name: len(run.tokens[index]) if run else None for name, run in runs.items()},
                    "seconds": {name: run.seconds / len(unit.prompts) if run else None for name, run in runs.items()},
                    "tokens_per_round": tokens_per_round(unit.runs[HEADS].rounds[index]),
                    "drafters": {
                        drafter if name == HEADS else name.removeprefix(OTHER): _drafting(run, index)
                        for name, run in unit.runs.items()
                        if name == HEADS or name.startswith(OTHER)
                    },
                    "divergence": None,
                }
            )
    return rows


PERCENTILES = {"p50": 1, "p95": 20, "p99": 100}
"""Minimum number of values: with fewer, the percentile would just be the largest."""


def _percentiles(
    units: Sequence[Unit], method: str, values: Callable[[Run], Iterable[float]]
) -> dict[str, float | None] | None:
    """Return the count and percentiles of a method's milliseconds; None for percentiles of too few."""
    seen = [value for unit in of_methods(units, method) for value in values(unit.runs[method])]
    if not seen:
        return None
    found = {
        name: float(np.percentile(seen, int(name[1:]))) if len(seen) >= least else None
        for name, least in PERCENTILES.items()
    }
    return {"count": len(seen), **found}


def _first_ms(run: Run) -> Iterable[float]:
    """Return the time to first token of each row, prefill included."""
    return (row[0] for row in run.token_ms if row)


def _gaps_ms(run: Run) -> Iterable[float]:
    """Yield the time between tokens: the wait for each arrival, divided equally among its tokens."""
    for row in run.token_ms:
        arrivals = [(ms, len(list(together))) for ms, together in groupby(row)]
        for (before, _), (now, tokens) in pairwise(arrivals):
            yield from [(now - before) / tokens] * tokens
