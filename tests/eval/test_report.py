"""The three files of a report: complete, self-contained, and correct when figures are missing."""

from __future__ import annotations

import copy
import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.eval.divergence import Difference, Judgement
from headstart.eval.figures import (
    Unit,
    categories,
    compare_rows,
    method_figures,
    per_prompt,
    places,
    prompt_lengths,
    summarise,
)
from headstart.eval.labels import BASELINES, OTHER, label_of
from headstart.eval.replay import races
from headstart.eval.report import divergence_sentence, remarks, show_results, verdicts, write_report
from tests.eval.test_figures import unit

TUNED = {
    "tree": "dynamic",
    "chosen": 2,
    "nodes": [[[0], 0.5], [[0, 0], 0.2], [[1], 0.1]],
    "acceptance": [[0.5, 0.1], [0.4, 0.1]],
    "costs": {"node_counts": [1, 4], "verify_ms": [10.0, 12.0], "draft_ms": 2.0, "level_ms": 0.5, "levels": 2},
    "kinds": [
        {"kind": "", "texts": 9, "positions": 900, "tau": 2.1, "entropy": 1.5},
        {"kind": "<i>|sums", "texts": 4, "positions": 400, "tau": 1.75, "entropy": 1.625},
    ],
}


def five_units(category: str = "code") -> list[Unit]:
    """The smallest number of prompts with an interval."""
    writing = [unit(number, "writing", [1, 3, 2], (1.0, 1.5 + 0.1 * number)) for number in range(4)]
    return [*writing, unit(4, category, [4, 1], (1.0, 1.4))]


def long_prompts() -> list[dict[str, Any]]:
    """Rows of two drafters, one of them at two lengths, and of a length that is left out."""
    figures = method_figures(five_units(), "heads", 0) | {"plain_tokens_per_second": 8.0, "left_out": ""}
    figures["plain_ttft_ms"] = {"p50": 7.0}
    figures["speedup_vs_plain"] = {"mean": 2.0, "low": 1.0, "high": 3.0}
    measured = [(512, "heads", 2.0), (512, "ngram", 1.0), (999, "heads", 1.5)]
    rows = [figures | {"prompt_tokens": size, "name": name, "tokens_per_round": tau} for size, name, tau in measured]
    return [*rows, {"prompt_tokens": 2048, "left_out": "Memory <is> short."}]


def measured() -> dict[str, Any]:
    units = five_units("<b>|code")
    for each in units:
        each.runs["transformers"] = each.runs["plain"]
    same = Judgement(5, 34, None, [])
    return {
        "schema_version": 2,
        "summary": {**summarise(units, 0), "divergences": same.to_json(), "predicted_speedup": 1.6, "drafter": "heads"},
        "compare": compare_rows(units, dict.fromkeys(units[0].runs, same), 0, "heads"),
        "categories": categories(units, 0),
        "prompt_lengths": prompt_lengths(units, 0),
        "places": places(units),
        "tuned": {**TUNED},
        "settings": {"heads_name": "tiny <heads>", "target": "tiny", "max_new_tokens": 8, "temperature": 0.0},
        "environment": {"cpu": "some | processor", "threads": 2, "dtype": "float32", "date": "today"},
        "per_prompt": per_prompt(units),
        "replays": races(units, None, "heads"),
    }


@pytest.fixture
def results() -> dict[str, Any]:
    return measured()


def pages(results: dict[str, Any], out: Path) -> tuple[str, str]:
    write_report(results, out)
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.md", "results.json"]
    return (out / "report.html").read_text(), (out / "report.md").read_text()


def terminal(results: dict[str, Any], width: int = 80) -> str:
    written = io.StringIO()
    show_results(results, "compared", Console(file=written, width=width))
    return written.getvalue()


def test_three_files(results: dict[str, Any], tmp_path: Path) -> None:
    html, markdown = pages(results, tmp_path / "report")
    assert json.loads((tmp_path / "report" / "results.json").read_text()) == results
    speedup = f"{results['summary']['speedup_vs_plain']['mean']:.2f}x"
    for text in (html, markdown):
        assert speedup in text
        assert "1.60" in text, "the prediction"
        assert "Tokens per round (τ)" in text
    assert html.count("<svg") == 2


def test_no_identifier_or_raw_time_stamp_is_shown(results: dict[str, Any], tmp_path: Path) -> None:
    results = compared(results)
    results["environment"]["date"] = "2026-11-04T09:07:31+00:00"
    html, markdown = pages(results, tmp_path)
    for text in (html, markdown):
        assert "4 November 2026, 09:07 UTC" in text and "2026-11-04T" not in text
        assert "8 new tokens" in text and "greedy" in text and "temperature 0.0" not in text
    for text in (html, markdown, terminal(results)):
        assert "prompt lookup" in text and "prompt_lookup" not in text


def test_acceptance_states_its_number_of_rounds(results: dict[str, Any], tmp_path: Path) -> None:
    results = compared(results)
    results["summary"] |= {"acceptance_by_position": [0.5, 7 / 9], "rounds_by_position": [200, 9]}
    results["compare"][0] |= {"acceptance_by_position": [0.5, 7 / 9], "rounds_by_position": [200, 9]}
    html, markdown = pages(results, tmp_path)
    for text in (html, markdown):
        plain = re.sub("<small>|</small>", " ", text)
        assert re.search(r"78 % .?45–94 %.? (of 9 rounds|n = 9)", plain) and re.search(r"50 % .?43–57 %", plain)
    assert "| 50 … |" in markdown, "nine rounds are too few to compare"


def test_default_drafter_comes_first(results: dict[str, Any], tmp_path: Path) -> None:
    results["compare"].append({**results["compare"][0], "name": "heads+ngram"})
    html, _ = pages(results, tmp_path)
    assert verdicts(results)[0].startswith("With heads + n-gram (the default): faster than the plain loop, 1.")
    assert verdicts(results)[1].startswith("With the heads: faster than the plain loop, 1.")
    assert html.index("heads + n-gram, the default, over the plain loop") < html.index("heads, over the plain loop")


def test_both_texts_are_shown_at_a_difference(results: dict[str, Any], tmp_path: Path) -> None:
    parting = {"position": 6, "tokens": [1, 2], "margin": 0.01, "explained": True}
    texts = {"before": "so <far>", "plain": " as plain", "drafted": " as drafted"}
    results["per_prompt"][1]["divergence"] = parting | texts
    html, _ = pages(results, tmp_path)
    assert "differs with the heads from token 7 on; rounding explains it (margin 0.0100" in html
    assert "…so &lt;far&gt;<b> as plain</b>" in html and "…so &lt;far&gt;<b> as drafted</b>" in html


def test_kinds_of_text_are_shown_with_the_targets_entropy(results: dict[str, Any], tmp_path: Path) -> None:
    html, markdown = pages(results, tmp_path)
    assert "| all | 9 | 2.10 | 1.50 |\n" in markdown and "sums | 4 | 1.75 | 1.62 |" in markdown
    assert "<b>Validation answers by kind of prompt</b>" in html and "&lt;i&gt;|sums" in html
    del results["tuned"]["kinds"]
    assert "by kind of prompt" not in "".join(pages(results, tmp_path))


def test_what_if_starts_from_the_measurement(results: dict[str, Any], tmp_path: Path) -> None:
    html, _ = pages(results, tmp_path / "tuned")
    (data,) = re.findall('data-measured="([^"]*)"', html)
    measured = json.loads(unescape(data))
    assert measured["start"] == {"depth": 2, "nodes": 3, "first": 50, "growth": 100}
    assert measured["costs"] == TUNED["costs"] and measured["acceptance"] == TUNED["acceptance"]
    assert re.search('class="whatif"[^>]* hidden>', html), "no dead sliders without the script"
    for name in re.findall('<output for="([^"]*)"', html):
        assert f'<input type="range" id="{name}"' in html
    results["tuned"] = None
    assert "whatif-" not in pages(results, tmp_path / "untuned")[0]


def test_heads_are_described(results: dict[str, Any], tmp_path: Path) -> None:
    assert "Heads</h2>" not in pages(results, tmp_path / "unknown")[0]
    results["settings"]["heads"] = {"family": "eagle3", "size": "9.8 M parameters", "steps": "537 | 600"}
    html, markdown = pages(results, tmp_path / "known")
    assert '<th scope="row">family</th><td>eagle3</td>' in html
    assert "| size | 9.8 M parameters |" in markdown and r"| steps | 537 \| 600 |" in markdown
    assert "{'family'" not in html + markdown


def test_command_and_question_set_are_shown(results: dict[str, Any], tmp_path: Path) -> None:
    results["settings"] |= {"questions_name": "mt-bench", "command": "headstart eval heads --out 'a b'"}
    html, markdown = pages(results, tmp_path)
    assert "Measured by <code>headstart eval heads --out &#39;a b&#39;</code>" in html
    assert "| command | headstart eval heads --out 'a b' |" in markdown
    for text in (html, markdown):
        assert "5 prompts (mt-bench)" in text


def test_long_prompts_are_a_table_and_a_plot(results: dict[str, Any], tmp_path: Path) -> None:
    write_report(results | {"contexts": long_prompts()}, tmp_path)
    html, text = ((tmp_path / name).read_text() for name in ("report.html", "report.md"))
    assert re.search(r"<th scope=\"row\">999, heads</th><td>8.0</td>", html) and "| 999 | heads | 8.0 |" in text
    assert "<td>10<small>7</small></td>" in html and "| 10 (7) |" in text, "first token"
    said = " ".join(terminal(results | {"contexts": long_prompts()}).split())
    assert "Prompts of 999 tokens, heads: " in said and said.count("Prompts of 2048 tokens") == 1
    lines = re.findall(r'class="curve" points="(.*?) "', html)
    # τ from 0 (y 180) to 2 (y 30), then the speed-up up to the interval's end, 3; a line for each drafter
    assert lines == ["50.0,30.0 340.0,67.5", "50.0,105.0", "50.0,80.0 340.0,80.0", "50.0,80.0"]
    assert html.count("130.0V30.0") == 3, "intervals of the speed-up alone"
    assert "Prompts of 2048 tokens: Memory &lt;is&gt; short." in html and "Prompts of 2048 tokens: Memory" in text


def test_engine_measurements_are_shown(results: dict[str, Any], tmp_path: Path) -> None:
    assert "engines</h2>" not in pages(results, tmp_path / "without")[0]
    row = {"requests": 1, "drafts": 3, "accepted": 0.648, "plain_tokens_per_second": 20.0, "tokens_per_second": 25.0}
    rows = [row | {"expected": 1.21}, row | {"requests": 4, "expected": 0.9}]
    results["engines"] = [{"engine": "vllm", "version": "0.32", "rows": rows, "setting": "vllm: 8 <prompts>."}]
    html, markdown = pages(results, tmp_path / "with")
    assert "vllm 0.32, 3 drafts</th><td>0.65</td><td>20.0</td><td>25.0</td><td>1.25x<small>1.21x</small>" in html
    assert "vllm 0.32, 3 drafts, 4 requests" in html and "vllm: 8 &lt;prompts&gt;." in html
    assert "| vllm 0.32 | 1 | 3 | 0.65 | 20.0 | 25.0 | 1.25x | 1.21x |" in markdown


def test_html_is_self_contained(results: dict[str, Any], tmp_path: Path) -> None:
    html, _ = pages(results, tmp_path)
    fetching = r"<script[^>]|<(link|img|iframe)\b|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\("
    assert not re.search(fetching, html), "nothing is fetched"
    assert "tiny &lt;heads&gt;" in html
    assert "<b>|code" not in html, "text from questions is escaped"


def test_markdown_tables_keep_their_columns(results: dict[str, Any], tmp_path: Path) -> None:
    _, markdown = pages(results | {"contexts": long_prompts()}, tmp_path)
    blocks = [block.splitlines() for block in markdown.split("\n\n") if block.lstrip().startswith("|")]
    assert len(blocks) >= 5
    for block in blocks:
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block if line.strip()}
        assert len(columns) == 1, block


def test_missing_figures_render(results: dict[str, Any], tmp_path: Path) -> None:
    for key in ("speedup_vs_transformers", "predicted_speedup"):
        results["summary"][key] = None
    for text in pages(results, tmp_path):
        assert "–" in text and "None" not in text


def test_few_prompts_have_no_interval(results: dict[str, Any], tmp_path: Path) -> None:
    assert "interval 1" in "".join(pages(copy.deepcopy(results), tmp_path / "five"))
    units = [unit(0, "writing", [1, 3, 2], (1.0, 1.5))]
    results["summary"] |= summarise(units, 0)
    results["categories"], results["per_prompt"] = categories(units, 0), per_prompt(units)
    judged = {name: Judgement(1, 7, None, []) for name in ("heads", "plain", "transformers", "ngram", OTHER + "x")}
    for name in judged:
        units[0].runs[name] = units[0].runs["plain" if name != "heads" else "heads"]
    results["compare"] = compare_rows(units, judged, 0, "heads")
    html, markdown = pages(results, tmp_path / "one")
    for text in (html, markdown):
        assert "1.50x the speed of the plain loop, on too few prompts for an interval." in text
        assert "1.50–1.50" not in text and "interval 1.50" not in text and "interval over prompts" not in text
        assert "None" not in text
    shown = terminal(results, 200)
    assert "1.50x" in shown and "1.50–1.50" not in shown


def test_verdicts_are_honest() -> None:
    unmeasured = dict.fromkeys(figure for figure in BASELINES)

    def verdict(low: float, mean: float, high: float) -> str:
        ratio = {"low": low, "mean": mean, "high": high}
        return verdicts({"summary": {**unmeasured, "speedup_vs_plain": ratio}, "per_prompt": [1]})[0]

    assert verdict(1.2, 1.3, 1.4) == "Faster than the plain loop, 1.30x (95 % interval 1.20 to 1.40)."
    assert verdict(0.7, 0.8, 0.9).startswith("Slower than the plain loop")
    assert verdict(0.9, 1.05, 1.2).startswith("Not clearly faster or slower")
    assert verdicts({"summary": unmeasured}) == []


@pytest.mark.parametrize(
    ("judged", "words"),
    [
        (Judgement(), "not compared"),
        (Judgement(3, 9), "Same text as without drafts: 9 tokens of 3 prompts"),
        (
            Judgement(3, 9, 0.25, [Difference(0, 1, (1, 2), 0.05, True), Difference(1, 1, (1, 2), 0.1, True)]),
            "on 1 of 3 prompts; rounding explains the other 2 .largest margin 0.1, limit 0.25",
        ),
        (
            Judgement(3, 9, 0.25, [Difference(0, 1, (1, 2), 0.5), Difference(1, 1, (1, 2), 0.1, True)]),
            "on 1 of 3 prompts; rounding does not explain 1 of the other 2 .*: look for a fault",
        ),
    ],
)
def test_divergence_sentence(judged: Judgement, words: str) -> None:
    summary = {"divergences": judged.to_json()}
    assert re.search(words, divergence_sentence({"summary": summary, "environment": {}}))


# -- every drafter in one table --------------------------------------------------------------------------------------


def compared(results: dict[str, Any]) -> dict[str, Any]:
    """Add two drafters to a report; one has failed."""
    units = five_units()
    for number, one in enumerate(units):
        runs = one.runs
        runs["transformers"] = runs["plain"]
        runs["transformers_prompt_lookup"] = runs["plain"]
        runs[OTHER + "ngram"] = unit(number, "", [2, 2], (0.5, 1.0)).runs["heads"]
        runs[OTHER + "a|b"] = unit(number, "", [1, 1], (2.0, 1.0)).runs["heads"]
        runs[OTHER + "a|b"].drafter_error = "ValueError: no | drafts"
    same = Judgement(5, 34, None, [])
    rows = compare_rows(units, dict.fromkeys(units[0].runs, same), 0, "dynamic")
    summary = {**results["summary"], "drafter": "dynamic"}
    return {**results, "summary": summary, "compare": rows}


def test_compared_drafters_share_a_table_and_a_plot(results: dict[str, Any], tmp_path: Path) -> None:
    results = compared(results)
    names = [row["name"] for row in results["compare"]]
    assert names == ["dynamic", "plain", "transformers", "transformers_prompt_lookup", "ngram", "a|b"]
    results["settings"]["compare"] = ("ngram",)
    html, markdown = pages(results, tmp_path)
    for text in (html, markdown):
        assert "a drafter failed" in text
    speeds = html[html.index('id="speed"') : html.index("</table>")]
    assert all(re.search(f'row">{re.escape(label_of(name))}<', speeds) for name in names), "one table has them all"
    table = next(part for part in markdown.split("\n\n") if part.startswith("| Method"))
    lines = table.splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| dynamic", "| plain", "| transformers", "| prompt lookup", "| n-gram", r"| a\|b",
    ]  # fmt: skip


def test_undrafted_runs_are_not_called_faster(results: dict[str, Any], tmp_path: Path) -> None:
    results = compared(results)
    for figures in (results["summary"], results["compare"][0], results["compare"][4]):
        figures["undrafted_prompts"] = 5
    expected = (
        r"Nothing was drafted, because the plain loop was expected to be faster: "
        r"the ratio of 1\.\d+x compares plain rounds with plain rounds\."
    )
    assert re.match(expected, verdicts(results)[0])
    html, markdown = pages(results, tmp_path)
    assert "Faster than the plain loop" not in html + markdown and "over the plain loop</span>" not in html
    for text in (html, markdown, terminal(results)):
        rows = [line for line in text.splitlines() if "nothing drafted" in line]
        assert {name for name in ("dynamic", "n-gram") for row in rows if name in row} == {"dynamic", "n-gram"}


@pytest.mark.parametrize(
    ("plain_ms", "settings", "noticed"),
    [
        (13.1, {}, True),
        (12.9, {}, False),
        (20.0, {"batch_size": 4}, False),
        (20.0, {"temperature": 1.0}, False),
        (None, {}, False),
    ],
)
def test_slower_plain_steps_than_at_tuning_are_noted(
    results: dict[str, Any], tmp_path: Path, plain_ms: float | None, settings: dict[str, Any], noticed: bool
) -> None:
    results = compared(results)
    plain = next(row for row in results["compare"] if row["name"] == "plain")
    plain["round_ms"] = None if plain_ms is None else {"draft": 0.0, "verify": plain_ms - 0.1, "host": 0.1}
    plain["tokens_per_round"] = 1.0
    results["settings"] |= settings
    for text in (*pages(results, tmp_path), terminal(results)):
        assert ("when costs were" in text) is noticed
    assert not remarks(results | {"tuned": None}), "no tuned costs"


def test_terminal_table_is_not_truncated(results: dict[str, Any]) -> None:
    results = compared(results)
    for row in results["compare"]:
        row["divergences"] = {"prompts": 80, "count": 12, "unexplained": 12}
    results["compare"][-1]["name"] = "memory:/a/folder/with/a/rather/long/name"
    lines = terminal(results).splitlines()
    table = "\n".join(line for line in lines if not line.endswith("."))
    assert "…" not in table
    assert all(len(line) <= 80 for line in table.splitlines())
    for row in results["compare"][:-1]:
        speedup = row["speedup_vs_plain"]
        line = next(line for line in lines if line.strip("│ ").startswith(f"{label_of(row['name'])} "))
        assert f"{row['tokens_per_second']:.1f}" in line
        interval = speedup and f"{speedup['mean']:.2f}x ({speedup['low']:.2f}–{speedup['high']:.2f})"
        assert (interval or " – ") in line, "the plain loop has no speed-up over itself"
        assert "12 of 80" in line
    assert "with/a/" in table
