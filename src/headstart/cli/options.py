"""What the commands take: each argument and option is described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from headstart.decode.options import Meaning, meaning, option

Command = Callable[..., None]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

# -- runs ------------------------------------------------------------------------------------------------------------

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A packaged recipe (see `headstart recipes`) or a YAML file.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the recipe, such as train.lr=3e-4.")
]
RunDir = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/<name of the recipe>")]

# -- heads -----------------------------------------------------------------------------------------------------------

Heads = Annotated[
    str, typer.Argument(metavar="HEADS", help="A folder of heads, the folder of a run, or a Hub id (user/name).")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a report that is there already.")]
JsonFile = Annotated[Path | None, typer.Option(help="Write the same to this file, for programs.")]


@dataclass(frozen=True)
class LoadOptions:
    """How heads and their target are loaded, see `headstart.load`."""

    dtype: Dtype = option("auto", "Numbers to compute in; auto is bfloat16 where the machine is fast at it.")
    target: str | None = option(None, "Load the target from here, when it is not where the heads say.")
    any_target: bool = option(False, "Take a target that the heads were not trained on, if its sizes fit.")
    exact: Literal["auto", "bits", "tokens"] = option(
        "auto",
        "bits: greedy text in bfloat16 equals plain decoding's token for token (CPUs only, slower). "
        "tokens, which auto takes: equal up to rounding at near-ties.",
    )
    quantization: Literal["none", "int8", "int4"] | None = option(
        None,
        "Put the target's linear layers into so many bits (needs torchao).",
        shown="as when the heads were exported or tuned",
    )
    revision: str | None = option(None, "Branch, tag or commit of heads on the Hub.")


TargetOption = Annotated[str | None, typer.Option("--target", help=meaning(LoadOptions, "target").text)]


def listed(values: Sequence[str] | None) -> tuple[str, ...]:
    """Values of an option that may be repeated and hold comma-separated lists.

    >>> listed(["a,b", "c"]), listed(None)
    (('a', 'b', 'c'), ())
    """
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())


def with_options(without: Sequence[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Decorator of a command: each of its parameters that is a dataclass of options becomes one option of the command
    line for each field, described as there; the command gets instances of the classes.

    Args:
        without: options that this command does not take.
        defaults: where this command has others than the class.
    """

    def decorated(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups = {name: _typed(hint, without) for name, hint in hints.items() if is_dataclass(hint)}

        @wraps(command)
        def call(**given: Any) -> None:
            chosen = {
                name: hints[name](**{item.name: _chosen(item, given.pop(item.name)) for item in group})
                for name, group in groups.items()
            }
            command(**given, **chosen)

        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                kinds = get_type_hints(hints[name])
                defined = ((item, defaults.get(item.name, item.default)) for item in groups[name])
                parameters += [_parameter(item, kinds[item.name], default) for item, default in defined]
            else:
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorated


def _typed(options: Any, without: Sequence[str]) -> list[Field[Any]]:
    """The fields of a class of options that a command takes."""
    return [item for item in fields(options) if item.metadata["meaning"].typed and item.name not in without]


def _parameter(item: Field[Any], kind: Any, default: Any) -> inspect.Parameter:
    """An option of the command line for a field: words to choose from for literals, a list for what may be many."""
    known: Meaning = item.metadata["meaning"]
    words = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
    typed: Any = kind
    if words:
        choice: Any = StrEnum
        typed = choice(item.name, {word: word for word in ([known.unset, *words] if known.unset else words)})
        default = typed(default or known.unset) if default or known.unset else None
    elif default == ():
        typed, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]  # known when it runs
    shown = typer.Option(
        f"--{item.name.replace('_', '-')}",
        help=known.text,
        min=known.minimum,
        metavar=known.metavar,
        show_default=known.shown or True,
    )
    typed = typed if default is not None else typed | None
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, shown]
    )


def _chosen(item: Field[Any], value: Any) -> Any:
    """A field's value from what was typed."""
    if isinstance(value, StrEnum):
        return None if value == item.metadata["meaning"].unset else value.value
    return item.default if value is None else value
