"""The model card of heads in a format of engines."""

from __future__ import annotations

from pathlib import Path

import yaml

from headstart.files import write_text
from headstart.heads.published import Published
from headstart.hub.card import LICENSES, environment, is_hub_id
from headstart.hub.engines.base import Format, TargetFacts, drafts_of
from headstart.hub.engines.huggingface import files_of

MARK = "<!-- written by headstart export -->"
"""By which a folder is known as one that may be written anew."""


def write_engine_card(folder: Path, one: Format, published: Published, facts: TargetFacts) -> None:
    """Write README.md beside the files of a format: what the heads are, and how each engine serves them."""
    hub_id = facts.spec if facts.spec and is_hub_id(facts.spec) else None
    license_id = LICENSES.get(facts.spec)
    metadata = {"license": license_id or "other"}
    if license_id is None:
        metadata["license_name"] = "license-of-the-target-model"
    if hub_id is not None:
        metadata |= {"base_model": hub_id, "base_model_relation": "adapter"}
    metadata["pipeline_tag"] = "text-generation"
    tags = {"tags": ["headstart", "speculative-decoding", "draft-heads", str(published.layout), *one.engines]}
    public = TargetFacts(**{**vars(facts), "folder": hub_id or "TARGET", "gguf": None})
    rows = {
        "target": f"{facts.name}, fingerprint {facts.fingerprint}",
        "arrangement": files_of(published),
        "trained to draft": f"{published.steps} tokens in a row; the commands ask for {drafts_of(published)}",
        "draft vocabulary": f"{published.draft_width} of {published.vocab_size} tokens",
    }
    if published.aux_layers:
        rows["reads the layers"] = ", ".join(map(str, published.aux_layers)) + " (transformers' hidden_states)"
    write_text(
        folder / "README.md",
        environment()
        .get_template("engine.md.j2")
        .render(
            metadata=yaml.safe_dump({**metadata, **tags}, sort_keys=False, allow_unicode=True),
            mark=MARK,
            name=facts.name,
            kind=files_of(published),
            hub_id=hub_id,
            commands=one.commands("HEADS", published, public),
            rows=rows,
        ),
    )
