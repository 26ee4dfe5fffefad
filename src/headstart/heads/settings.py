"""Base classes of head settings and recipe sections, and marks on their fields.

Imports neither torch nor the families, so that listing recipes is fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from headstart.errors import UserError


class Role(Enum):
    """Effect of a changed setting on artifacts, as a mark on its field: `Annotated[int, Role.AMOUNT]`.

    CONTENT, the default: another artifact.
    AMOUNT: the stage runs again and extends its artifact.
    RUNTIME: finished artifacts stay valid.
    """

    CONTENT = "content"
    AMOUNT = "amount"
    RUNTIME = "runtime"


@dataclass(frozen=True)
class DependsOn:
    """Mark of a setting that resets to its default when a variant or an override changes `key`."""

    key: str


@dataclass(frozen=True)
class FromTarget(DependsOn):
    """Mark of a head setting that defaults to the target's: `Annotated[int, FromTarget()]`. Recipes may set it if
    `settable`."""

    key: str = "target.spec"
    settable: bool = True


def from_target(field: FieldInfo) -> FromTarget | None:
    return next((mark for mark in field.metadata if isinstance(mark, FromTarget)), None)


def depends_on(field: FieldInfo) -> str | None:
    return next((mark.key for mark in field.metadata if isinstance(mark, DependsOn)), None)


class Section(BaseModel):
    """A part of a recipe. Rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _list_of_one(cls, value: Any, field: ValidationInfo) -> Any:
        is_list = get_args(cls.model_fields[str(field.field_name)].annotation)[1:] == (...,)
        return (value,) if is_list and isinstance(value, str | int | float) else value

    @classmethod
    def names(cls, *roles: Role) -> set[str]:
        """Return the names of the settings in these roles."""
        marks = {
            name: [mark for mark in field.metadata if isinstance(mark, Role)]
            for name, field in cls.model_fields.items()
        }
        return {name for name, given in marks.items() if (given or [Role.CONTENT])[0] in roles}

    def of_role(self, *roles: Role) -> dict[str, Any]:
        """Dump the settings in these roles as JSON values."""
        return self.model_dump(mode="json", include=self.names(*roles))


class HeadSettings(Section):
    """Settings of all head families; each family adds its own."""

    family: str = Field(description="Head family; a recipe that changes it drops the other family's settings.")
    draft_vocab_size: int = Field(
        0,
        ge=0,
        description="Tokens the heads can draft, the most frequent of the training data; 0 means the whole vocabulary.",
    )

    def check(self) -> None:
        """Raise a UserError for incompatible settings, ignoring unset `FromTarget` ones."""

    def to_recipe(self) -> dict[str, Any]:
        """Dump all settings except unset `FromTarget` ones."""
        left_to_target = {name for name, field in type(self).model_fields.items() if from_target(field)}
        return self.model_dump(mode="json", exclude=left_to_target - self.model_fields_set)


def section_fields(section: type[BaseModel]) -> Iterator[tuple[str, FieldInfo, type[BaseModel] | None]]:
    """Yield name, field and subsection (or None) of the settable fields of a section."""
    for name, field in section.model_fields.items():
        mark = from_target(field)
        if mark is None or mark.settable:
            inner = field.annotation
            yield name, field, inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def recipe_error(error: ValidationError, at: tuple[str, ...] = (), family: str = "quickstart") -> UserError:
    """Convert the first validation error of a section at this path of a recipe; the remedy names recipe `family`."""
    first = error.errors()[0]
    if isinstance(own := first.get("ctx", {}).get("error"), UserError):
        return own
    where = ".".join((*at, *map(str, first["loc"])))
    if first["type"] == "missing":
        return UserError(f"The recipe has no {where!r}.", "Add it, or start from another recipe (extends: quickstart).")
    reason = first["msg"].removeprefix("Value error, ")
    return UserError(
        f"Recipe key {where!r} is {first.get('input')!r}: {reason[0].lower()}{reason[1:]}.",
        f"For what is allowed: headstart recipes show {family} --all.",
    )
