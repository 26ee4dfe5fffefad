"""All settings of recipes as a table, from the schema: `headstart recipes show --all` and docs/recipes.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.heads.base import families
from headstart.heads.settings import HeadSettings, from_target, section_fields
from headstart.recipes.recipe import Recipe

TARGETS_OWN = "the target's"
"""Shown for head settings that follow from the target."""
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
"""Signs of the bounds in a field's metadata (annotated_types)."""


@dataclass(frozen=True)
class Setting:
    """One setting: `takes` is its type with bounds, or its choices; `default` is YAML, empty if required."""

    key: str
    takes: str
    default: str
    meaning: str


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section and its subsections."""
    for name, field, inner in section_fields(section):
        if inner is not None:
            yield from settings_of(inner, f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, _bounded(field.annotation, field), _default(field), _meaning(section, name))


def show_settings(recipe: Recipe, console: Console) -> None:
    """Print all settings of a recipe: a table on a terminal, else tab-separated lines."""
    rows = [(setting, _value(recipe, setting.key)) for setting in _settings_of_recipe(recipe)]
    if not console.is_terminal:
        lines = [("setting", "value", "default", "meaning")]
        lines += [(setting.key, value, setting.default, setting.meaning) for setting, value in rows]
        for line in lines:
            print("\t".join(line), file=console.file)  # rich expands tabs
        return
    table = Table(title=f"Settings of {recipe.name}", title_justify="left", box=None)
    table.add_column("setting", style="bold", overflow="fold")
    for column in ("value", "default", "meaning"):
        table.add_column(column, overflow="fold")
    section = ""
    for setting, value in rows:
        if (now := setting.key.partition(".")[0]) != section and "." in setting.key:
            table.add_section()
            section = now
        changed = value if value == setting.default else f"[cyan]{escape(value)}[/]"
        table.add_row(setting.key, changed, escape(setting.default), escape(setting.meaning))
    console.print(table)


def markdown() -> str:
    """Render docs/recipes.md: all sections of the schema and all head families."""
    lines = [
        "# Settings of recipes",
        "",
        "Made from the schema by `headstart recipes docs > docs/recipes.md`; do not edit it by hand.",
        "",
        "A recipe is a YAML file with these settings; `extends:` names another recipe to start from, packaged or a",
        "file. On the command line each can be given as `key=value`: `headstart run quickstart train.lr=3e-4`. An",
        "unknown key is refused; a single value is taken as a list of one. `headstart recipes show NAME --all` prints",
        "the same with the values of a recipe.",
        "",
        *_table(setting for setting in settings_of(Recipe) if "." not in setting.key),
    ]
    for name, _, section in section_fields(Recipe):
        if section is None:
            continue
        lines += ["", f"## {name}", "", _summary(section), ""]
        lines += _table(settings_of(section, f"{name}."))
        common = {setting.key for setting in settings_of(section, f"{name}.")}
        for family, head in sorted(families().items()) if issubclass(section, HeadSettings) else ():
            lines += ["", f"### heads.family={family}", "", _summary(head.Config), ""]
            lines += _table(setting for setting in settings_of(head.Config, f"{name}.") if setting.key not in common)
    return "\n".join(lines) + "\n"


def _settings_of_recipe(recipe: Recipe) -> Iterator[Setting]:
    for setting in settings_of(Recipe):
        if setting.key == "heads.family":
            yield from settings_of(type(recipe.heads), "heads.")
        elif not setting.key.startswith("heads."):
            yield setting


def _value(recipe: Recipe, key: str) -> str:
    value: Any = recipe.model_dump(mode="json")
    for part in key.split("."):
        if part not in value:
            return TARGETS_OWN
        value = value[part]
    return _yaml(value)


def _default(field: FieldInfo) -> str:
    if from_target(field):
        return TARGETS_OWN
    return "" if field.is_required() else _yaml(field.get_default(call_default_factory=True))


def _yaml(value: Any) -> str:
    """Format a value as typed after `key=`.

    >>> _yaml(None), _yaml((0.9, 0.95)), _yaml("auto"), _yaml(True)
    ('null', '[0.9, 0.95]', 'auto', 'true')
    """
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")


def _meaning(section: type[BaseModel], name: str) -> str:
    """Return a setting's description, inherited if the section only changes the default."""
    homes = (base for base in section.__mro__ if issubclass(base, BaseModel) and name in base.model_fields)
    return " ".join(next((text for base in homes if (text := base.model_fields[name].description)), "").split())


def _bounded(annotation: Any, field: FieldInfo) -> str:
    limits = [(sign, getattr(mark, name, None)) for mark in field.metadata for name, sign in _SIGNS.items()]
    bounds = ", ".join(f"{sign} {limit:.12g}" for sign, limit in limits if limit is not None)
    return f"{_kind(annotation)} {bounds}".strip()


def _kind(annotation: Any) -> str:
    """Name a type in the words of recipes.

    >>> _kind(int | None), _kind(tuple[int, ...]), _kind(Literal["auto", "no"]), _kind(dict[str, int])
    ('int or null', 'list of int', 'auto, no', 'mapping')
    >>> from pydantic import Field
    >>> _kind(tuple[Annotated[int, Field(ge=1)], ...])
    'list of int ≥ 1'
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, *marks = inside
        return next((_bounded(kind, mark) for mark in marks if isinstance(mark, FieldInfo)), _kind(kind))
    if origin in (Union, UnionType):
        return " or ".join(map(_kind, inside))
    if origin is Literal:
        return ", ".join(map(str, inside))
    if origin is tuple:
        return f"list of {_kind(inside[0])}"
    if annotation in (None, NoneType):
        return "null"
    kind = origin or annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "mapping"
    return {dict: "mapping", str: "text", bool: "true or false"}.get(kind) or str(getattr(kind, "__name__", kind))


def _summary(section: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(section) or "").partition("\n\n")[0].split())


def _table(settings: Iterator[Setting]) -> list[str]:
    lines = ["| Setting | Takes | Default | Meaning |", "|---|---|---|---|"]
    for setting in settings:
        default = setting.default if setting.default in ("", TARGETS_OWN) else f"`{setting.default}`"
        cells = (f"`{setting.key}`", setting.takes, default, setting.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
