"""Decoding options, defined once: for Python, the command line, eval, recipes and transformers.

`headstart.cli.options` builds the command-line options from the fields and their meanings, so this file imports neither
torch nor transformers. Names and order of the sampling options match transformers.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from headstart.errors import UserError, nearest
from headstart.servers.names import ENGINES

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Draft = Literal["auto", "on", "off"]
LogitBias = Mapping[int, float] | Mapping[str, float]  # by token id; texts of digits as in OpenAI's API
TreeKind = Literal["dynamic", "static", "chain"]
Processor = Callable[[Tensor, Tensor], Tensor]
"""A transformers LogitsProcessor: (input_ids [1, T], scores [1, V]) to scores [1, V]."""
StopTest = Callable[[int, list[int]], bool]
"""Called with (row, tokens emitted so far) after each token; true ends the row's text with that token."""

T = TypeVar("T")


@dataclass(frozen=True)
class Meaning:
    """Metadata of an option.

    Attributes:
        text: description, in a sentence or two.
        minimum, maximum: smallest and largest value that the command line accepts.
        metavar: placeholder of its value there; with a comma for several values, repeatable and comma-separated.
        none_choice: word that selects None there, and that is shown as the default if the option's default is None.
        default_text: default shown there, instead of the option's own.
        on_cli: whether the command line has the option.
        parse: converts the argument's text, instead of the type's own conversion.
    """

    text: str
    minimum: float | None = None
    maximum: float | None = None
    metavar: str | None = None
    none_choice: str = ""
    default_text: str = ""
    on_cli: bool = True
    parse: Callable[[str], Any] | None = None


def option(default: T, text: str, **known: Any) -> T:
    """Make a field with its `Meaning`."""
    return field(default=default, metadata={"meaning": Meaning(text, **known)})


def meaning(options: type[Any], name: str) -> Meaning:
    """Return the metadata of an option of a class."""
    known: Meaning = next(item for item in fields(options) if item.name == name).metadata["meaning"]
    return known


def document_options(options: type[T]) -> type[T]:
    """Class decorator: append the options and their meanings to the docstring."""
    lines = [f"    {item.name}: {item.metadata['meaning'].text}" for item in fields(options)]  # type: ignore[arg-type]  # a dataclass
    options.__doc__ = "\n".join([(options.__doc__ or "").rstrip(), "", "Attributes:", *lines])
    return options


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises UserError for any other text.

    >>> json_object('{"enable_thinking": false}')
    {'enable_thinking': False}
    """
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{text!r} is not a JSON object.", "Write it as '{\"enable_thinking\": false}'.")
    return values


def token_biases(text: str) -> dict[int, float]:
    """Parse a JSON object of token ids and numbers. Raises UserError for any other text.

    >>> token_biases('{"42": -1.5}')
    {42: -1.5}
    """
    try:
        return {int(token): float(bias) for token, bias in json_object(text).items()}
    except (TypeError, ValueError) as error:
        raise UserError(f"{text!r} does not map token ids to numbers.", "Write it as '{\"42\": -1.5}'.") from error


@document_options
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Settings of the sampling distribution, which `headstart.decode.sampling` computes."""

    temperature: float = option(0.0, "0 is greedy; above 0 samples the target's distribution.", minimum=0)
    top_k: int = option(0, "Sample from this many of the most likely tokens; 0 takes all.", minimum=0)
    top_p: float = option(1.0, "Sample from the smallest set of tokens with this much probability; 1 takes all.")
    min_p: float = option(0.0, "Drop tokens less likely than this fraction of the most likely one; 0 drops none.")
    repetition_penalty: float = option(
        1.0, "Above 1, makes tokens that already occur in the text less likely; 1 changes nothing."
    )
    presence_penalty: float = option(
        0.0, "Subtract this (-2 to 2) from the logit of each token in the answer.", minimum=-2, maximum=2
    )
    frequency_penalty: float = option(
        0.0, "Subtract this (-2 to 2) from a token's logit for each occurrence in the answer.", minimum=-2, maximum=2
    )
    logit_bias: LogitBias | None = option(
        None,
        "Add a number from -100 to 100 to the logits of these tokens, by token id; -100 practically bans a token.",
        metavar="JSON",
        default_text="none",
        parse=token_biases,
    )
    processors: Sequence[Processor] = option(
        (), "transformers LogitsProcessors that depend only on the text so far and the scores.", on_cli=False
    )

    @property
    def greedy(self) -> bool:
        """Whether decoding is deterministic argmax."""
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether tokens are penalised for occurring in the text."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def processes_logits(self) -> bool:
        """Whether bias, penalties or processors change the logits."""
        return self.penalises or bool(self.logit_bias) or bool(self.processors)

    def for_transformers(self) -> dict[str, Any]:
        """Convert to keyword arguments for the generation config of transformers, which has no presence or frequency
        penalty."""
        drawn = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        drawn["min_p"] = self.min_p or None
        sampling = {"do_sample": False} if self.greedy else {"do_sample": True, **drawn}
        bias = {(int(token),): float(value) for token, value in (self.logit_bias or {}).items()}
        return {**sampling, "repetition_penalty": self.repetition_penalty, "sequence_bias": bias or None}


@document_options
@dataclass(frozen=True)
class DecodeOptions(SamplingOptions):
    """Options of an answer.

    A `headstart.decoder.Decoder` reads `drafter`, `tree` and the rendering of a prompt (`raw`, `tools`,
    `chat_template_kwargs`), its log reads `source`; the decode loop reads the rest. Greedy output, and samples without
    drafts or with verifier="top_k", are independent of the other rows of a batch, up to rounding: in bfloat16 near-ties
    may differ. With sampled drafts and measured costs the other rows affect the number of drafts, and so the text.

    A seed reproduces a text as long as the costs are the same. The machine that tuned the heads uses the costs stored
    with them, as `deterministic` does on any machine. Other machines measure costs at first use, and store them unless
    the machine was busy.
    """

    max_new_tokens: int = option(128, "Longest answer in tokens, its end token included.", minimum=1)
    _: KW_ONLY
    seed: int | None = option(
        None, "Seed for sampling, to repeat an answer; prompt b of a batch uses seed + b.", default_text="random"
    )
    verifier: str = option(
        "auto",
        "How drafts are chosen and accepted when sampling; the text always follows the target's distribution. top_k "
        "drafts the most likely tokens and repeats the text of plain sampling with this seed. greedy_draft (auto) "
        "draws each node's last draft from the heads' distribution, so that more are accepted.",
        metavar="NAME",
    )
    draft: Draft = option(
        "auto",
        "auto pauses drafting while it does not pay, on never pauses it, off never drafts. Where costs were measured, "
        "only drafts that pay are verified.",
    )
    deterministic: bool = option(
        False,
        "Choose drafts by the costs stored with the heads and by acceptance, never by the clock or by earlier answers: "
        "equal calls give equal text in every process, unless non-deterministic calls run at the same time in the same "
        "process. Drafting pays less if the stored costs are wrong.",
    )
    drafter: str = option(
        "heads+ngram",
        "Draft with heads, none (plain decoding), ngram, memory[:FILE] (earlier answers, from training or stored in "
        "FILE), lookahead, early-exit[:LAYERS], mtp[:DRAFTS] (the target's own module), or several "
        "joined with +, such as heads+ngram.",
        metavar="NAME",
    )
    tree: TreeKind | None = option(
        None, "Shape of the heads' trees; tuned is the shape that tuning measured as the fastest.", none_choice="tuned"
    )
    stop: str | Sequence[str] = option((), "End the answer after this text; may be repeated.", metavar="TEXT")
    stop_token_ids: Sequence[int] = option(
        (), "End the answer with one of these tokens, as well as with the target's own end tokens.", metavar="ID,ID..."
    )
    logprobs: int | None = option(
        None,
        "Return the log-probabilities of each token and of this many most likely tokens, under the target's own "
        "distribution: before biases, penalties, temperature, top-k, top-p and min-p.",
        minimum=0,
        default_text="none",
    )
    min_new_tokens: int = option(0, "Suppress end tokens before this many tokens; stop texts still apply.", minimum=0)
    raw: bool = option(False, "Pass the prompt to the target as it is, without the chat template.")
    tools: Sequence[Any] = option(
        (), "Tools for the chat template: functions or JSON schemas, as in transformers.", on_cli=False
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "Chat template variables, in place of the ones used in training.",
        metavar="JSON",
        default_text="as in training",
        parse=json_object,
    )
    source: str = option("", "Name of the client in the log of served requests.", on_cli=False)
    ignore_end: bool = option(False, "Continue past the end-of-turn token, for measuring.", on_cli=False)
    stop_test: StopTest | None = option(None, "A callable that ends a row's text.", on_cli=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _without_numpy(getattr(self, item.name)))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple. The text ends with the token that completes a stop string, as in transformers."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def of(cls, keywords: DecodeKeywords) -> DecodeOptions:
        """Make options from keyword arguments. Raises UserError with the nearest known name for an unknown one."""
        check_names(keywords, DecodeKeywords.__annotations__)
        return cls(**keywords)


def _without_numpy(value: Any) -> Any:
    """Convert numpy's numbers to Python's, also in lists and mappings, for generators and JSON."""
    if isinstance(value, Mapping):
        return {_without_numpy(key): _without_numpy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_without_numpy, value))
    return value.item() if isinstance(value, Real) and hasattr(value, "item") else value


class DecodeKeywords(TypedDict, total=False):
    """Keyword arguments of the user; see `DecodeOptions`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: LogitBias | None
    processors: Sequence[Processor]
    seed: int | None
    verifier: str
    draft: Draft
    deterministic: bool
    drafter: str
    tree: TreeKind | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    logprobs: int | None
    min_new_tokens: int
    raw: bool
    tools: Sequence[Any]
    chat_template_kwargs: Mapping[str, Any] | None
    source: str


_KINDS: dict[str, tuple[Any, str]] = {
    "int": (Integral, "a whole number"),
    "int | None": ((Integral, NoneType), "a whole number"),
    "float": (Real, "a number"),
    "str": (str, "a name"),
    "bool": (bool, "True or False"),
    "Sequence[Processor]": (Sequence, "a list of logits processors"),
    "Sequence[int]": (Sequence, "a list of token ids"),
    "Sequence[Any]": (Sequence, "a list of tools"),
    "LogitBias | None": ((Mapping, NoneType), "numbers by token id, such as {42: -1.5}"),
    "Mapping[str, Any] | None": ((Mapping, NoneType), "names with values, such as {'enable_thinking': False}"),
}
"""Accepted types (numpy's numbers included) and their description in errors, by annotation."""


def random_seed() -> int:
    """Return a random seed, short enough to type."""
    return secrets.randbits(32)


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse (UserError) an unknown option, and suggest the nearest known one."""
    if unknown := sorted(set(given) - set(known)):
        raise UserError(f"Unknown option {unknown[0]!r}.", nearest(unknown[0], known))


def check_kinds(options: DecodeOptions) -> None:
    """Refuse (UserError) options of the wrong type."""
    for item in fields(options):
        kind, words = _KINDS.get(str(item.type), (object, ""))
        value = getattr(options, item.name)
        if not isinstance(value, kind) or (isinstance(value, bool) and "number" in words):
            raise UserError(f"{item.name} is {value!r}.", f"Give {words}.")
    if not isinstance(options.stop, Collection) or not all(isinstance(text, str) for text in options.stop):
        raise UserError(f"stop is {options.stop!r}.", "Give a text, or a list of texts.")
    if not all(isinstance(token, Integral) for token in options.stop_token_ids):
        raise UserError(f"stop_token_ids is {options.stop_token_ids!r}.", "Give a list of token ids.")
    for token, bias in (options.logit_bias or {}).items():
        is_id = isinstance(token, Integral) or (isinstance(token, str) and token.isdecimal())
        if not is_id or isinstance(bias, bool) or not isinstance(bias, Real) or not -100 <= bias <= 100:
            raise UserError(f"logit_bias has {token!r}: {bias!r}.", "Map token ids to numbers from -100 to 100.")


@document_options
@dataclass(frozen=True)
class ServingOptions:
    """A serving engine to measure, with its command, target and arguments."""

    engine: str = option(
        "", f"Measure a serving engine with and without heads ({ENGINES}) instead of headstart's loop.", metavar="NAME"
    )
    engine_command: str = option(
        "", "Command that starts the engine, such as a path; by default its usual command.", metavar="COMMAND"
    )
    engine_target: str = option(
        "", "Target to serve, such as another GGUF file; by default the heads' own.", metavar="TARGET"
    )
    engine_arguments: str = option(
        "", "Extra arguments for the engine, such as '--dtype bfloat16 --max-model-len 2048'.", metavar="ARGUMENTS"
    )


@document_options
@dataclass(frozen=True)
class EngineOptions(ServingOptions):
    """A serving engine to tune for, and the requests to measure it with."""

    engine_drafts: Sequence[int] = option(
        (),
        "Numbers of drafts to try; by default 1, 2, 3 and 5, and all drafts of heads that make them in one pass.",
        minimum=1,
        maximum=16,
        metavar="N,N...",
    )
    engine_requests: Sequence[int] = option(
        (1,),
        "Numbers of concurrent requests, such as 1,2,4,8; vLLM gets a number of drafts for each.",
        minimum=1,
        maximum=1024,
        metavar="N,N...",
    )
    engine_prompts: int = option(8, "Number of validation prompts to send.", minimum=1)
    engine_tokens: int = option(64, "Longest answer of the engine, in tokens.", minimum=2)
