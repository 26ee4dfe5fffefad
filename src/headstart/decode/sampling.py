"""The distribution that sampling draws from: a model's logits, processed and warped as in transformers.

Acceptance, residual and bonus token all use this distribution, so the output is distributed as in plain sampling with
the same settings.

Shape suffixes: B rows, M nodes, V vocabulary, T tokens of a text, C capacity in tokens, K seen tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.decode.options import Processor, SamplingOptions
from headstart.errors import UserError

_MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0: a floor far below any useful one."""
_TOP_P_CANDIDATES = 512
"""Number of most likely tokens that top-p sorts first on a CPU. It sorts the whole vocabulary if these hold less than
p, which is rare for p = 0.9. Other devices always sort all of it."""


def check_sampling(options: SamplingOptions) -> None:
    """Refuse (UserError) a setting out of its range; `check_processors` covers the processors."""
    defined = options.greedy or _MIN_TEMPERATURE <= options.temperature < math.inf
    for wrong, name, remedy in (
        (not defined, "temperature", f"Use 0 for greedy decoding, or at least {_MIN_TEMPERATURE:g} and finite."),
        (options.top_k < 0, "top_k", "Use 0 for all tokens, or the number of tokens to keep."),
        (not 0 < options.top_p <= 1, "top_p", "Use a share above 0, at most 1; 1 keeps every token."),
        (not 0 <= options.min_p <= 1, "min_p", "Use a share from 0 to 1; 0 keeps every token."),
        (
            not 0 < options.repetition_penalty < math.inf,
            "repetition_penalty",
            "Use a finite value above 0; 1 changes nothing.",
        ),
    ):
        if wrong:
            raise UserError(f"{name} is {getattr(options, name)}.", remedy)


def check_processors(options: SamplingOptions, vocab_size: int, device: torch.device | str) -> None:
    """Refuse (UserError) a processor with state, which would mix up the branches of a tree: equal calls must give equal
    scores."""
    for processor in options.processors:
        name = type(processor).__name__
        scores_1V = torch.linspace(-1.0, 1.0, vocab_size, device=device)[None]
        texts = [torch.tensor([text], device=device) for text in ([0, 0, 0], [0, 0, 0, 0], [0, 0, 0])]
        try:
            first, _, again = (processor(text, scores_1V.clone()) for text in texts)
        except Exception as error:
            raise UserError(
                f"The logits processor {name} cannot be applied to a token tree ({type(error).__name__}: {error}).",
                "Use one that takes (input_ids, scores) of one row, or decode with transformers.generate.",
            ) from error
        if first.shape != scores_1V.shape or not torch.equal(first, again):
            raise UserError(
                f"The logits processor {name} keeps a state or draws random numbers, so it cannot be applied at every "
                "node of a token tree.",
                "Use one that depends on input_ids and scores alone, or decode with transformers.generate.",
            )


class Prefixes:
    """Each row's text for the repetition penalty (a set of tokens) and the processors (all tokens in order).

    Both stay on the device and grow in place, so that headstart's own work per node does not grow with the text.
    """

    def __init__(
        self, options: SamplingOptions, texts: Sequence[Sequence[int]], row_processors: Sequence[Processor] = ()
    ) -> None:
        self._options = options
        self._processors = [[processor, *options.processors] for processor in row_processors] or [
            list(options.processors) for _ in texts
        ]
        self._new = [list(text) for text in texts]  # tokens of each row that are not on the device yet
        self._lengths = [0] * len(texts)
        self._seen_BV: Tensor | None = None
        self._ids_1C: list[Tensor] = []  # of each row, garbage after its length

    def extend(self, tokens: Sequence[Sequence[int]]) -> None:
        for new, added in zip(self._new, tokens, strict=True):
            new.extend(added)

    def reorder(self, rows: Sequence[int]) -> None:
        self._new, self._lengths = [self._new[row] for row in rows], [self._lengths[row] for row in rows]
        self._processors = [self._processors[row] for row in rows]
        self._ids_1C = [self._ids_1C[row] for row in rows] if self._ids_1C else []
        self._seen_BV = None if self._seen_BV is None else self._seen_BV[list(rows)]

    def process(self, logits_MV: Tensor, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        """Apply the repetition penalty and the processors to logits [M, V] after these rows' texts, each continued by
        its path; float32."""
        self._upload(logits_MV)
        scores_MV = logits_MV.to(torch.float32, copy=True)  # processors may write in place
        if self._seen_BV is not None:
            seen_MV = self._seen_BV[list(rows)]
            _mark(seen_MV, paths)
            penalty = self._options.repetition_penalty
            penalised_MV = torch.where(scores_MV < 0, scores_MV * penalty, scores_MV / penalty)
            scores_MV = torch.where(seen_MV, penalised_MV, scores_MV)
        if not any(self._processors):
            return scores_MV
        processed = []
        for row, path, scores_V in zip(rows, paths, scores_MV, strict=True):
            ids_1T, scores_1V = self._with_path(row, path), scores_V[None]
            for processor in self._processors[row]:
                scores_1V = processor(ids_1T, scores_1V)
            processed.append(scores_1V)
        return torch.cat(processed)

    def _upload(self, like_MV: Tensor) -> None:
        """Upload new tokens."""
        if not any(self._new):
            return
        if self._options.repetition_penalty != 1:
            if self._seen_BV is None:
                self._seen_BV = like_MV.new_zeros(len(self._new), like_MV.shape[1], dtype=torch.bool)
            _mark(self._seen_BV, self._new)
        if any(self._processors):
            self._ids_1C = self._ids_1C or [
                torch.empty(1, 0, dtype=torch.long, device=like_MV.device) for _ in self._new
            ]
            for row, new in enumerate(self._new):
                self._with_path(row, new)
        self._lengths = [length + len(new) for length, new in zip(self._lengths, self._new, strict=True)]
        self._new = [[] for _ in self._new]

    def _with_path(self, row: int, path: Sequence[int]) -> Tensor:
        """Return a row's text and a path after it, [1, T]: a view that the next path overwrites."""
        start, stop = self._lengths[row], self._lengths[row] + len(path)
        if stop > self._ids_1C[row].shape[1]:
            self._ids_1C[row] = F.pad(self._ids_1C[row], (0, 2 * stop - self._ids_1C[row].shape[1]))
        ids_1C = self._ids_1C[row]
        if path:
            ids_1C[0, start:stop] = torch.tensor(list(path), device=ids_1C.device)
        return ids_1C[:, :stop]


def _mark(seen_MV: Tensor, tokens: Sequence[Sequence[int]]) -> None:
    """Mark each row's tokens as seen."""
    pairs = [(row, token) for row, of_row in enumerate(tokens) for token in of_row]
    if pairs:
        row_K, token_K = torch.tensor(pairs, device=seen_MV.device).unbind(1)
        seen_MV[row_K, token_K] = True


def process(options: SamplingOptions, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
    """Apply the repetition penalty and the processors to logits [V] after `prefix`; see `Prefixes`."""
    return Prefixes(options, [prefix]).process(logits_V[None], [0], [[]])[0]


def warp(options: SamplingOptions, logits: Tensor) -> Tensor:
    """Convert logits [..., V] to float32 probabilities: temperature, top-k, top-p, min-p, in this order.

    >>> warp(SamplingOptions(temperature=1.0, top_k=2), torch.tensor([0.0, 0.0, -9.0])).tolist()
    [0.5, 0.5, 0.0]
    """
    if options.greedy:
        best = logits.max(-1, keepdim=True).indices
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    scores = logits.float()
    if options.temperature != 1:
        scores = scores / options.temperature
    if 0 < options.top_k < scores.shape[-1]:
        minimum = scores.topk(options.top_k).values[..., -1:]
        scores = scores.masked_fill(scores < minimum, float("-inf"))
    probs = scores.softmax(-1)
    if options.top_p < 1:
        probs = nucleus(probs, options.top_p)
    if options.min_p > 0:
        probs = probs.masked_fill(probs < options.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of most likely tokens with at least `top_p` of the probability, and renormalise.

    >>> nucleus(torch.tensor([0.5, 0.25, 0.25]), 0.5).tolist()
    [1.0, 0.0, 0.0]
    """
    size = probs.shape[-1]
    candidates = min(_TOP_P_CANDIDATES, size)
    if candidates == size or probs.device.type != "cpu":  # synchronising a device costs more than sorting
        return _nucleus(probs, top_p, size)[0]
    kept, short = _nucleus(probs, top_p, candidates)
    if bool(short.any()):
        kept[short] = _nucleus(probs[short], top_p, size)[0]
    return kept


def _nucleus(probs: Tensor, top_p: float, candidates: int) -> tuple[Tensor, Tensor]:
    """Return `nucleus` among the most likely `candidates`, and bool [...] where it may need more of them.

    The test is conservative: it is also true if the last candidate completes the set.
    """
    top, index = probs.topk(candidates)
    before = top.cumsum(-1) - top  # held by more likely tokens
    top = top.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, index, top / top.sum(-1, keepdim=True))
    return kept, before[..., -1] < top_p
