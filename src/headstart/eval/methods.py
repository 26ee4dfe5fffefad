"""The ways of decoding that a report compares, each with the same call: a batch of prompts in, a timed `Run` out.

Clocks start before the prompts become tensors and stop when the tokens are back as Python lists, for every method.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from headstart.decode.budget import Costs
from headstart.decode.loop import DecodeLoop, Drafter, Round
from headstart.decode.options import DecodeOptions, TreeKind
from headstart.errors import UserError
from headstart.eval.labels import LOOKUP, PLAIN, STOCK
from headstart.heads.base import DraftHead
from headstart.target.loading import silent
from headstart.target.model import Target

TREES: dict[str, TreeKind] = {"dynamic": "dynamic", "static": "static", "chain": "chain"}
"""Names of the heads with each kind of tree; "heads" has the one that tuning found best."""
ALL = (*TREES, "ngram", "lookahead", "early-exit", "heads+ngram")
"""What `--compare all` takes."""
LOOKUP_TOKENS = 4
"""Drafts a round of transformers' prompt lookup."""
WARM_UP_TOKENS = 32
"""Most tokens of the unmeasured generation that each method starts with, where nothing is captured."""


class Source(Protocol):
    """What is measured or audited: `headstart.decoder.Decoder`."""

    @property
    def target(self) -> Target: ...

    @property
    def heads(self) -> DraftHead: ...

    @property
    def costs(self) -> Costs | None: ...

    @property
    def calibration(self) -> dict[str, Any]: ...

    def drafters(self, name: str = "heads", tree: TreeKind | None = None) -> tuple[Drafter, ...]: ...


@dataclass
class Run:
    """What one method did with one batch of prompts, by row.

    Attributes:
        tokens: emitted token ids, the end-of-turn token included.
        seconds: wall-clock time of the whole batch, prefill included.
        token_ms: milliseconds since the call at which each token came.
        rounds: empty for methods that do not draft through our loop.
        drafter_error: what a drafter raised, when one did; decoding went on without it.
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


def named(source: Source, name: str) -> tuple[Drafter, ...]:
    """Drafters by their name in a table: one of `TREES`, or what the catalog knows."""
    tree = TREES.get(name)
    return source.drafters("heads", tree) if tree else source.drafters(name)


def wanted(names: Sequence[str], drafter: str) -> tuple[str, ...]:
    """The names to compare beside the drafter under test, each once, without those that every report has anyway.

    A name may be a comma-separated list, and "all" stands for `ALL`.

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
    """Our loop, with a drafter or without; length and seed come with each run, all else is in the options."""

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter] = (),
        options: DecodeOptions | None = None,
        costs: Costs | None = None,
    ) -> None:
        self._loop = DecodeLoop(target, *drafters, costs=costs if drafters else None)
        self._options = options or DecodeOptions()

    @property
    def captures(self) -> bool:
        """Whether its forwards are captured."""
        return self._loop.target.device.type == "cuda"

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int, *, always: bool = False) -> Run:
        """See `Method`; with `always` drafting never pauses."""
        options = replace(self._options, max_new_tokens=max_new_tokens, seed=seed)
        if always and options.draft == "auto":
            options = replace(options, draft="on")
        start = perf_counter()
        outputs = self._loop.generate(prompts, options)
        seconds = perf_counter() - start
        return Run(
            [output.tokens for output in outputs],
            seconds,
            [output.token_ms for output in outputs],
            [output.rounds for output in outputs],
            next((output.drafter_error for output in outputs if output.drafter_error), None),
        )


def warm_up(method: Method, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> None:
    """Decode a batch unmeasured. Where forwards are captured the whole of it, with drafts in every round: each size
    that is met is captured once, and later answers hardly meet others."""
    if isinstance(method, Ours) and method.captures:
        method.run(prompts, max_new_tokens, seed, always=True)
    else:
        method.run(prompts, min(WARM_UP_TOKENS, max_new_tokens), seed)


class Transformers:
    """`generate` of transformers on the untouched model, plain or (one prompt at a time only) with its prompt lookup.

    The model's own generation defaults (repetition penalty, top-p, ...) are set aside, so that both loops draw from the
    same distribution.
    """

    def __init__(self, target: Target, options: DecodeOptions, lookup: bool = False) -> None:
        if options.processors:
            raise UserError("Logits processors cannot be measured beside transformers.", "Leave them out.")
        self._target = target
        self._ends = target.end_tokens | set(options.stop_token_ids)
        pad = getattr(target.tokenizer, "pad_token_id", None)
        self._settings: dict[str, Any] = {
            "eos_token_id": sorted(self._ends) or None,
            "pad_token_id": min(self._ends, default=0) if pad is None else int(pad),
            "min_new_tokens": options.min_new_tokens or None,
            **options.for_transformers(),
            **({"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}),
        }

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        device = self._target.device
        clock = _TokenTimes(len(prompts))
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), silent(), self._target.stock() as model:
            torch.manual_seed(seed)
            defaults = model.generation_config
            model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, **self._settings)
            try:
                start = clock.start = perf_counter()
                tokens_BT, mask_BT = _left_padded(prompts, self._settings["pad_token_id"], device)
                out_BT = model.generate(input_ids=tokens_BT, attention_mask=mask_BT, streamer=clock)
                rows = out_BT[:, tokens_BT.shape[1] :].tolist()
                seconds = perf_counter() - start
            finally:
                model.generation_config = defaults
        tokens = [_cut(row[:max_new_tokens], self._ends) for row in rows]
        return Run(tokens, seconds, [clock.token_ms[: len(row)] for row in tokens])


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
    """Tokens up to the first one that ends the text, which is kept; what follows is padding.

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
