"""Format figures as Markdown tables, with one format per kind of figure."""

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
    "tokens_per_round": "τ",
    "tau": "τ",
    "outputs_different": "outputs that differ from plain",
    "outputs_compared": "of",
    "round_ms.draft": "draft, ms",
    "round_ms.verify": "verify, ms",
}
"""Headings of columns where the key with spaces for underscores is not readable enough."""

FORMATS = (
    (r"(speedup|over|\w+_over)_\w+", "{:.2f}x"),
    (r"\w*tokens_per_second|nodes_per_round|\w*_ms", "{:.1f}"),
    (r"tokens_per_round|\w*tau|mean|acceptance_by_\w+", "{:.2f}"),
    (r"\w*accepted_per_round", "{:.3f}"),
    (r"\w*seconds", "{:.0f}"),
)
"""Number format of each kind of key; other numbers get three significant digits."""

_LONGEST = 6
"""List members shown; n-grams can draft thirty tokens."""


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def heading(key: str) -> str:
    """Return the heading of a column.

    >>> heading("speedup_vs_plain"), heading("waits_per_round"), heading("over_plain.heads"), heading("step_ms")
    ('over plain', 'waits per round', 'heads, over plain', 'step, ms')
    """
    if key in HEADINGS:
        return HEADINGS[key]
    first, _, rest = key.partition(".")
    if rest:
        return f"{heading(rest)}, {heading(first)}"
    return re.sub(r" ms$", ", ms", key.replace("_", " "))


def written(value: Any, key: str = "") -> str:
    """Format a value; `key`, a dotted path, selects the number format.

    >>> written(1.7, "over_plain.heads"), written(38.84, "tokens_per_second"), written(0.12345)
    ('1.70x', '38.8', '0.123')
    >>> written({"mean": 1.5, "low": None, "high": None}, "speedup_vs_plain"), written(None), written(True)
    ('1.50x', '', 'yes')
    >>> written({"mean": 1.4, "low": 1.31, "high": 1.5}, "speedup_vs_plain")
    '1.40x (1.31-1.50)'
    >>> written({"draft": 6.2, "verify": 47.5}, "round_ms"), written(10_500_000, "parameters")
    ('draft 6.2, verify 47.5', '10.5 M')
    >>> written([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], "acceptance_by_position")
    '1.00 / 0.90 / 0.80 / 0.70 / 0.60 / 0.50 / …'
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return LABELS[value].row if key == "name" and value in LABELS else value
    if isinstance(value, list | tuple):
        return " / ".join([*(written(part, key) for part in value[:_LONGEST]), *["…"] * (len(value) > _LONGEST)])
    if isinstance(value, Mapping):
        if "mean" not in value:
            return ", ".join(f"{name} {written(part, key)}" for name, part in value.items())
        mean, low, high = (written(value.get(part), key) for part in ("mean", "low", "high"))
        return f"{mean} ({low.removesuffix('x')}-{high.removesuffix('x')})" if low and high else mean
    return _number(value, key)


def _number(value: float, key: str) -> str:
    if "parameters" in key:
        return f"{value / 1e6:.{1 if value < 1e8 else 0}f} M"
    for pattern, form in FORMATS:
        if any(re.fullmatch(pattern, part) for part in key.split(".")):
            return form.format(value)
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def at(row: Row, path: str) -> Any:
    """Return the value at a dotted path, or None.

    >>> at({"over_plain": {"heads": 1.2}}, "over_plain.heads"), at({"a": None}, "a.b")
    (1.2, None)
    """
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def paths(rows: Iterable[Row]) -> list[str]:
    """Return the dotted paths of all figures in order; an interval is one figure.

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
    """Return rows of a results file as a Markdown table, without rows that are empty but for their name.

    Args:
        rows: of the file.
        columns: dotted paths, or (path, heading); empty for all figures.

    Raises:
        KeyError: no row has a column.
    """
    known = [path for path in paths(rows) if any(at(row, path) is not None for row in rows)]
    chosen = [(column, heading(column)) if isinstance(column, str) else column for column in columns or known]
    for path, _ in chosen:
        if all(at(row, path) is None for row in rows):
            raise KeyError(path)
    lines = [[written(at(row, path), path) for path, _ in chosen] for row in rows]
    return table([head for _, head in chosen], [line for line in lines if any(line[1:]) or len(line) == 1])
