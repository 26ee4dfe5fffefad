"""The ways of decoding that a report compares, each with the same call: a batch of prompts in, a timed `Run` out.

Clocks start before the prompts become tensors and stop when the tokens are back as Python lists, for every method.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from headstart.decode.budget import Costs
from headstart.decode.loop import Drafter, Engine, Round
from headstart.decode.options import DecodeOptions, SamplingOptions, TreeKind
from headstart.errors import UserError
from headstart.eval.labels import LOOKUP, PLAIN, STOCK
from headstart.target.model import Target

ASSISTANT = "transformers_assistant:"
"""Before the name of a model that drafts in transformers' own assisted generation."""
TREES: dict[str, TreeKind] = {"dynamic": "dynamic", "static": "static", "chain": "chain"}
"""Names of the heads with each kind of tree; "heads" has the one that tuning found best."""
ALL = (*TREES, "ngram", "lookahead", "early-exit", "heads+ngram")
"""Every drafter that needs no second model."""


@dataclass
class Run:
    """What one method did with one batch of prompts.

    Attributes:
        tokens: emitted token ids of each row, the end-of-turn token included.
        seconds: wall-clock time of the whole batch, prefill included.
        token_ms: for each row, milliseconds since the call at which each of its tokens came.
        rounds: of each row; empty for methods that do not draft through our loop.
        drafter_error: what the drafter raised, when it did; decoding went on plainly.
    """

    tokens: list[list[int]]
    seconds: float
    token_ms: list[list[float]]
    rounds: list[list[Round]] = field(default_factory=list)
    drafter_error: str | None = None

    @property
    def count(self) -> int:
        """Tokens emitted by all rows."""
        return sum(map(len, self.tokens))


class Drafters(Protocol):
    """Where drafters come from: `headstart.decoder.Decoder`."""

    @property
    def costs(self) -> Costs | None: ...

    def drafter(self, name: str = "heads", tree: TreeKind | None = None) -> Drafter | None: ...


def named(source: Drafters, name: str) -> Drafter | None:
    """A drafter by its name in a table: one of `TREES`, or what the catalog knows.

    Raises:
        UserError: no such drafter.
    """
    tree = TREES.get(name)
    return source.drafter("heads", tree) if tree else source.drafter(name)


def wanted(names: Sequence[str], drafter: str) -> tuple[str, ...]:
    """The names to compare, each once, without those that every report has anyway; "all" stands for `ALL`.

    Args:
        names: as asked for; a name may be a comma-separated list.
        drafter: the one under test.

    >>> wanted(["ngram,none", "chain", "ngram"], "heads")
    ('ngram', 'chain')
    """
    asked = [name.strip() for listed in names for name in listed.split(",")]
    every = [method for name in asked if name for method in (ALL if name == "all" else (name,))]
    return tuple(name for name in dict.fromkeys(every) if name not in (drafter, "none", PLAIN, STOCK, LOOKUP))


class Method(Protocol):
    """One way of decoding."""

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        """Decode a batch and time it."""
        ...


class Ours:
    """Our loop, with a drafter or without.

    Args:
        target: the frozen model.
        drafter: what drafts; None decodes plainly.
        options: sampling, verifier and whether to draft; length and seed come with each run.
        costs: of verifying on this machine.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        options: DecodeOptions | None = None,
        costs: Costs | None = None,
    ) -> None:
        self._engine = Engine(target, drafter, costs if drafter is not None else None)
        self._options = options or DecodeOptions()

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        options = replace(self._options, max_new_tokens=max_new_tokens, seed=seed)
        start = perf_counter()
        outputs = self._engine.generate(prompts, options)
        seconds = perf_counter() - start
        return Run(
            [output.tokens for output in outputs],
            seconds,
            [output.token_ms for output in outputs],
            [output.rounds for output in outputs],
            next((output.drafter_error for output in outputs if output.drafter_error), None),
        )


class Transformers:
    """`generate` of transformers on the untouched model: plain, with its own prompt lookup, or with a draft model.

    The model's own generation defaults (repetition penalty, top-p, ...) are set aside, so that both loops draw from the
    same distribution.

    Args:
        target: whose model runs.
        sampling: the distribution to draw from.
        lookup_tokens: drafts per round of its prompt lookup (one prompt at a time only); None for no lookup.
        assistant: a smaller model that drafts (one prompt at a time only), with transformers' own settings.

    Raises:
        UserError: logits processors, or a draft model with another tokenizer.
    """

    def __init__(
        self,
        target: Target,
        sampling: SamplingOptions | None = None,
        lookup_tokens: int | None = None,
        assistant: Target | None = None,
    ) -> None:
        sampling = sampling or SamplingOptions()
        if sampling.processors:
            raise UserError("Logits processors cannot be measured beside transformers.", "Leave them out.")
        if assistant is not None:
            _check_same_words(target, assistant)
        self._target = target
        self._assistant = assistant
        self._ends = target.end_tokens
        self._settings: dict[str, Any] = {
            "eos_token_id": sorted(self._ends) or None,
            "pad_token_id": _pad_token(target, self._ends),
            **sampling.for_transformers(),
            **({"prompt_lookup_num_tokens": lookup_tokens} if lookup_tokens else {}),
        }

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        device = self._target.device
        clock = _TokenTimes(len(prompts))
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _quiet(), self._target.stock() as model, self._helper() as helper:
            torch.manual_seed(seed)
            defaults = model.generation_config
            model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, **self._settings)
            try:
                start = clock.start = perf_counter()
                tokens_BT, mask_BT = _left_padded(prompts, self._settings["pad_token_id"], device)
                out_BT = model.generate(input_ids=tokens_BT, attention_mask=mask_BT, streamer=clock, **helper)
                rows = out_BT[:, tokens_BT.shape[1] :].tolist()
                seconds = perf_counter() - start
            finally:
                model.generation_config = defaults
        tokens = [_cut(row[:max_new_tokens], self._ends) for row in rows]
        return Run(tokens, seconds, [clock.token_ms[: len(row)] for row in tokens])

    @contextmanager
    def _helper(self) -> Iterator[dict[str, Any]]:
        """What `generate` is given to draft with, beside the settings."""
        if self._assistant is None:
            yield {}
        else:
            with self._assistant.stock() as model:
                yield {"assistant_model": model}


def _check_same_words(target: Target, assistant: Target) -> None:
    """Drafts are token ids: they mean the same in both models only when the tokenizers do."""
    ours, theirs = target.tokenizer, assistant.tokenizer
    same = ours is not None and theirs is not None and ours.get_vocab() == theirs.get_vocab()
    if not same:
        raise UserError(
            f"The draft model {assistant.name} has another tokenizer than {target.name}.",
            "Choose a smaller model of the same family.",
        )


class _TokenTimes(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Notes when `generate` hands over tokens; it hands the prompt over first."""

    def __init__(self, rows: int) -> None:
        self.start = 0.0
        self.token_ms: list[float] = []
        self._rows = rows
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
        else:  # one token of every row, or several of a single one
            self.token_ms += [1e3 * (perf_counter() - self.start)] * (value.numel() // self._rows)

    def end(self) -> None:
        """Nothing is held back."""


def _cut(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Tokens up to the first end-of-turn token, which is kept; what follows is padding.

    >>> _cut([5, 2, 0, 0], frozenset({2}))
    [5, 2]
    """
    stop = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


def _left_padded(prompts: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, T], both int64."""
    width = max(map(len, prompts))
    tokens = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)


def _pad_token(target: Target, ends: frozenset[int]) -> int:
    pad = getattr(target.tokenizer, "pad_token_id", None)
    return int(pad) if pad is not None else min(ends, default=0)


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
