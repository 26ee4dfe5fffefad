"""A report: results.json, and the same figures as Markdown and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isfunction
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from headstart.errors import UserError
from headstart.eval import labels
from headstart.eval.figures import octave
from headstart.eval.labels import BASELINES, HEADS, HEADS_NGRAM, LABELS, PLAIN, label_of
from headstart.eval.replay import LINGER_MS, by_step, conclusion, contestants, end_ms, median_race, rank_text, state_at
from headstart.support.files import json_lines, read_json, write_text
from headstart.support.terminal import format_moment, tell
from headstart.tree.tree import RankPath

RESULTS = "results.json"
DEFINITIONS = {
    "Tokens per round (τ)": "The mean number of tokens that one forward of the target yields: accepted drafts plus the "
    "target's own next token. Plain decoding has τ = 1.",
    "Acceptance at position k": "The share of rounds that accepted draft k, among rounds that drafted k tokens ahead "
    "and accepted the first k − 1; with Wilson's 95 % interval, which treats rounds as independent.",
    "Speed-up": "Tokens per second with the drafter divided by tokens per second without, all tokens over all seconds. "
    "The interval is the middle 95 % of a paired bootstrap over prompts.",
    "Time to first token": "From the call to the first token, reading the prompt included.",
    "Time between tokens": "The wait for each arrival, shared evenly by the tokens that came with it.",
    "Host": "The part of a round that is neither drafting nor verifying: committing, bookkeeping.",
    "Divergence": "A prompt with different greedy outputs with drafts and in the plain loop. Rounding explains it if "
    "in float32, after the same text, both tokens lie within a measured margin of the best one.",
}
_SLOWER = 1.3  # ratio to tuning's plain step above which a report warns; cores that share no cache already cause 1.25
_COLUMN, _LINE = 76, 30  # pixels from one node of a drawn tree to the next


def read_results(path: Path) -> tuple[dict[str, Any], Path]:
    """Read a report, given its folder, its run's folder, or results.json; also return the path of that file."""
    inside = (path / RESULTS, path / "report" / RESULTS)
    file = next((file for file in inside if file.is_file()), inside[0]) if path.is_dir() else path
    results = read_json(file)
    if not isinstance(results, dict) or "settings" not in results:
        raise UserError(f"{file} is no report.", "Name the results.json of a report; headstart eval writes them.")
    return results, file


def write_report(results: Mapping[str, Any], out: Path) -> None:
    """Write results.json, report.md and report.html into the folder `out`, each atomically.

    Entries of `results["summary"]` may be null, for figures that were not measured.
    """
    write_text(out / RESULTS, json_lines(results, 3) + "\n")
    write_text(out / "report.md", render(results, "report.md.j2"))
    write_text(out / "report.html", render(results, "report.html.j2"))


def show_results(results: Mapping[str, Any], title: str, console: Console) -> None:
    """Print a table of all methods in 80 columns, the conclusions, and failed drafters."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("decoding", overflow="fold")
    for name in ("tokens/s", f"over {LABELS[PLAIN].short}", "τ"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", max_width=14)  # "5 of 6 differ," and "by rounding" below it
    for row in results["compare"]:
        speed, tau = labels.number(row["tokens_per_second"], 1), labels.number(row["tokens_per_round"])
        table.add_row(label_of(row["name"]), speed, over_plain(row, results), tau, labels.text_verdict(row))
    console.print(table)
    predicted = results["summary"]["predicted_speedup"]
    expected = [f"Tuning predicted {predicted:.2f}x over {LABELS[PLAIN].name}."] if predicted else []
    for row in results.get("contexts", ()):
        if not row["left_out"]:
            speed, tau = labels.number(row["tokens_per_second"], 1), labels.number(row["tokens_per_round"])
            figures = (
                f"{speed} tokens/s, {labels.speedup_text(row['speedup_vs_plain'])} over {LABELS[PLAIN].name}, τ {tau}"
            )
            tell(console, f"Prompts of {row['prompt_tokens']} tokens, {label_of(row['name'])}: {figures}.")
    for sentence in (*verdicts(results), *expected, divergence_sentence(results), *remarks(results)):
        tell(console, sentence)
    for sentence in failures(results):
        tell(console, sentence, style="bold red")


# -- rendering -------------------------------------------------------------------------------------------------------


def template(name: str) -> Template:
    """Load a template. Its filters are the functions of `labels`, and some of `replay`."""
    environment = Environment(
        loader=PackageLoader("headstart.eval"),
        autoescape=not name.endswith(".md.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: list[Callable[..., Any]] = [rank_text, by_step, end_ms, state_at]
    filters += filter(isfunction, vars(labels).values())
    environment.filters.update({function.__name__: function for function in filters})
    environment.filters["conclusion"] = lambda race: conclusion(*contestants(race))
    environment.globals.update(linger_ms=LINGER_MS, labels=labels)
    return environment.get_template(name)


def render(results: Mapping[str, Any], name: str) -> str:
    compare, races, tuned, summary = (results[key] for key in ("compare", "replays", "tuned", "summary"))
    speeds = [row["tokens_per_second_interval"] for row in compare]
    parts: list[Callable[[Mapping[str, Any]], Any]] = [
        *(settings_rows, conditions, by_speedup, cards, verdicts, divergence_sentence, tested_name),
        *(target_remarks, failures, remarks, fewer),
    ]
    derived: dict[str, Any] = {function.__name__: function(results) for function in parts}
    long_rows = [row for row in results.get("contexts", ()) if not row["left_out"]]
    taus = [(row, {"mean": row["tokens_per_round"], "low": None, "high": None}) for row in long_rows]
    speedups = [(row, row["speedup_vs_plain"]) for row in long_rows]
    derived |= {
        "heads": results["settings"].get("heads", {}),
        "fastest": max(speed["high"] or speed["mean"] for speed in speeds),
        "timed": [(row, sum(row["round_ms"].values())) for row in compare if row["round_ms"]],
        "over_plain": partial(over_plain, results=results),
        "nothing_drafted": partial(nothing_drafted, results=results),
        "over_baselines": [f"over {label.short}" for label in BASELINES.values()],
        "definitions": DEFINITIONS,
        "accepted": labels.pool_rare_positions(summary),
        "long_rows": long_rows,
        "panels": [("tokens per round (τ) by tokens of the prompt", taus), ("speed over plain, no prefill", speedups)],
        "nodes": sum_by_octave(summary["node_counts"]),
        "drafting_nodes": mean_drafting_nodes(summary["node_counts"]),
        "kinds": (tuned or {}).get("kinds", []),
        "tree": tree_svg(tuned) if tuned else None,
        "tree_words": tree_words(tuned) if tuned else "",
        "whatif": what_if(tuned, results["settings"]) if tuned else None,
        "races": races,
        "shown": median_race(races) if races else None,
        "extremes": races[:1] + races[1:][-1:],
    }
    return template(name).render({"batches": (), "engines": (), **results, **derived})


def conditions(results: Mapping[str, Any]) -> list[str]:
    """Describe the recorded conditions of the figures in a few words each."""
    settings, machine = results["settings"], results["environment"]
    batch, longest, threads = settings.get("batch_size"), settings.get("max_new_tokens"), machine.get("threads")
    temperature, date = settings.get("temperature"), machine.get("date")
    heads, prompts, questions = settings.get("heads", {}), len(results["per_prompt"]), settings.get("questions_name")
    parts = [
        *(heads.get(key) for key in ("family", "size")),
        f"{prompts} prompt{'s' * (prompts != 1)}" + (f" ({questions})" if questions else ""),
        longest and f"at most {longest} new tokens",
        None if temperature is None else labels.temperature_of(temperature),
        batch and (f"{batch} prompts at a time" if batch > 1 else "one prompt at a time"),
        machine.get("engine"),
        machine.get("dtype"),
        threads and not machine.get("gpu") and f"{threads} thread{'s' * (threads > 1)}",
        machine.get("gpu") or machine.get("cpu"),
        date and format_moment(date),
    ]
    return [part for part in parts if part]


def cards(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the headline figures with their captions: the default drafter before the tested one."""
    entries = []
    for row in sorted(results["compare"], key=lambda row: row["name"] != HEADS_NGRAM):
        ratio = row["speedup_vs_plain"]
        if row["name"] in (HEADS_NGRAM, results["summary"]["drafter"]) and ratio and not nothing_drafted(row, results):
            default = ", the default" if row["name"] == HEADS_NGRAM else ""
            lines = [f"{label_of(row['name'])}{default}, over {LABELS[PLAIN].name}"]
            lines += [] if ratio["low"] is None else [f"95 % interval {ratio['low']:.2f} to {ratio['high']:.2f}"]
            lines += [f"{row['tokens_per_round']:.2f} tokens per round (τ)"]
            entries.append({"value": labels.speedup_text(ratio, False), "lines": lines})
    speed, name = max((row["tokens_per_second"] or 0.0, row["name"]) for row in results["compare"])
    entries.append({"value": labels.number(speed, 1), "lines": [f"tokens/s with {label_of(name)}, the fastest here"]})
    if (predicted := results["summary"]["predicted_speedup"]) is not None:
        measured = labels.speedup_text(results["summary"][LABELS[PLAIN].speedup], False)
        lines = [f"predicted by tuning for {tested_name(results)}", f"measured: {measured}"]
        entries.append({"value": f"{predicted:.2f}x", "lines": lines})
    return entries


def by_speedup(results: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], float, float]]:
    """Sort prompts by speed-up over the plain loop, highest first, as (row, tokens per second, speed-up)."""
    entries = []
    for row in results["per_prompt"]:
        speed, plain = (row["tokens"][name] / row["seconds"][name] for name in (HEADS, PLAIN))
        entries.append((row, speed, speed / plain))
    return sorted(entries, key=lambda entry: -entry[2])


def sum_by_octave(counts: Sequence[Sequence[int]]) -> list[tuple[str, int]]:
    """Sum `node_counts` by octave.

    >>> sum_by_octave([[1, 5], [3, 1], [4, 2]])
    [('1', 5), ('3–4', 3)]
    """
    rows: dict[str, int] = {}
    for nodes, rounds in counts:
        rows[octave(nodes)] = rows.get(octave(nodes), 0) + rounds
    return list(rows.items())


def mean_drafting_nodes(counts: Sequence[Sequence[int]]) -> tuple[float, int] | None:
    """Return mean nodes of the rounds that drafted, and their number; None if all or none did.

    >>> mean_drafting_nodes([[1, 5], [3, 1], [4, 1]]), mean_drafting_nodes([[4, 2]])
    ((3.5, 2), None)
    """
    rounds, total = sum(count for nodes, count in counts if nodes > 1), sum(count for _, count in counts)
    return (sum(nodes * count for nodes, count in counts if nodes > 1) / rounds, rounds) if 0 < rounds < total else None


def tree_svg(tuned: Mapping[str, Any]) -> Markup:
    """Draw the tuned tree from left to right, a column per depth; the best child is in line with its parent."""
    probs: dict[RankPath, float] = {(): 1.0} | {tuple(path): prob for path, prob in tuned["nodes"]}
    chosen = [tuple(path) for path, _ in tuned["nodes"][: tuned["chosen"]]]
    lines: dict[RankPath, int] = {}
    _assign_lines((), sorted(probs), lines, count())
    nodes: dict[RankPath, dict[str, Any]] = {}
    for path in sorted(probs):  # parents before their children
        nodes[path] = {
            "parent": nodes[path[:-1]] if path else None,
            "kind": "chosen" if path in ((), *chosen) else "next",
            "x": _COLUMN * len(path) + 2,
            "y": _LINE * lines[path] + 3,
            "label": f"{100 * probs[path]:.0f} %" if path else "token",
        }
    likely = ", ".join(f"{100 * probs[path]:.0f} %" for path in chosen)
    title = f"Tree of {len(chosen)} drafts, accepted with probabilities {likely}" if likely else "No tree pays here"
    size = {"width": _COLUMN * (1 + max(map(len, probs))) - 20, "height": _LINE * (1 + max(lines.values()))}
    return Markup(template("tree.svg.j2").render(title=title, nodes=nodes.values(), **size))


def _assign_lines(path: RankPath, paths: Sequence[RankPath], lines: dict[RankPath, int], unused: count[int]) -> None:
    """Give a node the line of its first child, or a new line if it has none, after doing so for all nodes below it."""
    children = [child for child in paths if len(child) == len(path) + 1 and child[:-1] == path]
    for child in children:
        _assign_lines(child, paths, lines, unused)
    lines[path] = lines[children[0]] if children else next(unused)


def tree_words(tuned: Mapping[str, Any]) -> str:
    """Explain the drawing of the tree."""
    if not tuned["chosen"]:
        return "At its costs none pays here."
    if tuned["tree"] != "dynamic":
        return "Solid: drafted in every round. Dashed: the next candidates."
    return "Solid: the best fixed tree. A round drafts the nodes that pay by their own probabilities, more or fewer."


def what_if(tuned: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of whatif.js, and the initial values of its sliders."""
    chosen = tuned["nodes"][: tuned["chosen"]]
    start = {
        "depth": max((len(path) for path, _ in chosen), default=1),
        "nodes": len(chosen) + 1,
        "first": round(100 * tuned["acceptance"][0][0]),
        "growth": 100,
    }
    rows = settings.get("batch_size", 1)
    return {"acceptance": tuned["acceptance"], "costs": tuned["costs"], "start": start, "rows": rows}


def settings_rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = {name: value for name, value in results["settings"].items() if name != "heads"}
    for name in rows.keys() & {"methods", "compare", "drafters"}:
        rows[name] = list(map(label_of, rows[name] or ()))
    rows |= results["environment"] | {"date": format_moment(results["environment"]["date"])}
    return [(name.replace("_", " "), labels.cell(value)) for name, value in rows.items()]


# -- sentences -------------------------------------------------------------------------------------------------------


def tested_name(results: Mapping[str, Any]) -> str:
    """Name the tested drafter.

    >>> tested_name({"summary": {"drafter": "ngram"}})
    'n-gram'
    """
    drafter: str = results["summary"]["drafter"]
    return LABELS[HEADS].name if drafter == HEADS else label_of(drafter)


def failures(results: Mapping[str, Any]) -> list[str]:
    return [
        f"{label_of(row['name'])}: a drafter failed ({row['drafter_error']}); decoding went on without it."
        for row in results["compare"]
        if row["drafter_error"]
    ]


def remarks(results: Mapping[str, Any]) -> list[str]:
    """List the methods that drafted nothing for some prompts, and warn of slower plain steps than in tuning.

    >>> remarks({"compare": [{"name": "heads", "undrafted_prompts": 2}], "per_prompt": [1, 2, 3], "settings": {}})
    ['heads: nothing was drafted for 2 of 3 prompts, where plain decoding was expected to be faster.']
    """
    sentences = [
        f"{label_of(row['name'])}: nothing was drafted for {row['undrafted_prompts']} of {len(results['per_prompt'])} "
        "prompts, where plain decoding was expected to be faster."
        for row in results["compare"]
        if row.get("undrafted_prompts")
    ]
    rows = results.get("contexts", ())
    sentences += [f"Prompts of {row['prompt_tokens']} tokens: {row['left_out']}" for row in rows if row["left_out"]]
    settings, tuned = results["settings"], results.get("tuned")
    plain = next((row.get("round_ms") for row in results["compare"] if row["name"] == PLAIN), None)
    if plain and tuned and settings.get("batch_size", 1) == 1 and settings.get("temperature", 0) == 0:
        plain_ms, tuned_ms = sum(plain.values()), tuned["costs"]["verify_ms"][0]
        if plain_ms >= _SLOWER * tuned_ms:
            sentences.append(
                f"Plain steps took {plain_ms:.1f} ms here, and {tuned_ms:.1f} when costs were measured (other work, "
                "other cores, or long texts): on an idle machine the speed-ups may differ."
            )
    return sentences


def fewer(results: Mapping[str, Any]) -> str:
    """Name the methods that skipped some prompts, in a sentence; empty without any.

    >>> fewer({"compare": [{"name": "plain", "prompts": 8}, {"name": "ngram", "prompts": 2}], "per_prompt": [0] * 8})
    'n-gram: 2 of the 8 prompts, evenly spaced; ratios to it are over these.'
    """
    prompts = len(results["per_prompt"])
    rows = [row for row in results["compare"] if row["prompts"] < prompts]
    if not rows:
        return ""
    names, it = " and ".join(label_of(row["name"]) for row in rows), "them" if len(rows) > 1 else "it"
    return f"{names}: {rows[0]['prompts']} of the {prompts} prompts, evenly spaced; ratios to {it} are over these."


def nothing_drafted(figures: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    return figures.get("undrafted_prompts") == len(results["per_prompt"])


def over_plain(row: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    return "nothing drafted" if nothing_drafted(row, results) else labels.speedup_text(row["speedup_vs_plain"])


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """Say of the tested drafter, for each baseline, whether it is faster, slower or neither; and first, of the default
    drafter if it is another, against the plain loop only."""
    summary, key = results["summary"], LABELS[PLAIN].speedup
    sentences = [_verdict(summary, name, results) for name in BASELINES if summary[name]]
    for row in results.get("compare", ()):
        if row["name"] == HEADS_NGRAM != summary["drafter"] and row[key]:
            drafters = [f"{LABELS[HEADS_NGRAM].name} (the default)", *[tested_name(results)] * len(sentences)]
            pairs = zip(drafters, [_verdict(row, key, results), *sentences], strict=True)
            sentences = [f"With {drafter}: {sentence[:1].lower()}{sentence[1:]}" for drafter, sentence in pairs]
    return sentences


def _verdict(figures: Mapping[str, Any], key: str, results: Mapping[str, Any]) -> str:
    ratio, name = figures[key], BASELINES[key].name
    interval = f"{ratio['mean']:.2f}x (95 % interval {ratio['low'] or 0:.2f} to {ratio['high'] or 0:.2f})"
    if key == LABELS[PLAIN].speedup and nothing_drafted(figures, results):
        compared = f"the ratio of {ratio['mean']:.2f}x compares plain rounds with plain rounds"
        return f"Nothing was drafted, because {name} was expected to be faster: {compared}."
    if ratio["low"] is None:
        return f"{ratio['mean']:.2f}x the speed of {name}, on too few prompts for an interval."
    if ratio["low"] > 1:
        return f"Faster than {name}, {interval}."
    if ratio["high"] < 1:
        return f"Slower than {name}, {interval}."
    return f"Not clearly faster or slower than {name}, {interval}."


def target_remarks(results: Mapping[str, Any]) -> list[str]:
    """List remarks, in sentences, on a target that differs from the published model.

    >>> target_remarks({"settings": {"target": "tiny"}})
    []
    >>> target_remarks({"settings": {"target": "tiny in int8", "quantization": "int8"}})
    ["The target's linear layers are in int8: the speed-ups are against its own plain loop, and the text is its own."]
    """
    settings = results["settings"]
    remarks, comparison = [], "the speed-ups are against its own plain loop, and the text is its own"
    if bits := settings.get("quantization"):
        remarks.append(f"The target's linear layers are in {bits}: {comparison}.")
    if settings.get("adapter"):
        remarks.append(f"The target is the adapted model, {settings['target']}: {comparison}, not the base model's.")
    return remarks


def divergence_sentence(results: Mapping[str, Any]) -> str:
    judged = results["summary"]["divergences"]
    prompts, differ = judged["prompts"], judged["count"]
    if not prompts:
        return "Texts were not compared: sampled ones differ from run to run."
    if not differ:
        return f"Same text as without drafts: {judged['tokens_compared']} tokens of {prompts} prompts, none differs."
    same = f"Same text as without drafts on {prompts - differ} of {prompts} prompts"
    if results["environment"].get("exact") == "bits":
        return f"{same}, although all bits should be the same: look for a fault."
    if judged["unexplained"] is None:
        return f"{same}; the engine may round differently with drafts, and the reasons were not looked for."
    limit, largest = judged["margin_limit"], judged["largest_margin"]
    margins = "" if limit is None or largest is None else f" (largest margin {largest:.3g}, limit {limit:.3g})"
    if not judged["unexplained"]:
        return f"{same}; rounding explains the other {differ}{margins}."
    unexplained = f"rounding does not explain {judged['unexplained']} of the other {differ}{margins}"
    return f"{same}; {unexplained}: look for a fault."
