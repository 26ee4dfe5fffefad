"""The model card of heads in a format of engines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml

from headstart.heads.exchange.published import Published
from headstart.hub.card import environment, is_hub_id, license_and_base
from headstart.hub.engines.base import Format, TargetFacts, kind_of
from headstart.hub.measured import EngineTuning, engine_rows, setting_of, tuned_drafts
from headstart.support.files import write_text

MARK = "<!-- written by headstart export -->"
"""By which a folder is known as one that may be written anew."""
ENGINE_FILES = ("README.md", "config.json", "heads.gguf", "model.safetensors")
"""All that a folder of formats of engines holds."""


def is_engine_folder(folder: Path) -> bool:
    """Whether `export` wrote a folder for engines."""
    card = folder / "README.md"
    return card.is_file() and MARK in card.read_text(encoding="utf-8", errors="replace")


def write_engine_card(
    folder: Path,
    formats: Sequence[Format],
    published: Published,
    facts: TargetFacts,
    measured: dict[str, EngineTuning],
) -> None:
    """Write README.md beside the files of some formats: what the heads are, and how each engine serves them."""
    drafts = tuned_drafts(measured)
    hub_id = facts.spec if facts.spec and is_hub_id(facts.spec) else None
    public = TargetFacts(**{**vars(facts), "folder": hub_id or "TARGET", "gguf": None})
    commands = {
        engine: shlex.join(words)
        for format in formats
        for engine, words in format.commands("HEADS", published, public, drafts).items()
    }
    engines = sorted(commands)
    metadata = {
        **license_and_base(facts.spec),
        "pipeline_tag": "text-generation",
        "tags": ["headstart", "speculative-decoding", "draft-heads", str(published.layout), *engines],
    }
    rows = {
        "target": f"{facts.name}, fingerprint {facts.fingerprint}",
        "arrangement": kind_of(published),
        "trained to draft": f"{published.steps} tokens in a row",
        "draft vocabulary": f"{published.draft_width} of {published.vocab_size} tokens",
    }
    if published.block_size:
        rows["block"] = f"{published.block_size} inputs, the mask token is {published.mask_token_id}"
    if published.aux_layers:
        rows["reads the layers"] = ", ".join(map(str, published.aux_layers)) + " (transformers' hidden_states)"
    write_text(
        folder / "README.md",
        environment()
        .get_template("engine.md.j2")
        .render(
            metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
            mark=MARK,
            name=facts.name,
            kind=kind_of(published),
            hub_id=hub_id,
            commands=commands,
            plain_is_faster=[name for name, tuning in measured.items() if name in engines and not tuning.drafts],
            engine_rows=engine_rows(measured),
            engine_setting=setting_of(measured),
            rows=rows,
        ),
    )
