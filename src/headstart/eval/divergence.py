"""Where two greedy outputs part, and whether rounding explains it.

A tree forward and a one-token forward multiply matrices of different shapes, so their low-precision results round
differently; where two tokens are nearly tied, either may come out on top. A difference is *explained* when, in float32
and at the same prefix, both tokens lie within a margin of the best one. The margin is measured, not chosen: it is the
largest error that the target's dtype makes in the gap between two leading logits, on the texts of this very run. A
token that an implementation error puts forward lies outside it.

Shape suffixes: T positions, V vocabulary, L leading tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.decode.options import SamplingOptions
from headstart.decode.sampling import process
from headstart.eval.exact import in_float32
from headstart.target.model import Target

EXACT_MARGIN = 1e-3
"""Margin in float32, where results of different shapes agree to about 1e-5."""
LEADERS = 4
"""How many of the best tokens of a position the rounding error is measured on."""
MEASURED_PROMPTS = 16
"""On how many of the diverging prompts the rounding error is measured, those with the largest margins first."""


@dataclass(frozen=True)
class Difference:
    """The first token at which an output differs from the plain loop's.

    Attributes:
        prompt: index among the compared prompts.
        position: of the first differing token, from 0.
        tokens: (plain's token, the other's); None where one output had ended.
    """

    prompt: int
    position: int
    tokens: tuple[int | None, int | None]


@dataclass(frozen=True)
class Verdict:
    """A difference, judged.

    Attributes:
        prompt: index among the compared prompts.
        position: of the first differing token.
        tokens: (plain's token, the other's).
        margin: how far, in float32 logits, the worse of both tokens lies below the best; None where an output ended.
        explained: whether the margin is within the limit.
    """

    prompt: int
    position: int
    tokens: tuple[int | None, int | None]
    margin: float | None
    explained: bool


@dataclass(frozen=True)
class Judgement:
    """All differences between the plain loop's outputs and another method's.

    Attributes:
        prompts: prompts compared.
        tokens_compared: positions compared, the first difference included; later ones follow from it.
        margin_limit: the margin within which a difference is explained; None when there was none to judge.
        verdicts: one per prompt that differs.
    """

    prompts: int
    tokens_compared: int
    margin_limit: float | None
    verdicts: list[Verdict]

    def to_json(self) -> dict[str, Any]:
        """The entry of results.json."""
        margins = [verdict.margin for verdict in self.verdicts if verdict.margin is not None]
        return {
            "prompts": self.prompts,
            "tokens_compared": self.tokens_compared,
            "count": len(self.verdicts),
            "unexplained": sum(not verdict.explained for verdict in self.verdicts),
            "margin_limit": self.margin_limit,
            "largest_margin": max(margins, default=None),
        }


class Judge:
    """Decides which differences rounding explains, in float32: the target's own weights, cast a layer at a time.

    Args:
        target: what decoded.
        sampling: how; a repetition penalty moves logits, so margins are measured after it.
        say: takes a sentence for the user before the first difference is looked at.
    """

    def __init__(
        self, target: Target, sampling: SamplingOptions | None = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._target = target
        self._sampling = sampling or SamplingOptions()
        self._say = say
        self._last: dict[tuple[int, ...], Tensor] = {}  # float32 logits [V] after each prefix that was looked at
        self._errors: dict[tuple[int, ...], float] = {}  # of each text that was measured

    def judge(
        self, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
    ) -> Judgement:
        """Compare greedy outputs to the plain loop's, prompt by prompt, up to the first difference."""
        found = [
            difference(number, ours, theirs) for number, (ours, theirs) in enumerate(zip(plain, other, strict=True))
        ]
        compared = sum(
            len(ours) if found_one is None else min(found_one.position + 1, len(ours))
            for ours, found_one in zip(plain, found, strict=True)
        )
        differences = [one for one in found if one is not None]
        if not differences:
            return Judgement(len(prompts), compared, None, [])
        if self._say is not None:
            self._say(
                f"Answers differ from the plain loop's, first on {len(differences)} of {len(prompts)} prompts: whether "
                "rounding explains it is computed in float32, a layer at a time."
            )
            self._say = None
        margins = [self._margin(prompts, plain, one) for one in differences]
        # The text where the gap is largest is where rounding must have done most: the error is measured there first.
        worst = sorted(range(len(differences)), key=lambda index: -(margins[index] or 0.0))[:MEASURED_PROMPTS]
        limit = self.limit([(prompts[differences[k].prompt], plain[differences[k].prompt]) for k in worst])
        verdicts = [
            Verdict(one.prompt, one.position, one.tokens, margin, margin is not None and margin <= limit)
            for one, margin in zip(differences, margins, strict=True)
        ]
        return Judgement(len(prompts), compared, limit, verdicts)

    def _margin(
        self, prompts: Sequence[Sequence[int]], plain: Sequence[Sequence[int]], one: Difference
    ) -> float | None:
        if None in one.tokens:
            return None
        return self.margin([*prompts[one.prompt], *plain[one.prompt][: one.position]], one.tokens)

    def margin(self, prefix: Sequence[int], tokens: Sequence[int | None]) -> float:
        """How far the worse of these tokens lies below the best one after `prefix`, in float32 logits."""
        index = tuple(prefix)
        if index not in self._last:  # several drafters often leave the plain loop at the same near-tie
            self._last[index] = self._exact_logits(prefix, 1)[0]
        logits_V = self._last[index]
        if self._sampling.needs_prefix:
            logits_V = process(self._sampling, logits_V, prefix)
        return float(logits_V.max() - min(logits_V[token] for token in tokens if token is not None))

    def limit(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        """The margin that rounding explains: the largest error on all (prompt, answer) texts given so far."""
        if self._target.dtype in (torch.float32, torch.float64):
            return EXACT_MARGIN
        for prompt, answer in texts:
            text, keep = (*prompt, *answer), len(answer) + 1
            if text not in self._errors:
                with self._target.stock() as model:
                    rounded_TV = _logits(model, text, keep)
                self._errors[text] = gap_error(rounded_TV, self._exact_logits(text, keep), self._target.dtype)
        return max(self._errors.values())

    def _exact_logits(self, tokens: Sequence[int], keep: int) -> Tensor:
        """Float32 logits [keep, V] after the last `keep` tokens, by transformers' own attention."""
        with self._target.stock() as model:
            if self._target.dtype in (torch.float32, torch.float64):
                return _logits(model, tokens, keep)
            with in_float32(model, self._target.layers):
                return _logits(model, tokens, keep)


def difference(prompt: int, plain: Sequence[int], other: Sequence[int]) -> Difference | None:
    """Where `other` leaves `plain`; None when they are the same.

    >>> difference(0, [5, 6, 7], [5, 8])
    Difference(prompt=0, position=1, tokens=(6, 8))
    >>> difference(0, [5, 6], [5]).tokens
    (6, None)
    """
    for position in range(max(len(plain), len(other))):
        pair = (
            plain[position] if position < len(plain) else None,
            other[position] if position < len(other) else None,
        )
        if pair[0] != pair[1]:
            return Difference(prompt, position, pair)
    return None


def gap_error(rounded_TV: Tensor, exact_TV: Tensor, dtype: torch.dtype) -> float:
    """The largest error of the gap between two of the leading tokens of a position.

    Never less than one step of the dtype at the size of the leading logits: two logits, each off by half a step.

    Args:
        rounded_TV: logits computed in the target's dtype.
        exact_TV: the same in float32.
        dtype: the target's.

    >>> exact = torch.tensor([[20.0, 19.9, 3.0, 2.0]])
    >>> round(gap_error(exact + torch.tensor([[0.0, 0.3, 0.1, 0.0]]), exact, torch.bfloat16), 4)
    0.3
    >>> gap_error(exact, exact, torch.bfloat16)
    0.125
    """
    leaders_TL = exact_TV.topk(min(LEADERS, exact_TV.shape[-1]), dim=-1).indices
    leading_TL = exact_TV.gather(1, leaders_TL)
    error_TL = rounded_TV.gather(1, leaders_TL).float() - leading_TL
    largest = max(leading_TL.abs().max().item(), 1e-6)
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
    return max(float((error_TL.amax(-1) - error_TL.amin(-1)).max()), step)


def as_entry(verdict: Verdict) -> dict[str, Any]:
    """A verdict as per_prompt of results.json holds it."""
    entry = asdict(verdict)
    del entry["prompt"]
    return {**entry, "tokens": list(verdict.tokens)}


@torch.inference_mode()
def _logits(model: Any, tokens: Sequence[int], keep: int) -> Tensor:
    tokens_1T = torch.tensor([list(tokens)], device=model.device)
    out = model(input_ids=tokens_1T, attention_mask=torch.ones_like(tokens_1T), use_cache=False, logits_to_keep=keep)
    logits_TV: Tensor = out.logits[0].float()
    return logits_TV
