"""The compared ways of decoding, all with the same call: a batch of prompts in, a timed `Run` out.

For every method the clock starts before the prompts become tensors and stops when the tokens are Python lists.

Shape suffixes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from headstart.decode.budget import Costs
from headstart.decode.drafting import Drafter
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, TreeKind
from headstart.decode.texts import Round
from headstart.errors import UserError
from headstart.eval.enumeration import OutputPenalties
from headstart.eval.labels import LOOKUP, PLAIN, STOCK
from headstart.heads.base import DraftHead
from headstart.model.loading import silent
from headstart.model.model import Target

TREES: dict[str, TreeKind] = {"dynamic": "dynamic", "static": "static", "chain": "chain"}
"""Names of the heads with each kind of tree; "heads" uses the kind that tuning found best."""
ALL = (*TREES, "ngram", "lookahead", "early-exit", "heads+ngram")  # meaning of `--compare all`
LOOKUP_TOKENS = 4  # drafts per round of transformers' prompt lookup
WARM_UP_TOKENS = 32  # maximum tokens of each method's unmeasured first generation, without CUDA graphs


class Source(Protocol):
    """The system under test: `headstart.decoder.Decoder`."""

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
    """One method's results on one batch of prompts, by row."""

    tokens: list[list[int]]  # emitted token ids, the end-of-turn token included
    seconds: float  # wall-clock time of the whole batch, prefill included
    token_ms: list[list[float]]  # arrival of each token, in milliseconds since the call
    rounds: list[list[Round]] = field(default_factory=list)  # empty for methods that do not draft through our loop
    drafter_error: str | None = None  # error of a failed drafter; decoding continued without it

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))

    def after_prefill(self) -> Run:
        """Return a run of one row without its first token and the time to it; arrivals stay as they are."""
        return replace(self, tokens=[self.tokens[0][1:]], seconds=(self.token_ms[0][-1] - self.token_ms[0][0]) / 1e3)


def drafters_named(source: Source, name: str) -> tuple[Drafter, ...]:
    """Resolve the name of a compared drafter: one of `TREES`, or a name in the catalog."""
    tree = TREES.get(name)
    return source.drafters("heads", tree) if tree else source.drafters(name)


def expand(names: Sequence[str], drafter: str) -> tuple[str, ...]:
    """Return the drafters to compare with the tested one, each once, without the baselines of every report.

    A name may be a comma-separated list, and "all" stands for `ALL`.

    >>> expand(["ngram,none", "chain", "ngram"], "heads")
    ('ngram', 'chain')
    """
    listed = [name.strip() for entry in names for name in entry.split(",")]
    every = [method for name in listed for method in (ALL if name == "all" else (name,))]
    return tuple(name for name in dict.fromkeys(every) if name not in (drafter, "none", PLAIN, STOCK, LOOKUP, ""))


class Ours:
    """Our loop, with or without drafters; length and seed are set per run, all else in the options."""

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
        """Whether forwards may be captured as CUDA graphs."""
        return self._loop.target.device.type == "cuda"

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int, *, always: bool = False) -> Run:
        """Decode a batch and time it; with `always`, drafting never pauses."""
        least = min(self._options.min_new_tokens, max_new_tokens)
        options = replace(self._options, max_new_tokens=max_new_tokens, min_new_tokens=least, seed=seed)
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
    """Decode a batch unmeasured. With CUDA graphs, decode it in full and always draft, to capture nearly every size."""
    if isinstance(method, Ours) and method.captures:
        method.run(prompts, max_new_tokens, seed, always=True)
    else:
        method.run(prompts, min(WARM_UP_TOKENS, max_new_tokens), seed)


class Transformers:
    """transformers' `generate` on the untouched model, plain or (for single prompts) with its prompt lookup.

    The model's generation defaults (repetition penalty, top-p, ...) are disabled, so both loops sample from the same
    distribution.
    """

    def __init__(self, target: Target, options: DecodeOptions, lookup: bool = False) -> None:
        if options.processors:
            raise UserError("Logits processors cannot be compared with transformers.", "Leave them out.")
        self._target, self._options = target, options
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
        device, model = self._target.device, self._target.model
        clock = _TokenTimes(len(prompts))
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), silent():
            torch.manual_seed(seed)
            defaults = model.generation_config
            model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, **self._settings)
            try:
                start = clock.start = perf_counter()
                tokens_BT = _left_padded(prompts, self._settings["pad_token_id"]).to(device)
                mask_BT = _left_padded([[1] * len(prompt) for prompt in prompts], 0).to(device)
                penalises = self._options.presence_penalty or self._options.frequency_penalty
                penalties = [OutputPenalties(self._options, tokens_BT.shape[1])] if penalises else []
                out_BT = model.generate(
                    input_ids=tokens_BT, attention_mask=mask_BT, streamer=clock, logits_processor=penalties
                )
                rows = out_BT[:, tokens_BT.shape[1] :].tolist()
                seconds = perf_counter() - start
            finally:
                model.generation_config = defaults
        tokens = [_cut(row[:max_new_tokens], self._ends) for row in rows]
        return Run(tokens, seconds, [clock.token_ms[: len(row)] for row in tokens])


class Method(Protocol):
    """One way of decoding."""

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        """Decode a batch and time it. Row b is sampled with seed + b; `Transformers` seeds the batch once."""


class _TokenTimes(BaseStreamer):  # type: ignore[misc]  # transformers has no types
    """Records when `generate` emits tokens; its first call has the prompt."""

    def __init__(self, rows: int) -> None:
        self.start = 0.0
        self.token_ms: list[float] = []
        self._rows = rows
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
        else:  # one token per row, or several of a single row
            self.token_ms += [1e3 * (perf_counter() - self.start)] * (value.numel() // self._rows)

    def end(self) -> None:
        """Do nothing: no tokens are buffered."""


def _cut(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Truncate after the first end token: padding follows.

    >>> _cut([5, 2, 0, 0], frozenset({2}))
    [5, 2]
    """
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))]


def _left_padded(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Return rows as a tensor [B, T]."""
    return pad_sequence([torch.tensor(row) for row in rows], True, padding, padding_side="left")
