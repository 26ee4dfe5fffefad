"""The gate for new heads: better than the heads in service on later traffic, and not worse on the run's own texts.

Both draft the same static tree on the same texts, and are compared by the tokens per round of a replay. Rounds are
paired by text. The bootstrap resamples traffic by source, so that its interval covers the variation between sources. It
resamples the run's own texts, and traffic of too few sources, by text.

Shape suffixes: O origins, K steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from headstart.data.conversations.records import Conversation
from headstart.errors import UserError
from headstart.eval.figures import LEAST_UNITS, Interval, Totals, interval
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.tree.tree import RankPath
from headstart.tuning.acceptance import measure_drafts
from headstart.tuning.tune import replay_rounds

Rounds = dict[str, tuple[int, int]]
"""Tokens and rounds of each text, by its id."""


def replay_heads(
    target: Target,
    heads: DraftHead,
    texts: Sequence[Conversation],
    paths: Sequence[RankPath],
    console: Console | None = None,
) -> Rounds:
    """Replay decoding with a static tree of the heads; skips texts too short to draft in."""
    try:
        drafts = measure_drafts(target, heads, texts, 1 + max(max(path) for path in paths), console)
    except UserError:
        return {}
    text_O = drafts.text_O
    assert text_O is not None
    return {texts[at].id: replay_rounds(drafts.ranks_OK[text_O == at], paths) for at in sorted({*text_O.tolist()})}


def compare_rounds(new: Rounds, old: Rounds, texts: Sequence[Conversation], traffic: bool = False) -> dict[str, Any]:
    """Compare tokens per round, with intervals: over the sources of `traffic` if there are enough, else over texts."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    used = [text for text in texts if text.id in new and text.id in old]
    by_source = traffic and len({text.category or text.id for text in used}) >= LEAST_UNITS
    for text in used:
        for place, count in enumerate((*new[text.id], *old[text.id])):
            sums[(by_source and text.category) or text.id][place] += count
    columns = list(zip(*sums.values(), strict=True)) or [(), (), (), ()]
    known = {"texts": len(used), "drawn": len(sums), "tokens": sum(columns[0])}
    if not sums:
        nothing: Interval = {"mean": 0.0, "low": None, "high": None}
        return {**known, "before": nothing, "after": nothing, "change": nothing}
    after_R, before_R = Totals(columns[0], columns[1]).rates(), Totals(columns[2], columns[3]).rates()
    change = interval(after_R / before_R - 1)
    return {**known, "before": interval(before_R), "after": interval(after_R), "change": change}


def refusals(later: dict[str, Any], original: dict[str, dict[str, Any]], fall: float) -> list[str]:
    """List the reasons, as sentences, why the heads may not serve.

    `original` maps the name of a baseline to the comparison with it on the run's own validation texts.
    """
    reasons = []
    low = later["change"]["low"]
    if low is None or low <= 0:
        reasons.append(f"On {later['texts']} later requests they are not clearly better: {describe(later)}.")
    for name, figures in original.items():
        low, where = figures["change"]["low"], f"On the run's own validation texts, compared with {name}"
        if low is None:
            few = f"{figures['texts']} are long enough to draft in, and an interval needs {LEAST_UNITS}"
            reasons.append(f"{where}: {few} (data.validation and data.max_new_tokens of the run).")
        elif low < -fall:
            reasons.append(f"{where}, a fall of more than {100 * fall:g} % is not excluded: {describe(figures)}.")
    return reasons


def describe(figures: dict[str, Any]) -> str:
    before, after, change = figures["before"]["mean"], figures["after"]["mean"], figures["change"]
    interval = "" if change["low"] is None else f", {100 * change['low']:+.1f} to {100 * change['high']:+.1f} %"
    return f"{before:.3f} to {after:.3f} tokens per round ({100 * change['mean']:+.1f} %{interval})"
