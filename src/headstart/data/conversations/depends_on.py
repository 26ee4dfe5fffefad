"""Identity of a set of conversations, which runs share, and the dataset commits it pins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.data.prompts.chat import has_template
from headstart.data.prompts.sources import Origin, find_origin
from headstart.heads.settings import Role
from headstart.model.model import Target
from headstart.recipes.sections import DataSection

VERSION = 8
"""Bumped when the same settings produce different conversations."""


def identity(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity: target, chat template, prompt sources and sampling; `settings` is the JSON data section."""
    prompts, by_server = settings["prompts"], bool(settings.get("server"))
    self_prompted, mixed = prompts == "self", not isinstance(prompts, str)
    asks_itself = self_prompted or (mixed and any(source["source"] == "self" for source in prompts))
    without_effect = {"split", "regenerate"} if self_prompted else {"split"} if mixed else set()
    without_effect |= set() if asks_itself else {"seed_prompts"}
    without_effect |= {"prefix_tokens"} if has_template(target.tokenizer) else set()
    without_effect |= {"writing_dtype"} if by_server else set()
    origin = None if self_prompted or mixed else find_origin(prompts, settings.get("revision"))
    template = json.dumps(getattr(target.tokenizer, "chat_template", None), sort_keys=True)
    return {
        "version": VERSION,
        "target": target.identity().fingerprint,
        "settings": target.settings,
        "dtype": target.dtype_name,
        "vocabulary": target.vocabulary,
        "ends": sorted(target.end_tokens),
        "template": hashlib.sha256(template.encode()).hexdigest()[:16],
        **{name: settings[name] for name in DataSection.names(Role.CONTENT) - without_effect},
        "server": by_server,  # whose numerics differ
        "prompts": _mixture(settings) if mixed else "self" if origin is None else origin.identity,
        "configuration": "" if origin is None or origin.content is None else _configuration(prompts),
        "revision": None if origin is None else origin.commit,
        "exclude": sorted(str(find_origin(file).content) for file in settings["exclude"]),
    }


def _mixture(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    total = sum(source["weight"] for source in settings["prompts"])
    identities = []
    for source in settings["prompts"]:
        own = source["source"] == "self"
        origin = Origin("self", content="written") if own else find_origin(source["source"], source["revision"])
        identities.append(
            {
                "origin": origin.identity,
                "commit": origin.commit,
                "configuration": "" if origin.content is None else _configuration(source["source"]),
                "split": source["split"] or settings["split"],
                "share": round(source["weight"] / total, 6),
            }
        )
    return identities


def _configuration(source: str) -> str:
    """Return the configuration of a `folder:config` source."""
    return "" if Path(source).expanduser().exists() else source.partition(":")[2]


def begun_at(settings: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings pinned to the Hub commits in `begun`, the identity of the run's conversations (or empty)."""
    prompts, before = settings["prompts"], begun.get("prompts")
    if isinstance(prompts, str):
        commit = begun.get("revision")
        same = settings["revision"] is None and commit and before == f"{prompts} at {commit}"
        return {**settings, "revision": commit} if same else dict(settings)
    if not isinstance(before, list) or len(before) != len(prompts):
        return dict(settings)
    pinned_sources = []
    for source, known in zip(prompts, before, strict=True):
        same = known["origin"] == f"{source['source']} at {known['commit']}"
        pinned_sources.append({**source, "revision": source["revision"] or known["commit"]} if same else source)
    return {**settings, "prompts": pinned_sources}


def revisions(prompts: Any, revision: str | None) -> list[tuple[str, str | None]]:
    """Return the requested revision of each source; None is the newest."""
    return [(prompts, revision)] if isinstance(prompts, str) else [(one["source"], one["revision"]) for one in prompts]


def pinned(data: DataSection, identity: Mapping[str, Any]) -> DataSection:
    """Return the settings pinned to the commits of an identity."""
    if isinstance(data.prompts, str):
        return data.model_copy(update={"revision": identity["revision"]})
    pairs = zip(data.prompts, identity["prompts"], strict=True)
    sources = tuple(source.model_copy(update={"revision": known["commit"]}) for source, known in pairs)
    return data.model_copy(update={"prompts": sources})
