"""First differences of greedy outputs, and whether rounding explains them.

Tree and single-token forwards multiply matrices of different shapes, so their low-precision results round differently,
and near-ties can flip. A difference is *explained* if in float32, at the same prefix, both tokens are within a margin
of the best one. The margin is measured: the largest error of the target's dtype in the gap between two leading logits,
on texts of this run that diverge. For float32 targets it is fixed. A larger difference points to an error in the code.

Shape suffixes: T positions, V vocabulary, L leading tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from headstart.decode.options import DecodeOptions
from headstart.decode.sampling import process
from headstart.decode.verify import min_length_processors
from headstart.model.model import Target

EXACT_MARGIN = 1e-3  # margin in float32, where different shapes agree to about 1e-5
LEADERS = 4  # top tokens of each position on which the rounding error is measured
MEASURED_PROMPTS = 16  # diverging prompts on which the rounding error is measured, largest margins first

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Difference:
    """A token at which an output differs from the plain loop's."""

    prompt: int  # index among the compared prompts
    position: int
    tokens: tuple[int | None, int | None]  # (plain's, the other's); None if that output had ended
    margin: float | None = None  # of the worse token to the best, in float32 logits; None if an output had ended
    explained: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the `divergence` entry of per_prompt in results.json."""
        return {name: value for name, value in asdict(self).items() if name != "prompt"} | {"tokens": [*self.tokens]}


@dataclass(frozen=True)
class Judgement:
    """Differences between the outputs of the plain loop and of another method: at most one per prompt (`judge`), or any
    number (`judge_each`)."""

    prompts: int = 0
    tokens_compared: int = 0  # positions up to and including each first difference
    margin_limit: float | None = None  # differences up to this margin are explained; None without differences
    differences: list[Difference] = field(default_factory=list)
    is_examined: bool = True  # whether reasons were looked for

    def to_json(self) -> dict[str, Any]:
        margins = [difference.margin for difference in self.differences if difference.margin is not None]
        return {
            "prompts": self.prompts,
            "tokens_compared": self.tokens_compared,
            "count": len(self.differences),
            "unexplained": sum(not each.explained for each in self.differences) if self.is_examined else None,
            "margin_limit": self.margin_limit,
            "largest_margin": max(margins, default=None),
        }


def compare_texts(prompts: Texts, plain: Texts, other: Texts) -> Judgement:
    """Compare outputs with the plain ones, up to each first difference, without looking for the reasons."""
    pairs = enumerate(zip(plain, other, strict=True))
    differences = [item for number, pair in pairs if (item := first_difference(number, *pair)) is not None]
    compared = sum(map(len, plain))
    compared -= sum(max(0, len(plain[item.prompt]) - item.position - 1) for item in differences)
    return Judgement(len(prompts), compared, None, differences, is_examined=not differences)


class Judge:
    """Decides which differences rounding explains, in float32: the target's own weights, cast layer by layer.

    Margins are measured after the repetition penalty and the minimum length are applied.
    """

    def __init__(self, target: Target, options: DecodeOptions | None = None) -> None:
        self._target = target
        self._options = options or DecodeOptions()
        self._last: dict[tuple[int, ...], Tensor] = {}  # float32 logits [V] by prefix
        self._errors: dict[tuple[int, ...], float] = {}  # by text

    def judge(self, prompts: Texts, plain: Texts, other: Texts) -> Judgement:
        """Compare greedy outputs with the plain loop's, up to each first difference."""
        found = compare_texts(prompts, plain, other)
        differences = []
        for first in found.differences:
            answer = plain[first.prompt][: first.position]
            differences.append(replace(first, margin=self.margin(prompts[first.prompt], answer, first.tokens)))
        return self._explained(found, prompts, plain, differences)

    def judge_each(self, prompts: Texts, best: Texts, texts: Texts) -> Judgement:
        """Compare every token of greedy texts with `best`, the target's top token after the same prefix."""
        differences = []
        for number, (prompt, own, text) in enumerate(zip(prompts, best, texts, strict=True)):
            if places := [place for place, pair in enumerate(zip(own, text, strict=True)) if pair[0] != pair[1]]:
                exact_TV = self._exact_logits((*prompt, *text), len(text) + 1)
                gap_T = exact_TV[:-1].amax(-1) - exact_TV[range(len(text)), list(text)]
                pairs = ((place, (own[place], text[place])) for place in places)
                differences += [Difference(number, place, pair, float(gap_T[place])) for place, pair in pairs]
        return self._explained(Judgement(len(prompts), sum(map(len, texts))), prompts, texts, differences)

    def _explained(self, found: Judgement, prompts: Texts, texts: Texts, differences: list[Difference]) -> Judgement:
        """Add differences to a judgement, and the margin limit for rounding, measured on these texts."""
        if not differences:
            return found
        # A large margin suggests a large rounding error.
        worst = dict.fromkeys(item.prompt for item in sorted(differences, key=lambda item: -(item.margin or 0.0)))
        limit = self.limit([(prompts[number], texts[number]) for number in list(worst)[:MEASURED_PROMPTS]])
        explained = [item.margin is not None and item.margin <= limit for item in differences]
        judged = [replace(item, explained=each) for item, each in zip(differences, explained, strict=True)]
        return replace(found, margin_limit=limit, differences=judged, is_examined=True)

    def margin(self, prompt: Sequence[int], answer: Sequence[int], tokens: Sequence[int | None]) -> float | None:
        """Return the gap in float32 logits after this text between the best token and the worst of `tokens`."""
        if None in tokens:
            return None
        text = (*prompt, *answer)
        if text not in self._last:  # drafters often diverge at the same near-tie
            self._last[text] = self._exact_logits(text, 1)[0]
        logits_V = self._last[text]
        min_length = min_length_processors([self._options], [prompt], self._target)
        options = replace(self._options, processors=[*min_length, *self._options.processors])
        if options.processes_logits:
            logits_V = process(options, logits_V, prompt, answer)
        return float(logits_V.max() - min(logits_V[token] for token in tokens if token is not None))

    def limit(self, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        """Return the margin that rounding explains: the largest error on all (prompt, answer) texts so far."""
        if self._target.dtype in (torch.float32, torch.float64):
            return EXACT_MARGIN
        for prompt, answer in texts:
            text, keep = (*prompt, *answer), len(answer) + 1
            if text not in self._errors:
                rounded_TV = _logits(self._target.model, text, keep)
                self._errors[text] = gap_error(rounded_TV, self._exact_logits(text, keep), self._target.dtype)
        return max(self._errors.values())

    def _exact_logits(self, tokens: Sequence[int], keep: int) -> Tensor:
        """Return float32 logits [keep, V] after the last `keep` tokens, with transformers' own attention."""
        exact = self._target.dtype in (torch.float32, torch.float64)
        with nullcontext() if exact else in_float32(self._target.model, self._target.layers):
            return _logits(self._target.model, tokens, keep)


def first_difference(prompt: int, plain: Sequence[int], other: Sequence[int]) -> Difference | None:
    """Return the first difference between two outputs; None if they are equal.

    >>> difference = first_difference(0, [5, 6, 7], [5, 8])
    >>> difference.position, difference.tokens
    (1, (6, 8))
    >>> first_difference(0, [5, 6], [5]).tokens
    (6, None)
    """
    for position, (expected, token) in enumerate(zip_longest(plain, other)):
        if expected != token:
            return Difference(prompt, position, (expected, token))
    return None


def gap_error(rounded_TV: Tensor, exact_TV: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error of a dtype in the gap between two leading tokens of a position.

    At least one step of the dtype at the size of the leading logits: two logits, each off by half a step.

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
    """Run the model's forward in float32 with its own weights, and restore them afterwards.

    Results equal `copy.deepcopy(model).float()` bit for bit, but only the largest part (a layer, or the LM head) is in
    memory twice: each part is cast during its own forward. Decoder layers are cast as a whole, because their parts may
    read each other's weights.
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
    """Cast a module's tensors before its forward and restore them afterwards, also if the forward raises."""
    tensors = [*module.parameters(recurse), *module.buffers(recurse)]
    low = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dtype != torch.float32]
    if not low:
        return
    originals: list[tuple[Tensor, Tensor]] = []

    def cast(*_: Any) -> None:
        originals.extend((tensor, tensor.data) for tensor in low)
        for tensor in low:
            tensor.data = tensor.data.float()

    def restore(*_: Any) -> None:
        while originals:
            tensor, data = originals.pop()
            tensor.data = data

    hooks.callback(module.register_forward_pre_hook(cast).remove)
    hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
