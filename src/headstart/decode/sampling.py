"""The sampling distribution: a model's logits, processed and warped as in transformers.

`Prefixes.process` applies, in this order, `logit_bias`, the repetition, frequency and presence penalties (the last two
count generated tokens only, as in vLLM and OpenAI's API), and logits processors. `warp` then applies temperature,
top-k, top-p and min-p. Acceptance, residual and bonus token all use this distribution, so the output is distributed as
in plain sampling with the same settings.

Shape suffixes: B rows, M nodes, V vocabulary, T tokens of a text, C capacity in tokens, P tokens of a path, K new
tokens, X positions of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headstart.decode.options import Processor, SamplingOptions
from headstart.errors import UserError
from headstart.support.rng import in_parts
from headstart.support.uploads import upload

_MIN_TEMPERATURE = 1e-6
"""Lowest nonzero temperature, far below any useful value."""
_TOP_P_CANDIDATES = 512
"""Number of most likely tokens that top-p sorts first on a CPU. The whole vocabulary is the fallback if they hold less
than p, which is rare for p = 0.9. Other devices always sort the whole vocabulary."""


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
        *(
            (not -2 <= getattr(options, name) <= 2, name, "Use a value from -2 to 2; 0 changes nothing.")
            for name in ("presence_penalty", "frequency_penalty")
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
                "Use one that depends only on input_ids and scores, or decode with transformers.generate.",
            )


class Prefixes:
    """Each row's prompt and generated tokens, for the penalties (counts by token) and the processors (all tokens in
    order).

    Both stay on the device and grow in place, so that headstart's own work per node does not grow with the text.
    """

    def __init__(
        self, options: SamplingOptions, prompts: Sequence[Sequence[int]], row_processors: Sequence[Processor] = ()
    ) -> None:
        self._options = options
        self._processors = [[processor, *options.processors] for processor in row_processors] or [
            list(options.processors) for _ in prompts
        ]
        self.runs_processors = any(self._processors)
        self._prompts = [list(prompt) for prompt in prompts]  # this and `_resumed` are emptied by the upload
        self._resumed = [list[int]() for _ in prompts]
        self._lengths = [0] * len(prompts)
        self._bias_V: Tensor | None = None
        self._in_prompt_BV: Tensor | None = None
        self._counts_BV: Tensor | None = None  # of generated tokens
        self._ids_1C: list[Tensor] = []  # per row; garbage past its length

    def resume(self, emitted: Sequence[Sequence[int]]) -> None:
        """Set the tokens that each row has already generated; call before the first use."""
        self._resumed = [list(tokens) for tokens in emitted]

    def extend(self, token_BK: Tensor, sizes: Sequence[int]) -> None:
        """Append generated tokens to each row's text; padding past a row's size is -1."""
        if self._counts_BV is not None:
            _count(self._counts_BV, token_BK)
        for row, size in enumerate(sizes) if self.runs_processors else ():
            self._with_path(row, token_BK[row, :size])
            self._lengths[row] += size

    def reorder(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self._lengths, self._processors = [self._lengths[row] for row in rows], [self._processors[row] for row in rows]
        if self._prompts:
            self._prompts, self._resumed = [self._prompts[row] for row in rows], [self._resumed[row] for row in rows]
        self._ids_1C = [self._ids_1C[row] for row in rows] if self._ids_1C else []
        self._in_prompt_BV = None if self._in_prompt_BV is None else self._in_prompt_BV[list(rows)]
        self._counts_BV = None if self._counts_BV is None else self._counts_BV[list(rows)]

    def join(self, other: Prefixes) -> None:
        """Append the rows of another batch with the same options; both have drawn their first tokens."""
        assert not self._prompts and not other._prompts, "the first draw uploads the texts"
        self._lengths, self._processors = self._lengths + other._lengths, self._processors + other._processors
        self._ids_1C += other._ids_1C
        if self._counts_BV is not None and other._counts_BV is not None:
            self._counts_BV = torch.cat([self._counts_BV, other._counts_BV])
        if self._in_prompt_BV is not None and other._in_prompt_BV is not None:
            self._in_prompt_BV = torch.cat([self._in_prompt_BV, other._in_prompt_BV])

    def process(self, logits_MV: Tensor, row_M: Tensor, path_MP: Tensor) -> Tensor:
        """Apply bias, penalties and processors to logits [M, V] after these rows' texts, each continued by its path;
        float32. Paths may contain -1 for no token, but only without processors."""
        if self._prompts:
            self._upload(logits_MV)
        scores_MV = logits_MV.to(torch.float32, copy=True)  # processors may write in place
        if self._bias_V is not None:
            scores_MV += self._bias_V
        if self._counts_BV is not None:
            counts_MV = _count(self._counts_BV[row_M], path_MP)
            if self._in_prompt_BV is not None:
                penalty = self._options.repetition_penalty
                penalised_MV = torch.where(scores_MV < 0, scores_MV * penalty, scores_MV / penalty)
                scores_MV = torch.where(self._in_prompt_BV[row_M] | (counts_MV > 0), penalised_MV, scores_MV)
            if self._options.frequency_penalty:
                scores_MV -= self._options.frequency_penalty * counts_MV
            if self._options.presence_penalty:
                scores_MV -= self._options.presence_penalty * (counts_MV > 0)
        if not self.runs_processors:
            return scores_MV
        processed = []
        for row, path_P, scores_V in zip(row_M.tolist(), path_MP, scores_MV, strict=True):
            ids_1T, scores_1V = self._with_path(row, path_P), scores_V[None]
            for processor in self._processors[row]:
                scores_1V = processor(ids_1T, scores_1V)
            processed.append(scores_1V)
        return torch.cat(processed)

    def _upload(self, like_MV: Tensor) -> None:
        """Upload bias and texts before the first use."""
        options, device, rows, vocab = self._options, like_MV.device, len(self._prompts), like_MV.shape[1]
        if options.logit_bias:
            bias_V = torch.zeros(vocab)
            bias_V[list(map(int, options.logit_bias))] = torch.tensor(list(map(float, options.logit_bias.values())))
            self._bias_V = upload(bias_V, device)
        self._ids_1C = [torch.empty(1, 0, dtype=torch.long, device=device) for _ in self._prompts]
        prompt_BK, resumed_BK = (upload(_padded(texts), device, torch.long) for texts in (self._prompts, self._resumed))
        self.extend(prompt_BK, list(map(len, self._prompts)))  # before the counts exist: prompts are not counted
        if options.penalises:
            self._counts_BV = like_MV.new_zeros(rows, vocab, dtype=torch.int32)
        if options.repetition_penalty != 1:
            self._in_prompt_BV = _count(like_MV.new_zeros(rows, vocab, dtype=torch.int32), prompt_BK) > 0
        self.extend(resumed_BK, list(map(len, self._resumed)))
        self._prompts = self._resumed = []

    def _with_path(self, row: int, path_P: Tensor) -> Tensor:
        """Return a row's text and a path after it, [1, T]: a view that the next path overwrites."""
        start, stop = self._lengths[row], self._lengths[row] + len(path_P)
        if stop > self._ids_1C[row].shape[1]:
            self._ids_1C[row] = F.pad(self._ids_1C[row], (0, 2 * stop - self._ids_1C[row].shape[1]))
        ids_1C = self._ids_1C[row]
        ids_1C[0, start:stop] = path_P
        return ids_1C[:, :stop]


def _padded(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    longest = max(map(len, texts))
    return [[*text, *[-1] * (longest - len(text))] for text in texts]


def _count(counts_MV: Tensor, tokens_MK: Tensor) -> Tensor:
    """Add each row's tokens to its counts, in place; -1 is no token."""
    return counts_MV.scatter_add_(1, tokens_MK.clamp(min=0), (tokens_MK >= 0).to(counts_MV.dtype))


def process(options: SamplingOptions, logits_V: Tensor, prompt: Sequence[int], generated: Sequence[int] = ()) -> Tensor:
    """Apply bias, penalties and processors to logits [V] after a text; see `Prefixes`."""
    prefixes, row_M = Prefixes(options, [prompt]), torch.zeros(1, dtype=torch.long, device=logits_V.device)
    prefixes.resume([generated])
    return prefixes.process(logits_V[None], row_M, row_M.new_empty(1, 0))[0]


def token_logprobs(logits_BPV: Tensor, token_BP: Tensor, most_likely: int) -> list[list[dict[int, float]]]:
    """Return, for each row and position, the log-probability of its token and then of the `most_likely` tokens, by
    token id; garbage where the token is -1. Takes the model's own logits; synchronises with the device once."""
    rows, places, vocab = logits_BPV.shape
    logits_XV, token_X1, found = logits_BPV.flatten(0, 1), token_BP.reshape(-1, 1), []
    for part in in_parts(rows * places, vocab, logits_XV.device):
        logprobs_XV = logits_XV[part].float().log_softmax(-1)
        ids = torch.cat([token_X1[part].clamp(min=0), logprobs_XV.topk(min(most_likely, vocab)).indices], 1)
        found.append(torch.stack([ids.double(), logprobs_XV.gather(1, ids).double()], 1))
    listed = torch.cat(found).view(rows, places, 2, -1).tolist()
    return [[dict(zip(map(int, tokens), values, strict=True)) for tokens, values in row] for row in listed]


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
    """Return `nucleus` over the most likely `candidates`, and a bool mask [...] of rows that may need more candidates.

    The mask is conservative: it is also true if the last candidate completes the set.
    """
    top, index = probs.topk(candidates)
    before = top.cumsum(-1) - top  # probability of the more likely tokens
    top = top.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, index, top / top.sum(-1, keepdim=True))
    return kept, before[..., -1] < top_p
