"""The ways of decoding that a report compares, each behind the same call: a batch of prompts in, a timed `Run` out.

Clocks start before the prompts become tensors and stop when the tokens are back as Python lists, for every method.

Shape suffixes: B rows, T tokens, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from headstart.decode.drafters import Drafter
from headstart.decode.loop import DecodeOptions, Engine, Round
from headstart.target import DraftTree, Target

HEADS, PLAIN, STOCK, LOOKUP = "heads", "plain", "transformers", "transformers_prompt_lookup"
METHODS = (HEADS, PLAIN, STOCK, LOOKUP)

Arrivals = list[tuple[float, int]]
"""(milliseconds since the call, tokens that came at that moment), in order."""


@dataclass
class Run:
    """What one method did with one batch of prompts.

    Attributes:
        tokens: emitted token ids of each row, the end-of-turn token included.
        seconds: wall-clock time of the whole batch, prefill included.
        arrivals: when the tokens of each row came.
        rounds: of each row; empty for methods that do not draft through our loop.
        depths: depth of the tree drafted in each of these rounds.
    """

    tokens: list[list[int]]
    seconds: float
    arrivals: list[Arrivals]
    rounds: list[list[Round]] = field(default_factory=list)
    depths: list[list[int]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Tokens emitted by all rows."""
        return sum(map(len, self.tokens))


class Method(Protocol):
    """One way of decoding."""

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        """Decode a batch and time it."""
        ...


class Ours:
    """Our loop, with a drafter or without."""

    def __init__(self, target: Target, drafter: Drafter | None, temperature: float) -> None:
        self._recorder = DepthRecorder(drafter) if drafter is not None else None
        self._engine = Engine(target, self._recorder)
        self._temperature = temperature

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        options = DecodeOptions(max_new_tokens=max_new_tokens, temperature=self._temperature, seed=seed)
        start = perf_counter()
        outputs = self._engine.generate(prompts, options)
        seconds = perf_counter() - start
        rounds = [output.rounds for output in outputs]
        depths = self._recorder.depths() if self._recorder else [[0] * len(row) for row in rounds]
        arrivals = [_arrivals(output.token_ms) for output in outputs]
        return Run([output.tokens for output in outputs], seconds, arrivals, rounds, depths)


class Transformers:
    """`generate` of transformers on the untouched model, with its own prompt lookup or without.

    The model's own generation defaults (repetition penalty, top-p, ...) are set aside, so that both loops draw from the
    same distribution.

    Args:
        target: whose model runs.
        temperature: 0 is greedy; above 0 plain sampling, without top-k or top-p.
        lookup_tokens: drafts per round of its prompt lookup (one prompt at a time only); None for the plain loop.
    """

    def __init__(self, target: Target, temperature: float, lookup_tokens: int | None = None) -> None:
        self._target = target
        self._ends = target.end_tokens
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        self._settings: dict[str, Any] = {
            "eos_token_id": sorted(self._ends) or None,
            "pad_token_id": _pad_token(target, self._ends),
            **(sampling if temperature > 0 else {"do_sample": False}),
            **({"prompt_lookup_num_tokens": lookup_tokens} if lookup_tokens else {}),
        }

    def run(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seed: int) -> Run:
        device = self._target.device
        clock = _Clock(len(prompts))
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), _quiet(), self._target.stock() as model:
            torch.manual_seed(seed)
            own = model.generation_config
            model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, **self._settings)
            try:
                start = clock.start = perf_counter()
                tokens_BT, mask_BT = _left_padded(prompts, self._settings["pad_token_id"], device)
                out_BT = model.generate(input_ids=tokens_BT, attention_mask=mask_BT, streamer=clock)
                rows = out_BT[:, tokens_BT.shape[1] :].tolist()
                seconds = perf_counter() - start
            finally:
                model.generation_config = own
        tokens = [_cut(row[:max_new_tokens], self._ends) for row in rows]
        return Run(tokens, seconds, [_until(clock.arrivals, len(row)) for row in tokens])


@dataclass
class _Recording:
    inner: Any
    rows: list[int]


class DepthRecorder:
    """A drafter that notes how deep each tree of another one is, without looking at it while the clock runs."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name = drafter.name
        self.taps = drafter.taps
        self.max_nodes = drafter.max_nodes
        self._seen: list[list[tuple[Tensor, int]]] = []

    def depths(self) -> list[list[int]]:
        """Depth of the tree of each round, for each row of the last generation."""
        return [[int(depths_BN[place].max()) for depths_BN, place in row] for row in self._seen]

    def open(self, prompts: Sequence[Sequence[int]], states: dict[int, Tensor]) -> _Recording:
        self._seen = [[] for _ in prompts]
        return _Recording(self._drafter.open(prompts, states), list(range(len(prompts))))

    def propose(self, session: _Recording, root_B: Tensor) -> DraftTree:
        tree = self._drafter.propose(session.inner, root_B)
        own = tree.depths_BN.shape[0] > 1
        for place, row in enumerate(session.rows):
            self._seen[row].append((tree.depths_BN, place if own else 0))
        return tree

    def observe(self, session: _Recording, tokens_BP: Tensor, states: dict[int, Tensor], counts: Sequence[int]) -> None:
        self._drafter.observe(session.inner, tokens_BP, states, counts)

    def select(self, session: _Recording, rows: Sequence[int]) -> None:
        self._drafter.select(session.inner, rows)
        session.rows = [session.rows[row] for row in rows]


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when `generate` hands over tokens; it hands the prompt over first."""

    def __init__(self, rows: int) -> None:
        self.start = 0.0
        self.arrivals: Arrivals = []
        self._rows = rows
        self._prompt = True

    def put(self, value: Tensor) -> None:
        if self._prompt:
            self._prompt = False
        else:  # one token of every row, or several of a single one
            self.arrivals.append((1e3 * (perf_counter() - self.start), value.numel() // self._rows))

    def end(self) -> None:
        """Nothing is held back."""


def _arrivals(token_ms: Sequence[float]) -> Arrivals:
    """Tokens with the same time came together.

    >>> _arrivals([5.0, 9.0, 9.0])
    [(5.0, 1), (9.0, 2)]
    """
    arrivals: Arrivals = []
    for ms in token_ms:
        if arrivals and arrivals[-1][0] == ms:
            arrivals[-1] = (ms, arrivals[-1][1] + 1)
        else:
            arrivals.append((ms, 1))
    return arrivals


def _until(arrivals: Arrivals, count: int) -> Arrivals:
    """The arrivals of a row's first `count` tokens.

    >>> _until([(1.0, 1), (2.0, 3), (3.0, 1)], 3)
    [(1.0, 1), (2.0, 2)]
    """
    kept: Arrivals = []
    for ms, tokens in arrivals:
        if count <= 0:
            break
        kept.append((ms, min(tokens, count)))
        count -= tokens
    return kept


def _cut(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Tokens up to the first end-of-turn token, which is kept; what follows is padding.

    >>> _cut([5, 2, 0, 0], frozenset({2}))
    [5, 2]
    """
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
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
