"""Comparison of reports: the same prompts with other heads, another drafter or another version.

The first report is the base; only prompts in every report count. Speed-ups over the plain loop of the same run are
compared, not tokens per second, which depend on the machine's load. Intervals are paired bootstraps over questions
(`headstart.eval.figures`).

A regression is a fall of tokens per round or of the speed-up that exceeds the limit, with an interval below zero.
The interval covers the variation between prompts, but not shifts of a whole run, such as other load on the machine; the
limit allows for those. Acceptance by position explains a fall and is not judged: with many figures, one falls by
chance.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.errors import UserError
from headstart.eval.figures import LEAST_UNITS, Interval, Totals, interval
from headstart.eval.labels import LEAST_ROUNDS, PLAIN, label_of
from headstart.eval.report import read_results

WORST = 10  # maximum number of prompts listed that lost tokens per round
_SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "max_new_tokens", "min_new_tokens", "stop_token_ids", "batch_size", "chat_template_kwargs"),
)
"""Settings that change the answers, or their cost without drafts."""
_CONDITIONS = ("engine", "dtype", "device", "gpu", "cpu", "threads", "exact")
"""Entries of the environment that a speed-up depends on."""
_VERSIONS = ("torch", "transformers")

Row = Mapping[str, Any]
Rates = NDArray[np.float64]


@dataclass(frozen=True)
class Report:
    """A report: the path as typed, a letter for its position, and its results."""

    path: Path
    letter: str
    results: Mapping[str, Any]

    @property
    def drafters(self) -> list[str]:
        """All drafters, the tested one first."""
        tested = self.results["summary"]["drafter"]
        return [tested, *(name for name in self.results["per_prompt"][0]["drafters"] if name != tested)]


class Change(NamedTuple):
    """A figure in the base and in another report, and its change."""

    name: str
    unit: str  # "x" of a speed-up, "%" of a share (stored as a fraction), empty for tokens
    base: Interval
    other: Interval
    change: Interval  # difference of shares, else relative to the base
    judged: bool  # whether a fall can be a regression

    def regressed(self, limit: float) -> bool:
        """Whether it fell by more than the limit, with an interval below zero."""
        return self.judged and self.change["mean"] < -limit and below(self.change)


@dataclass(frozen=True)
class Comparison:
    """A report against the base: cautions, changes by drafter, and the (base, other) rows of the prompts that lost
    most tokens per round."""

    report: Report
    cautions: list[str]
    drafters: dict[str, list[Change]]
    worst: list[tuple[Row, Row]]

    def regressions(self, limit: float) -> list[tuple[str, Change]]:
        return [(name, change) for name, change in self._judged() if change.regressed(limit)]

    def possible_fall(self, limit: float) -> tuple[float, str, str] | None:
        """Return the largest fall beyond the limit that the intervals do not exclude, with its drafter and figure."""
        rest = [pair for pair in self._judged() if not pair[1].regressed(limit)]
        lows = [(change.change["low"] or 0.0, name, change.name) for name, change in rest]
        return min((entry for entry in lows if entry[0] < -limit), default=None)

    def _judged(self) -> list[tuple[str, Change]]:
        return [(name, change) for name, changes in self.drafters.items() for change in changes if change.judged]


@dataclass(frozen=True)
class Diff:
    """All reports on their common prompts; `left_out` prompts are not in every report. `limit` is the allowed fall, a
    fraction."""

    base: Report
    others: list[Comparison]
    prompts: int
    left_out: int
    limit: float

    @property
    def reports(self) -> list[Report]:
        return [self.base, *(other.report for other in self.others)]

    @property
    def regressed(self) -> bool:
        return any(other.regressions(self.limit) for other in self.others)


def below(change: Interval) -> bool:
    return change["high"] is not None and change["high"] < 0


def above(change: Interval) -> bool:
    return change["low"] is not None and change["low"] > 0


def diff(paths: Sequence[Path], limit: float) -> Diff:
    """Compare reports with the first of them.

    Raises:
        UserError: a report is unreadable, or they differ in target or settings, or share too few prompts.
    """
    base, *others = reports = [Report(path, chr(ord("A") + index), _read(path)) for index, path in enumerate(paths)]
    for other in others:
        _check(base, other)
    by_prompt = [{_key(row): row for row in report.results["per_prompt"]} for report in reports]
    shared = [key for key in by_prompt[0] if all(key in rows for rows in by_prompt)]
    total = len({key for rows in by_prompt for key in rows})
    _check_prompts(base, shared, by_prompt[0], total)
    paired = [[rows[key] for key in shared] for rows in by_prompt]
    compared = [_compare(base, other, paired[0], theirs) for other, theirs in zip(others, paired[1:], strict=True)]
    return Diff(base, compared, len(shared), total - len(shared), limit)


def _read(path: Path) -> dict[str, Any]:
    results, file = read_results(path)
    if not results.get("per_prompt") or "drafters" not in results["per_prompt"][0]:
        raise UserError(f"{file} has no figures per prompt.", "Measure again: headstart eval.")
    return results


def _key(row: Row) -> tuple[str, str, int]:
    """Identify a prompt; in a later turn, the length stands for the earlier answers."""
    return row["id"], row["asked"], row["prompt_tokens"]


def _check(base: Report, other: Report) -> None:
    """Refuse reports of different targets or settings."""
    ours, theirs = base.results["settings"], other.results["settings"]
    pair = f"{other.path} cannot be compared with {base.path}"
    if ours["target_fingerprint"] != theirs["target_fingerprint"]:
        names = [f"{settings['target']} ({settings['target_fingerprint'][:8]})" for settings in (theirs, ours)]
        raise UserError(f"{pair}: their targets are {names[0]} and {names[1]}.", "Compare reports of one target.")
    differing = [name for name in _SETTINGS if ours.get(name) != theirs.get(name)]
    if differing:
        values = ", ".join(f"{name} is {theirs.get(name)} and {ours.get(name)}" for name in differing)
        options = _eval_options({name: ours.get(name) for name in differing})
        raise UserError(f"{pair}: {values}.", f"Measure it again {options}.")


def _eval_options(settings: Mapping[str, Any]) -> str:
    """Say how to pass these settings to `eval`, in shell syntax."""
    present, absent = list[str](), list[str]()
    for name, value in settings.items():
        option = f"--{name.replace('_', '-')}"
        if value in (None, [], {}):
            absent.append(option)
        for item in value if isinstance(value, list) else [] if value in (None, {}) else [value]:
            present += [option, json.dumps(item) if isinstance(item, Mapping) else str(item)]
    parts = [f"with {shlex.join(present)}"] * bool(present) + [f"without {', '.join(absent)}"] * bool(absent)
    return " and ".join(parts)


def _check_prompts(base: Report, shared: Sequence[Any], rows: Mapping[Any, Row], total: int) -> None:
    """Refuse too few prompts, and batches that contain other prompts."""
    remedy = "Measure all reports on the same questions."
    if not shared:
        raise UserError("The reports have no prompt in common.", remedy)
    batched = base.results["settings"]["batch_size"] > 1
    if batched and len(shared) < total:
        problem = f"Only {len(shared)} of {total} prompts are in all reports, and batches include the rest."
        raise UserError(problem, remedy)
    groups = len({rows[key]["group"] for key in shared})
    if groups < LEAST_UNITS:
        unit = "batches" if batched else "questions"
        problem = f"An interval needs {LEAST_UNITS} {unit} that all reports have, and there are {groups}."
        raise UserError(problem, "Measure more questions, the same for all reports.")


def _cautions(base: Report, other: Report) -> Iterator[str]:
    ours, theirs = base.results["environment"], other.results["environment"]
    if differing := _differing(ours, theirs, _CONDITIONS):
        yield (
            f"{other.letter} was measured under other conditions than {base.letter} ({differing}): its speed-up is "
            "shown and not judged. Measure both on one machine, in the same dtype and threads, to compare speeds."
        )
    if differing := _differing(ours, theirs, _VERSIONS):
        yield f"{other.letter} used other versions than {base.letter} ({differing})."
    for report in (base, other):
        for row in report.results["compare"]:
            if error := row["drafter_error"]:
                yield f"{report.letter}: {label_of(row['name'])} failed ({error}); decoding went on without it."


def _differing(ours: Row, theirs: Row, names: Sequence[str]) -> str:
    pairs = [(name, ours.get(name), theirs.get(name)) for name in names]
    return ", ".join(f"{name} {their}, not {our}" for name, our, their in pairs if our != their)


def _compare(base: Report, other: Report, ours: Sequence[Row], theirs: Sequence[Row]) -> Comparison:
    same_speed = not _differing(base.results["environment"], other.results["environment"], _CONDITIONS)
    tested = base.drafters[0], other.drafters[0]
    pairs = [tested, *((name, name) for name in base.drafters if name in other.drafters and name not in tested)]
    groups = [row["group"] for row in ours]
    drafters = {}
    for our, their in pairs:
        name = label_of(our) if our == their else f"{label_of(our)} → {label_of(their)}"
        drafters[name] = list(_changes(_Drafter(our, ours, groups), _Drafter(their, theirs, groups), same_speed))

    def ratio(pair: tuple[Row, Row]) -> float:
        return float(pair[1]["tokens_per_round"] / pair[0]["tokens_per_round"])

    lower = [pair for pair in zip(ours, theirs, strict=True) if ratio(pair) < 1]
    return Comparison(other, list(_cautions(base, other)), drafters, sorted(lower, key=ratio)[:WORST])


@dataclass(frozen=True)
class _Drafter:
    """A drafter's rows, with the group of each in the base report."""

    name: str
    rows: Sequence[Row]
    groups: Sequence[int]

    def emitted(self) -> Totals:
        return self._totals(lambda row, drafted: (drafted["emitted"], drafted["rounds"]))

    def drafted(self) -> Totals:
        return self._totals(lambda row, drafted: (drafted["tokens"], drafted["seconds"]))

    def plain(self) -> Totals:
        return self._totals(lambda row, drafted: (row["tokens"][PLAIN], row["seconds"][PLAIN]))

    def accepted(self, position: int) -> Totals:
        """Rounds that accepted a position (from 0), over the rounds that reached it."""
        here = slice(position, position + 1)  # empty in rows that never reached it
        return self._totals(lambda row, drafted: (sum(drafted["accepted"][here]), sum(drafted["reached"][here])))

    def _totals(self, counts: Callable[[Row, Row], tuple[float, float]]) -> Totals:
        sums: dict[int, tuple[float, float]] = {}
        for row, group in zip(self.rows, self.groups, strict=True):
            before, more = sums.get(group, (0, 0)), counts(row, row["drafters"][self.name])
            sums[group] = before[0] + more[0], before[1] + more[1]
        return Totals([over for over, _ in sums.values()], [under for _, under in sums.values()])


def _changes(ours: _Drafter, theirs: _Drafter, same_speed: bool) -> Iterator[Change]:
    old, new = ours.emitted(), theirs.emitted()
    if sum(old.seconds_N) and sum(new.seconds_N):  # rounds, here
        before_R, after_R = old.rates(), new.rates()
        yield _change("tokens per round (τ)", "", before_R, after_R, after_R / before_R - 1, True)
    before_R, after_R = (each.drafted().rates() / each.plain().rates() for each in (ours, theirs))
    yield _change("speed-up over plain", "x", before_R, after_R, after_R / before_R - 1, same_speed)
    for position in count():
        old, new = ours.accepted(position), theirs.accepted(position)
        if min(sum(old.seconds_N), sum(new.seconds_N)) < LEAST_ROUNDS:  # of each report
            return
        before_R, after_R = old.rates(), new.rates()
        yield _change(f"accepted at {position + 1}", "%", before_R, after_R, after_R - before_R, False)


def _change(name: str, unit: str, before_R: Rates, after_R: Rates, change_R: Rates, judged: bool) -> Change:
    return Change(name, unit, interval(before_R), interval(after_R), interval(change_R), judged)
