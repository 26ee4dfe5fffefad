"""Recipes: strict typed YAML, `extends:` for variants, `key.sub=value` overrides. The one way to configure a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, field_serializer, field_validator, model_validator

from headstart.errors import UserError, close, nearest
from headstart.heads.base import families, parse_heads
from headstart.heads.settings import HeadSettings, Section, recipe_error, section_fields
from headstart.recipes.sections import DataSection, EvalSection, ExportSection, TargetSection, TrainSection, TuneSection
from headstart.recipes.values import are_minutes, read_values, shares


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
    fit: bool = Field(
        False,
        description="Fit the run to the machine's GPUs, if any: choose target.device, data.states, data.batch_size, "
        "data.cache_gigabytes, data.server_arguments, train.batch_tokens, train.gradient_accumulation_steps and "
        "train.gradient_checkpointing. Settings in the command or in your own recipe files stay.",
    )
    target: TargetSection = TargetSection()
    data: DataSection = DataSection()
    heads: HeadSettings = Field(description="Family and its settings.")
    train: TrainSection = TrainSection()
    tune: TuneSection = TuneSection()
    export: ExportSection = ExportSection()
    eval: EvalSection = EvalSection()

    @property
    def measuring_engine(self) -> tuple[str, str]:
        """Command and arguments of eval.engine: by default those of data.server, if it is the same engine."""
        given, data = self.eval, self.data
        if given.engine != data.engine:
            return given.engine_command, given.engine_arguments
        return given.engine_command or data.server_command, given.engine_arguments or data.server_arguments

    @model_validator(mode="before")
    @classmethod
    def _share_minutes(cls, values: Any) -> Any:
        minutes = values.get("minutes") if isinstance(values, Mapping) else None
        if not are_minutes(minutes):
            return values  # absent, or the field's own check raises
        shared, data = dict(values), values.get("data")
        for section, settings in shares(minutes, data.get("minutes") if isinstance(data, Mapping) else None).items():
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


def load_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """Load a packaged recipe by name or a YAML file by path, with `key.sub=value` overrides; raises as `parse_recipe`,
    and for an unknown recipe or unreadable YAML."""
    return parse_recipe(read_values(name, overrides, {name: head.Config for name, head in families().items()}))


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """Validate a recipe; a UserError names the first mistake, and the nearest key to an unknown one."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] != "extra_forbidden":
            raise recipe_error(error) from None
        raise _unknown_key([str(part) for part in first["loc"]]) from None
    recipe.heads.check()
    return recipe


def _unknown_key(path: list[str]) -> UserError:
    """Return the error for an unknown key, with the nearest one of its section, or the same key of another section."""
    section: type[BaseModel] = Recipe
    for part in path[:-1]:
        section = {key: inner for key, _, inner in section_fields(section) if inner}[part]
    name, known = path[-1], {key for key, _, _ in section_fields(section)}
    elsewhere = (f"{key}.{name}" for key, _, inner in section_fields(Recipe) if inner and name in inner.model_fields)
    other = None if close(name, known) else next(elsewhere, None)
    remedy = f"Did you mean {other!r}?" if other else nearest(name, known)
    return UserError(f"Unknown recipe key {'.'.join(path)!r}.", remedy)
