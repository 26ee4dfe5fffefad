"""Recipes: strict typed YAML, `extends:` for variants, `key.sub=value` overrides. The one way to configure a run.

Every package may import this module, so it imports none of them. The settings of a head family are in the family's
file; reading a recipe looks them up by name, which imports the families and torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module, resources
from math import inf
from pathlib import Path
from typing import Any, TypeGuard

import yaml
from pydantic import BaseModel, Field, ValidationError, field_serializer, field_validator, model_validator
from pydantic.fields import FieldInfo

from headstart.errors import UserError, close, nearest
from headstart.recipes.sections import (
    DataSection,
    EvalSection,
    ExportSection,
    HeadSettings,
    Section,
    TargetSection,
    TrainSection,
    TuneSection,
    depends_on,
    from_target,
)

_WRITING = 0.58
"""Fraction of the data and training minutes spent on writing conversations: new text beats a fourth epoch."""
_AT_LEAST = 0.77
"""Minimum fraction of all minutes for data and training."""
_LOADING, _A_PROMPT = 2.0, 0.06
"""Minutes of loading, tuning and the transformers baselines, and of a prompt of the report, on two cores."""
_PROMPTS = 0.8
"""Prompts of the report per minute of the recipe."""


def _shares(minutes: float, writing: Any) -> dict[str, dict[str, float]]:
    """Return the settings that follow from a recipe's minutes and from data.minutes (`writing`), by section. Limits
    leave room for machines with more than two cores."""
    prompts = min(64, max(10, int(_PROMPTS * minutes)))
    heads = max(_AT_LEAST * minutes, minutes - _LOADING - _A_PROMPT * prompts)
    share, training = (max(0.01, round(share * heads, 2)) for share in (_WRITING, 1 - _WRITING))
    written = writing if _are_minutes(writing) else share
    data = {
        "minutes": share,
        "conversations": max(1, round(900 * written)),
        "cache_gigabytes": max(DataSection().cache_gigabytes, round(0.6 * written, 2)),
    }
    return {"data": data, "train": {"minutes": training}, "eval": {"limit": prompts}}


class Recipe(Section):
    """Everything a run depends on."""

    name: str = Field(description="Folder under runs/.")
    description: str = Field("", description="One sentence for `headstart recipes`.")
    minutes: float | None = Field(
        None,
        gt=0,
        description="About how long all of it may take. Writing, training and the report get their shares; "
        "data.minutes, data.conversations, data.cache_gigabytes, train.minutes and eval.limit go before them where "
        "they are given.",
    )
    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    heads: HeadSettings = Field(description="Family and its settings.")
    train: TrainSection = TrainSection()
    tune: TuneSection = TuneSection()
    export: ExportSection = ExportSection()
    eval: EvalSection = EvalSection()

    @model_validator(mode="before")
    @classmethod
    def _share_minutes(cls, values: Any) -> Any:
        minutes = values.get("minutes") if isinstance(values, Mapping) else None
        if not _are_minutes(minutes):
            return values  # absent, or the field's own check raises
        shared, data = dict(values), values.get("data")
        for section, settings in _shares(minutes, data.get("minutes") if isinstance(data, Mapping) else None).items():
            given = shared.get(section, {})
            if isinstance(given, Mapping):
                shared[section] = {**settings, **given}
        return shared

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if name != Path(name).name or name in ("", ".."):
            raise UserError(f"Recipe key 'name' is {name!r}.", "Write the name of one folder: it is made under runs/.")
        return name

    @field_validator("target", mode="before")
    @classmethod
    def _short_target(cls, value: Any) -> Any:
        return {"spec": value} if isinstance(value, str) else value

    @field_validator("heads", mode="before")
    @classmethod
    def _of_its_family(cls, value: Any) -> HeadSettings:
        return value if isinstance(value, HeadSettings) else parse_heads(value)

    @field_serializer("heads")
    def _with_all_of_its_family(self, heads: HeadSettings) -> dict[str, Any]:
        return heads.to_recipe()


def recipe_text(recipe: Recipe) -> str:
    """Dump a recipe with all settings, as YAML for `load_recipe`."""
    return _yaml(recipe.model_dump(mode="json"))


def text_to_edit(recipe: Recipe) -> str:
    """Dump a recipe without the settings that follow from its minutes, so that these can be edited."""
    return _yaml(_without_shares(recipe.model_dump(mode="json")))


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _without_shares(values: dict[str, Any]) -> dict[str, Any]:
    """Drop the values that follow from a recipe's minutes."""
    minutes, data, kept = values.get("minutes"), values.get("data"), dict(values)
    if _are_minutes(minutes):
        for section, settings in _shares(minutes, data.get("minutes") if isinstance(data, dict) else None).items():
            if isinstance(given := values.get(section), dict):
                kept[section] = {name: value for name, value in given.items() if settings.get(name, ...) != value}
    return kept


def head_settings() -> dict[str, type[HeadSettings]]:
    """Return the settings of each head family by name. The first call imports the families, and torch."""
    # Imported by name, to keep the package imports of this module empty.
    return {name: head.Config for name, head in import_module("headstart.heads.base").families().items()}


def packaged_recipes() -> dict[str, Path]:
    """Return the packaged recipes by name, the zoo last."""
    folder = Path(str(resources.files("headstart") / "recipes"))
    return {file.stem: file for pattern in ("*.yaml", "zoo/*.yaml") for file in sorted(folder.glob(pattern))}


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Load a packaged recipe by name or a YAML file by path, with `key.sub=value` overrides; raises as `parse_recipe`,
    and for an unknown recipe or unreadable YAML."""
    return parse_recipe(read_values(name, overrides, head_settings()))


def read_values(
    name: str, overrides: Iterable[str] = (), families: Mapping[str, type[HeadSettings]] | None = None
) -> dict[str, Any]:
    """Read a recipe, the recipes it extends and the overrides, unchecked. Each level drops the settings of the earlier
    ones that depend on what it changes; settings of heads that depend on the target are kept without `families`."""
    given, over, values = list(map(_parse_override, overrides)), dict[str, Any](), dict[str, Any]()
    for override in given:
        _put(over, *override)
    for level in _levels(name, Path(), []):
        values = _merge(_without_stale(values, level, families or {}), level)
    values = _without_stale(values, over, families or {})
    for override in given:
        _put(values, *override)
    return values


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """Validate a recipe; a UserError names the first mistake, and the nearest key to an unknown one."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise _explain(error, Recipe) from None
    recipe.heads.check()
    return recipe


def parse_heads(settings: Any) -> HeadSettings:
    """Check the settings of heads, each by itself; `HeadSettings.check` checks them together."""
    if not isinstance(settings, Mapping):
        raise UserError(f"Recipe key 'heads' is {settings!r}.", "Write a family and its settings.")
    known = head_settings()
    name = str(settings.get("family", ""))
    if name not in known:
        raise UserError(f"Unknown head family {name!r}.", nearest(name, known))
    try:
        return known[name].model_validate(settings)
    except ValidationError as error:
        raise _explain(error, known[name], ("heads",)) from None


def _are_minutes(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < inf


def _levels(name: str, folder: Path, seen: list[str]) -> list[dict[str, Any]]:
    """Read the recipes that a recipe extends, and then itself; a path in `extends` is relative to its file."""
    known = packaged_recipes()
    path = known.get(name) or folder / Path(name).expanduser()
    if not path.is_file():
        where = f" (extended by {seen[-1]})" if seen else ""
        raise UserError(f"No recipe {name!r}{where}.", f"{nearest(name, known)} A path to a YAML file works too.")
    resolved = str(path.resolve())
    if resolved in seen:
        raise UserError(
            f"Recipe {name!r} extends itself ({' -> '.join([*seen, resolved])}).", "Remove one of these extends."
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
    return [*(_levels(str(parent), path.parent, [*seen, resolved]) if parent else ()), values]


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


def section_fields(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """Yield name, field and subsection (or None) of the settable fields of a section."""
    for name, field in section.model_fields.items():
        mark = from_target(field)
        if mark is None or mark.settable:
            inner = field.annotation
            yield name, field, inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _explain(error: ValidationError, section: type[BaseModel], at: tuple[str, ...] = ()) -> UserError:
    """Convert the first validation error of a section; `at` is the section's path in the recipe."""
    first = error.errors()[0]
    if isinstance(own := first.get("ctx", {}).get("error"), UserError):
        return own
    index, name = (*at, *map(str, first["loc"])), str(first["loc"][-1])
    where, given = ".".join(index), first.get("input")
    if first["type"] == "extra_forbidden" and at:
        return _not_of_this_family(name, section)
    if first["type"] == "extra_forbidden":
        for part in first["loc"][:-1]:
            section = {key: inner for key, _, inner in section_fields(section) if inner}[str(part)]
        return UserError(f"Unknown recipe key {where!r}.", _nearest_key(name, section))
    if first["type"] == "missing":
        return UserError(f"The recipe has no {where!r}.", "Add it, or start from another recipe (extends: quickstart).")
    reason = first["msg"].removeprefix("Value error, ")
    return UserError(
        f"Recipe key {where!r} is {given!r}: {reason[0].lower()}{reason[1:]}.",
        f"For what is allowed: headstart recipes show {_family_of(section) or 'quickstart'} --all.",
    )


def _nearest_key(name: str, section: type[BaseModel]) -> str:
    """Suggest the nearest key of this section, or the same key of another."""
    known = {key for key, _, _ in section_fields(section)}
    elsewhere = (f"{key}.{name}" for key, _, inner in section_fields(Recipe) if inner and name in inner.model_fields)
    if not close(name, known) and (other := next(elsewhere, None)):
        return f"Did you mean {other!r}?"
    return nearest(name, known)


def _not_of_this_family(name: str, section: type[BaseModel]) -> UserError:
    """Build the error for a setting that a head family lacks; other families may have it."""
    families = {family: {key for key, _, _ in section_fields(config)} for family, config in head_settings().items()}
    family = _family_of(section) or ""
    elsewhere = close(name, set().union(*families.values()))
    if close(name, families[family]) or not elsewhere:
        remedy = nearest(name, families[family])
    else:
        owners = " and ".join(sorted(other for other in families if elsewhere in families[other]))
        remedy = f"{elsewhere!r} is a setting of {owners}; of {family}: {', '.join(sorted(families[family]))}."
    return UserError(f"{family} heads have no setting {name!r}.", remedy)


def _family_of(section: type[BaseModel]) -> str | None:
    """Return the head family of a section of settings; None for other sections."""
    if not issubclass(section, HeadSettings):
        return None
    return next((family for family, config in head_settings().items() if config is section), None)
