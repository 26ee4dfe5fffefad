"""`headstart.load`: heads and their target, ready to generate, in one call."""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

from headstart.data.conversations import Message, prompt_tokens
from headstart.decode.budget import Mode
from headstart.decode.costs import Conditions, Costs
from headstart.decode.drafting import Drafter
from headstart.decode.loop import Engine, Generation, OnTokens, check
from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import Processor
from headstart.drafters.catalog import DEFAULT, DRAFTERS, make_drafter, parts_of
from headstart.drafters.heads import HeadDrafter, Tree
from headstart.errors import UserError, nearest
from headstart.heads import DraftHead
from headstart.hub import check_folder, locate, read_heads, target_spec
from headstart.target import Exact, Target, TreeShape, load_target
from headstart.tuning.here import tuned_here
from headstart.tuning.tune import Tuning

TREES = get_args(Tree)
Prompt = str | Sequence[Message] | Sequence[int]
"""A user's text, a conversation of {"role", "content"} messages, or token ids."""


class GenerateOptions(TypedDict, total=False):
    """How to generate; everything may be left out.

    Attributes:
        max_new_tokens: tokens to emit at most, the end-of-turn token included; 128.
        temperature: 0 (as when left out) is greedy; above 0 the target's distribution is sampled.
        top_k: sample from this many of the most likely tokens; 0 for all.
        top_p: sample from the fewest tokens that hold this share of the probability; 1 for all.
        min_p: leave out tokens less likely than this share of the most likely one; 0 leaves out none.
        repetition_penalty: above 1 makes tokens that were read or written already less likely; 1 changes nothing.
        processors: transformers LogitsProcessors that depend on the text so far and the scores alone.
        seed: of sampling; 0.
        stop: strings that end the text.
        raw: read a text prompt as it is, without the chat template.
        drafter: what drafts: "heads", "none" for plain decoding, "ngram", "lookahead", "early-exit",
            "draft-model:SPEC", or several joined; "heads+ngram" when left out.
        tree: how the heads draft: "dynamic", "static" or "chain"; by default as tuning found best.
        draft: "auto" pauses drafting where it does not pay, "on" always drafts, "off" never.
        verifier: how drafts are accepted when sampling; "auto" is lossless, and so are all but "typical".
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    processors: Sequence[Processor]
    seed: int
    stop: str | Sequence[str]
    raw: bool
    drafter: str
    tree: Tree | None
    draft: Mode
    verifier: str


@dataclass(frozen=True)
class Answer:
    """What was generated for one prompt.

    Attributes:
        text: as read by people: without the end-of-turn token and other special tokens; a stop string that ended the
            text is part of it. Empty when the target has no tokenizer.
        tokens: token ids, the end-of-turn token included.
        finish: why it ended: "end" (the model ended its turn), "length" or "stop".
        tokens_per_round: τ, mean tokens per forward of the target after the prompt; 1 without drafts.
        tokens_per_second: tokens over the wall-clock seconds from the call to the last token, reading the prompt
            included; in a batch, this row's tokens only.
        first_token_ms: from the call to the first token.
        drafter_error: what the drafter raised, when it did; the text is whole all the same, decoded plainly from there.
    """

    text: str
    tokens: list[int]
    finish: str
    tokens_per_round: float
    tokens_per_second: float
    first_token_ms: float
    drafter_error: str | None = None


def load(
    heads: str | Path,
    target: Target | str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    any_target: bool = False,
    exact: Exact = "auto",
) -> Decoder:
    """Load heads and the model they belong to.

    Args:
        heads: a folder of heads, the folder of a run, or a Hub id (user/name).
        target: the model, when it is loaded already or lies elsewhere than the heads say (then what `load_target`
            takes). By default the one that the heads name is loaded.
        revision: branch, tag or commit of the heads, when they come from the Hub.
        dtype: of the model and the heads, see `load_target`; a model that is loaded already keeps its own.
        device: likewise.
        any_target: take a target that does not look like the one the heads were trained on, if its sizes fit; the
            text stays the target's own, and fewer drafts may be accepted.
        exact: "bits" keeps every bit of what the target says without drafts, "tokens" its tokens but for near-ties in
            short dtypes, see `Target.exact`; "auto" keeps the bits where that is cheap. A model that is loaded already
            keeps its own setting unless this is given.

    Raises:
        UserError: no such heads, files that are cut short, a target that cannot be loaded, or one that the heads were
            not trained on.
    """
    if isinstance(target, Target) and (dtype, device) != ("auto", "auto"):
        raise UserError(
            "dtype and device are those of the target, and it is loaded already.",
            "Give load_target the dtype and device, or give headstart.load the target's name instead of a Target.",
        )
    folder = locate(heads, revision)
    check_folder(folder)
    if not isinstance(target, Target):
        target = load_target(target or _named_target(folder), dtype, device, exact=exact)
    elif exact != "auto":
        target.exact = exact
    return Decoder(target, *read_heads(folder, target, any_target))


class Decoder:
    """Generates with a target and its heads; lossless, so the words are the target's own.

    Args:
        target: the frozen model.
        heads: bound to it, in its dtype and on its device.
        shape: the static tree to draft; without nodes but the root, decoding with heads is plain.
        calibration: what tuning measured, see `Tuning.to_json`; without it the heads draft the static tree always.

    Raises:
        UserError: a calibration that lacks something.
    """

    def __init__(
        self, target: Target, heads: DraftHead, shape: TreeShape, calibration: dict[str, Any] | None = None
    ) -> None:
        self.target = target
        self.heads = heads
        self.shape = shape
        self.calibration = calibration or {}
        self.tuning = _tuning(self.calibration)
        self._engines: dict[tuple[str, Tree | None, bool], Engine] = {}
        self._conditions: Conditions | None = None
        self._here: Tuning | None = None  # the tuning at what drafting costs under these conditions
        self._lock = threading.RLock()
        self._told = False  # what older heads lack

    @property
    def costs(self) -> Costs | None:
        """What drafting and verifying cost here, which the number of drafts follows; None without a calibration.

        Heads that were tuned under other conditions are measured the first time that this is asked for.
        """
        here = self._tuned_here()
        return here.costs if here else None

    def drafter(self, name: str = "heads", tree: Tree | None = None) -> Drafter | None:
        """A drafter by its name, see `GenerateOptions`; None decodes plainly.

        Raises:
            UserError: no such drafter, one that cannot draft for this target, or heads not tuned for such trees.
        """
        return self._drafter(name, tree, self._tuned_here() if _drafts(name, tree) else self.tuning)

    def engine(self, drafter: str = DEFAULT, tree: Tree | None = None, drafts: bool = True) -> Engine:
        """The decode loop with a drafter, see `drafter`; made once, so that a draft model is loaded once.

        Costs are measured here where they have to be, before the clock of an answer starts.

        Args:
            drafter: its name.
            tree: how heads draft.
            drafts: whether it will ever draft. Plain decoding needs no costs.
        """
        drafts = drafts and _drafts(drafter, tree)
        with self._lock:
            tuning = self._tuned_here() if drafts else self._here or self.tuning
            key = (drafter, tree, drafts)
            if key not in self._engines:
                costs = tuning.costs if tuning and drafts else None
                self._engines[key] = Engine(self.target, self._drafter(drafter, tree, tuning), costs)
                if drafts and tuning and tuning.lacks and not self._told:
                    print(f"{tuning.lacks} Better: headstart tune HEADS.", file=sys.stderr)
                    self._told = True
            return self._engines[key]

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """Answer one prompt.

        Args:
            prompt: a text becomes one user message; messages are rendered by the target's chat template; token ids
                are read as they are.
            **options: see `GenerateOptions`.

        Raises:
            UserError: a prompt that is empty, too long or of another kind, a target without a chat template, or an
                option that is unknown or out of range; all before anything is decoded.
        """
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(self, prompts: Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Answer]:
        """Answer several prompts at once; prompt b samples with seed + b.

        Raises:
            UserError: as `generate`.
        """
        decoding = _decoding(options)
        tokens = [self.tokens(prompt, options.get("raw", False)) for prompt in prompts]
        check(self.target, tokens, decoding)
        engine = self.engine(options.get("drafter", DEFAULT), options.get("tree"), options.get("draft") != "off")
        return [self._answer(generation) for generation in engine.generate(tokens, decoding)]

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Answer one prompt, piece by piece.

        Returns:
            An iterator over pieces of text. They never break a character, and joined they are the answer's text; its
            `answer` is there at the end. Decoding starts with the first piece asked for, and leaving the loop ends it.

        Raises:
            UserError: as `generate`.
        """
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UserError("Streaming text needs a tokenizer.", "Load the target with its tokenizer, or use generate.")
        decoding = _decoding(options)
        tokens = self.tokens(prompt, options.get("raw", False))
        check(self.target, [tokens], decoding)
        engine = self.engine(options.get("drafter", DEFAULT), options.get("tree"), options.get("draft") != "off")
        pieces = TextPieces(tokenizer, self.target.end_tokens)
        return Stream(lambda on_tokens: self._answer(engine.generate([tokens], decoding, on_tokens)[0]), pieces)

    def tokens(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids that the target reads for a prompt, see `generate`.

        Raises:
            UserError: as `generate`.
        """
        tokenizer = self.target.tokenizer
        said = prompt if isinstance(prompt, str) else _last_words(prompt)
        if said is not None and not (said if raw else said.strip()):
            raise UserError("The prompt is empty.", "Write what the target is to answer.")
        if isinstance(prompt, str) and raw:
            if tokenizer is None:
                raise UserError("A text prompt needs a tokenizer.", "Pass token ids.")
            return list(tokenizer.encode(prompt))
        if isinstance(prompt, str):
            return self.tokens([{"role": "user", "content": prompt}])
        if prompt and all(isinstance(turn, dict) for turn in prompt):
            if not getattr(tokenizer, "chat_template", None):
                raise UserError(
                    f"{self.target.name} has no chat template to render messages with.",
                    "Pass token ids, or a text with raw=True to have it continued as it is.",
                )
            for number, turn in enumerate(prompt):
                if not isinstance(turn, dict) or not {"role", "content"} <= turn.keys():
                    raise UserError(
                        f"Message {number} lacks a role or a content.", 'Write {"role": .., "content": ..}.'
                    )
            return prompt_tokens([turn for turn in prompt if isinstance(turn, dict)], tokenizer)
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) != len(prompt):
            raise UserError(
                "A prompt of this kind is not understood.",
                "Pass a text, a list of messages with role and content, or a list of token ids.",
            )
        if ids and not 0 <= min(ids) <= max(ids) < self.target.vocab_size:
            raise UserError(
                f"Token ids run from {min(ids)} to {max(ids)}, and {self.target.name} knows 0 to "
                f"{self.target.vocab_size - 1}.",
                "Use the target's own tokenizer.",
            )
        return ids

    def _tuned_here(self) -> Tuning | None:
        """The tuning with costs that hold here and now, measured once for each set of conditions."""
        if self.tuning is None:
            return None
        with self._lock:
            conditions = Conditions.of(self.target)
            if conditions != self._conditions:
                self._here = tuned_here(self.tuning, self.heads, self.target, conditions)
                self._conditions = conditions
                self._engines.clear()
            return self._here

    def _drafter(self, name: str, tree: Tree | None, tuning: Tuning | None) -> Drafter | None:
        if tree not in (None, *TREES):
            raise UserError(f"Unknown tree {tree!r}.", nearest(str(tree), TREES))
        parts = name.split("+")
        heads = self._heads(tree, tuning) if "heads" in parts else None
        if "heads" in parts and heads is None:  # no tree pays: whatever else was asked for drafts alone
            name = "+".join(part for part in parts if part != "heads") or "none"
        return make_drafter(name, self.target, heads)

    def _heads(self, tree: Tree | None, tuning: Tuning | None) -> HeadDrafter | None:
        if tuning is not None:
            return tuning.drafter(self.heads, tree)
        return HeadDrafter(self.heads, self.shape, tree or "static") if self.shape.size > 1 else None

    def _answer(self, generation: Generation) -> Answer:
        tokenizer, ends = self.target.tokenizer, self.target.end_tokens
        words = [token for token in generation.tokens if token not in ends]
        return Answer(
            text=_decode(tokenizer, words) if tokenizer is not None else "",
            tokens=generation.tokens,
            finish=generation.finish,
            tokens_per_round=generation.tokens_per_round,
            tokens_per_second=1e3 * len(generation.tokens) / generation.token_ms[-1],
            first_token_ms=generation.first_token_ms,
            drafter_error=generation.drafter_error,
        )


def _last_words(prompt: Sequence[Any]) -> str | None:
    """What the last of a list of messages says, when it is the user's; None for any other prompt."""
    last = prompt[-1] if prompt else None
    said = last.get("content") if isinstance(last, dict) and last.get("role") == "user" else None
    return said if isinstance(said, str) else None


class Stream(Iterator[str]):
    """Pieces of a text as they are decided.

    The decoding runs in a thread of its own and hands over token ids once a round; turning them into text happens in
    the reader's thread, beside the next forward.
    """

    def __init__(self, run: Callable[[OnTokens], Answer], pieces: TextPieces) -> None:
        self._answer: list[Answer] = []
        # Nothing of the decoding refers to this object, so that it ends when nobody else does.
        self._generator = _decoded(run, pieces, self._answer)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        return next(self._generator)

    @property
    def answer(self) -> Answer | None:
        """The whole answer once the last piece was read, None before."""
        return self._answer[0] if self._answer else None

    def close(self) -> None:
        """End the decoding early; happens by itself when the stream is no longer used."""
        self._generator.close()


def _decoded(run: Callable[[OnTokens], Answer], pieces: TextPieces, answer: list[Answer]) -> Generator[str, None, None]:
    """The pieces of a stream; its answer is appended at the end."""
    inbox: queue.SimpleQueue[list[int] | Answer | BaseException] = queue.SimpleQueue()
    stopped = threading.Event()
    still_open = _OPEN  # at the end of the interpreter a module's names are gone before its objects

    def on_tokens(_row: int, tokens: list[int]) -> None:
        if stopped.is_set():
            raise _Stopped
        inbox.put(tokens)

    def work() -> None:
        try:
            inbox.put(run(on_tokens))
        except BaseException as error:  # raised again in the reader's thread
            inbox.put(error)

    thread = threading.Thread(target=work, name="headstart-stream", daemon=True)
    thread.start()
    still_open[thread] = stopped
    try:
        while not isinstance(message := inbox.get(), Answer):
            if isinstance(message, BaseException):
                raise message
            if piece := pieces.push(message):
                yield piece
        if piece := pieces.rest():
            yield piece
        answer.append(message)
    finally:
        stopped.set()
        thread.join()
        still_open.pop(thread, None)


_OPEN: dict[threading.Thread, threading.Event] = {}
"""Threads of streams that were not read to their end, and what ends them."""


@atexit.register
def _end_streams() -> None:
    """End what still decodes when the interpreter does: torch aborts the process if it is torn down under a thread."""
    for stopped in list(_OPEN.values()):
        stopped.set()
    for thread in list(_OPEN):
        thread.join()


class TextPieces:
    """Token ids to text, a few at a time, without breaking a character.

    Bytes of a character that is not complete yet decode to U+FFFD; text that ends with it is held back. Only the last
    piece and the new tokens are decoded again, so that the work does not grow with the text.

    Args:
        tokenizer: of the target.
        ends: ids of end-of-turn tokens; they are not text.
    """

    def __init__(self, tokenizer: Any, ends: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._tokens: list[int] = []
        self._start = 0  # the context that decides on spaces starts here
        self._shown = 0  # tokens whose text has been given out

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._tokens.extend(token for token in tokens if token not in self._ends)
        text = self._pending()
        if not text or text.endswith("\ufffd"):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        text = self._pending()
        self._start = self._shown = len(self._tokens)
        return text

    def _pending(self) -> str:
        known = _decode(self._tokenizer, self._tokens[self._start : self._shown])
        return _decode(self._tokenizer, self._tokens[self._start :])[len(known) :]


class _Stopped(Exception):
    """The reader of a stream has gone."""


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _drafts(name: str, tree: Tree | None) -> bool:
    """Whether a drafter of this name needs costs: not plain decoding, nor one that is refused."""
    known = all(part.partition(":")[0] in DRAFTERS for part in parts_of(name))
    return known and name != "none" and tree in (None, *TREES)


def _decoding(options: GenerateOptions) -> DecodeOptions:
    """The options of the decode loop; those about the prompt and the drafter are left out."""
    unknown = sorted(set(options) - set(GenerateOptions.__annotations__))
    if unknown:
        raise UserError(f"Unknown option {unknown[0]!r}.", nearest(unknown[0], GenerateOptions.__annotations__))
    stop = options.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise UserError("A stop string is empty.", "Leave it out.")
    return DecodeOptions(
        max_new_tokens=options.get("max_new_tokens", 128),
        temperature=options.get("temperature", 0.0),
        seed=options.get("seed", 0),
        stop_strings=stops,
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
        min_p=options.get("min_p", 0.0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        processors=tuple(options.get("processors", ())),
        verifier=options.get("verifier", "auto"),
        draft=options.get("draft", "auto"),
    )


def _tuning(calibration: dict[str, Any]) -> Tuning | None:
    if not calibration:
        return None
    try:
        return Tuning.from_json(calibration)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"The heads' calibration is not whole ({type(error).__name__}: {error}).",
            "Export or fetch the heads again, or tune them again.",
        ) from None


def _named_target(folder: Path) -> str:
    """What to load for heads that name their target."""
    spec, _, name = target_spec(folder)
    if not spec or (Path(spec).is_absolute() and not Path(spec).exists()):
        raise UserError(
            f"The heads in {folder} belong to {name}, and {spec or 'where it lies'} is not on this machine.",
            f"Say where {name} is: a folder or a hub id as target.",
        )
    return spec
