"""The audit's report: audit.json, Markdown, and a table on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from headstart.eval.enumeration import POWER
from headstart.eval.labels import label_of, number
from headstart.eval.report import settings_rows, template
from headstart.support.files import write_json, write_text
from headstart.support.terminal import tell


def write_audit(results: Mapping[str, Any], out: Path) -> None:
    """Write audit.json and audit.md atomically into the folder `out`."""
    page = template("audit_engine.md.j2" if "engine" in results else "audit.md.j2")
    text = page.render(verdict=verdict(results), settings_rows=settings_rows(results), **results)
    write_json(out / "audit.json", results)
    write_text(out / "audit.md", text)


def verdict(results: Mapping[str, Any]) -> str:
    if engine := results.get("engine"):
        return _engine_verdict(engine, results["problems"])
    tokens = sum(row["tokens"] for row in results["greedy"])
    samples = sum(row["samples"] for row in results["sampling"])
    if results["clean"]:
        compared = f"{tokens} greedy tokens and {samples} samples compared, and nothing differs from plain decoding"
        return f"Clean: {compared}. {_detectable_faults(results)}"
    checks = len(results["greedy"]) + len(results["sampling"]) + (results["environment"]["exact"] == "bits")
    return f"Not clean: {len(results['problems'])} of {checks} checks failed."


def _engine_verdict(engine: Mapping[str, Any], problems: Sequence[str]) -> str:
    checks = [*engine["tokens"], *engine["acceptance"], engine["prompts"]]
    if problems:
        return f"Not clean: {len(problems)} of {len(checks)} checks failed."
    tokens, explained = (sum(row[name] for row in engine["tokens"]) for name in ("tokens", "different"))
    rounding = f" ({explained} within rounding)" if explained else ""
    return (
        f"Clean: {tokens} greedy tokens{rounding} are the target's, and {engine['name']} accepts the expected drafts."
    )


def _detectable_faults(results: Mapping[str, Any]) -> str:
    """State the smallest faults that the audit would have detected."""
    parts, sampled = list[str](), results["sampling"]
    if tokens := min((row["tokens"] for row in results["greedy"]), default=0):
        parts.append(f"a drafter that gets one token in {max(1, int(1 / (1 - (1 - POWER) ** (1 / tokens))))} wrong")
    if detectable := [row["least_seen"] for row in sampled if row["least_seen"] is not None]:
        parts.append(f"a sampling distribution off by {max(detectable):.2f} or more")
    text = f"In {100 * POWER:.0f} % of cases this finds {', and '.join(parts)}." if parts else ""
    if certain := len(sampled) - len(detectable):
        nearly = f" In {certain} of {len(sampled)} sampling checks the text is nearly certain"
        text += f"{nearly}, so no deviation of frequencies would show."
    return text


def show_audit(results: Mapping[str, Any], console: Console) -> None:
    """Print one line per check, then the verdict and the problems."""
    settings = results["settings"]
    version = f" ({settings['heads_version']})" if settings["heads_version"] else ""
    columns = "check", Column("compared", justify="right"), Column("found", justify="right"), "verdict"
    where = f" in {results['engine']['name']}" if "engine" in results else ""
    table = Table(*columns, title=f"Audit of {settings['heads_name']}{version}{where}", title_justify="left")
    for row in _lines(results):
        table.add_row(*row)
    console.print(table)
    console.print(verdict(results), style="green" if results["clean"] else "bold red", highlight=False, markup=False)
    for problem in results["problems"]:
        tell(console, problem)


def _lines(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield rows of check, comparison, result, verdict."""
    if engine := results.get("engine"):
        yield from _engine_lines(engine)
        return
    for row in results["greedy"]:
        yield (
            f"greedy, {label_of(row['drafter'])}, batch {row['batch_size']}",
            f"{row['tokens']} tokens",
            f"{row['different_tokens']} differ, {row['drafts_accepted']} drafts accepted",
            _mark(row["problem"] is None),
        )
    bits = results["bits"]
    exact = results["environment"]["exact"] == "bits"
    mark = _mark(not bits["differ"]) if exact else "[dim]not promised[/]"
    yield "logits of trees and of single steps, bit by bit", f"{bits['rows']} rows", f"{bits['differ']} differ", mark
    for row in results["sampling"]:
        yield (
            f"{row['verifier']}, temperature {row['temperature']:g}, prompt {row['prompt']}",
            f"{row['samples']} samples",
            f"p {row['p_value']:.2g}, off by {row['total_variation']:.3f} (noise {row['expected_variation']:.3f}), "
            f"detectable from {number(row['least_seen'], 3)}",
            _mark(row["problem"] is None) if row["problem"] or row["cells"] > 1 else "[dim]not testable[/]",
        )


def _engine_lines(engine: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for row in engine["tokens"]:
        found = f"{row['different']} differ, {row['unexplained']} not by rounding"
        yield f"greedy, {row['requests']} at a time", f"{row['tokens']} tokens", found, _mark(row["problem"] is None)
    for row in engine["acceptance"]:
        expected = row.get("expected_tokens_per_round")
        found = f"{row['tokens_per_round']:.2f} tokens per round, {number(expected, 2)} expected"
        compared = f"{row['rounds']} rounds of {row['drafts']} drafts"
        yield f"acceptance, {row['requests']} at a time", compared, found, _mark(row["problem"] is None)
    row = engine["prompts"]
    mark = _mark(row["problem"] is None) if row["prompts"] else "[dim]not reported[/]"
    yield "chat template", f"{row['prompts']} prompts", f"{row['different']} differ", mark


def _mark(clean: bool) -> str:
    return "[green]clean[/]" if clean else "[bold red]not clean[/]"
