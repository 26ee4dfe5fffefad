"""Records of stages and artifacts that earlier versions wrote, with the words and the values of this version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import UserError
from headstart.recipes.recipe import parse_heads
from headstart.support.renamed import section_now


def settings_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key, as records of stages keep them, under the names of this version."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, dot, name = key.partition(".")
        sections.setdefault(section if dot else "", {})[name if dot else key] = value
    plain = sections.pop("", {})
    found = {key: _whole(key, value) if isinstance(value, Mapping) else value for key, value in plain.items()}
    for section, values in sections.items():
        found |= {f"{section}.{name}": value for name, value in _whole(section, values).items()}
    return found


def _whole(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A section as it is kept now: of heads, earlier versions kept what the recipe said, without the defaults."""
    now = section_now(section, values)
    if section != "heads" or "family" not in now:
        return now
    try:
        return parse_heads(now).to_recipe()
    except UserError:  # of a family that is not there any more
        return now


def identity_now(kind: str, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of an artifact under the names of this version.

    Args:
        kind: of the artifact, as `headstart.support.artifacts.artifact` takes it.
        identity: as it was noted.
    """
    return settings_now(section_now("data", identity) if kind == "conversations" else identity)
