"""What identifies a set of conversations shared between runs, and the pinning of its datasets to commits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.data.prompts.chat import has_template
from headstart.data.prompts.sources import find_origin
from headstart.heads.settings import Role
from headstart.model.model import Target
from headstart.recipes.sections import DataSection, PromptSource

VERSION = 8
"""Bumped when the same settings produce different conversations."""


def identity(target: Target, data: DataSection) -> dict[str, Any]:
    """Return the identity: target, chat template, prompt sources and sampling, as JSON values."""
    # Sources are recorded by their content, not by name. Settings without effect are left out as well.
    left_out = {"prompts", "split", "revision", "exclude"} | (set() if data.self_share else {"seed_prompts"})
    left_out |= (set() if data.sources else {"regenerate"}) | ({"writing_dtype"} if data.server else set())
    left_out |= {"prefix_tokens"} if has_template(target.tokenizer) else set()
    template = json.dumps(getattr(target.tokenizer, "chat_template", None), sort_keys=True)
    sources = _sources(data)
    total = sum(source.weight for source in sources)
    return {
        "version": VERSION,
        "target": target.identity().fingerprint,
        "settings": target.settings,
        "dtype": target.dtype_name,
        "vocabulary": target.vocabulary,
        "ends": sorted(target.end_tokens),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        **{name: value for name, value in data.of_role(Role.CONTENT).items() if name not in left_out},
        "server": data.server_numerics or bool(data.server),  # servers round differently
        "prompts": [{**_origin(source), "share": round(source.weight / total, 6)} for source in sources],
        "exclude": sorted(str(find_origin(file).content) for file in data.exclude),
    }


def _sources(data: DataSection) -> tuple[PromptSource, ...]:
    """Return all sources of prompts, "self" included, each with its split."""
    if isinstance(data.prompts, str):
        return (PromptSource(source=data.prompts, split=data.split, revision=data.revision),)
    return tuple(source.model_copy(update={"split": source.split or data.split}) for source in data.prompts)


def _origin(source: PromptSource) -> dict[str, Any]:
    if source.source == "self":
        return {"origin": "self", "commit": None}
    origin = find_origin(source.source, source.revision)
    # The configuration: recorded for local folders only (folder:name); a Hub origin already contains it.
    has_none = origin.content is None or Path(source.source).expanduser().exists()
    configuration = "" if has_none else source.source.partition(":")[2]
    return {
        "origin": origin.identity,
        "commit": origin.commit,
        "configuration": configuration,
        "split": source.split,
    }


def pin_as_begun(data: DataSection, begun: Mapping[str, Any]) -> DataSection:
    """Pin sources without a revision to the Hub commits of `begun`.

    `begun` is the identity this run recorded when it started; {} for a new run.
    """
    sources, earlier = _sources(data), begun.get("prompts")
    if not isinstance(earlier, list) or len(earlier) != len(sources):
        return data
    commits = [
        known["commit"] if known["origin"] == f"{source.source} at {known['commit']}" else None
        for source, known in zip(sources, earlier, strict=True)
    ]
    return _with_revisions(data, [source.revision or commit for source, commit in zip(sources, commits, strict=True)])


def pin_to(data: DataSection, identity: Mapping[str, Any]) -> DataSection:
    """Return the settings pinned to the commits of an identity."""
    return _with_revisions(data, [known["commit"] for known in identity["prompts"]])


def _with_revisions(data: DataSection, revisions: list[str | None]) -> DataSection:
    pairs = zip(_sources(data), revisions, strict=True)
    prompts = tuple(source.model_copy(update={"revision": revision}) for source, revision in pairs)
    return data.model_copy(update={"prompts": prompts, "revision": None})


def requested_revisions(prompts: Any, revision: str | None) -> list[tuple[str, str | None]]:
    """Return the requested revision of each source; None is the newest."""
    return [(prompts, revision)] if isinstance(prompts, str) else [(one["source"], one["revision"]) for one in prompts]
