"""Recipes as plain values, unchecked: packaged ones and YAML files, `extends:`, `key.sub=value` overrides, and the
settings that follow from `minutes`. Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import resources
from math import inf
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from headstart.errors import UserError, nearest
from headstart.heads.settings import HeadSettings, Section, depends_on
from headstart.recipes.sections import DataSection, TargetSection

_PACKAGED = Path(str(resources.files("headstart") / "recipes"))
_WRITING = 0.58
"""Fraction of the data and training minutes spent on writing conversations: new text beats a fourth epoch."""
_AT_LEAST = 0.77
"""Minimum fraction of all minutes for data and training."""
_LOADING, _A_PROMPT = 2.0, 0.06
"""Minutes of loading, tuning and the transformers baselines, and of a prompt of the report, on two cores."""
_PROMPTS = 0.8
"""Prompts of the report per minute of the recipe."""


def shares(minutes: float, writing: Any) -> dict[str, dict[str, float]]:
    """Return the settings that follow from a recipe's minutes and from data.minutes (`writing`), by section. Limits
    leave room for machines with more than two cores."""
    prompts = min(64, max(10, int(_PROMPTS * minutes)))
    heads = max(_AT_LEAST * minutes, minutes - _LOADING - _A_PROMPT * prompts)
    share, training = (max(0.01, round(share * heads, 2)) for share in (_WRITING, 1 - _WRITING))
    written = writing if are_minutes(writing) else share
    data = {
        "minutes": share,
        "conversations": max(1, round(900 * written)),
        "cache_gigabytes": max(DataSection().cache_gigabytes, round(0.6 * written, 2)),
    }
    return {"data": data, "train": {"minutes": training}, "eval": {"limit": prompts}}


def recipe_text(recipe: Section) -> str:
    """Dump a recipe with all settings, as YAML for `headstart.recipes.recipe.load_recipe`."""
    return _yaml(recipe.model_dump(mode="json"))


def text_to_edit(recipe: Section) -> str:
    """Dump a recipe without the settings that follow from its minutes, so that these can be edited."""
    return _yaml(_without_shares(recipe.model_dump(mode="json")))


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _without_shares(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the values that follow from a recipe's minutes."""
    minutes, data, kept = values.get("minutes"), values.get("data"), dict(values)
    if are_minutes(minutes):
        for section, settings in shares(minutes, data.get("minutes") if isinstance(data, dict) else None).items():
            if isinstance(given := values.get(section), dict):
                kept[section] = {name: value for name, value in given.items() if settings.get(name, ...) != value}
    return kept


def packaged_recipes() -> dict[str, Path]:
    """Return the packaged recipes by name, the zoo last."""
    return {file.stem: file for pattern in ("*.yaml", "zoo/*.yaml") for file in sorted(_PACKAGED.glob(pattern))}


def read_values(
    name: str, overrides: Iterable[str] = (), families: Mapping[str, type[HeadSettings]] | None = None
) -> dict[str, Any]:
    """Read a recipe, the recipes it extends and the overrides, unchecked. Each level drops the settings of the earlier
    ones that depend on what it changes; settings of heads that depend on the target are kept without `families`."""
    given, over, values = list(map(_parse_override, overrides)), dict[str, Any](), dict[str, Any]()
    for override in given:
        _put(over, *override)
    for _, level in _levels(name, Path(), []):
        values = _merge(_without_stale(values, level, families or {}), level)
    values = _without_stale(values, over, families or {})
    for override in given:
        _put(values, *override)
    return values


def given_keys(name: str, overrides: Iterable[str] = ()) -> set[str]:
    """Return the dotted keys that overrides and the user's own recipe files set; packaged recipes do not count."""
    given = {".".join(path) for _, path, _ in map(_parse_override, overrides)}
    for path, level in _levels(name, Path(), []):
        if not path.is_relative_to(_PACKAGED):
            given |= {f"{section}.{key}" for section, held in level.items() if isinstance(held, dict) for key in held}
    return given


def are_minutes(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < inf


def _levels(name: str, folder: Path, seen: list[str]) -> list[tuple[Path, dict[str, Any]]]:
    """Read the recipes that a recipe extends and then itself, each with its file; `extends` is relative to the file."""
    known = packaged_recipes()
    path = known.get(name) or folder / Path(name).expanduser()
    if not path.is_file():
        where = f" (extended by {seen[-1]})" if seen else ""
        raise UserError(f"No recipe {name!r}{where}.", f"{nearest(name, known)} A path to a YAML file works too.")
    resolved = str(path.resolve())
    if resolved in seen:
        raise UserError(
            f"Recipe {name!r} extends itself ({' -> '.join([*seen, resolved])}).", "Remove an extends from this circle."
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}", "Correct the file.") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no settings.", "Start from a packaged recipe: headstart recipes show quickstart")
    values.setdefault("name", path.stem)
    if isinstance(target := values.get("target"), str):
        values["target"] = {"spec": target}
    parent = values.pop("extends", None)
    return [*(_levels(str(parent), path.parent, [*seen, resolved]) if parent else ()), (path, values)]


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _without_stale(
    base: dict[str, Any], over: dict[str, Any], families: Mapping[str, type[HeadSettings]]
) -> dict[str, Any]:
    """Drop the settings of `base` that depend on a setting with another value in `over`."""

    def changes(key: str) -> bool:
        section, _, name = key.partition(".")
        held = (values.get(section) for values in (base, over))
        before, now = (values.get(name) if isinstance(values, dict) else None for values in held)
        if before is None and section == "target":
            before = TargetSection.model_fields[name].default
        return None not in (before, now) and before != now

    kept = _without_shares(base) if "minutes" in over else dict(base)
    heads: dict[str, Any] = given if isinstance(given := base.get("heads"), dict) else {}
    if changes("heads.family"):
        kept["heads"] = {name: value for name, value in heads.items() if name in HeadSettings.model_fields}
    of_family = families.get(str(heads.get("family")), HeadSettings)
    for section, settings in (("target", TargetSection), ("data", DataSection), ("heads", of_family)):
        stale = {name for name, field in settings.model_fields.items() if (key := depends_on(field)) and changes(key)}
        if isinstance(held := kept.get(section), dict):
            kept[section] = {name: value for name, value in held.items() if name not in stale}
    return kept


def _parse_override(override: str) -> tuple[str, list[str], Any]:
    """Read `key.sub=value`; returns it with its path and its value."""
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise UserError(f"{override!r} is not an override.", "Write key=value, for example train.lr=3e-4.")
    if not text.strip():
        raise UserError(
            f"{override!r} gives {key!r} no value.", f"Write one after the sign, or {key}=null where it may have none."
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if value == text.strip():  # YAML 1.1 reads 1e-3 as text; quoted values stay text
        with suppress(ValueError):
            value = float(text)
    return override, ["target", "spec"] if key == "target" and isinstance(value, str) else key.split("."), value


def _put(values: dict[str, Any], override: str, path: list[str], value: Any) -> None:
    for depth, folder in enumerate(path[:-1], start=1):
        inner = values.setdefault(folder, {})
        if not isinstance(inner, dict):
            parent = ".".join(path[:depth])
            raise UserError(f"{parent!r} in {override!r} has no settings inside.", f"Write {parent}=value.")
        values = inner
    values[path[-1]] = value
