"""Comparing reports: planted regressions are found, repeated runs pass, and incomparable reports are refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.data.prompts.questions import Question
from headstart.decode.texts import Round
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.eval.diff import Diff, above, below, diff
from headstart.eval.diff_report import sentences
from headstart.eval.divergence import Judgement
from headstart.eval.evaluate import evaluate
from headstart.eval.figures import Prompt, Unit, compare_rows, per_prompt, summarise
from headstart.eval.labels import OTHER
from headstart.eval.methods import Run
from headstart.eval.options import EvalOptions
from headstart.model.model import Target
from headstart.support.files import write_json
from tests.eval.sources import Drafts
from tests.test_cli import call, refused, works

QUESTIONS, TURNS, DRAFTS = 40, 2, 3
DRAFT_SECONDS, PLAIN_SECONDS = 0.05, 0.04  # per round, and per plain token


def measured(
    seed: int = 0, *, accepts: float = 1.0, slower: float = 1.0, noise: float = 0.0, drift: float = 0.0
) -> dict[str, Any]:
    """Simulate a report on questions of two turns with varying acceptance.

    Args:
        seed: seeds the noise; the prompts and their acceptance never change.
        accepts: probability of keeping a draft that should be accepted.
        slower: factor on the time of a round.
        noise: relative noise of each call's time.
        drift: relative noise of a method's time, common to all its calls.
    """
    prompts, rng = np.random.default_rng(1), np.random.default_rng(seed)
    common = 1 + drift * rng.standard_normal(3)
    units = []
    for question in range(QUESTIONS):
        for turn in range(TURNS):
            chance, length = prompts.uniform(0.3, 0.8), int(prompts.integers(20, 80))
            emitted = 1 + np.cumprod(prompts.random((length, DRAFTS)) < chance, axis=1).sum(axis=1)
            tokens = [1] * (1 + int(emitted.sum()))
            rounds = [
                Round(4, 1 + int(np.cumprod(rng.random(count - 1) < accepts).sum()), 1.0, 6.0, 3.0, depth=DRAFTS)
                for count in emitted
            ]
            while sum(done.emitted for done in rounds) < len(tokens) - 1:  # answers keep their length
                rounds.append(Round(4, 2, 1.0, 6.0, 3.0, depth=DRAFTS))
            seconds = np.array([len(rounds) * DRAFT_SECONDS * slower, len(tokens) * PLAIN_SECONDS])
            seconds = np.append(seconds, seconds[0] * 0.9) * common * (1 + noise * rng.standard_normal(3))
            runs = {
                name: Run([tokens], took, [[]], [rounds if drafts else []])
                for name, took, drafts in zip(
                    ("heads", "plain", OTHER + "heads+ngram"), seconds, (True, False, True), strict=True
                )
            }
            name = f"{question}/{turn + 1}" if turn else str(question)
            units.append(Unit(question, [Prompt(name, "talk", [1, 2, 3], f"<b>{name}")], runs))
    return {
        "schema_version": 1,
        "summary": {**summarise(units, 0), "drafter": "heads"},
        "compare": compare_rows(units, dict.fromkeys(units[0].runs, Judgement()), 0, "heads"),
        "settings": {
            "heads_name": "<tiny>", "target": "tiny", "target_fingerprint": "f" * 32, "max_new_tokens": 64,
            "temperature": 0.0, "batch_size": 1, "heads": {"family": "eagle3", "size": "9.8 M parameters"},
        },
        "environment": {
            "dtype": "float32", "device": "cpu", "gpu": None, "cpu": "some processor", "threads": 2, "exact": "tokens",
            "torch": "2.13", "transformers": "5.23", "headstart": "0.1", "date": "2026-11-24T13:57:46+00:00",
        },
        "per_prompt": per_prompt(units),
    }  # fmt: skip


@pytest.fixture(scope="module")
def before() -> dict[str, Any]:
    return measured()


def compared(*reports: dict[str, Any], limit: float = 0.03) -> Diff:
    paths = [Path(f"report{number}") for number in range(len(reports))]
    for path, report in zip(paths, reports, strict=True):
        write_json(path / "results.json", report)
    return diff(paths, limit)


def changed(report: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Copy a report with other settings, or other fields of its environment."""
    other = copy.deepcopy(report)
    for name, value in settings.items():
        other["environment" if name in other["environment"] else "settings"][name] = value
    return other


# -- regressions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("planted", "figure", "change"),
    [({"accepts": 0.938}, "tokens per round (τ)", -0.05), ({"slower": 1 / 0.95}, "speed-up over plain", -0.05)],
)
def test_planted_regression_of_5_percent_is_found(
    before: dict[str, Any], seed: int, planted: dict[str, float], figure: str, change: float
) -> None:
    found = compared(before, measured(seed, noise=0.035, **planted))
    assert found.regressed
    (heads,) = [each for name, each in found.others[0].regressions(0.03) if name == "heads" and each.name == figure]
    assert heads.change["mean"] == pytest.approx(change, abs=0.01)
    if figure.startswith("tokens"):
        shares = [each for each in found.others[0].drafters["heads"] if each.unit == "%"]
        assert len(shares) == DRAFTS and all(below(each.change) for each in shares), "every position is named"


@pytest.mark.parametrize("seed", range(5))
def test_repeated_run_is_no_regression(before: dict[str, Any], seed: int) -> None:
    """Calls vary by 3.5 %: "plain again" in benchmarks/results/never_slower.json compares eight calls with eight
    others, 1.00 +- 0.017 at batch 1."""
    again = compared(before, measured(seed, noise=0.035, drift=0.003, accepts=0.998))
    assert not again.regressed
    assert [said for said, bad in sentences(again) if bad] == []


def test_exit_code_reports_a_regression(before: dict[str, Any]) -> None:
    for name, report in (("before", before), ("after", measured(1, accepts=0.938, noise=0.03))):
        write_json(Path(name, "results.json"), report)
    write_json(Path("run/report/results.json"), measured(2, noise=0.03))
    assert "B: no regression beyond 3 %." in works("report", "diff", "before", "run").stdout, "a run's folder"
    fell = call("report", "diff", "before/results.json", "after")
    assert fell.exit_code == 1
    assert re.search(r"B: regression beyond 3 %: heads, tokens per round \(τ\): −[45]\.\d % \(", fell.stdout)
    assert "tokens/s" not in fell.stdout
    assert all(len(line) <= 80 for line in fell.stdout.splitlines() if "%" in line and not line.startswith("B:"))
    works("report", "diff", "before", "after", "--regression", "10%")
    assert call("report", "diff", "after", "before").exit_code == 0, "a rise is no regression"
    assert call("report", "diff", "before", "run", "after", "--regression", "3").exit_code == 1, "any of them"


def test_inconclusive_drop_is_reported(before: dict[str, Any]) -> None:
    found = compared(before, measured(3, noise=0.3), limit=0.03)
    assert not found.regressed
    assert any("is not excluded (" in said for said, _ in sentences(found))
    assert not any("is not excluded" in said for said, _ in sentences(compared(before, before)))


def test_figures_match_the_reports(before: dict[str, Any]) -> None:
    other = measured(1, accepts=0.95, noise=0.03)
    changes = {change.name: change for change in compared(before, other).others[0].drafters["heads"]}
    tokens, speed, first = (changes[name] for name in ("tokens per round (τ)", "speed-up over plain", "accepted at 1"))
    for change, ours, theirs in (
        (tokens, *(each["summary"]["tokens_per_round"] for each in (before, other))),
        (speed, *(each["summary"]["speedup_vs_plain"]["mean"] for each in (before, other))),
        (first, *(each["summary"]["acceptance_by_position"][0] for each in (before, other))),
    ):
        assert (change.base["mean"], change.other["mean"]) == (pytest.approx(ours), pytest.approx(theirs))
    assert speed.base == pytest.approx(before["summary"]["speedup_vs_plain"]), "the same bootstrap"
    assert speed.change["mean"] == pytest.approx(speed.other["mean"] / speed.base["mean"] - 1)
    assert first.change["mean"] == pytest.approx(first.other["mean"] - first.base["mean"])


def test_pairing_narrows_the_interval(before: dict[str, Any]) -> None:
    tokens = compared(before, measured(1, accepts=0.97)).others[0].drafters["heads"][0]
    assert tokens.base["high"] is not None and tokens.base["low"] is not None
    assert tokens.change["high"] is not None and tokens.change["low"] is not None
    alone = (tokens.base["high"] - tokens.base["low"]) / tokens.base["mean"]
    assert tokens.change["high"] - tokens.change["low"] < alone / 3
    assert below(tokens.change) and not above(tokens.change)


# -- comparable reports ------------------------------------------------------------------------------------------------


def test_common_prompts_are_paired(before: dict[str, Any]) -> None:
    other = copy.deepcopy(before)
    other["per_prompt"] = other["per_prompt"][:60:-1] + other["per_prompt"][:20]
    other["per_prompt"][0]["asked"] = "another question of the same number"
    found = compared(before, other)
    assert (found.prompts, found.left_out) == (38, 43)
    for change in found.others[0].drafters["heads"]:
        assert change.change == pytest.approx({"mean": 0, "low": 0, "high": 0}), change.name
    assert "43 more are not in all reports" in sentences(found)[0][0]


def test_speeds_of_other_machines_are_not_judged(before: dict[str, Any]) -> None:
    for other in ({"threads": 4}, {"dtype": "bfloat16"}, {"cpu": "another"}, {"gpu": "one", "device": "cuda"}):
        found = compared(before, changed(measured(1, slower=1.5), **other))
        assert not found.regressed
        (caution,) = found.others[0].cautions
        assert "shown and not judged. Measure both on one machine" in caution
        assert str(next(iter(other.values()))) in caution
    found = compared(before, changed(measured(1, accepts=0.9), threads=4))
    assert {change.name for _, change in found.others[0].regressions(0.03)} == {"tokens per round (τ)"}
    (caution,) = compared(before, changed(before, torch="2.14")).others[0].cautions
    assert "torch 2.14, not 2.13" in caution


def test_renamed_drafters_are_compared(before: dict[str, Any]) -> None:
    other = copy.deepcopy(before)
    other["summary"]["drafter"] = "dynamic"
    for row in other["per_prompt"]:
        row["drafters"]["dynamic"] = row["drafters"].pop("heads")
    assert list(compared(before, other).others[0].drafters) == ["heads → dynamic", "heads + n-gram"]


def test_incomparable_reports_are_refused(before: dict[str, Any]) -> None:
    for other, said in (
        (changed(before, target_fingerprint="0" * 32), r"targets are tiny \(00000000\) and tiny \(ffffffff\)"),
        (changed(before, temperature=1.0), r"temperature is 1.0 and 0.0\. .*--temperature 0.0"),
        (changed(before, max_new_tokens=8, batch_size=2), "--max-new-tokens 64 --batch-size 1"),
        (changed(before, stop_token_ids=[5, 6]), r"again without --stop-token-ids\.$"),
        ({**before, "per_prompt": before["per_prompt"][:8]}, "needs 5 questions .* and there are 4"),
        ({**before, "per_prompt": [{**row, "asked": "x"} for row in before["per_prompt"]]}, "no prompt in common"),
        ({**before, "per_prompt": [{"id": "1"}]}, "has no figures per prompt. Measure again"),
        ({"summary": {}}, "is no report"),
    ):
        with pytest.raises(UserError, match=said):
            compared(before, other)
    thinking = changed(before, chat_template_kwargs={"enable_thinking": False}, stop_token_ids=[5, 6])
    with pytest.raises(UserError) as caught:
        compared(thinking, before)
    assert caught.value.remedy == (
        "Measure it again with --stop-token-ids 5 --stop-token-ids 6 "
        """--chat-template-kwargs '{"enable_thinking": false}'."""
    )
    batched = changed(before, batch_size=4)
    with pytest.raises(UserError, match=r"Only 60 of 80 prompts .* batches"):
        compared(batched, {**batched, "per_prompt": batched["per_prompt"][:60]})
    assert "One report is named" in refused("report", "diff", "report0")
    assert "gone" in refused("report", "diff", "report0", "gone")
    for text in ("-1%", "100", "much"):
        assert f"--regression is '{text}'" in refused("report", "diff", "report0", "report0", f"--regression={text}")


def test_failed_drafter_is_reported(before: dict[str, Any]) -> None:
    other = copy.deepcopy(before)
    other["compare"][0]["drafter_error"] = "ValueError: no drafts"
    (caution,) = compared(before, other).others[0].cautions
    assert caution.startswith("B: heads failed (ValueError: no drafts)")


# -- the page ----------------------------------------------------------------------------------------------------------


def test_page_shows_all_reports(before: dict[str, Any]) -> None:
    for name, report in (("a", before), ("b", measured(1, noise=0.03)), ("c", measured(2, accepts=0.9))):
        write_json(Path(name, "results.json"), report)
    assert "diff.html" in call("report", "diff", "a", "b", "c", "--out", "diff.html", "--regression", "3%").stdout
    page = Path("diff.html").read_text()
    assert not re.search(r"<(link|img|iframe|script)\b|@import|url\(", page), "nothing is fetched"
    assert page.count('<table class="barred">') == 2, "heads, and heads with n-grams"
    rows = re.findall(r"<tr><th scope=\"row\">(?:tokens per round|speed-up|accepted).*?</tr>", page, re.DOTALL)
    assert len(rows) == 2 * (2 + DRAFTS)
    assert all(row.count('<span class="bar') == 3 and row.count("<td>") == 3 for row in rows), "overlaid"
    assert "C: regression beyond 3 %: heads, tokens per round (τ)" in page and "B: no regression" in page
    assert "&lt;tiny&gt;" in page and "<tiny>" not in page and "None" not in page
    assert "Largest drops in tokens per round in C" in page
    widths = [float(width) for width in re.findall(r"width:([\d.e+-]+)%", page)]
    assert widths and all(0 <= width <= 100 for width in widths)


def test_reports_of_real_runs(tiny_target: Target, drafter: HeadDrafter) -> None:
    questions = [Question(number, "", [f"count to {number}"]) for number in range(5)]
    options = EvalOptions(max_new_tokens=8, baselines=False, compare=("ngram",))
    again = EvalOptions(max_new_tokens=8, baselines=False)
    reports = [evaluate(Drafts(tiny_target, drafter), questions, each) for each in (options, again)]
    found = compared(*reports, limit=0.99)
    assert found.prompts == 5 and list(found.others[0].drafters) == ["heads"]
    assert found.others[0].drafters["heads"][0].change["mean"] == 0, "greedy, and of the same heads"
