"""The model card: what the heads are, how to use them, and what was measured; no figure that nobody measured."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from headstart.errors import nearest
from headstart.eval.labels import BASELINES, LABELS
from headstart.hub.measured import engine_rows, read_engine_tunings, setting_of
from headstart.support.files import format_bytes, read_json, write_text
from headstart.target.loading import PACKAGED
from headstart.tree.tree import TreeShape

FACTS = ("measurements", "training", "license", "limits")
LICENSES = {"smollm2-135m": "apache-2.0"}
"""Licences of the packaged targets. Heads that start from a target's LM head are derived from it."""
_ENGINES_SECTION = re.compile(r"^## In serving engines\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write README.md beside the other files of an exported folder, also to add figures measured later.

    Args:
        folder: with config.json, tree.json and heads.safetensors.
        facts: all optional.
            measurements: list of {"name": what was asked, "results": content of an eval's results.json}.
            training: {label: value} rows about the training data and the training.
            license: a licence by its Hub identifier; by default the packaged target's.
            limits: list of further sentences about what the heads are not good for.

    Raises:
        ValueError: a fact with an unknown name.
    """
    for name in facts:
        if name not in FACTS:
            raise ValueError(f"unknown fact {name!r} for the model card. {nearest(name, FACTS)}")
    config = read_json(folder / "config.json")
    spec = config["target"]["spec"]
    write_text(
        folder / "README.md",
        environment()
        .get_template("README.md.j2")
        .render(
            metadata=yaml.safe_dump(metadata(config, facts), sort_keys=False, allow_unicode=True),
            target=config["target"],
            hub_id=spec if is_hub_id(spec) else None,
            loadable=spec in PACKAGED or is_hub_id(spec),
            heads=config["heads"],
            version=config["headstart_version"],
            tree=TreeShape.from_paths(read_json(folder / "tree.json")["paths"]),
            weight_bytes=format_bytes((folder / "heads.safetensors").stat().st_size),
            measurements=[
                {"name": entry["name"], "setting": _setting(entry["results"]), "rows": _rows(entry["results"])}
                for entry in facts.get("measurements", ())
            ],
            training=facts.get("training", {}),
            limits=facts.get("limits", ()),
            **engine_figures(folder),
        ),
    )


def engine_figures(folder: Path) -> dict[str, Any]:
    """What the cards' templates take of what was measured in serving engines."""
    measured = read_engine_tunings(folder)
    return {"engine_rows": engine_rows(measured), "engine_setting": setting_of(measured)}


def add_engine_figures(folder: Path) -> None:
    """Write what was measured in serving engines into a folder's card, in place of what it said of them before."""
    section = environment().get_template("engines.md.j2").render(**engine_figures(folder))
    text = _ENGINES_SECTION.sub("", (folder / "README.md").read_text(encoding="utf-8"))
    before, heading, after = text.partition("## Training\n")
    write_text(folder / "README.md", f"{before}{section}{heading}{after}" if heading else f"{text}\n{section}")


def metadata(config: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The YAML block that the Hub reads."""
    spec = config["target"]["spec"]
    values: dict[str, Any] = {}
    license_id = facts.get("license") or LICENSES.get(spec)
    values["license"] = license_id or "other"
    if license_id is None:
        values["license_name"] = "license-of-the-target-model"
    if is_hub_id(spec):
        values["base_model"] = spec
        values["base_model_relation"] = "adapter"
    values["library_name"] = "headstart"
    values["pipeline_tag"] = "text-generation"
    family = str(config["heads"]["family"])
    values["tags"] = ["headstart", "speculative-decoding", "draft-heads", "custom_generate", family]
    return values


def is_hub_id(spec: str) -> bool:
    """Whether a target spec names a model on the Hub rather than a package, a file or a folder."""
    return (
        spec not in PACKAGED
        and re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", spec) is not None
        and not spec.endswith(".gguf")
        and not Path(spec).exists()
    )


def _setting(results: Mapping[str, Any]) -> str:
    """One sentence with everything a figure depends on; what was not recorded is left out."""
    settings, machine = results.get("settings", {}), results.get("environment", {})
    parts = [
        _part(settings, "questions", "{} prompts"),
        _part(settings, "max_new_tokens", "at most {} new tokens each"),
        _part(settings, "temperature", "temperature {}"),
        _part(settings, "batch_size", "batch size {}"),
        _part(machine, "dtype", "{}"),
        _part(machine, "threads", "{} threads"),
        _part(machine, "gpu", "on one {}") or _part(machine, "cpu", "on {}"),
        _part(machine, "torch", "torch {}"),
        _part(machine, "transformers", "transformers {}"),
        _part(machine, "headstart", "headstart {}"),
        _part(machine, "date", "{}"),
    ]
    return ", ".join(part for part in parts if part)


def _part(values: Mapping[str, Any], key: str, text: str) -> str:
    value = values.get(key)
    return "" if value is None else text.format(value)


def _rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(figure, value) of everything that was measured."""
    summary = results["summary"]
    rows: list[tuple[str, str]] = []
    for method, speed in (summary.get("tokens_per_second") or {}).items():
        if speed is not None:
            rows.append((f"tokens/s, {LABELS[method].name if method in LABELS else method}", f"{speed:.1f}"))
    for key, other in BASELINES.items():
        if (ratio := summary.get(key)) is not None:
            value = f"{ratio['mean']:.2f}x"
            if ratio["low"] is not None:  # one prompt has no interval
                value += f" (95 % interval {ratio['low']:.2f} to {ratio['high']:.2f})"
            rows.append((f"speed-up over {other.name}", value))
    if summary.get("tokens_per_round") is not None:
        rows.append(("tokens per forward of the target (τ)", f"{summary['tokens_per_round']:.2f}"))
    for position, share in enumerate(summary.get("acceptance_by_position") or (), start=1):
        if share is not None:
            rows.append((f"draft {position} accepted, when those before it were", f"{100 * share:.0f} %"))
    found = summary.get("divergences")
    if found and found.get("prompts"):
        rows.append(
            (
                f"prompts answered in other words than without drafts, of {found['prompts']}",
                f"{found['count']}, of which {found['unexplained']} not explained by rounding",
            )
        )
    return rows


def environment() -> Environment:
    """Templates of this room."""
    environment = Environment(  # Markdown, not HTML: nothing to escape but the bars of its tables
        loader=PackageLoader("headstart.hub"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda value: " ".join(str(value).split()).replace("|", "\\|")
    return environment
