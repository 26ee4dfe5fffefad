"""Every drafter in one table: which ones there are, and what each one came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headstart.decode.budget import Costs
from headstart.decode.drafting import Drafter
from headstart.eval.divergence import Judgement
from headstart.eval.labels import HEADS, LOOKUP, PLAIN, STOCK
from headstart.eval.summary import (
    Unit,
    acceptance_by_position,
    all_steps,
    drafter_error,
    host_share,
    mean_round_ms,
    rate,
    speedup,
    tokens_per_round,
)
from headstart.options import Tree

OTHER = "other: "
"""Before the names of compared drafters among a unit's runs, so that none is taken for a method of every report."""
TREES: dict[str, Tree] = {"dynamic": "dynamic", "static": "static", "chain": "chain"}
"""Names of the heads with each kind of tree; "heads" has the one that tuning found best."""
ALL = (*TREES, "ngram", "lookahead", "early-exit", "heads+ngram")
"""Every drafter that needs no second model."""


class Drafters(Protocol):
    """Where drafters come from: `headstart.decoder.Decoder`."""

    @property
    def costs(self) -> Costs | None: ...

    def drafter(self, name: str = "heads", tree: Tree | None = None) -> Drafter | None: ...


def named(source: Drafters, name: str) -> Drafter | None:
    """A drafter by its name in a table: one of `TREES`, or what the catalog knows.

    Raises:
        UserError: no such drafter.
    """
    tree = TREES.get(name)
    return source.drafter("heads", tree) if tree else source.drafter(name)


def wanted(names: Sequence[str], drafter: str) -> tuple[str, ...]:
    """The names to compare, each once, without those that every report has anyway; "all" stands for `ALL`.

    Args:
        names: as asked for; a name may be a comma-separated list.
        drafter: the one under test.

    >>> wanted(["ngram,none", "chain", "ngram"], "heads")
    ('ngram', 'chain')
    """
    asked = [name.strip() for listed in names for name in listed.split(",")]
    every = [one for name in asked if name for one in (ALL if name == "all" else (name,))]
    return tuple(one for one in dict.fromkeys(every) if one not in (drafter, "none", PLAIN, STOCK, LOOKUP))


def compare_rows(
    units: Sequence[Unit], judged: Mapping[str, Judgement], seed: int, drafter: str
) -> list[dict[str, Any]]:
    """One row per method that ran, the drafter under test first: the `compare` of results.json.

    Args:
        units: what ran.
        judged: for each method, how its words compare with the plain loop's.
        seed: of the bootstrap.
        drafter: name of the one under test.
    """
    rows = []
    for method, judgement in judged.items():
        drafted = all_steps(units, method)
        round_ms = mean_round_ms(units, method)
        speed = rate(units, method, seed)
        rows.append(
            {
                "name": drafter if method == HEADS else method.removeprefix(OTHER),
                "tokens_per_second": speed["mean"] if speed else None,
                "tokens_per_second_interval": speed,
                "speedup_vs_plain": speedup(units, PLAIN, seed, method),
                "speedup_vs_transformers": speedup(units, STOCK, seed, method),
                "speedup_vs_prompt_lookup": speedup(units, LOOKUP, seed, method),
                "tested_over_it": speedup(units, method, seed, HEADS),
                "tokens_per_round": tokens_per_round(drafted) if drafted else None,
                "acceptance_by_position": acceptance_by_position(drafted),
                "nodes_per_round": sum(one.nodes for one in drafted) / len(drafted) if drafted else None,
                "round_ms": round_ms,
                "host_share": host_share(round_ms),
                "divergences": judgement.to_json(),
                "drafter_error": drafter_error(units, method),
            }
        )
    return rows
