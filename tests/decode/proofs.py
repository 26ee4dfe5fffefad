"""Two proofs that verification is lossless, of the plain reference and on the tables of `tests.decode.tables`.

`prove_exactly` runs the reference's own code through every outcome of every random choice (the drafter's draws, the
acceptance tests, the drawn tokens) and adds up the probabilities. `prove_by_sampling` judges texts that were decoded
with the real random streams, so it also sees streams that are not independent.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.eval.enumeration import Distribution, fit
from tests import reference
from tests.decode.tables import VOCAB, Draft, Grower, Pick, context, depth, exact_joint
from tests.reference import Chance, fall_on, random_numbers

Result = TypeVar("Result")

# -- random choices as data --------------------------------------------------------------------------------------------


class Picked(Chance):
    """All that is random comes from `pick`."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick

    def accepts(self, probability: float) -> bool:
        probability = min(1.0, max(0.0, probability))
        return self.pick("accept", [probability, 1.0 - probability]) == 0

    def draw(self, weights_V: Tensor) -> int:
        return self.pick("residual", weights_V.tolist())


def emit(draft: Draft, chance: Chance) -> tuple[int, ...]:
    """Return the tokens of one round."""
    path, last = reference.accept(draft.root, draft.p_target, itertools.repeat(chance))
    return (*path[1:], last)


def outcomes(experiment: Callable[[Pick], Result]) -> Iterator[tuple[Result, float]]:
    """Yield every result of an experiment with its probability."""
    script: list[list[tuple[int, float]]] = []  # per choice, the options left to explore; the last one is current
    while True:
        index, probability = 0, 1.0

        def pick(stream: str, weights: list[float]) -> int:
            nonlocal index, probability
            if index == len(script):
                script.append([(i, weight / sum(weights)) for i, weight in enumerate(weights) if weight > 0])
            choice, prob = script[index][-1]
            index, probability = index + 1, probability * prob
            return choice

        yield experiment(pick), probability
        while script and len(script[-1]) == 1:
            script.pop()
        if not script:
            return
        script[-1].pop()


class _Point:
    """A state of an experiment: before a choice, at its result, or not reached yet."""

    __slots__ = ("after", "cumulative", "results", "stream")

    def __init__(self) -> None:
        self.after: list[_Point] = []
        self.results: list[Any] = []

    def meet(self, stream: str, weights: list[float]) -> None:
        self.stream, self.cumulative = stream, list(itertools.accumulate(weights))
        self.after = [_Point() for _ in weights]

    def choose(self, number: float) -> int:
        return bisect.bisect_right(self.cumulative, number * self.cumulative[-1])


class Repeated(Generic[Result]):
    """An experiment that is repeated many times, replaying known choices at no cost."""

    def __init__(self, experiment: Callable[[Pick], Result]) -> None:
        self._experiment = experiment
        self._start = _Point()

    def __call__(self, numbers: dict[str, Iterator[float]]) -> Result:
        """Do it once, with uniform numbers from each stream."""
        point, made = self._start, []
        while point.after:
            made.append(point.choose(next(numbers[point.stream])))
            point = point.after[made[-1]]
        if not point.results:
            replayed = iter(made)

            def pick(stream: str, weights: list[float]) -> int:
                nonlocal point
                if (choice := next(replayed, None)) is None:
                    point.meet(stream, weights)
                    choice = point.choose(next(numbers[stream]))
                    point = point.after[choice]
                return choice

            result = self._experiment(pick)
            point.results.append(result)
        return point.results[0]


# -- proof by enumeration --------------------------------------------------------------------------------------------

EXACT = 1e-12
"""Tolerance of a probability. All arithmetic is in float64: thousands of outcomes of total probability 1, each a
product of a few factors with relative errors of 1e-16, add up to errors below 1e-14."""


def enumerate_round(grower: Grower, prefix: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """Return the exact distribution of the tokens that one round emits after a prefix."""
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for draft, drafted in outcomes(partial(grower.grow, prefix)):
        for tokens, prob in outcomes(lambda pick, draft=draft: emit(draft, Picked(pick))):  # type: ignore[misc]
            emitted[tokens] += drafted * prob
    return emitted


def exact_error(grower: Grower, prefix: tuple[int, ...] = ()) -> float:
    """Return the error of one round followed by the target alone in the joint distribution of the next 4 tokens.

    Four tokens are all that a round emits from the shapes above. Later rounds do the same after their own prefixes, so
    by induction an error of 0 means that whole texts follow the target's distribution.

    Returns:
        The largest error of the probability of any four tokens.
    """
    joint = np.zeros((VOCAB,) * 4)
    for tokens, probability in enumerate_round(grower, prefix).items():
        joint[tokens] += probability * exact_joint((*prefix, *tokens), 4 - len(tokens))
    return float(np.abs(joint - exact_joint(prefix, 4)).max())


def prove_exactly(grower: Grower, tolerance: float = EXACT) -> None:
    """Assert that rounds are lossless after several prefixes."""
    for prefix in ((), (1,), (2, 3)):
        error = exact_error(grower, prefix)
        assert error < tolerance, f"differs from the target: by {error:.2g} after {prefix}"


# -- proof by sampling -----------------------------------------------------------------------------------------------

SAMPLES = 100_000
UNLIKELY = 1e-6
"""Bound on the probability that a proof by sampling rejects a correct rule (seeds are fixed, so results repeat)."""

_CHOICES = 8
"""More numbers than a round after a chain takes from one stream."""


def sample_texts(
    grower: Grower,
    length: int | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    same_noise: tuple[str, str] | None = None,
) -> NDArray[np.int64]:
    """Decode texts round by round with the real random streams, and count their first `length` tokens.

    Args:
        grower: grows the drafts.
        length: by default the most tokens that a round emits, and at least 2.
        samples: texts.
        seed: of the streams.
        same_noise: two of the draft, accept and residual streams that wrongly share their noise in each round.

    Returns:
        Counts, one axis per token.
    """
    length = length or max(2, 1 + depth(grower.shape))
    numbers = _numbers(seed)
    rounds: dict[tuple[int, ...], Repeated[Repeated[tuple[int, ...]]]] = {}

    def draft(last_two: tuple[int, ...], pick: Pick) -> Repeated[tuple[int, ...]]:
        grown = grower.grow(last_two, pick)
        return Repeated(lambda pick: emit(grown, Picked(pick)))

    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(samples):
        text: tuple[int, ...] = ()
        while len(text) < length:
            if (last_two := context(text)) not in rounds:
                rounds[last_two] = Repeated(partial(draft, last_two))
            if same_noise:
                noise = list(itertools.islice(numbers[same_noise[0]], _CHOICES))
                drawing = numbers | {name: iter(noise) for name in same_noise}
            else:
                drawing = numbers
            text = (*text, *rounds[last_two](drawing)(drawing))
        counts[text[:length]] += 1
    return _table(counts, length)


def sample_texts_plainly(grower: Grower, length: int, samples: int, seed: int = 0) -> NDArray[np.int64]:
    """Sample the same texts without remembering choices, as a reference for `sample_texts`."""
    numbers = _numbers(seed)

    def pick(stream: str, weights: list[float]) -> int:
        return fall_on(torch.tensor(weights, dtype=torch.float64), next(numbers[stream]))

    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(samples):
        text: tuple[int, ...] = ()
        while len(text) < length:
            text = (*text, *emit(grower.grow(text, pick), Picked(pick)))
        counts[text[:length]] += 1
    return _table(counts, length)


def _numbers(seed: int) -> dict[str, Iterator[float]]:
    return dict(zip(("accept", "residual", "draft"), random_numbers(seed), strict=True))


def _table(counts: Counter[tuple[int, ...]], length: int) -> NDArray[np.int64]:
    table = np.zeros((VOCAB,) * length, dtype=np.int64)
    for tokens, count in counts.items():
        table[tokens] = count
    return table


def chi_square_p(counts: NDArray[np.int64], exact: NDArray[np.float64]) -> float:
    """Return the probability that correct samples deviate at least as much as `counts`, with the audit's test."""
    return fit(dict(np.ndenumerate(counts)), Distribution(counts.ndim, dict(np.ndenumerate(exact)))).p_value


def variation_bound(cells: int, samples: int) -> float:
    """Return a total variation that correct samples exceed with probability UNLIKELY at most.

    Its mean is at most half the sum over cells of sqrt(p / samples), thus at most sqrt(cells / samples) / 2. One sample
    moves it by 1 / samples at most, so by McDiarmid's inequality it is beyond its mean by t with probability
    exp(-2 samples t^2) at most.
    """
    return 0.5 * math.sqrt(cells / samples) + math.sqrt(-math.log(UNLIKELY) / (2 * samples))


def prove_by_sampling(counts: NDArray[np.int64]) -> None:
    """Assert that counts of texts fit the target's joint distribution: no impossible text, chi-square, variation."""
    exact = exact_joint((), counts.ndim)
    samples = int(counts.sum())
    variation = 0.5 * float(np.abs(counts / samples - exact).sum())
    p_value = chi_square_p(counts, exact)
    fits = p_value > UNLIKELY and variation < variation_bound(int((exact > 0).sum()), samples)
    message = f"chi-square p {p_value:.2g}, total variation {variation:.4f}"
    assert not counts[exact == 0].any(), "differs from the target: an impossible text came out"
    assert fits, f"differs from the target: {message}"
