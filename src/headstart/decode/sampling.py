"""The distribution that sampling draws from: a model's logits, processed and warped as transformers does it.

Drafts are verified against this distribution and nothing else: the acceptance test, the residual and the bonus token
all read it, so what comes out is what plain sampling with the same settings draws.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from headstart.decode.options import Processor, SamplingOptions
from headstart.errors import UserError

_COLDEST = 1e-6
"""Lowest temperature above 0; logits divided by less leave the range of float32."""
_HEAD = 512
"""Tokens that top-p looks at before it sorts the whole vocabulary; a share of 0.9 seldom needs more."""


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit; that of `argmax`, ties included, and five times faster in bfloat16 on a CPU."""
    return logits.max(-1).indices


def check_sampling(options: SamplingOptions) -> None:
    """Refuse (UserError) a setting out of its range, before any work; `check_processors` looks at the processors."""
    defined = options.greedy or _COLDEST <= options.temperature < math.inf
    for wrong, name, remedy in (
        (not defined, "temperature", f"Use 0 for greedy decoding, or at least {_COLDEST:g} and finite."),
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
    """Refuse (UserError) a processor whose result depends on more than its arguments, before any work."""
    for processor in options.processors:
        _check_processor(processor, vocab_size, device)


def not_before(count: int, prompt: int, ends: Sequence[int], device: torch.device) -> Processor:
    """A processor that takes the probability of the tokens `ends` away until so many tokens stand after a prompt of
    this length."""
    processor: Processor = MinNewTokensLengthLogitsProcessor(prompt, count, list(ends), device=device)
    return processor


def process(options: SamplingOptions, logits_V: Tensor, prefix: Sequence[int]) -> Tensor:
    """Logits [V] after the repetition penalty and the processors, for the token after `prefix`.

    Processors run at every node of a tree, with that node's own prefix.
    """
    ids_1T = torch.tensor([list(prefix)], device=logits_V.device)
    scores_1V = logits_V[None].to(torch.float32, copy=True)  # processors may write in place
    if options.repetition_penalty != 1:
        scores_1V = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)(ids_1T, scores_1V)
    for processor in options.processors:
        scores_1V = processor(ids_1T, scores_1V)
    return scores_1V[0]


def warp(options: SamplingOptions, logits: Tensor) -> Tensor:
    """Logits [..., V] to probabilities, float32 of the same shape: temperature, top-k, top-p, min-p, in this order.

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


def nucleus(probs: Tensor, share: float) -> Tensor:
    """Keep the fewest most likely tokens that hold at least `share` of the probability, and renormalise.

    >>> nucleus(torch.tensor([0.5, 0.25, 0.25]), 0.5).tolist()
    [1.0, 0.0, 0.0]
    """
    size = probs.shape[-1]
    head = min(_HEAD, size)
    if head == size or probs.device.type != "cpu":  # asking an accelerator costs more than sorting
        return _nucleus(probs, share, size)[0]
    kept, short = _nucleus(probs, share, head)
    if bool(short.any()):
        kept[short] = _nucleus(probs[short], share, size)[0]
    return kept


def _nucleus(probs: Tensor, share: float, head: int) -> tuple[Tensor, Tensor]:
    """(`nucleus` among the `head` most likely tokens, bool [...] where those do not hold the share)."""
    top, index = probs.topk(head)
    before = top.cumsum(-1) - top  # held by more likely tokens
    top = top.masked_fill(before >= share, 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, index, top / top.sum(-1, keepdim=True))
    return kept, before[..., -1] < share


def _check_processor(processor: Any, vocab_size: int, device: torch.device | str) -> None:
    """A processor that keeps a state would mix up the branches of a tree: the same call must give the same scores."""
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
