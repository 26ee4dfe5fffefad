"""From timed runs to the numbers of a report. Each number is defined here, once.

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

RESAMPLES = 10_000
"""Bootstrap resamples for each interval."""
LEAST_UNITS = 5
"""Units that an interval needs: resamples of fewer are much the same, and it would be too narrow."""


class Interval(TypedDict):
    """A point estimate ("mean") with its 95 % interval; without one below `LEAST_UNITS` units to draw from."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Prompt:
    """One measured prompt: the tokens of a conversation up to the answer. The second turn of question 81 is "81/2".
    `question` is what the user said last."""

    id: str
    category: str
    tokens: list[int]
    question: str = ""


@dataclass(frozen=True)
class Unit:
    """Prompts that were decoded together, and what each method did with them.

    Attributes:
        group: what the bootstrap draws: turns of the same questions are not independent, so they share a group.
    """

    group: int
    prompts: list[Prompt]
    runs: Mapping[str, Run]


def of_methods(units: Sequence[Unit], *methods: str) -> list[Unit]:
    """The units that all of these methods decoded."""
    return [unit for unit in units if all(method in unit.runs for method in methods)]


def method_rounds(units: Sequence[Unit], method: str) -> list[Round]:
    """Rounds of all rows that a method decoded; none where it did not draft through our loop."""
    return [done for unit in of_methods(units, method) for row in unit.runs[method].rounds for done in row]


def undrafted_prompts(units: Sequence[Unit], method: str) -> int:
    """Prompts in whose answers nothing was ever drafted, because it would not have paid."""
    rows = [row for unit in of_methods(units, method) for row in unit.runs[method].rounds]
    return sum(all(done.nodes == 1 for done in row) and any(done.paused for done in row) for row in rows)


# -- drafting --------------------------------------------------------------------------------------------------------


def tokens_per_round(rounds: Sequence[Round]) -> float:
    """τ: tokens emitted per round, the target's own included; plain decoding is 1.

    >>> tokens_per_round([Round(3, emitted, 0, 0, 0) for emitted in (1, 3, 1)])  # (1 + 3 + 1) / 3
    1.6666666666666667
    """
    return sum(done.emitted for done in rounds) / len(rounds) if rounds else 1.0


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """Conditional acceptance: of the rounds that drafted k tokens ahead or more and whose first k - 1 drafts were
    accepted, the share whose k-th was accepted too. It ends at the last position that any round reached.

    >>> rounds = [Round(3, emitted, 0, 0, 0, depth=2) for emitted in (1, 3, 2)]
    >>> acceptance_by_position([*rounds, Round(2, 2, 0, 0, 0, depth=1)])  # 3 of 4, then 1 of 2
    [0.75, 0.5]
    """
    return [
        sum(done.emitted > position for done in reached) / len(reached)
        for position, reached in enumerate(_reached(rounds), start=1)
    ]


def rounds_by_position(rounds: Sequence[Round]) -> list[int]:
    """How many rounds each share of `acceptance_by_position` is of."""
    return [len(reached) for reached in _reached(rounds)]


def _reached(rounds: Sequence[Round]) -> Iterator[list[Round]]:
    """For each position, the rounds that drafted it after accepting all before it; as far as any did."""
    for position in range(1, max((done.depth for done in rounds), default=0) + 1):
        reached = [done for done in rounds if done.depth >= position and done.emitted >= position]
        if not reached:
            return
        yield reached


def _drafting(run: Run, row: int) -> dict[str, Any]:
    """The counts of a row, of which figures of several are made. `emitted` are the tokens of its rounds; `reached` and
    `accepted` count rounds by position, see `acceptance_by_position`."""
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
    """Wilson's 95 % interval of a share of so many independent cases.

    >>> low, high = share_interval(1.0, 10)
    >>> round(low, 3), round(high, 3)
    (0.722, 1.0)
    """
    wide = 1.96**2 / count
    middle, half = share + wide / 2, 1.96 * math.sqrt(share * (1 - share) / count + wide / 4 / count)
    return max(0.0, (middle - half) / (1 + wide)), min(1.0, (middle + half) / (1 + wide))


def accepted(row: Mapping[str, Any]) -> list[tuple[float, int]]:
    """Acceptance at each position, with the rounds that it is of."""
    shares, rounds = row.get("acceptance_by_position") or (), row.get("rounds_by_position") or ()
    return list(zip(shares, rounds, strict=False))


LEAST_ROUNDS = 30
"""That a share of acceptance is shown of by itself: with 30 it is good to 18 points."""


def folded(row: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Acceptance by position as (position, share, rounds): from the first position that few rounds reached on, all in
    one.

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
    """A share with what it is worth.

    >>> acceptance(7 / 9, 9)
    '78 % (45–94 %) of 9 rounds'
    """
    low, high = share_interval(share, rounds)
    return f"{100 * share:.0f} % ({100 * low:.0f}–{100 * high:.0f} %) of {rounds} round{'s' * (rounds > 1)}"


def node_counts(rounds: Sequence[Round]) -> list[list[int]]:
    """How many rounds verified how many nodes, the root included, ascending: [nodes, rounds]."""
    return [list(pair) for pair in sorted(Counter(done.nodes for done in rounds).items())]


def mean_round_ms(units: Sequence[Unit], method: str) -> dict[str, float] | None:
    """Mean milliseconds of a round, by part. The rows of a batch share its rounds: the longest row has them all."""
    runs = [unit.runs[method] for unit in of_methods(units, method)]
    rounds = [done for run in runs for done in max(run.rounds, key=len, default=[])]
    if not rounds:
        return None
    parts = ("draft", "verify", "host")
    return {part: float(np.mean([getattr(done, f"{part}_ms") for done in rounds])) for part in parts}


# -- speed -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)  # most figures are of the same units, one after the other
def _resamples(size: int, seed: int) -> NDArray[np.float64]:
    """How often each of so many units is drawn, by resample."""
    return np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), RESAMPLES).astype(float)


class Totals(NamedTuple):
    """Tokens and seconds of a method in each unit."""

    tokens_N: Sequence[float]
    seconds_N: Sequence[float]

    def rates(self, seed: int) -> tuple[float, NDArray[np.float64]]:
        """Total tokens over total seconds: as measured, and of each bootstrap resample."""
        counts_RN = _resamples(len(self.tokens_N), seed)
        tokens_N, seconds_N = np.asarray(self.tokens_N, float), np.asarray(self.seconds_N, float)
        with np.errstate(invalid="ignore"):  # a resample may draw no unit that counts: it says nothing
            return tokens_N.sum() / seconds_N.sum(), (counts_RN @ tokens_N) / (counts_RN @ seconds_N)


def rate_interval(totals: Totals, seed: int) -> Interval:
    """Total tokens over total seconds, with its 95 % bootstrap interval over units, see `Interval`."""
    return _interval(*totals.rates(seed), len(totals.tokens_N))


def ratio_interval(totals: Totals, base: Totals, seed: int) -> Interval:
    """Speed-up: the ratio of two throughputs (total tokens over total seconds), with its 95 % interval.

    Paired bootstrap: a resample draws units, and takes both methods' runs of each unit drawn.

    >>> ratio_interval(Totals([10] * 5, [1] * 5), Totals([10] * 5, [2] * 5), seed=0)
    {'mean': 2.0, 'low': 2.0, 'high': 2.0}
    """
    return quotient_interval([totals], [base], seed)


def quotient_interval(above: Sequence[Totals], below: Sequence[Totals], seed: int) -> Interval:
    """Rates multiplied, over others multiplied, with the 95 % interval of a bootstrap that is paired as above: all of
    them are of the same units."""
    point, resampled_R = 1.0, np.ones(RESAMPLES)
    for rate, rate_R in (totals.rates(seed) for totals in above):
        point, resampled_R = point * rate, resampled_R * rate_R
    for rate, rate_R in (totals.rates(seed) for totals in below):
        point, resampled_R = point / rate, resampled_R / rate_R
    return _interval(point, resampled_R, len(above[0].tokens_N))


def relative_interval(above: Sequence[Totals], below: Sequence[Totals], seed: int) -> Interval:
    """`quotient_interval` less 1: a relative change."""
    ratio = quotient_interval(above, below, seed)
    low, high = ratio["low"], ratio["high"]
    return {
        "mean": ratio["mean"] - 1,
        "low": None if low is None else low - 1,
        "high": None if high is None else high - 1,
    }


def difference_interval(totals: Totals, base: Totals, seed: int) -> Interval:
    """One rate less another of the same units, with the 95 % interval of a paired bootstrap."""
    (rate, rate_R), (base_rate, base_rate_R) = totals.rates(seed), base.rates(seed)
    return _interval(rate - base_rate, rate_R - base_rate_R, len(totals.tokens_N))


def _interval(point: float, resampled_R: NDArray[np.float64], units: int) -> Interval:
    if units < LEAST_UNITS:
        return {"mean": float(point), "low": None, "high": None}
    low, high = np.nanpercentile(resampled_R, [2.5, 97.5])
    return {"mean": float(point), "low": float(low), "high": float(high)}


def _totals(units: Sequence[Unit], method: str) -> Totals:
    """Tokens and seconds of a method, per group."""
    groups = dict.fromkeys(unit.group for unit in units)
    runs = [[unit.runs[method] for unit in units if unit.group == group] for group in groups]
    return Totals(
        [sum(run.count for run in of_group) for of_group in runs],
        [sum(run.seconds for run in of_group) for of_group in runs],
    )


def rate(units: Sequence[Unit], method: str, seed: int) -> Interval | None:
    """Tokens per second of a method, where it ran; None when it did not."""
    within = of_methods(units, method)
    return rate_interval(_totals(within, method), seed) if within else None


def speedup(units: Sequence[Unit], base: str, seed: int, method: str = HEADS) -> Interval | None:
    """A method's tokens per second over another's, where both ran; None when they did nowhere, or are the same."""
    within = of_methods(units, method, base)
    if method == base or not within:
        return None
    return ratio_interval(_totals(within, method), _totals(within, base), seed)


def speedups(units: Sequence[Unit], method: str, seed: int) -> dict[str, Interval | None]:
    """Over each baseline, by the names of these figures in results.json."""
    baselines = {name: label.speedup for name, label in LABELS.items() if label.speedup}
    return {figure: speedup(units, base, seed, method) for base, figure in baselines.items()}


# -- tables ----------------------------------------------------------------------------------------------------------


def method_figures(units: Sequence[Unit], method: str, seed: int) -> dict[str, Any]:
    """What a report says of any method; what does not apply to it is None."""
    rounds, speed = method_rounds(units, method), rate(units, method, seed)
    errors = [unit.runs[method].drafter_error for unit in of_methods(units, method)]
    return {
        "prompts": sum(len(unit.prompts) for unit in of_methods(units, method)),
        "tokens_per_second": speed["mean"] if speed else None,
        "tokens_per_second_interval": speed,
        **speedups(units, method, seed),
        "tokens_per_round": tokens_per_round(rounds) if rounds else None,
        "acceptance_by_position": acceptance_by_position(rounds),
        "rounds_by_position": rounds_by_position(rounds),
        "rounds": len(rounds),
        "node_counts": node_counts(rounds),
        "nodes_per_round": sum(done.nodes for done in rounds) / len(rounds) if rounds else None,
        "round_ms": mean_round_ms(units, method),
        "ttft_ms": _percentiles(units, method, _first_ms),
        "inter_token_ms": _percentiles(units, method, _gaps_ms),
        "undrafted_prompts": undrafted_prompts(units, method) if rounds and method != PLAIN else None,
        "drafter_error": next((error for error in errors if error), None),
    }


def compare_rows(
    units: Sequence[Unit], judged: Mapping[str, Judgement], seed: int, drafter: str
) -> list[dict[str, Any]]:
    """One row per method that ran, the drafter under test first: the `compare` of results.json. `judged` says how the
    words of each method compare with the plain loop's."""
    return [
        {
            "name": drafter if method == HEADS else method.removeprefix(OTHER),
            **method_figures(units, method, seed),
            "divergences": judgement.to_json(),
        }
        for method, judgement in judged.items()
    ]


def summarise(units: Sequence[Unit], seed: int) -> dict[str, Any]:
    """The part of `summary` that follows from the runs."""
    rounds = method_rounds(units, HEADS)
    speeds = {name: rate(units, name, seed) for name in METHODS}
    return {
        **method_figures(units, HEADS, seed),
        "tokens_per_round": tokens_per_round(rounds),
        "tokens_per_second": {name: speed["mean"] if speed else None for name, speed in speeds.items()},
        "tokens_per_second_interval": speeds,
    }


def per_prompt(units: Sequence[Unit], drafter: str = HEADS) -> list[dict[str, Any]]:
    """One row per prompt. In a batch each prompt is given an equal share of the batch's seconds.

    `asked` is a hash of what the user said last; prompts of the same `group` are not independent. `drafters` has every
    method that drafted through our loop, by its name in `compare`; the drafter under test is called `drafter` there.
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
"""How many values each takes: of fewer, the largest would stand for it."""


def _percentiles(
    units: Sequence[Unit], method: str, values: Callable[[Run], Iterable[float]]
) -> dict[str, float | None] | None:
    """Percentiles of a method's milliseconds, and of how many values they are; None of those that too few make."""
    seen = [value for unit in of_methods(units, method) for value in values(unit.runs[method])]
    if not seen:
        return None
    found = {
        name: float(np.percentile(seen, int(name[1:]))) if len(seen) >= least else None
        for name, least in PERCENTILES.items()
    }
    return {"count": len(seen), **found}


def _first_ms(run: Run) -> Iterable[float]:
    """Time to the first token of each row, prefill included."""
    return (row[0] for row in run.token_ms if row)


def _gaps_ms(run: Run) -> Iterable[float]:
    """Time between tokens: the wait for an arrival, shared evenly by the tokens that came with it."""
    for row in run.token_ms:
        arrivals = [(ms, len(list(together))) for ms, together in groupby(row)]
        for (before, _), (now, tokens) in pairwise(arrivals):
            yield from [(now - before) / tokens] * tokens
