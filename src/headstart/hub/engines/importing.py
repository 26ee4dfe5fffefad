"""Published checkpoints of draft heads, as headstart heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from pydantic import ValidationError

from headstart.errors import UserError
from headstart.heads.base import DraftHead, families
from headstart.heads.exchange.published import Published
from headstart.hub.engines.base import infinite
from headstart.hub.engines.export import formats_of
from headstart.hub.engines.facts import facts_of_target
from headstart.hub.format import export_heads, refuse_other_files
from headstart.hub.pull import HUB_ID
from headstart.hub.target_facts import kind_of
from headstart.support.hub_errors import explained
from headstart.target.model import Target


def import_heads(source: str | Path, target: Target, out: Path, revision: str | None = None) -> DraftHead:
    """Write a published checkpoint as a folder of headstart heads, see `headstart.import_heads`."""
    refuse_other_files(out)
    folder = _folder(source, revision)
    published = read_checked(folder, target)
    family = next(family for family in families().values() if family.publishes is published.layout)
    try:
        heads = family.from_published(published, target)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            f"Heads of headstart cannot hold {'.'.join(map(str, first['loc']))} of this checkpoint: "
            f"{first['msg'].lower()}.",
            "Take another checkpoint, or upgrade: pip install --upgrade headstart",
        ) from None
    name = source if isinstance(source, str) and HUB_ID.fullmatch(source) else folder.name
    facts = {"training": {"imported from": str(name), "arrangement": kind_of(published)}}
    export_heads(out, heads, target, tuning=untuned(heads), facts=facts)
    return heads


def read_checked(folder: Path, target: Target) -> Published:
    """The heads of a folder; a UserError where they do not fit the target."""
    facts = facts_of_target(target)
    published = formats_of(folder)[0].read(folder, facts)
    if (published.hidden_size, published.vocab_size) != (facts.hidden_size, facts.vocab_size):
        raise UserError(
            f"The heads in {folder} are for a target of size {published.hidden_size} over {published.vocab_size} "
            f"tokens; {facts.name} has {facts.hidden_size} over {facts.vocab_size}.",
            "Name the target that they were trained on with --target.",
        )
    for problem, remedy in infinite(published):
        raise UserError(problem, remedy)
    return published


def untuned(heads: DraftHead) -> dict[str, Any]:
    """A chain as deep as the heads, with costs and acceptance that nobody measured: decoding measures costs anew."""
    steps = heads.draft_steps
    return {
        "paths": [[0] * depth for depth in range(1, steps + 1)],
        "widths": [1, steps + 1],
        "verify_ms": [1.0, 1.0],
        "draft_ms": 0.1,
        "acceptance": [[0.5] for _ in range(steps)],
        "predicted": {"tokens_per_round": 2.0, "speedup": 1.0, "tokens_per_second": 0.0},
        "chain": steps,
        "settings": {"imported": True},
    }


def _folder(source: str | Path, revision: str | None) -> Path:
    folder = Path(source).expanduser()
    if folder.exists():
        return folder
    if not isinstance(source, str) or not HUB_ID.fullmatch(source):
        raise UserError(f"No folder at {source}.", "Give a folder of draft heads, or a Hub id (user/name).")
    with explained("Cannot fetch", source, revision):
        return Path(snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.safetensors"]))
