"""Generating text with a target and its heads: prompts in, answers out."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, get_args

from headstart.data.prompts.chat import (
    Unusable,
    has_template,
    prompt_tokens,
    read_messages,
    with_template_kwargs,
    with_tools,
)
from headstart.data.served.log import RequestLog, Served, template_version
from headstart.decode.batch import Row
from headstart.decode.costs import Conditions, Costs, Measured
from headstart.decode.drafting import Drafter
from headstart.decode.engine import Engine, Ticket
from headstart.decode.loop import DecodeLoop, check, check_options
from headstart.decode.options import DecodeKeywords, DecodeOptions, TreeKind, random_seed
from headstart.decode.texts import Generation
from headstart.drafters.catalog import DEFAULT, check_drafter, make_drafters, parts_of
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.memory import MemoryDrafter
from headstart.errors import UserError, check_text, nearest
from headstart.heads.base import DraftHead
from headstart.model.model import Target
from headstart.streaming import Answer, Inbox, Stream, warn_of_failures
from headstart.support.detokenizer import IncrementalDetokenizer
from headstart.tree.tree import TreeShape
from headstart.tuning.local_costs import warn_of_stored_costs, with_local_costs
from headstart.tuning.tune import Tuning

TREES = get_args(TreeKind)
Loaded = tuple[DraftHead, TreeShape, dict[str, Any], Path | None]
"""Heads with their tree, calibration and file of answers, as `Decoder` takes them."""
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""A user's text, a conversation of {"role", "content"} messages, or token ids. A content is a text, or a list of parts
such as {"type": "text", "text": ...}."""


class Decoder:
    """Generates losslessly with a target and its heads.

    Args:
        heads: bound to the target, in its dtype and on its device; None for a target with other drafters.
        shape: the static tree; heads with the root alone decode plainly.
        calibration: see `Tuning.to_json`; without it the heads always draft the static tree.
        answers: a file of earlier answers of the target, for the drafter "memory".

    Attributes:
        log: receives every completed request; None by default.
        newer: returns heads to use from the next request on, or None without newer ones.

    Raises:
        UserError: an incomplete calibration.
    """

    def __init__(
        self,
        target: Target,
        heads: DraftHead | None = None,
        shape: TreeShape | None = None,
        calibration: dict[str, Any] | None = None,
        answers: Path | None = None,
    ) -> None:
        self.target = target
        self._loaded: DraftHead | None = None
        self._loops: dict[tuple[str, TreeKind | None, bool, bool], DecodeLoop] = {}
        self._models: dict[str, Drafter] = {}  # drafters that loaded or copied a model
        self._conditions: Conditions | None = None
        self._local: Tuning | None = None  # the tuning with costs for these conditions
        self._warned = False  # of stored costs
        self._lock = threading.RLock()
        self._engine = Engine(target)
        self.swap(heads, shape or TreeShape.chain(0), calibration or {}, answers)
        self.log: RequestLog | None = None
        self.newer: Callable[[], Loaded | None] | None = None
        target.record()  # so that the first answer does not

    @property
    def heads(self) -> DraftHead:
        """The heads. Raises UserError if only a target was loaded."""
        if self._loaded is None:
            raise UserError(f"{self.target.name} was loaded without heads.", "Name a folder of heads.")
        return self._loaded

    def swap(
        self, heads: DraftHead | None, shape: TreeShape, calibration: dict[str, Any], answers: Path | None = None
    ) -> None:
        """Draft with other heads from the next request on; running requests finish with the old ones.

        Drops the experience with the old heads, and their measured costs unless the new heads have the same config. The
        old heads stay if this raises, as `Decoder` does.
        """
        tuning = Tuning.from_json(calibration) if calibration else None
        with self._lock:
            same = self._loaded is not None and heads is not None and self._loaded.config == heads.config
            local, self._local = self._local, None
            if not same or tuning is None:
                self._conditions = None
            elif local is not None:
                self._local = tuning.at_costs(Measured(local.costs, local.packed))
            self._loaded, self.shape, self.calibration, self.tuning = heads, shape, calibration, tuning
            self.answers, self._warned = answers, False
            self._loops.clear()

    @property
    def costs(self) -> Costs | None:
        """Costs on this machine, measured at first use; None without a calibration."""
        tuning = self._local_tuning()
        return tuning.costs if tuning else None

    def drafters(self, name: str = "heads", tree: TreeKind | None = None) -> tuple[Drafter, ...]:
        """Make the drafters of a name, see `DecodeOptions`. Raises UserError if one cannot draft here."""
        _check_drafting(name, tree)
        if "heads" in parts_of(name):
            _ = self.heads
        return self._drafters(name, tree, self.tuning if name == "none" else self._local_tuning())

    def loop(
        self, drafter: str = DEFAULT, tree: TreeKind | None = None, drafts: bool = True, deterministic: bool = False
    ) -> DecodeLoop:
        """Return the cached decode loop of a drafter, after measuring costs; not if `deterministic` (stored costs) or
        without `drafts` (no costs)."""
        _check_drafting(drafter, tree)
        if deterministic and any(part.startswith("memory:") for part in parts_of(drafter)):
            raise UserError(
                "Deterministic decoding does not depend on earlier answers, and memory:FILE does.",
                "Write memory, which reads only the answers of the training.",
            )
        drafts = drafts and drafter != "none"
        with self._lock:
            if drafts:
                tuning = self._stored_tuning() if deterministic else self._local_tuning()
            else:
                tuning = self._local or self.tuning
            key = (drafter, tree, drafts, deterministic)
            if key not in self._loops:
                costs = tuning.costs if tuning and drafts else None
                self._loops[key] = DecodeLoop(self.target, *self._drafters(drafter, tree, tuning), costs=costs)
            if tuning and drafts and self._loaded is not None:  # loops share the heads
                tuning.pack(self._loaded)
            return self._loops[key]

    def generate(self, prompt: Prompt, **options: Unpack[DecodeKeywords]) -> Answer:
        """Answer one prompt.

        Args:
            prompt: a text (one user message), messages for the target's chat template, or token ids.
            **options: see `DecodeOptions`.

        Raises:
            UserError: a prompt that is empty, too long or of another kind, a target without a chat template, or an
                option that is unknown or out of range; all before anything is decoded.
        """
        return self._answers([prompt], options)[0]

    def generate_batch(self, prompts: Sequence[Prompt], **options: Unpack[DecodeKeywords]) -> list[Answer]:
        """Answer several prompts at once; prompt b samples with seed + b. Raises the errors of `generate`."""
        if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
            raise UserError(
                f"The prompts of a batch are of the type {type(prompts).__name__}.",
                "Give a list of prompts, or one prompt to generate.",
            )
        return self._answers(prompts, options)

    def stream(self, prompt: Prompt, **options: Unpack[DecodeKeywords]) -> Stream:
        """Answer one prompt, piece by piece; raises the errors of `generate`. Streams of several threads share one
        batch, and a prompt that begins like an earlier one is read from there on.

        Returns:
            An iterator over pieces of the text, which never split a character; `answer` is set at the end. Decoding
            starts with the first piece, and leaving the loop ends it.
        """
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UserError("Streaming text needs a tokenizer.", "Load the target with its tokenizer, or use generate.")
        settings = DecodeOptions.of(options)
        (tokens,), loop = self._prepare([prompt], settings)
        pieces = IncrementalDetokenizer(tokenizer, self.target.end_tokens, self.target.markup)
        seed = random_seed() if settings.seed is None else settings.seed

        def submit(inbox: Inbox) -> Ticket:
            def end(outcome: Generation | BaseException | None) -> None:
                try:
                    if isinstance(outcome, Generation):
                        self.remember(loop, [tokens], [outcome])
                        inbox.put(self._answer(tokens, outcome, settings, loop))
                    else:
                        inbox.put(outcome)
                except Exception as error:
                    inbox.put(error)
                inbox.put(None)

            row = Row(tokens, replace(settings, seed=seed), time.perf_counter())
            row.on_tokens = lambda _, added, drafted: inbox.put((added, drafted))
            return self._engine.submit(loop, row, end)

        return Stream(submit, pieces)

    def remember(self, loop: DecodeLoop, prompts: Sequence[Sequence[int]], generations: Sequence[Generation]) -> None:
        """Store these answers in memory drafters. Not for measurements."""
        for drafter in loop.drafters:
            if isinstance(drafter, MemoryDrafter):
                for prompt, generation in zip(prompts, generations, strict=True):
                    drafter.remember(prompt, generation.tokens)

    def tokens(
        self,
        prompt: Prompt,
        raw: bool = False,
        tools: Sequence[Any] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokenise a prompt; takes the options of `generate` and raises its errors."""
        tokenizer = self.target.tokenizer
        empty = UserError("The prompt is empty.", "Give a question or a text to continue.")
        if isinstance(prompt, str) and raw:
            if not prompt:
                raise empty
            if tokenizer is None:
                raise UserError("A text prompt needs a tokenizer.", "Pass token ids.")
            check_text(prompt, "The prompt")
            return list(tokenizer.encode(prompt))
        unknown = UserError("This kind of prompt is not supported.", "Pass a text, a list of messages or token ids.")
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
            raise unknown
        items: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if items and all(isinstance(item, dict) for item in items):
            self.check_template()
            try:
                messages = read_messages(items)
            except Unusable as reason:
                remedy = "Write {'role': 'user', 'content': text}; roles are system, user, assistant and tool."
                raise UserError(f"A prompt {reason} cannot be answered.", remedy) from None
            if not messages or (messages[-1]["role"] == "user" and not messages[-1]["content"].strip()):
                raise empty
            return prompt_tokens(
                messages, with_tools(with_template_kwargs(tokenizer, chat_template_kwargs or {}), tools)
            )
        if not all(isinstance(item, int) for item in items):
            raise unknown
        if items and not 0 <= min(items) <= max(items) < self.target.vocab_size:
            given, known = f"{min(items)} to {max(items)}", f"0 to {self.target.vocab_size - 1}"
            raise UserError(f"Token ids run from {given}, and the target has {known}.", "Use its own tokenizer.")
        return items

    def check_template(self) -> None:
        """Refuse (UserError) a target without a chat template."""
        if not has_template(self.target.tokenizer):
            raise UserError(
                f"{self.target.name} has no chat template to render messages with.",
                "Pass token ids, or a text with raw=True (--raw) to have it continued as it is.",
            )

    def _answers(self, prompts: Iterable[Prompt], options: DecodeKeywords) -> list[Answer]:
        settings = DecodeOptions.of(options)
        tokens, loop = self._prepare(prompts, settings)
        generations = loop.generate(tokens, settings)
        self.remember(loop, tokens, generations)
        answers = [self._answer(*pair, settings, loop) for pair in zip(tokens, generations, strict=True)]
        warn_of_failures(answers)
        return answers

    def _prepare(self, prompts: Iterable[Prompt], options: DecodeOptions) -> tuple[list[list[int]], DecodeLoop]:
        check_options(options)
        tokens = [self.tokens(prompt, options.raw, options.tools, options.chat_template_kwargs) for prompt in prompts]
        check(self.target, tokens, options)
        self._update_heads()
        return tokens, self.loop(options.drafter, options.tree, options.draft != "off", options.deterministic)

    def _update_heads(self) -> None:
        """Switch to newer heads, if any; warn if that fails."""
        if self.newer is None:
            return
        with self._lock:
            try:
                if (newer := self.newer()) is not None:
                    self.swap(*newer)
            except (UserError, OSError, RuntimeError) as error:  # RuntimeError: out of memory
                warnings.warn(f"New heads cannot be used: {error} The old ones stay.", RuntimeWarning, stacklevel=5)

    def _local_tuning(self) -> Tuning | None:
        """The tuning with costs for the current conditions, measured once each."""
        if self.tuning is None:
            return None
        with self._lock:
            conditions = Conditions.of(self.target)
            if conditions != self._conditions:
                self.target.record()  # measure recorded forwards, as in later calls
                conditions = Conditions.of(self.target)
                self._local = with_local_costs(self.tuning, self.heads, self.target, conditions)
                self._conditions = conditions
                self._loops.clear()
            return self._local

    def _stored_tuning(self) -> Tuning | None:
        """Return the tuning with stored costs; logs once if they were measured elsewhere."""
        if self.tuning is not None and not self._warned:
            warn_of_stored_costs(self.tuning, Conditions.of(self.target))
            self._warned = True
        return self.tuning

    def _drafters(self, name: str, tree: TreeKind | None, tuning: Tuning | None) -> tuple[Drafter, ...]:
        parts = parts_of(name)
        heads: HeadDrafter | None = None
        if parts == ["heads"]:
            _ = self.heads  # a UserError without heads
        if "heads" in parts and self._loaded is not None:
            if tuning is not None:
                heads = tuning.drafter(self._loaded, tree)
            elif self.shape.size > 1:
                heads = HeadDrafter(self._loaded, self.shape, tree or "static")
        if "heads" in parts and heads is None:  # no tree pays
            name = "+".join(part for part in parts if part != "heads") or "none"
        return make_drafters(name, self.target, heads, self.answers, self._models)

    def _answer(
        self, prompt: Sequence[int], generation: Generation, options: DecodeOptions, loop: DecodeLoop
    ) -> Answer:
        rounds = len(generation.rounds)
        drafts = options.drafter != "none" and options.draft != "off"  # without drafters: no tree pays
        drafting = (drafter.heads.version for drafter in loop.drafters if isinstance(drafter, HeadDrafter))
        answer = Answer(
            text="" if self.target.tokenizer is None else self.target.text_of(generation.tokens),
            tokens=generation.tokens,
            finish_reason=generation.finish_reason,
            tokens_per_round=generation.tokens_per_round,
            tokens_per_second=1e3 * len(generation.tokens) / generation.token_ms[-1],
            first_token_ms=generation.token_ms[0],
            drafter_error=generation.drafter_error,
            rounds=rounds,
            paused_rounds=generation.paused_rounds if loop.drafters or not drafts else rounds,
            seed=generation.seed,
            heads=next(drafting, ""),
            logprobs=None if options.logprobs is None else generation.logprobs,
        )
        if self.log is None:
            return answer
        names = () if options.greedy else ("temperature", "top_k", "top_p", "min_p")
        sampling: dict[str, Any] = {name: getattr(options, name) for name in names}
        if options.processes_logits:
            sampling["processed"] = True
        served = Served(
            list(prompt),
            answer.tokens,
            answer.finish_reason,
            time.time(),
            sampling,
            *self._stamp,
            source=options.source,
            heads=answer.heads,
            rounds=answer.rounds,
        )
        self.log.add(served)
        return answer

    @cached_property
    def _stamp(self) -> tuple[str, str]:
        """Fingerprints of the target and its chat template, for the log."""
        return self.target.identity().fingerprint, template_version(self.target.tokenizer)


def _check_drafting(drafter: str, tree: TreeKind | None) -> None:
    check_drafter(drafter)
    if tree not in (None, *TREES):
        raise UserError(f"Unknown tree {tree!r}.", nearest(tree, TREES))
