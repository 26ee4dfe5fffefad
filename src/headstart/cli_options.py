"""What the commands take: each argument and option is described once."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer


class Dtype(StrEnum):
    """What `--dtype` takes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


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


class TreeChoice(StrEnum):
    """What `--tree` takes."""

    tuned = "tuned"
    dynamic = "dynamic"
    static = "static"
    chain = "chain"

    @property
    def kind(self) -> Literal["dynamic", "static", "chain"] | None:
        """The kind of tree; None leaves it to tuning."""
        match self:
            case TreeChoice.dynamic:
                return "dynamic"
            case TreeChoice.static:
                return "static"
            case TreeChoice.chain:
                return "chain"
        return None


class DraftChoice(StrEnum):
    """What `--draft` takes."""

    auto = "auto"
    on = "on"
    off = "off"

    @property
    def mode(self) -> Literal["auto", "on", "off"]:
        """The same, as the decode loop takes it."""
        match self:
            case DraftChoice.on:
                return "on"
            case DraftChoice.off:
                return "off"
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
        "--exact", help="What drafts leave as it is: every bit, or the tokens; auto keeps the bits where that is cheap."
    ),
]
AnyTarget = Annotated[
    bool, typer.Option("--any-target", help="Take a target that the heads were not trained on, if its sizes fit.")
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of heads on the Hub.")]
DtypeOption = Annotated[Dtype, typer.Option(help="auto is bfloat16 where the machine is fast at it.")]

# -- the text --------------------------------------------------------------------------------------------------------

MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy; above 0 the target's distribution is sampled.")]
TopP = Annotated[float, typer.Option(help="Sample from the fewest tokens that hold this share of the probability.")]
TopK = Annotated[int, typer.Option(min=0, help="Sample from this many of the most likely tokens; 0 for all.")]
MinP = Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the most likely one.")]
Penalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 makes tokens of the text so far less likely.")
]
Seed = Annotated[int, typer.Option(help="Of sampling.")]
Stops = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Ends the answer; may be repeated.")]

# -- drafting --------------------------------------------------------------------------------------------------------

DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="NAME",
        help="heads, none (plain decoding), ngram, lookahead, early-exit[:LAYERS], draft-model:SPEC, or several joined "
        "with +, such as heads+ngram.",
    ),
]
Tree = Annotated[TreeChoice, typer.Option(help="How the heads draft; tuned takes what tuning found best.")]
Draft = Annotated[DraftChoice, typer.Option(help="auto pauses drafting where it does not pay.")]
VerifierName = Annotated[
    str,
    typer.Option(
        "--verifier",
        metavar="NAME",
        help="How drafts are accepted when sampling: auto, top_k, greedy_draft, rrs, block, traversal, or typical "
        "(LOSSY).",
    ),
]

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
    typer.Option(
        "--verifier", metavar="NAME,NAME...", help="Of the sampling proof.", show_default="every lossless one"
    ),
]


def listed(values: Sequence[str] | None) -> tuple[str, ...]:
    """Values of an option that may be repeated and hold comma-separated lists.

    >>> listed(["a,b", "c"]), listed(None)
    (('a', 'b', 'c'), ())
    """
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())
