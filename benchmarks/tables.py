"""How figures are written in tables: one format for each kind of figure, wherever it stands."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headstart.eval.labels import LABELS

Row = Mapping[str, Any]

HEADINGS = {
    "name": "",
    "tokens_per_second": "tokens/s",
    "speedup_vs_plain": "over plain",
    "speedup_vs_transformers": "over `transformers.generate`",
    "speedup_vs_prompt_lookup": "over prompt lookup",
    "over_plain": "over plain",
    "tokens_per_round": "τ",
    "tau": "τ",
    "nodes_per_round": "nodes a round",
    "acceptance_by_position": "acceptance by position",
    "outputs_different": "outputs that differ from plain",
    "outputs_compared": "of",
    "top1": "top-1 by step",
    "round_ms.draft": "draft, ms",
    "round_ms.verify": "verify, ms",
    "round_ms.host": "host, ms",
    "round_total_ms": "a round, ms",
    "plain_step_ms": "a plain step, ms",
    "tokens_per_cpu_second": "tokens a second of a core",
    "speedup_of_ours": "ours over it",
    "speedup_of_ours_cpu": "ours over it",
}
"""Headings of columns whose key is no good heading once its underscores are spaces."""

FORMATS = (
    (r"(speedup|over|\w+_over)_\w+", "{:.2f}x"),
    (r"\w*tokens_per_(cpu_)?second|nodes_per_round|\w*_ms|megaflop\w*", "{:.1f}"),
    (r"tokens_per_round|\w*tau|\w*acceptance_by_\w+|top1", "{:.2f}"),
    (r"epochs", "{:g}"),
    (r"\w*accepted_per_round", "{:.3f}"),
    (r"\w*seconds", "{:.0f}"),
)
"""For each kind of key how its numbers are written; any other number has three significant digits."""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def times(interval: Mapping[str, float | None] | None) -> str:
    """A speed-up with its interval; one prompt has none.

    >>> times({"mean": 1.4, "low": 1.31, "high": 1.5})
    '1.40x (1.31-1.50)'
    """
    return written(interval, "speedup_vs_plain")


def shares(values: Iterable[float]) -> str:
    """Shares of one.

    >>> shares([0.613, 0.5])
    '0.61 / 0.50'
    """
    return written(list(values), "acceptance_by_position")


def heading(key: str) -> str:
    """The heading of a column.

    >>> heading("speedup_vs_plain"), heading("waits_per_round"), heading("over_plain.heads"), heading("step_ms")
    ('over plain', 'waits per round', 'heads, over plain', 'step, ms')
    """
    if key in HEADINGS:
        return HEADINGS[key]
    first, _, rest = key.partition(".")
    if rest:
        return f"{heading(rest)}, {heading(first)}"
    return re.sub(r" ms$", ", ms", key.replace("_", " "))


_LONGEST = 6
"""Members of a list that a table shows: n-grams draft as far as thirty tokens."""


def written(value: Any, key: str = "") -> str:
    """A value as it stands in a table; `key`, a dotted path, says what kind of figure it is.

    >>> written(1.7, "over_plain.heads"), written(38.84, "tokens_per_second"), written(0.12345)
    ('1.70x', '38.8', '0.123')
    >>> written({"mean": 1.5, "low": None, "high": None}, "speedup_vs_plain"), written(None), written(True)
    ('1.50x', '', 'yes')
    >>> written({"draft": 6.2, "verify": 47.5}, "round_ms"), written(10_500_000, "parameters")
    ('draft 6.2, verify 47.5', '10.5 M')
    >>> written({"mean": 6.6, "max": 7}), written({"mean": 1133.4, "max": 1191}), written({"mean": 3.0, "max": 3})
    ('6.6 (max 7)', '1133 (max 1191)', '3')
    >>> written([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], "acceptance_by_position")
    '1.00 / 0.90 / 0.80 / 0.70 / 0.60 / 0.50 / …'
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return LABELS[value].row if key == "name" and value in LABELS else value
    if isinstance(value, list):
        return " / ".join([*(written(part, key) for part in value[:_LONGEST]), *["…"] * (len(value) > _LONGEST)])
    if isinstance(value, Mapping):
        if "mean" not in value:
            return ", ".join(f"{name} {written(part, key)}" for name, part in value.items())
        mean = written(value["mean"], key)
        low, high, maximum = (written(value.get(end), key) for end in ("low", "high", "max"))
        if low and high:
            return f"{mean} ({low.removesuffix('x')}-{high.removesuffix('x')})"
        return f"{mean} (max {maximum})" if maximum and maximum != mean else mean
    return _number(value, key)


def _number(value: float, key: str) -> str:
    if "parameters" in key:
        return f"{value / 1e6:.{1 if value < 1e8 else 0}f} M"
    for pattern, form in FORMATS:
        if any(re.fullmatch(pattern, part) for part in key.split(".")):
            return form.format(value)
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def at(row: Row, path: str) -> Any:
    """The value at a dotted path; None where there is none.

    >>> at({"over_plain": {"heads": 1.2}}, "over_plain.heads"), at({"a": None}, "a.b")
    (1.2, None)
    """
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def paths(rows: Iterable[Row]) -> list[str]:
    """The columns of all rows, in order: each key, and each key of those that hold other keys; intervals are one.

    >>> paths([{"name": "a", "ms": {"draft": 1, "verify": 2}}, {"name": "b", "over": {"mean": 1.0}}])
    ['name', 'ms.draft', 'ms.verify', 'over']
    """
    columns: dict[str, None] = {}
    for row in rows:
        for key, value in row.items():
            inner = isinstance(value, Mapping) and "mean" not in value
            columns |= dict.fromkeys([f"{key}.{inner_path}" for inner_path in paths([value])] if inner else [key])
    return list(columns)


def figures(rows: Sequence[Row], columns: Sequence[str | tuple[str, str]] = ()) -> str:
    """Rows of a results file as a Markdown table; one with nothing but its name in these columns is left out.

    Args:
        rows: of the file.
        columns: dotted paths, or (path, heading); without any, all that the rows hold.

    Raises:
        KeyError: no row has a column.
    """
    chosen = [(column, heading(column)) if isinstance(column, str) else column for column in columns or paths(rows)]
    for path, _ in chosen:
        if all(at(row, path) is None for row in rows):
            raise KeyError(path)
    lines = [[written(at(row, path), path) for path, _ in chosen] for row in rows]
    return table([head for _, head in chosen], [line for line in lines if any(line[1:]) or len(line) == 1])
