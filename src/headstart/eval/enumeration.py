"""Exact distributions of sampled texts, enumerated with transformers alone, and the test of samples against them.

The first tokens after a prompt are enumerated with the untouched model, its own cache and transformers' logits warpers,
independently of the code under test. Samples are compared by Pearson's chi-square test and by total variation.

Shape suffixes: V vocabulary, N texts of one length, T tokens, C cells, J terms of a Poisson mixture.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.decode.options import SamplingOptions
from headstart.model.model import Target

MIN_EXPECTED = 5.0  # cells with a lower expected count are pooled, as the chi-square approximation requires
POWER = 0.95  # probability of detecting the smallest fault that the audit claims to detect
_ROWS = 32  # batch size of the enumeration

Text = tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """The exact distribution of texts of a few tokens, enumerated as far as affordable."""

    depth: int
    probs: Mapping[Text, float]
    rest: float = 0.0  # total probability of the texts that were not enumerated
    following: Mapping[Text, frozenset[int]] = field(repr=False, default_factory=dict)  # next tokens of extended texts

    def possible(self, text: Text) -> bool:
        """Return False only for a text that is known to have probability zero."""
        prefixes = [text[:length] for length in range(self.depth)]
        return all(token in self.following.get(prefix, {token}) for prefix, token in zip(prefixes, text, strict=True))


@dataclass(frozen=True)
class Fit:
    """Goodness of fit of samples: a cell for each text expected often enough, and one for all other texts."""

    samples: int
    cells: int
    chi_square: float  # Pearson's statistic; it has `cells` - 1 degrees of freedom
    p_value: float  # probability that honest samples fit at least as badly; 1 for a single cell
    total_variation: float  # half the sum of |share - probability| over the cells
    expected_variation: float  # mean total variation of the same number of honest samples: sampling noise
    impossible: int  # samples of probability zero

    def clean(self, level: float) -> bool:
        return self.impossible == 0 and self.p_value >= level


@torch.inference_mode()
def enumerate_texts(
    target: Target, prompt: Sequence[int], sampling: SamplingOptions, depth: int, maximum: int = 64
) -> Distribution:
    """Return the exact distribution of the first `depth` tokens after a prompt; run the target in float32.

    Of each length only the `maximum` most probable texts are extended.
    """
    assert not sampling.greedy and not sampling.processors, "sampling with settings that transformers has warpers for"
    warpers = _warpers(sampling, len(prompt))
    prompt_1T = torch.tensor([list(prompt)], device=target.device)
    out = target.model(input_ids=prompt_1T, attention_mask=torch.ones_like(prompt_1T), use_cache=True, logits_to_keep=1)
    level: dict[Text, float] = {(): 1.0}
    following: dict[Text, frozenset[int]] = {}
    rest = 0.0
    for length in range(depth):
        ranked = sorted(level, key=lambda text: (-level[text], text))
        rest += sum(level[text] for text in ranked[maximum:])
        texts, longer = ranked[:maximum], dict[Text, float]()
        for first in range(0, len(texts), _ROWS):
            block = texts[first : first + _ROWS]
            logits_NV = out.logits[:, -1] if length == 0 else _next_logits(target.model, prompt_1T, out, block)
            ids_NT = torch.tensor([[*prompt, *text] for text in block], device=target.device)
            probs_NV = warpers(ids_NT, logits_NV.float()).softmax(-1)
            for text, probs_V in zip(block, probs_NV, strict=True):
                tokens = probs_V.nonzero()[:, 0].tolist()
                following[text] = frozenset(tokens)
                for token, prob in zip(tokens, probs_V[tokens].tolist(), strict=True):
                    longer[(*text, token)] = level[text] * prob
        level = longer
    return Distribution(depth, level, rest, following)


def _next_logits(model: Any, prompt_1T: Tensor, prefill: Any, texts: Sequence[Text]) -> Tensor:
    """Return logits [N, V] after the prompt and each text (equal lengths), from the prompt's cache."""
    cache = copy.deepcopy(prefill.past_key_values)
    cache.batch_repeat_interleave(len(texts))
    tokens_NT = torch.tensor(texts, device=prompt_1T.device)
    mask_NT = torch.ones(len(texts), prompt_1T.shape[1] + tokens_NT.shape[1], dtype=torch.long, device=prompt_1T.device)
    out = model(input_ids=tokens_NT, attention_mask=mask_NT, past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits_NV: Tensor = out.logits[:, -1]
    return logits_NV


class OutputPenalties(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Presence and frequency penalty for transformers; `start` is the length of the prompts, padding included."""

    def __init__(self, sampling: SamplingOptions, start: int) -> None:
        self._presence, self._frequency, self._start = sampling.presence_penalty, sampling.frequency_penalty, start

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        generated_NT = input_ids[:, self._start :]
        counts_NV = torch.zeros_like(scores).scatter_add_(1, generated_NT, torch.ones_like(generated_NT).to(scores))
        return scores - self._frequency * counts_NV - self._presence * (counts_NV > 0)


def _warpers(sampling: SamplingOptions, start: int) -> LogitsProcessorList:
    """Return transformers' processors for these settings, in the order of its `generate`."""
    bias = sampling.for_transformers()["sequence_bias"]
    penalty, top_k, top_p, min_p = sampling.repetition_penalty, sampling.top_k, sampling.top_p, sampling.min_p
    return LogitsProcessorList(
        [
            *([SequenceBiasLogitsProcessor(bias)] if bias else []),
            *([RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []),
            OutputPenalties(sampling, start),
            TemperatureLogitsWarper(float(sampling.temperature)),
            *([TopKLogitsWarper(top_k)] if top_k else []),
            *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
            *([MinPLogitsWarper(min_p)] if min_p > 0 else []),
        ]
    )


def fit(counts: Mapping[Text, int], exact: Distribution) -> Fit:
    """Test samples (texts of `exact.depth` tokens, with how often each was drawn) against the exact distribution."""
    samples = sum(counts.values())
    texts = [text for text, prob in exact.probs.items() if prob * samples >= MIN_EXPECTED]
    probs_C = torch.tensor([exact.probs[text] for text in texts], dtype=torch.float64)
    counts_C = torch.tensor([counts.get(text, 0) for text in texts], dtype=torch.float64)
    # Rare texts share a last cell. If that is too small as well, it is merged into the least likely cell.
    rare, rare_count = max(0.0, 1.0 - float(probs_C.sum())), samples - float(counts_C.sum())
    if rare * samples >= MIN_EXPECTED or not texts:
        probs_C = torch.cat([probs_C, probs_C.new_tensor([rare])])
        counts_C = torch.cat([counts_C, counts_C.new_tensor([rare_count])])
    else:
        least_likely = int(probs_C.argmin())
        probs_C[least_likely] += rare
        counts_C[least_likely] += rare_count
    statistic = float((((counts_C - samples * probs_C) ** 2) / (samples * probs_C)).sum())
    return Fit(
        samples=samples,
        cells=len(probs_C),
        chi_square=statistic,
        p_value=chi_square_p(statistic, len(probs_C) - 1),
        total_variation=float((counts_C / samples - probs_C).abs().sum() / 2),
        expected_variation=expected_variation(probs_C, samples),
        impossible=sum(count for text, count in counts.items() if not exact.possible(text)),
    )


def chi_square_p(statistic: float, freedom: int) -> float:
    """Probability that a chi-square variable with `freedom` degrees of freedom is at least as large.

    >>> round(chi_square_p(3.841, 1), 3), round(chi_square_p(18.307, 10), 3), chi_square_p(0.0, 0)
    (0.05, 0.05, 1.0)
    """
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def least_seen(cells: int, samples: int, level: float) -> float | None:
    """Return the smallest total variation that fails the test with probability `POWER`; None for a single cell.

    Under a deviation the statistic is noncentral chi-square, a Poisson mixture of central ones. Its noncentrality,
    `samples` times the sum of squared deviations over probabilities, is at least `samples` * 4 * TV² for a total
    variation TV (Cauchy-Schwarz).

    >>> round(least_seen(2, 100, 0.05) or 0, 4)  # of one normal variable: (1.9600 + 1.6449) / sqrt(100) / 2
    0.1802
    """
    freedom = cells - 1
    if freedom == 0:
        return None
    critical = _solve(lambda statistic: -chi_square_p(statistic, freedom), -level)
    counts_J = torch.arange(4096, dtype=torch.float64)
    failing_J = torch.special.gammaincc(freedom / 2 + counts_J, torch.full_like(counts_J, critical / 2))

    def power(noncentrality: float) -> float:
        mean = noncentrality / 2
        weights_J = torch.exp(counts_J * math.log(mean) - mean - torch.lgamma(counts_J + 1))
        return float((weights_J * failing_J).sum())

    return min(1.0, math.sqrt(_solve(power, POWER) / samples) / 2)


def _solve(rising: Callable[[float], float], value: float) -> float:
    """Return the positive argument at which an increasing function reaches a value, by bisection."""
    low, high = 0.0, 1.0
    while rising(high) < value:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < value else (low, middle)
    return high


def expected_variation(probs_C: Tensor, samples: int) -> float:
    """Return the mean total variation of honest samples: half the sum of their mean absolute deviations.

    Each share is nearly normal with standard deviation sqrt(p (1 - p) / samples). Its mean absolute deviation is sqrt(2
    / pi) times that.

    >>> round(expected_variation(torch.tensor([0.5, 0.5]), 100), 3)
    0.04
    """
    return float((probs_C * (1 - probs_C)).clamp(min=0).sqrt().sum()) * math.sqrt(2 / math.pi / samples) / 2
