"""Shared arguments and options of the commands."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

import typer
from rich.console import Console

from headstart.decode.options import Meaning, ServingOptions, meaning, option
from headstart.errors import UserError
from headstart.hub.options import LoadOptions
from headstart.servers.names import ENGINES

if TYPE_CHECKING:
    from headstart.pipeline.run import Run

Command = Callable[..., None]

# -- runs ------------------------------------------------------------------------------------------------------------

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A packaged recipe (see `headstart recipes`) or a YAML file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace the recipe's, such as train.lr=3e-4."),
]
RunDir = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/<name of the recipe>")]


Processes = Annotated[
    int | None,
    typer.Option(min=1, help="Training processes to start on this machine.", show_default="one per GPU"),
]


def open_run(recipe: str, overrides: list[str] | None, run_dir: Path | None, processes: int | None = None) -> Run:
    """Return the run of a recipe, fitted to this machine, by default in runs/<its name>.

    `processes` defaults to `training_processes`.
    """
    from headstart.pipeline.fit import fit_recipe
    from headstart.pipeline.launch import training_processes
    from headstart.pipeline.run import Run
    from headstart.recipes.recipe import load_recipe
    from headstart.recipes.values import given_keys
    from headstart.train.processes import count_processes

    loaded, console = load_recipe(recipe, overrides or []), Console()
    folder = run_dir or Path("runs") / loaded.name
    is_launched = bool({"WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys()) or count_processes() > 1
    if is_launched and processes:
        raise UserError("A launcher started this process.", "Leave out --processes, or the launcher.")
    ranks = count_processes() if is_launched else processes
    loaded = fit_recipe(loaded, given_keys(recipe, overrides or []), folder, console, ranks)
    count = 1 if is_launched else processes or training_processes(loaded, folder)
    return Run(loaded, folder, console, processes=count)


# -- heads -----------------------------------------------------------------------------------------------------------

HEADS = typer.Argument(metavar="HEADS", help="A folder of heads, the folder of a run, or a Hub id (user/name).")
Heads = Annotated[str, HEADS]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing report.")]
Log = Annotated[
    Path | None, typer.Option(help="Log token ids of requests and answers in this folder, for headstart adapt.")
]
Follow = Annotated[
    bool, typer.Option("--follow", help="If HEADS is a link that `headstart adapt` moves: switch to newer heads.")
]
JsonFile = Annotated[Path | None, typer.Option(help="Also write the result as JSON to this file.")]


@dataclass(frozen=True)
class Loading(LoadOptions):
    """How heads and their target are loaded, and the target's location."""

    target: str | None = option(None, "Folder or Hub id of the target, if it is not where the heads expect it.")


def given(loading: Loading, but: Collection[str]) -> list[str]:
    """List the options that were given, except the fields in `but`."""
    names = [name for name, value in vars(loading).items() if name not in but and value != getattr(Loading, name)]
    return [f"--{name.replace('_', '-')}" for name in names]


def check_engine_options(serving: ServingOptions, loading: Loading, but: Collection[str]) -> None:
    """Refuse options for an engine without one, and with one the options of headstart's loop except `but`."""
    if not serving.engine and serving != type(serving)():
        raise UserError("An option for engines was given without an engine.", f"Name one with --engine: {ENGINES}.")
    if serving.engine and (unused := given(loading, but)):
        raise UserError(f"{unused[0]} is for headstart's own loop.", "For an engine use --engine-arguments='...'.")


TargetOption = Annotated[str | None, typer.Option("--target", help=meaning(Loading, "target").text)]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help=meaning(Loading, "trust_remote_code").text)]


def names(help: str, default: str | None = None) -> Any:
    """Build an option for names, repeatable and comma-separated (see `listed`)."""
    return typer.Option(metavar="NAME,NAME...", help=help, show_default=default or False)


def listed(values: Sequence[str] | None) -> tuple[str, ...]:
    """Flatten the comma-separated values of a repeatable option.

    >>> listed(["a,b", "c"]), listed(None)
    (('a', 'b', 'c'), ())
    """
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())


def with_options(without: Sequence[str] = (), **defaults: Any) -> Callable[[Command], Command]:
    """Replace each dataclass parameter of a command by options for its fields, except `without`.

    `defaults` replace those of the class.
    """

    def decorate(command: Command) -> Command:
        hints = get_type_hints(command, include_extras=True)
        groups = {
            name: [item for item in fields(hint) if item.metadata["meaning"].on_cli and item.name not in without]
            for name, hint in hints.items()
            if is_dataclass(hint)
        }
        kinds = {name: get_type_hints(hints[name]) for name in groups}

        @wraps(command)
        def call(**given: Any) -> None:
            chosen = {
                name: hints[name](
                    **{item.name: _chosen(item, kinds[name][item.name], given.pop(item.name)) for item in group}
                )
                for name, group in groups.items()
            }
            command(**given, **chosen)

        parameters: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if name in groups:
                defined = ((item, defaults.get(item.name, item.default)) for item in groups[name])
                parameters += [_parameter(item, kinds[name][item.name], default) for item, default in defined]
            else:
                parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def _parameter(item: Field[Any], kind: Any, default: Any) -> inspect.Parameter:
    """Build the command-line option of a field; a field with several values is a list of texts, see `_separated`."""
    known: Meaning = item.metadata["meaning"]
    shown_default: str | bool = known.default_text or True
    if known.none_choice:
        words = [word for part in get_args(kind) for word in get_args(part)]
        kind, default = Literal[known.none_choice, *words], default or known.none_choice
    elif known.parse:
        kind = str | None
    elif isinstance(default, tuple):
        shown_default = known.default_text or ",".join(map(str, default)) or False
        kind, default = list[str] | None, None
    name = item.name.replace("_", "-")
    shown = typer.Option(
        f"--{name}/--no-{name}" if default is True else f"--{name}",
        help=known.text,
        min=known.minimum,
        max=known.maximum,
        metavar=known.metavar,
        show_default=shown_default,
    )
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
    )


def _chosen(item: Field[Any], kind: Any, value: Any) -> Any:
    known: Meaning = item.metadata["meaning"]
    if known.none_choice and value == known.none_choice:
        return None
    if value is None:
        return item.default
    if "," in (known.metavar or ""):
        return _separated(f"--{item.name.replace('_', '-')}", known, get_args(kind)[0], value)
    return known.parse(value) if known.parse else value


def _separated(option: str, known: Meaning, kind: type[Any], typed: Sequence[str]) -> tuple[Any, ...]:
    """Convert comma-separated values; a UserError if there are none, or numbers are malformed or out of range."""
    low, high = (-math.inf if known.minimum is None else known.minimum), known.maximum or math.inf
    with suppress(ValueError):
        values = tuple(map(kind, listed(typed)))
        if values and (kind is str or all(low <= value <= high for value in values)):
            return values
    limits = f" from {low:g}" * (low > -math.inf) + f" to {high:g}" * (high < math.inf)
    raise UserError(f"{option} is {','.join(typed)!r}, not {known.metavar}{limits}.", "Separate values by commas.")
