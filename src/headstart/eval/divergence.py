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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headstart.decode.loop import keeping_on
from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import process
from headstart.target.model import Target

EXACT_MARGIN = 1e-3
"""Margin in float32, where results of different shapes agree to about 1e-5."""
LEADERS = 4
"""How many of the best tokens of a position the rounding error is measured on."""
MEASURED_PROMPTS = 16
"""On how many of the diverging prompts the rounding error is measured, those with the largest margins first."""

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Difference:
    """The first token at which an output differs from the plain loop's.

    Attributes:
        prompt: index among the compared prompts.
        tokens: (plain's token, the other's); None where one output had ended.
        margin: how far, in float32 logits, the worse of both tokens lies below the best; None where an output ended.
    """

    prompt: int
    position: int
    tokens: tuple[int | None, int | None]
    margin: float | None = None
    explained: bool = False

    def to_json(self) -> dict[str, Any]:
        """As per_prompt of results.json holds it."""
        entry = asdict(self)
        del entry["prompt"]
        return {**entry, "tokens": list(self.tokens)}


@dataclass(frozen=True)
class Judgement:
    """All differences between the plain loop's outputs and another method's: one per prompt that differs.

    Attributes:
        tokens_compared: positions compared, the first difference included; later ones follow from it.
        margin_limit: the margin within which a difference is explained; None when there was none to judge.
    """

    prompts: int = 0
    tokens_compared: int = 0
    margin_limit: float | None = None
    differences: list[Difference] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The entry of results.json."""
        margins = [difference.margin for difference in self.differences if difference.margin is not None]
        return {
            "prompts": self.prompts,
            "tokens_compared": self.tokens_compared,
            "count": len(self.differences),
            "unexplained": sum(not difference.explained for difference in self.differences),
            "margin_limit": self.margin_limit,
            "largest_margin": max(margins, default=None),
        }


class Judge:
    """Decides which differences rounding explains, in float32: the target's own weights, cast a layer at a time.

    A repetition penalty moves logits, and before the shortest answer no token may end it: margins are measured after
    both.
    """

    def __init__(self, target: Target, options: DecodeOptions | None = None) -> None:
        self._target = target
        self._options = options or DecodeOptions()
        self._last: dict[tuple[int, ...], Tensor] = {}  # float32 logits [V] after each prefix that was looked at
        self._errors: dict[tuple[int, ...], float] = {}  # of each text that was measured

    def judge(self, prompts: Texts, plain: Texts, other: Texts) -> Judgement:
        """Compare greedy outputs to the plain loop's, prompt by prompt, up to the first difference."""
        pairs = enumerate(zip(plain, other, strict=True))
        firsts = [first_difference(number, expected, output) for number, (expected, output) in pairs]
        differences = [difference for difference in firsts if difference is not None]
        compared = sum(map(len, plain))
        compared -= sum(max(0, len(plain[item.prompt]) - item.position - 1) for item in differences)
        if not differences:
            return Judgement(len(prompts), compared)
        measured = []
        for difference in differences:
            answer = plain[difference.prompt][: difference.position]
            margin = self.margin(prompts[difference.prompt], answer, difference.tokens)
            measured.append(replace(difference, margin=margin))
        # The text where the gap is largest is where rounding must have done most: the error is measured there first.
        worst = sorted(measured, key=lambda difference: -(difference.margin or 0.0))[:MEASURED_PROMPTS]
        limit = self.limit([(prompts[difference.prompt], plain[difference.prompt]) for difference in worst])
        judged = [
            replace(difference, explained=difference.margin is not None and difference.margin <= limit)
            for difference in measured
        ]
        return Judgement(len(prompts), compared, limit, judged)

    def margin(self, prompt: Sequence[int], answer: Sequence[int], tokens: Sequence[int | None]) -> float | None:
        """How far the worse of these tokens lies below the best one after a prompt and the beginning of its answer, in
        float32 logits."""
        if None in tokens:
            return None
        text = (*prompt, *answer)
        if text not in self._last:  # several drafters often leave the plain loop at the same near-tie
            self._last[text] = self._exact_logits(text, 1)[0]
        logits_V = self._last[text]
        not_yet = keeping_on(self._options, [prompt], self._target)
        options = replace(self._options, processors=[*not_yet, *self._options.processors])
        if options.needs_prefix:
            logits_V = process(options, logits_V, text)
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


def first_difference(prompt: int, plain: Sequence[int], other: Sequence[int]) -> Difference | None:
    """Where `other` leaves `plain`; None when they are the same.

    >>> difference = first_difference(0, [5, 6, 7], [5, 8])
    >>> difference.position, difference.tokens
    (1, (6, 8))
    >>> first_difference(0, [5, 6], [5]).tokens
    (6, None)
    """
    for position in range(max(len(plain), len(other))):
        expected = plain[position] if position < len(plain) else None
        token = other[position] if position < len(other) else None
        if expected != token:
            return Difference(prompt, position, (expected, token))
    return None


def gap_error(rounded_TV: Tensor, exact_TV: Tensor, dtype: torch.dtype) -> float:
    """The largest error that a dtype makes in the gap between two of the leading tokens of a position.

    Never less than one step of the dtype at the size of the leading logits: two logits, each off by half a step.

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


@torch.inference_mode()
def _logits(model: Any, tokens: Sequence[int], keep: int) -> Tensor:
    tokens_1T = torch.tensor([list(tokens)], device=model.device)
    out = model(input_ids=tokens_1T, attention_mask=torch.ones_like(tokens_1T), use_cache=False, logits_to_keep=keep)
    logits_TV: Tensor = out.logits[0].float()
    return logits_TV


@contextmanager
def in_float32(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let the model's forward compute in float32 with its own weights; the weights are as before when it ends.

    The results are those of `copy.deepcopy(model).float()`, bit for bit; the memory is that of the largest part (a
    layer, or the LM head) instead of the whole model's, because each part is cast while its own forward runs. Decoder
    layers are cast as a whole, since what is in one may read its neighbours' weights.
    """
    layers = list(layers)
    inside = {id(part) for layer in layers for part in layer.modules()}
    with ExitStack() as hooks:
        for layer in layers:
            _cast(layer, hooks, recurse=True)
        for module in model.modules():
            if id(module) not in inside:
                _cast(module, hooks, recurse=False)
        yield


def _cast(module: nn.Module, hooks: ExitStack, recurse: bool) -> None:
    """Cast what a module holds before its forward, and give it back afterwards, also when the forward raises."""
    every = [*module.parameters(recurse), *module.buffers(recurse)]
    low = [tensor for tensor in every if tensor.is_floating_point() and tensor.dtype != torch.float32]
    if not low:
        return
    kept: list[tuple[Tensor, Tensor]] = []

    def before(*_: Any) -> None:
        kept.extend((tensor, tensor.data) for tensor in low)
        for tensor in low:
            tensor.data = tensor.data.float()

    def after(*_: Any) -> None:
        while kept:
            tensor, data = kept.pop()
            tensor.data = data

    hooks.callback(module.register_forward_pre_hook(before).remove)
    hooks.callback(module.register_forward_hook(after, always_call=True).remove)
