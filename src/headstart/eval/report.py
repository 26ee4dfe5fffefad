"""A report for people: results.json, and the same figures as Markdown and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from headstart.eval.figures import acceptance, accepted
from headstart.eval.labels import BASELINES, HEADS, LABELS, METHODS, PLAIN, label_of, temperature_of
from headstart.eval.plots import plots
from headstart.eval.replay import LINGER_MS, by_step, end_ms, featured, place, standing, unpack
from headstart.support.files import json_lines, write_text
from headstart.support.terminal import format_moment, tell

DEFINITIONS = {
    "Tokens per round (τ)": "The mean number of tokens that one forward of the target yields: accepted drafts plus the "
    "target's own next token. Plain decoding has τ = 1.",
    "Acceptance at position k": "Of the rounds that drafted at least k tokens ahead and whose first k − 1 drafts were "
    "accepted, the share whose k-th was accepted too; with the 95 % interval of Wilson, as if "
    "rounds did not depend on each other.",
    "Speed-up": "Tokens per second with the drafter divided by tokens per second without, all tokens over all seconds. "
    "The interval is the middle 95 % of a paired bootstrap over prompts.",
    "Time to first token": "From the call to the first token, reading the prompt included.",
    "Time between tokens": "The wait for each arrival, shared evenly by the tokens that came with it.",
    "Host": "The part of a round that is neither drafting nor verifying: accepting, committing, bookkeeping.",
    "Divergence": "A prompt whose greedy output with drafts is not the plain loop's. It is explained when rounding "
    "alone accounts for it: in float32, after the same text, both tokens lie within a measured margin of the best one.",
}


def write_report(results: Mapping[str, Any], out: Path) -> None:
    """Write results.json, report.md and report.html into the folder `out`, each in one step.

    Entries of `results["summary"]` may be null; the report then says that they were not measured.
    """
    write_text(out / "results.json", json_lines(results, 3) + "\n")
    write_text(out / "report.md", render(results, "report.md.j2"))
    write_text(out / "report.html", render(results, "report.html.j2", plots(results)))


def show_results(results: Mapping[str, Any], title: str, console: Console) -> None:
    """Print every method in a table that fits into 80 columns, what it comes to, and drafters that failed."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("decoding", overflow="fold")
    for name in ("tokens/s", f"over {LABELS[PLAIN].short}", "τ"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("words", max_width=14)  # "5 of 6 differ," and "by rounding" below it
    for row in results["compare"]:
        speed, speedup = number(row["tokens_per_second"], 1), over_plain(row, results)
        table.add_row(label_of(row["name"]), speed, speedup, number(row["tokens_per_round"]), words(row))
    console.print(table)
    predicted = results["summary"]["predicted_speedup"]
    expected = [f"Tuning predicted {predicted:.2f}x over {LABELS[PLAIN].name}."] if predicted else []
    for sentence in (*verdicts(results), *expected, divergence_sentence(results)):
        tell(console, sentence)
    for sentence in undrafted(results):
        tell(console, sentence)
    for name, error in failed(results):
        text = f"{name}: a drafter failed ({error}), and the figures are those of decoding without it."
        tell(console, text, style="bold red")


def template(name: str) -> Template:
    """One of the templates, with the filters below."""
    environment = Environment(
        loader=PackageLoader("headstart.eval"),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, times=times, cell=cell)
    environment.filters.update(span=span, shares=shares, words=words, label=label_of, temperature=temperature_of)
    environment.filters.update(place=place, by_step=by_step, end_ms=end_ms, standing=standing)
    environment.globals["linger_ms"] = LINGER_MS
    return environment.get_template(name)


def render(results: Mapping[str, Any], name: str, figures: Sequence[Mapping[str, str]] = ()) -> str:
    """A report by the name of its template."""
    compare, races = results["compare"], unpack(results["replays"])
    return template(name).render(
        summary=results["summary"],
        settings={name: value for name, value in results["settings"].items() if name != "heads"},
        heads=results["settings"].get("heads", {}),
        machine=_machine(results["environment"]),
        categories=results["categories"],
        prompts=len(results["per_prompt"]),
        verdicts=verdicts(results),
        divergence=divergence_sentence(results),
        diverged=[row for row in results["per_prompt"] if row["divergence"]],
        methods=METHODS,
        names={name: tested(results) if name == HEADS else LABELS[name].name for name in METHODS},
        tested=tested(results),
        compare=compare if len(compare) > len(METHODS) else [],
        compared=compare,
        target_remarks=target_remarks(results["settings"]),
        failed=failed(results),
        undrafted=undrafted(results),
        plainly=drafted_nothing(results["summary"], results),
        over_plain=partial(over_plain, results=results),
        baselines=BASELINES,
        definitions=DEFINITIONS,
        accepted=[acceptance(*pair) for pair in accepted(results["summary"])],
        races=races,
        shown=featured(races) if races else None,
        plots=[{**plot, "svg": Markup(plot["svg"])} for plot in figures],
    )


def _machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The machine, and when, as people write it."""
    return {name: format_moment(value) if name == "date" else value for name, value in environment.items()}


def tested(results: Mapping[str, Any]) -> str:
    """What the report is about, in words.

    >>> tested({"summary": {"drafter": "ngram"}})
    'n-gram'
    """
    drafter: str = results["summary"]["drafter"]
    return LABELS[HEADS].name if drafter == HEADS else label_of(drafter)


def failed(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Drafters that failed, each with its error."""
    return [(label_of(row["name"]), row["drafter_error"]) for row in results["compare"] if row["drafter_error"]]


def undrafted(results: Mapping[str, Any]) -> list[str]:
    """For how many prompts a method drafted nothing, a sentence each.

    >>> undrafted({"compare": [{"name": "heads", "undrafted_prompts": 2}], "per_prompt": [1, 2, 3]})
    ['heads: nothing was drafted for 2 of 3 prompts, where plain decoding was expected to be faster.']
    """
    return [
        f"{label_of(row['name'])}: nothing was drafted for {row['undrafted_prompts']} of {len(results['per_prompt'])} "
        "prompts, where plain decoding was expected to be faster."
        for row in results["compare"]
        if row.get("undrafted_prompts")
    ]


def drafted_nothing(figures: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    """Whether a method, by its figures, decoded every prompt plainly."""
    return figures.get("undrafted_prompts") == len(results["per_prompt"])


def over_plain(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """The speed-up of a compared method over the plain loop, in a cell."""
    return "nothing drafted" if drafted_nothing(row, results) else times(row["speedup_vs_plain"])


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """One sentence per baseline: faster, slower, or not to be told apart."""
    sentences = []
    for key, label in BASELINES.items():
        ratio, name = results["summary"][key], label.name
        if not ratio:
            continue
        interval = f"{ratio['mean']:.2f}x (95 % interval {ratio['low'] or 0:.2f} to {ratio['high'] or 0:.2f})"
        if key == LABELS[PLAIN].speedup and drafted_nothing(results["summary"], results):
            chance = f"{ratio['mean']:.2f}x its speed is chance"
            sentences.append(f"Nothing was drafted, because {name} was expected to be faster: {chance}.")
        elif ratio["low"] is None:
            sentences.append(f"{ratio['mean']:.2f}x the speed of {name}, on too few prompts for an interval.")
        elif ratio["low"] > 1:
            sentences.append(f"Faster than {name}: {interval}.")
        elif ratio["high"] < 1:
            sentences.append(f"Slower than {name}: {interval}.")
        else:
            sentences.append(f"Not clearly faster or slower than {name}: {interval}.")
    return sentences


def target_remarks(settings: Mapping[str, Any]) -> list[str]:
    """What to know of a target that is not the model as it was published, in sentences.

    >>> target_remarks({"target": "tiny"})
    []
    >>> target_remarks({"target": "tiny in int8", "quantization": "int8"})
    ["The target's linear layers are in int8: the speed-ups are against its own plain loop, and the words are its own."]
    """
    remarks, comparison = [], "the speed-ups are against its own plain loop, and the words are its own"
    if bits := settings.get("quantization"):
        remarks.append(f"The target's linear layers are in {bits}: {comparison}.")
    adapter = settings.get("adapter") or {}
    if adapter:
        without = "which are not always those of the model without the adapter"
        remarks.append(f"The target is the adapted model, {settings['target']}: {comparison}, {without}.")
    if adapter.get("tokens"):
        before, after = adapter["perplexity_before"], adapter["perplexity_after"]
        remarks.append(
            f"On {adapter['tokens']} validation tokens it is {adapter['kl']:.4f} nats a token from the model without "
            f"the adapter (KL); the perplexity of the answers, which that model wrote, goes from {before:.2f} to "
            f"{after:.2f}."
        )
    return remarks


def divergence_sentence(results: Mapping[str, Any]) -> str:
    """Whether the words stayed the same, in one or two sentences."""
    judged = results["summary"]["divergences"]
    if not judged["prompts"]:
        return "Outputs were not compared token by token: sampled outputs differ from run to run."
    if not judged["count"]:
        compared = f"{judged['tokens_compared']} tokens of {judged['prompts']} prompts compared"
        return f"The words are the same: {compared} with {LABELS[PLAIN].name}, none differs."
    differ = f"{judged['count']} of {judged['prompts']} prompts leave the plain loop's output at some token"
    if results["environment"].get("exact") == "bits":
        return f"{differ}, although all bits should be the same: look for a fault."
    limit, largest = judged["margin_limit"], judged["largest_margin"]
    margins = "" if limit is None or largest is None else f" (largest margin {largest:.3g}, limit {limit:.3g})"
    if not judged["unexplained"]:
        return f"{differ}. Rounding explains every one of them{margins}."
    return f"{differ}. Rounding does not explain {judged['unexplained']} of them{margins}: look for a fault."


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash when it was not measured.

    >>> number(1.234), number(None)
    ('1.23', '–')
    """
    return "–" if value is None else f"{value:.{digits}f}"


_SHARES = 6  # positions that a cell shows
_ROUNDS = 30  # that a share in a cell is of, at least: with 30 it is good to 18 points


def shares(row: Mapping[str, Any]) -> str:
    """Acceptance by position in one cell, in per cent: no more positions than fit, and none that few rounds reached.

    >>> shares({"acceptance_by_position": [0.5, 0.25, 0.7], "rounds_by_position": [90, 45, 9]})
    '50 / 25 …'
    >>> shares({"acceptance_by_position": [0.5], "rounds_by_position": [4]}), shares({"acceptance_by_position": []})
    ('…', '–')
    """
    pairs = accepted(row)
    told = [f"{100 * share:.0f}" for share, rounds in pairs if rounds >= _ROUNDS][:_SHARES]
    parts = [" / ".join(told)] if told else []
    return " ".join([*parts, "…"] if len(told) < len(pairs) else parts) or "–"


def words(row: Mapping[str, Any]) -> str:
    """Whether a compared method leaves the words as they are, in a cell.

    >>> words({"divergences": {"prompts": 8, "count": 2, "unexplained": 0}})
    '2 of 8 differ, by rounding'
    """
    judged = row["divergences"]
    if not judged["prompts"]:
        return "sampled"
    if not judged["count"]:
        return "the same"
    cause = f"{judged['unexplained']} unexplained" if judged["unexplained"] else "by rounding"
    return f"{judged['count']} of {judged['prompts']} differ, {cause}"


def times(ratio: Mapping[str, float | None] | None, interval: bool = True) -> str:
    """A speed-up, with its interval when asked for; a few prompts have none.

    >>> times({"mean": 1.5, "low": 1.4, "high": 1.6}), times({"mean": 1.5, "low": None, "high": None}), times(None)
    ('1.50x (1.40–1.60)', '1.50x', '–')
    """
    if ratio is None:
        return "–"
    shown = interval and ratio["low"] is not None
    return f"{ratio['mean']:.2f}x" + (f" ({ratio['low']:.2f}–{ratio['high']:.2f})" if shown else "")


def span(speed: Mapping[str, float | None] | None) -> str:
    """The interval of a throughput in a cell.

    >>> span({"mean": 20.0, "low": 19.0, "high": 21.0}), span({"mean": 20.0, "low": None, "high": None}), span(None)
    ('19.0–21.0', '–', '–')
    """
    return "–" if speed is None or speed["low"] is None else f"{speed['low']:.1f}–{speed['high']:.1f}"


def cell(value: Any) -> str:
    """Any setting, on one line of a table.

    >>> cell(0.0), cell([1, "a|b"]), cell(None), cell(True)
    ('0', '1, a\\\\|b', '–', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    text = f"{value:.12g}" if isinstance(value, float) else text
    return "–" if value is None else text.replace("|", "\\|").replace("\n", " ")
