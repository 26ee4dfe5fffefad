"""Identity of a set of conversations, which runs share, and the dataset commits it pins."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headstart.data.prompts.chat import has_template
from headstart.data.prompts.sources import Origin, find_origin
from headstart.model.model import Target
from headstart.recipes.sections import DataSection

AMOUNTS = {
    *("conversations", "heldout", "validation", "minutes", "batch_size"),
    *("cache_gigabytes", "states", "states_dtype"),
}
"""Data settings that set the amount, not the content."""
OF_SERVERS = {"server", "server_requests"}
"""Server settings; the identity only records that a server wrote the text, as its numerics differ."""
VERSION = 7
"""Bumped when the same settings produce different conversations."""
_OF_FILES, _OF_SELF = {"split", "regenerate", "revision"}, {"seed_prompts"}
_OF_SOME = {"prefix_tokens", "chat_template_kwargs", "exclude", "writing_dtype"}
"""Settings in the identity only where they apply."""


def identity(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the identity: target, chat template, prompt sources and sampling; `settings` is the JSON data section."""
    prompts = settings["prompts"]
    self_prompted, mixed = prompts == "self", not isinstance(prompts, str)
    partly = mixed and any(source["source"] == "self" for source in prompts)
    unneeded = AMOUNTS | OF_SERVERS | _OF_SOME | (_OF_FILES if self_prompted else set() if partly else _OF_SELF)
    unneeded |= {"split"} if mixed else set()
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
        **{key: value for key, value in settings.items() if key not in unneeded},
        **({"server": True} if settings.get("server") else {}),
        "prompts": _mixture(settings) if mixed else "self" if origin is None else origin.identity,
        "configuration": "" if origin is None or origin.content is None else _configuration(prompts),
        "revision": None if origin is None else origin.commit,
        **_of_some(target, settings),
    }


def _of_some(target: Target, settings: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {} if settings["prompts"] == "self" else {"tools": True}  # prompts with tools are taken
    if not has_template(target.tokenizer):
        known["prefix_tokens"] = settings["prefix_tokens"]
    if values := settings.get("chat_template_kwargs"):
        known["chat_template_kwargs"] = values
    if settings.get("writing_dtype") == "int8" and not settings.get("server"):
        known["writing_dtype"] = "int8"
    if files := settings.get("exclude"):
        known["exclude"] = sorted(str(find_origin(file).content) for file in files)
    return known


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
