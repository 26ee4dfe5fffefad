"""Model cards: description, usage and measured figures only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from headstart.eval.labels import BASELINES, HEADS_NGRAM, LABELS, PLAIN, acceptance, accepted, temperature_of
from headstart.heads.exchange.published import Published
from headstart.hub.engine_tuning import EngineTuning, engine_rows, read_engine_tunings, setting_of
from headstart.hub.target_facts import TargetFacts, kind_of
from headstart.model.loading import PACKAGED
from headstart.support.files import format_bytes, read_json, write_text
from headstart.support.provenance import origin
from headstart.support.terminal import format_moment
from headstart.tree.tree import TreeShape

LICENSES = {"smollm2-135m": "apache-2.0"}
"""Licences of the packaged targets: heads that start from a target's LM head are derived works."""
TARGET_LICENSE = "license-of-the-target-model"
ENGINE_FILES = ("README.md", "config.json", "heads.gguf", "model.safetensors")
"""Files of a folder in engine formats."""
ENGINE_MARK = "<!-- written by headstart export -->"
"""Marks the card of a folder that an export may overwrite."""
_ENGINES_SECTION = re.compile(r"^## In serving engines\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def write_card(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write README.md of an exported folder; called again to add later figures.

    `facts` may have "measurements", a list of {"name": prompts, "results": content of an eval's results.json}, and
    "training", {label: value} rows.
    """
    config = read_json(folder / "config.json")
    spec = config["target"]["spec"]
    text = _render(
        "README.md.j2",
        read_engine_tunings(folder),
        metadata=_metadata(spec, "custom_generate", config["heads"]["family"]) | {"library_name": "headstart"},
        target=config["target"],
        hub_id=spec if is_hub_id(spec) else None,
        loadable=spec in PACKAGED or is_hub_id(spec),
        packaged=spec in PACKAGED,
        heads=config["heads"],
        version=config["headstart_version"],
        origin=origin(),
        tree=TreeShape.from_paths(read_json(folder / "tree.json")["paths"]),
        untuned=is_untuned(folder),
        weight_bytes=format_bytes((folder / "heads.safetensors").stat().st_size),
        measurements=[
            {"name": entry["name"], "setting": _setting(entry["results"]), "rows": _rows(entry["results"])}
            for entry in facts.get("measurements", ())
        ],
        training=facts.get("training", {}),
    )
    write_text(folder / "README.md", text)


def is_untuned(folder: Path) -> bool:
    """Whether the heads of a folder draft an untuned chain."""
    return not (read_json(folder / "calibration.json").get("settings") or {}).get("conditions")


def add_engine_figures(folder: Path) -> None:
    """Replace the measurements in serving engines in a folder's card."""
    section = _render("engines.md.j2", read_engine_tunings(folder))
    text = _ENGINES_SECTION.sub("", (folder / "README.md").read_text(encoding="utf-8"))
    before, heading, after = text.partition("## Training\n")
    write_text(folder / "README.md", f"{before}{section}{heading}{after}" if heading else f"{text}\n{section}")


def is_engine_folder(folder: Path) -> bool:
    card = folder / "README.md"
    return card.is_file() and ENGINE_MARK in card.read_text(encoding="utf-8", errors="replace")


def write_engine_card(
    folder: Path,
    published: Published,
    facts: TargetFacts,
    commands: Mapping[str, Sequence[str]],
    measured: Mapping[str, EngineTuning],
) -> None:
    """Write README.md of an engine export; `commands` are command lines that serve from a folder "HEADS"."""
    rows = {
        "target": f"{facts.name}, fingerprint {facts.fingerprint}",
        "arrangement": kind_of(published),
        "trained to draft": f"{published.steps} tokens in a row",
        "draft vocabulary": f"{published.draft_width} of {published.vocab_size} tokens",
    }
    if not measured:
        rows["drafts per round"] = "the default: `headstart tune HEADS --engine NAME` finds the best number"
    if published.block_size:
        rows["block"] = f"{published.block_size} inputs, the mask token is {published.mask_token_id}"
    if published.aux_layers:
        rows["reads the layers"] = ", ".join(map(str, published.aux_layers)) + " (transformers' hidden_states)"
    text = _render(
        "engine.md.j2",
        measured,
        metadata=_metadata(facts.spec, str(published.layout), *sorted(commands)),
        mark=ENGINE_MARK,
        name=facts.name,
        kind=kind_of(published),
        hub_id=facts.spec if is_hub_id(facts.spec) else None,
        variables=facts.chat_template_kwargs,
        commands={engine: shlex.join(words) for engine, words in commands.items()},
        plain_is_faster=[name for name, tuning in measured.items() if name in commands and not tuning.drafts],
        rows=rows,
    )
    write_text(folder / "README.md", text)


def _metadata(spec: str, *tags: str) -> dict[str, Any]:
    """Build the YAML metadata for the Hub, with the licence of a packaged target and the id of a target on the Hub."""
    return {
        **({"license": LICENSES[spec]} if spec in LICENSES else {"license": "other", "license_name": TARGET_LICENSE}),
        **({"base_model": spec, "base_model_relation": "adapter"} if is_hub_id(spec) else {}),
        "pipeline_tag": "text-generation",
        "tags": ["headstart", "speculative-decoding", "draft-heads", *tags],
    }


def is_hub_id(spec: str) -> bool:
    """Whether a target spec names a model on the Hub rather than a package, a file or a folder."""
    return (
        spec not in PACKAGED
        and re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", spec) is not None
        and not spec.endswith(".gguf")
        and not Path(spec).exists()
    )


def _setting(results: Mapping[str, Any]) -> str:
    settings, machine = results.get("settings", {}), results.get("environment", {})
    temperature, date = settings.get("temperature"), machine.get("date")
    parts = [
        ("{} prompts", settings.get("questions")),
        ("at most {} new tokens each", settings.get("max_new_tokens")),
        ("{}", None if temperature is None else temperature_of(temperature)),
        ("batch size {}", settings.get("batch_size")),
        ("{}", machine.get("dtype")),
        ("{} threads", machine.get("threads")),
        ("on one {}", machine.get("gpu")),
        ("on {}", machine.get("cpu") if machine.get("gpu") is None else None),
        ("{}", machine.get("engine")),
        ("torch {}", machine.get("torch")),
        ("transformers {}", machine.get("transformers")),
        ("headstart {}", machine.get("headstart")),
        ("{}", format_moment(date) if date else None),
    ]
    return ", ".join(text.format(value) for text, value in parts if value is not None)


def _rows(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    summary = results["summary"]
    rows = [
        (f"tokens/s, {LABELS[method].name if method in LABELS else method}", f"{speed:.1f}")
        for method, speed in (summary.get("tokens_per_second") or {}).items()
        if speed is not None
    ]
    for key, other in BASELINES.items():
        if (ratio := summary.get(key)) is not None:
            rows.append((f"speed-up over {other.name}", _interval(ratio)))
    for row in results.get("compare") or ():
        if row["name"] == HEADS_NGRAM and (speed := row["tokens_per_second"]) is not None:
            label = LABELS[HEADS_NGRAM].name
            rows.append((f"tokens/s, {label} (the default drafter)", f"{speed:.1f}"))
            rows.append((f"speed-up of {label} over {LABELS[PLAIN].name}", _interval(row["speedup_vs_plain"])))
    if summary.get("tokens_per_round") is not None:
        rows.append(("tokens per forward of the target (τ)", f"{summary['tokens_per_round']:.2f}"))
    for position, pair in enumerate(accepted(summary), start=1):
        rows.append((f"draft {position} accepted, given the earlier drafts were", acceptance(*pair)))
    divergences = summary.get("divergences")
    if divergences and divergences.get("prompts"):
        label = f"prompts answered differently than without drafts, of {divergences['prompts']}"
        rows.append((label, f"{divergences['count']}, {divergences['unexplained']} not explained by rounding"))
    return rows


def _interval(ratio: Mapping[str, float | None]) -> str:
    """Format a speed-up with its interval, which is missing for very few prompts."""
    interval = "" if ratio["low"] is None else f" (95 % interval {ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{ratio['mean']:.2f}x{interval}"


def _render(template: str, measured: Mapping[str, EngineTuning], metadata: Any = None, **variables: Any) -> str:
    """Render a template with YAML metadata and measurements in serving engines."""
    environment = Environment(  # Markdown, not HTML: escapes only the bars of tables
        loader=PackageLoader("headstart.hub"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = lambda value: " ".join(str(value).split()).replace("|", "\\|")
    return environment.get_template(template).render(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        engine_rows=engine_rows(measured),
        engine_setting=setting_of(measured),
        **variables,
    )
