"""What can be asked of decoding, defined once: for Python, the command line, eval, recipes and transformers.

Each option is a field with its type, its default and its meaning; what takes options takes one of these classes, and
the command line makes its own from the same fields (`headstart.cli.options`). Names and order of application of the
sampling options are those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

if TYPE_CHECKING:
    from torch import Tensor
else:  # the command line reads these types, and starts without torch
    Tensor = Any

Draft = Literal["auto", "on", "off"]
Tree = Literal["dynamic", "static", "chain"]
Processor = Callable[[Tensor, Tensor], Tensor]
"""A transformers LogitsProcessor: (input_ids [1, T], scores [1, V]) to scores [1, V]."""

T = TypeVar("T")


@dataclass(frozen=True)
class Meaning:
    """What is known of an option beside its type and default.

    Attributes:
        text: what it means, in a sentence or two.
        minimum: its smallest value, where the command line refuses smaller ones by itself.
        metavar: of its value there.
        unset: the word that stands for None there.
        typed: whether it can be given there at all.
    """

    text: str
    minimum: float | None = None
    metavar: str | None = None
    unset: str = ""
    typed: bool = True


def option(default: T, text: str, **known: Any) -> T:
    """A field with its meaning, see `Meaning`."""
    return field(default=default, metadata={"meaning": Meaning(text, **known)})


def meaning(options: type[Any], name: str) -> Meaning:
    """What one of the options of a class means."""
    found: Meaning = next(one for one in fields(options) if one.name == name).metadata["meaning"]
    return found


def explained(options: type[T]) -> type[T]:
    """Class decorator: the docstring lists the options with their meanings."""
    lines = [f"    {one.name}: {one.metadata['meaning'].text}" for one in fields(options)]  # type: ignore[arg-type]  # a dataclass
    options.__doc__ = "\n".join([(options.__doc__ or "").rstrip(), "", "Attributes:", *lines])
    return options


@explained
@dataclass(frozen=True)
class LengthOptions:
    """How much is written."""

    max_new_tokens: int = option(128, "Longest answer in tokens, the one that ends the turn included.", minimum=1)


@explained
@dataclass(frozen=True)
class SamplingOptions:
    """Which distribution a token is drawn from."""

    temperature: float = option(0.0, "0 is greedy; above 0 the target's distribution is sampled.", minimum=0)
    top_k: int = option(0, "Sample from this many of the most likely tokens; 0 for all.", minimum=0)
    top_p: float = option(1.0, "Sample from the fewest tokens that hold this share of the probability; 1 for all.")
    min_p: float = option(0.0, "Leave out tokens less likely than this share of the most likely one; 0 for none.")
    repetition_penalty: float = option(
        1.0, "Above 1 makes tokens that were read or written already less likely; 1 changes nothing."
    )

    @property
    def greedy(self) -> bool:
        """Whether no randomness is involved."""
        return self.temperature == 0

    def for_transformers(self) -> dict[str, Any]:
        """The same for the generation config of transformers."""
        drawn = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        drawn["min_p"] = self.min_p or None
        sampling = {"do_sample": False} if self.greedy else {"do_sample": True, **drawn}
        return {**sampling, "repetition_penalty": self.repetition_penalty}


@explained
@dataclass(frozen=True)
class EngineOptions:
    """A serving engine to measure: how it is started, and what it is asked."""

    engine: str = option(
        "",
        "Measure a serving engine instead, with heads and without: vllm or llama.cpp. Says how many drafts pay there.",
        metavar="NAME",
    )
    engine_command: str = option(
        "", "What starts it, such as a path; else `vllm serve` or `llama-server`.", metavar="COMMAND"
    )
    engine_target: str = option(
        "", "The target as the engine takes it, such as another GGUF file; else the heads' own.", metavar="TARGET"
    )
    engine_arguments: str = option(
        "", "More of its own arguments, such as '--dtype bfloat16 --max-model-len 2048'.", metavar="ARGUMENTS"
    )
    engine_drafts: str = option(
        "", "Numbers of drafts to try; else 1, 2, 3 and 5, and all of a block.", metavar="N,N..."
    )
    engine_prompts: int = option(8, "Prompts to ask, those of calibration conversations.", minimum=1)
    engine_tokens: int = option(64, "Longest answer of the engine in tokens.", minimum=2)


@explained
@dataclass(frozen=True)
class LoopOptions(SamplingOptions, LengthOptions):
    """What the decode loop does, whatever drafts."""

    seed: int = option(0, "Of sampling; prompt b of a batch takes seed + b.")
    verifier: str = option(
        "auto",
        "How drafts are accepted when sampling: auto, top_k or greedy_draft.",
        metavar="NAME",
    )
    draft: Draft = option("auto", "auto pauses drafting where it does not pay, on always drafts, off never.")


@explained
@dataclass(frozen=True)
class DraftingOptions(LoopOptions):
    """What drafts as well."""

    drafter: str = option(
        "heads+ngram",
        "heads, none (plain decoding), ngram, lookahead, early-exit[:LAYERS], mtp[:DRAFTS] (the target's own modules), "
        "draft-model:SPEC, or several joined with +, such as heads+ngram.",
        metavar="NAME",
    )
    tree: Tree | None = option(None, "How the heads draft; by default as tuning found best.", unset="tuned")


@explained
@dataclass(frozen=True)
class GenerateOptions(DraftingOptions):
    """What can be asked of `headstart.decoder.Decoder.generate`."""

    stop: str | Sequence[str] = option((), "Ends the answer; several may be given.", metavar="TEXT")
    raw: bool = option(False, "Read a text prompt as it is, without the chat template.")
    processors: Sequence[Processor] = option(
        (), "transformers LogitsProcessors that depend on the text so far and the scores alone.", typed=False
    )


class GenerateKeywords(TypedDict, total=False):
    """The fields of `GenerateOptions` as keyword arguments; what they mean is said there."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    verifier: str
    draft: Draft
    drafter: str
    tree: Tree | None
    stop: str | Sequence[str]
    raw: bool
    processors: Sequence[Processor]
