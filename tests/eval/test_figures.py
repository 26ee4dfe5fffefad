"""τ, acceptance, intervals and latencies, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.decode.texts import Round
from headstart.eval.figures import (
    Prompt,
    Totals,
    Unit,
    after_prefill,
    categories,
    drafting_figures,
    interval,
    method_figures,
    node_counts,
    per_prompt,
    places,
    prompt_lengths,
    summarise,
)
from headstart.eval.labels import pool_rare_positions
from headstart.eval.methods import Run


def unit(group: int, category: str, emitted: list[int], seconds: tuple[float, float] = (1.0, 2.0)) -> Unit:
    """One prompt with chains of 3 drafts (4 nodes) per round; the first token comes from the prefill."""
    rounds = [Round(4, count, 1.0, 6.0, 3.0, depth=3) for count in emitted]
    total = 1 + sum(emitted)
    token_ms = [10.0]
    for count in emitted:
        token_ms += [token_ms[-1] + 12.0] * count
    heads = Run([[7] * total], seconds[0], [token_ms], [rounds])
    plain = Run([[7] * total], seconds[1], [[10.0 + 8.0 * i for i in range(total)]], [[]])
    return Unit(group, [Prompt(str(group), category, [1, 2])], {"heads": heads, "plain": plain})


def test_tokens_per_round_weights_rounds_not_prompts() -> None:
    summary = summarise([unit(0, "a", [1, 1, 1, 1]), unit(1, "a", [4])], seed=0)
    assert summary["tokens_per_round"] == (1 + 1 + 1 + 1 + 4) / 5
    assert summary["rounds"] == 5
    assert drafting_figures([])["tokens_per_round"] == 1.0


def test_acceptance_is_conditional() -> None:
    rounds = [Round(4, emitted, 0, 0, 0, depth=3) for emitted in (1, 2, 3, 4)] + [Round(2, 2, 0, 0, 0, depth=1)]
    # Position 1: 4 of 5. Position 2: 2 of 3, without the shallow tree. Position 3: 1 of 2.
    for these, shares, counts in (
        (rounds, [4 / 5, 2 / 3, 1 / 2], [5, 3, 2]),
        ([Round(4, 1, 0, 0, 0, depth=3)], [0.0], [1]),  # nothing ever reached the second position
        ([Round(1, 1, 0, 0, 0)], [], []),  # no drafts
    ):
        figures = drafting_figures(these)
        assert (figures["acceptance_by_position"], figures["rounds_by_position"]) == (shares, counts)


def test_drafting_costs() -> None:
    summary = summarise([unit(0, "a", [1, 3])], seed=0)
    assert summary["nodes_per_round"] == 4
    assert summary["round_ms"] == {"draft": 1.0, "verify": 6.0, "host": 3.0}


def test_latencies() -> None:
    units = [unit(number, "a", [3] * 5) for number in range(7)]
    heads, plain = method_figures(units, "heads", 0), method_figures(units, "plain", 0)
    assert heads["ttft_ms"] == {"count": 7, "p50": 10.0, "p95": None, "p99": None}, "too few for high percentiles"
    assert heads["inter_token_ms"] == {"count": 105, **dict.fromkeys(("p50", "p95", "p99"), 4.0)}, "shared by 3 tokens"
    assert plain["inter_token_ms"]["p50"] == 8.0
    assert method_figures(units, "transformers", 0)["ttft_ms"] is None


def test_speed_after_the_prefill() -> None:
    """The first token and the wait for it do not count, nor do answers of one token."""
    units = [unit(0, "a", [1, 3]), unit(1, "a", [])]
    slow = units[0].runs["heads"]
    slow.token_ms[0][:] = [ms + 5000.0 for ms in slow.token_ms[0]]
    figures = method_figures(after_prefill(units), "heads", 0)
    assert figures["prompts"] == 1 and figures["tokens_per_round"] == 2.0
    assert figures["tokens_per_second"] == pytest.approx(4 / 0.024)
    assert figures["speedup_vs_plain"]["mean"] == pytest.approx((4 / 0.024) / (4 / 0.032))
    assert figures["ttft_ms"]["p50"] == 5010.0, "is shown apart"


def test_rarely_reached_positions_are_merged() -> None:
    row = {"acceptance_by_position": [0.5, 0.5, 1.0], "rounds_by_position": [90, 20, 10]}
    assert pool_rare_positions(row) == [("1", 0.5, 90), ("2–3", pytest.approx(20 / 30), 30)]
    assert pool_rare_positions({"acceptance_by_position": [1.0], "rounds_by_position": [3]}) == [("1", 1.0, 3)]
    assert pool_rare_positions({}) == []
    assert node_counts([Round(nodes, 1, 0, 0, 0) for nodes in (4, 1, 4)]) == [[1, 1], [4, 2]]


def test_drafting_by_prompt_length_and_position() -> None:
    units = [unit(0, "a", [4] * 6), unit(1, "a", [1, 2])]
    units[1].prompts[0].tokens.extend([1] * 40)
    lengths = prompt_lengths(units, seed=0)
    found = [(row["prompt_tokens"], row["prompts"], row["rounds"]) for row in lengths]
    assert found == [("1–32", 1, 6), ("33–64", 1, 2)]
    assert lengths[1]["speedup_vs_plain"]["mean"] == pytest.approx(2)
    # Rounds of the first answer begin at tokens 2, 6, 10, 14, 18 and 22, of the second at 2 and 3.
    at = [(row["place"], row["rounds"], row["tokens_per_round"]) for row in places(units)]
    assert at == [("1–16", 6, 19 / 6), ("17–32", 2, 4.0)]


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
        ratio = interval(Totals(tokens, fast).rates() / Totals(tokens, slow).rates())
        assert ratio["low"] <= 1.5 <= ratio["high"]
        return ratio["high"] - ratio["low"]

    assert width(400) < 0.6 * width(40)


def test_pairing_cancels_common_slowness() -> None:
    """A prompt that is slow for both methods does not widen the interval of their ratio."""
    tokens, seconds = [10.0] * 6, [1.0, 9.0, 2.0, 7.0, 1.0, 5.0]
    ratio = interval(Totals(tokens, seconds).rates() / Totals(tokens, [2 * share for share in seconds]).rates())
    assert (ratio["low"], ratio["mean"], ratio["high"]) == pytest.approx((2, 2, 2))
    rate = interval(Totals(tokens, seconds).rates())
    assert rate["low"] < rate["mean"] < rate["high"]


def test_turns_of_a_question_are_resampled_together() -> None:
    turns = [unit(0, "a", [1], (1.0, 2.0)), unit(0, "a", [4], (1.0, 4.0))]
    ratio = summarise(turns, seed=0)["speedup_vs_plain"]
    assert ratio == {"mean": 3.0, "low": None, "high": None}, "one group cannot be resampled"
    assert summarise(turns, seed=0)["tokens_per_second_interval"]["heads"]["low"] is None
    others = [unit(number, "a", [4], (1.0, 4.0)) for number in range(1, 5)]
    assert summarise([*turns, *others[:-1]], seed=0)["speedup_vs_plain"]["low"] is None, "four are too few"
    five = summarise([*turns, *others], seed=0)["speedup_vs_plain"]
    assert five["low"] < five["mean"] < five["high"]
