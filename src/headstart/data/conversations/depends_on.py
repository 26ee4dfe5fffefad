"""Identity of a set of conversations, which runs share, and the dataset commits it pins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.data.prompts.chat import has_template
from headstart.data.prompts.sources import find_origin
from headstart.model.model import Target
from headstart.recipes.sections import DataSection, PromptSource

AMOUNTS = {
    *("conversations", "heldout", "validation", "minutes", "batch_size"),
    *("cache_gigabytes", "states", "states_dtype"),
}
"""Data settings that set the amount, not the content."""
OF_SERVERS = {"server", "server_requests"}
"""Server settings; the identity only records that a server wrote the text, as its numerics differ."""
VERSION = 8
"""Bumped when the same settings produce different conversations."""
_CONDITIONAL = {"prompts", "split", "revision", "prefix_tokens", "chat_template_kwargs", "exclude", "writing_dtype"}
"""Settings that the identity records in another form, or only where they apply."""


def identity(target: Target, data: DataSection) -> dict[str, Any]:
    """Return the identity: target, chat template, prompt sources and sampling, as JSON values."""
    unneeded = AMOUNTS | OF_SERVERS | _CONDITIONAL
    unneeded |= (set() if data.self_share else {"seed_prompts"}) | (set() if data.sources else {"regenerate"})
    template = json.dumps(getattr(target.tokenizer, "chat_template", None), sort_keys=True)
    named = _named(data)
    total = sum(source.weight for source in named)
    known = {
        "version": VERSION,
        "target": target.identity().fingerprint,
        "settings": target.settings,
        "dtype": target.dtype_name,
        "vocabulary": target.vocabulary,
        "ends": sorted(target.end_tokens),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        **{name: value for name, value in data.model_dump(mode="json").items() if name not in unneeded},
        "prompts": [{**_origin(source), "share": round(source.weight / total, 6)} for source in named],
    }
    if not has_template(target.tokenizer):
        known["prefix_tokens"] = data.prefix_tokens
    if data.chat_template_kwargs:
        known["chat_template_kwargs"] = data.chat_template_kwargs
    if data.exclude:
        known["exclude"] = sorted(str(find_origin(file).content) for file in data.exclude)
    if data.server:
        known["server"] = True
    if data.in_int8:
        known["writing_dtype"] = "int8"
    return known


def _named(data: DataSection) -> tuple[PromptSource, ...]:
    """Return all sources of prompts, "self" included, each with its split."""
    if isinstance(data.prompts, str):
        return (PromptSource(source=data.prompts, split=data.split, revision=data.revision),)
    return tuple(source.model_copy(update={"split": source.split or data.split}) for source in data.prompts)


def _origin(source: PromptSource) -> dict[str, Any]:
    if source.source == "self":
        return {"origin": "self", "commit": None}
    origin = find_origin(source.source, source.revision)
    # Of a local `folder:config`; the name of a Hub dataset includes it.
    is_plain = origin.content is None or Path(source.source).expanduser().exists()
    configuration = "" if is_plain else source.source.partition(":")[2]
    return {
        "origin": origin.identity,
        "commit": origin.commit,
        "configuration": configuration,
        "split": source.split,
    }


def begun_at(data: DataSection, begun: Mapping[str, Any]) -> DataSection:
    """Pin sources without a revision to the Hub commits of `begun`, the identity of the run's conversations or {}."""
    named, before = _named(data), begun.get("prompts")
    if not isinstance(before, list) or len(before) != len(named):
        return data
    commits = [
        known["commit"] if known["origin"] == f"{source.source} at {known['commit']}" else None
        for source, known in zip(named, before, strict=True)
    ]
    return _at_revisions(data, [source.revision or commit for source, commit in zip(named, commits, strict=True)])


def pinned(data: DataSection, identity: Mapping[str, Any]) -> DataSection:
    """Return the settings pinned to the commits of an identity."""
    return _at_revisions(data, [known["commit"] for known in identity["prompts"]])


def _at_revisions(data: DataSection, revisions: list[str | None]) -> DataSection:
    pairs = zip(_named(data), revisions, strict=True)
    prompts = tuple(source.model_copy(update={"revision": revision}) for source, revision in pairs)
    return data.model_copy(update={"prompts": prompts, "revision": None})


def revisions(prompts: Any, revision: str | None) -> list[tuple[str, str | None]]:
    """Return the requested revision of each source; None is the newest."""
    return [(prompts, revision)] if isinstance(prompts, str) else [(one["source"], one["revision"]) for one in prompts]
