"""What the commands take: each argument and option is described once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from headstart.options import LoopOptions, Meaning, meaning

Command = Callable[..., None]
T = TypeVar("T")


class Dtype(StrEnum):
    """What `--dtype` takes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Bits(StrEnum):
    """What `--quantization` takes."""

    none = "none"
    int8 = "int8"
    int4 = "int4"


class ExactChoice(StrEnum):
    """What `--exact` takes."""

    auto = "auto"
    bits = "bits"
    tokens = "tokens"

    @property
    def kind(self) -> Literal["auto", "bits", "tokens"]:
        """The same, as `headstart.load` takes it."""
        match self:
            case ExactChoice.bits:
                return "bits"
            case ExactChoice.tokens:
                return "tokens"
        return "auto"


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
TargetOption = Annotated[
    str | None, typer.Option("--target", help="Where the target is, when it is not where the heads say.")
]
ExactOption = Annotated[
    ExactChoice,
    typer.Option(
        "--exact",
        help="bits: greedy text in bfloat16 equals plain decoding's token for token (CPUs only, slower). "
        "tokens, which auto takes: equal up to rounding at near-ties.",
    ),
]
AnyTarget = Annotated[
    bool, typer.Option("--any-target", help="Take a target that the heads were not trained on, if its sizes fit.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of heads on the Hub.")]
QuantizationOption = Annotated[
    Bits | None,
    typer.Option(
        "--quantization",
        help="Bits that the target's linear layers are put into (needs torchao).",
        show_default="as when the heads were exported or tuned",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option(help="auto is bfloat16 where the machine is fast at it.")]

# -- measuring -------------------------------------------------------------------------------------------------------

Limit = Annotated[int | None, typer.Option(min=1, help="Questions at most.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts decoded together.")]
MultiTurn = Annotated[bool, typer.Option(help="Ask every turn; without it the first only.")]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME,NAME...",
        help="Other drafters to measure in the same turns: those of --drafter, dynamic, static, chain, "
        "transformers_assistant:SPEC, or all (every one that needs no second model).",
    ),
]

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a report that is there already.")]

# -- the audit -------------------------------------------------------------------------------------------------------

Questions = Annotated[
    list[Path] | None, typer.Option(help="JSONL with questions; may be repeated. Without it, a few of our own.")
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(min=0.0, help="Of sampling; may be repeated.", show_default="0.7 and 1"),
]
Samples = Annotated[int, typer.Option(min=1, help="Drawn for each prompt, verifier and temperature.")]
TopP = Annotated[float, typer.Option(help=meaning(LoopOptions, "top_p").text)]
Seed = Annotated[int, typer.Option(help=meaning(LoopOptions, "seed").text)]
AuditDrafters = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME,NAME...",
        help="Drafters of the greedy proof: those of --compare, 'random heads', 'always wrong'.",
        show_default="one of each kind",
    ),
]
Verifiers = Annotated[
    list[str] | None,
    typer.Option("--verifier", metavar="NAME,NAME...", help="Of the sampling proof.", show_default="both"),
]


def listed(values: Sequence[str] | None) -> tuple[str, ...]:
    """Values of an option that may be repeated and hold comma-separated lists.

    >>> listed(["a,b", "c"]), listed(None)
    (('a', 'b', 'c'), ())
    """
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())


# -- what decoding can be asked ----------------------------------------------------------------------------------------


def with_options(options: type[T], **defaults: Any) -> Callable[[Command], Command]:
    """Decorator of a command: its parameter `options` becomes one option of the command line for each field of a class,
    described as there, and the command gets an instance of the class.

    Args:
        options: a class of `headstart.options`.
        defaults: where this command has others than the class.
    """
    every: tuple[Field[Any], ...] = fields(options)  # type: ignore[arg-type]  # a dataclass
    asked = [one for one in every if one.metadata["meaning"].typed]
    types = get_type_hints(options)

    def decorated(command: Command) -> Command:
        @wraps(command)
        def call(**given: Any) -> None:
            chosen = {one.name: _chosen(one, given.pop(one.name)) for one in asked}
            command(options=options(**chosen), **given)

        hints, parameters = get_type_hints(command, include_extras=True), list[inspect.Parameter]()
        for parameter in inspect.signature(command).parameters.values():
            if parameter.name == "options":
                parameters += [_parameter(one, types[one.name], defaults.get(one.name, one.default)) for one in asked]
            else:
                named = parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
                parameters.append(named)
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by typer
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorated


def _parameter(one: Field[Any], kind: Any, default: Any) -> inspect.Parameter:
    """An option of the command line for a field: words to choose from for literals, a list for what may be many."""
    known: Meaning = one.metadata["meaning"]
    words = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
    flag = f"--{one.name.replace('_', '-')}"
    typed: Any = kind
    if words:
        words = [known.unset, *words] if known.unset else words
        choice: Any = StrEnum
        typed = choice(one.name, {word: word for word in words})
        default = typed(known.unset if default is None else default)
    elif default == ():
        typed, default = list[str] | None, None
    shown = typer.Option(flag, help=known.text, min=known.minimum, metavar=known.metavar)
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[typed, shown]
    )


def _chosen(one: Field[Any], value: Any) -> Any:
    """A field's value from what was typed."""
    if isinstance(value, StrEnum):
        return None if value == one.metadata["meaning"].unset else value.value
    return one.default if value is None else value
