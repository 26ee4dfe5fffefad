"""τ, acceptance, intervals and latencies, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.decode.loop import Round
from headstart.eval.figures import (
    Prompt,
    Totals,
    Unit,
    acceptance_by_position,
    categories,
    per_prompt,
    rate_interval,
    ratio_interval,
    rounds_by_position,
    summarise,
    tokens_per_round,
)
from headstart.eval.methods import Run


def unit(group: int, category: str, emitted: list[int], seconds: tuple[float, float] = (1.0, 2.0)) -> Unit:
    """One prompt: a chain of 3 drafts (4 nodes) a round, first token from the prefill."""
    rounds = [Round(4, count, 1.0, 6.0, 3.0, depth=3) for count in emitted]
    total = 1 + sum(emitted)
    token_ms = [10.0]
    for count in emitted:
        token_ms += [token_ms[-1] + 12.0] * count
    heads = Run([[7] * total], seconds[0], [token_ms], [rounds])
    plain = Run([[7] * total], seconds[1], [[10.0 + 8.0 * i for i in range(total)]], [[]])
    return Unit(group, [Prompt(str(group), category, [1, 2])], {"heads": heads, "plain": plain})


def test_tokens_per_round_weighs_rounds_not_prompts() -> None:
    summary = summarise([unit(0, "a", [1, 1, 1, 1]), unit(1, "a", [4])], seed=0)
    assert summary["tokens_per_round"] == (1 + 1 + 1 + 1 + 4) / 5
    assert summary["rounds"] == 5
    assert tokens_per_round([]) == 1.0


def test_acceptance_is_conditional() -> None:
    rounds = [Round(4, emitted, 0, 0, 0, depth=3) for emitted in (1, 2, 3, 4)] + [Round(2, 2, 0, 0, 0, depth=1)]
    # Position 1: 4 of 5. Position 2: the shallow tree never got there, 2 of 3. Position 3: 1 of 2.
    assert acceptance_by_position(rounds) == [4 / 5, 2 / 3, 1 / 2]
    assert rounds_by_position(rounds) == [5, 3, 2]
    assert acceptance_by_position([Round(4, 1, 0, 0, 0, depth=3)]) == [0.0], "nothing ever reached the second position"
    assert acceptance_by_position([Round(1, 1, 0, 0, 0)]) == [], "no drafts"


def test_drafting_costs() -> None:
    summary = summarise([unit(0, "a", [1, 3])], seed=0)
    assert summary["nodes_per_round"] == 4
    assert summary["round_ms"] == {"draft": 1.0, "verify": 6.0, "host": 3.0}


def test_latencies() -> None:
    summary = summarise([unit(0, "a", [3])], seed=0)
    assert summary["ttft_ms"]["heads"] == {"p50": 10.0, "p95": 10.0}
    assert summary["inter_token_ms"]["heads"] == {"p50": 4.0, "p95": 4.0}, "12 ms shared by 3 tokens"
    assert summary["inter_token_ms"]["plain"] == {"p50": 8.0, "p95": 8.0}
    assert summary["ttft_ms"]["transformers"] is None


def test_speedup_is_a_ratio_of_totals() -> None:
    units = [unit(0, "a", [1], (1.0, 2.0)), unit(1, "b", [4], (1.0, 4.0))]
    summary = summarise(units, seed=0)
    assert summary["speedup_vs_plain"]["mean"] == pytest.approx((7 / 2) / (7 / 6))
    assert summary["speedup_vs_transformers"] is None
    by_name = {row["category"]: row for row in categories(units, seed=0)}
    assert by_name["a"]["speedup_vs_plain"]["mean"] == pytest.approx(2)
    assert by_name["b"]["speedup_vs_plain"] == {"mean": pytest.approx(4), "low": None, "high": None}
    assert by_name["b"]["tokens_per_round"] == 4
    assert per_prompt(units)[1]["tokens_per_round"] == 4


def test_interval_covers_the_truth_and_narrows() -> None:
    rng = np.random.default_rng(1)

    def width(size: int) -> float:
        tokens = rng.integers(50, 130, size)
        slow = tokens / rng.normal(20, 2, size)
        fast = slow / 1.5 * rng.normal(1, 0.15, size)
        ratio = ratio_interval(Totals(tokens, fast), Totals(tokens, slow), seed=0)
        assert ratio["low"] <= 1.5 <= ratio["high"]
        return ratio["high"] - ratio["low"]

    assert width(400) < 0.6 * width(40)


def test_pairing_cancels_what_both_share() -> None:
    """A prompt that is slow for both methods does not widen the interval of their ratio."""
    tokens, seconds = [10.0] * 6, [1.0, 9.0, 2.0, 7.0, 1.0, 5.0]
    ratio = ratio_interval(Totals(tokens, seconds), Totals(tokens, [2 * share for share in seconds]), seed=0)
    assert (ratio["low"], ratio["mean"], ratio["high"]) == pytest.approx((2, 2, 2))
    rate = rate_interval(Totals(tokens, seconds), seed=0)
    assert rate["low"] < rate["mean"] < rate["high"]


def test_turns_of_one_question_are_drawn_together() -> None:
    turns = [unit(0, "a", [1], (1.0, 2.0)), unit(0, "a", [4], (1.0, 4.0))]
    ratio = summarise(turns, seed=0)["speedup_vs_plain"]
    assert ratio == {"mean": 3.0, "low": None, "high": None}, "one group, nothing to draw"
    assert summarise(turns, seed=0)["tokens_per_second_interval"]["heads"]["low"] is None
    others = [unit(number, "a", [4], (1.0, 4.0)) for number in range(1, 5)]
    assert summarise([*turns, *others[:-1]], seed=0)["speedup_vs_plain"]["low"] is None, "four are too few"
    five = summarise([*turns, *others], seed=0)["speedup_vs_plain"]
    assert five["low"] < five["mean"] < five["high"]
