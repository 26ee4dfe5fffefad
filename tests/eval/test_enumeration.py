"""The exact distribution against brute force, and its statistical test on honest and on wrong samples."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from headstart.decode.options import SamplingOptions
from headstart.decode.sampling import process, warp
from headstart.eval.enumeration import Distribution, chi_square_p, enumerate_texts, expected_variation, fit, least_seen
from headstart.model.model import Target
from tests.tiny import tiny_model

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_model("llama", vocab_size=12)
    model.lm_head.weight.data *= 6  # a peaked distribution
    return Target(model)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.7, top_p=0.9),
        SamplingOptions(temperature=1.0, top_k=3, min_p=0.1),
        SamplingOptions(temperature=1.0, repetition_penalty=2.0),
        SamplingOptions(temperature=1.0, presence_penalty=1.5, frequency_penalty=-0.5, logit_bias={4: 1.0}),
    ],
)
def test_enumeration_matches_brute_force(target: Target, sampling: SamplingOptions) -> None:
    exact = enumerate_texts(target, PROMPT, sampling, depth=2, maximum=100)
    assert exact.rest == 0
    assert sum(exact.probs.values()) == pytest.approx(1, abs=1e-5)
    with torch.inference_mode():
        for text in itertools.product(range(12), repeat=2):
            expected, prefix = 1.0, list(PROMPT)
            for token in text:
                logits_V = target.model(torch.tensor([prefix])).logits[0, -1]
                expected *= float(warp(sampling, process(sampling, logits_V, PROMPT, prefix[len(PROMPT) :]))[token])
                prefix.append(token)
            assert exact.probs.get(text, 0.0) == pytest.approx(expected, abs=1e-5)
            assert exact.possible(text) == (expected > 0)


def test_pruned_texts_stay_in_the_rest(target: Target) -> None:
    whole = enumerate_texts(target, PROMPT, SamplingOptions(temperature=1.0), depth=3, maximum=200)
    part = enumerate_texts(target, PROMPT, SamplingOptions(temperature=1.0), depth=3, maximum=4)
    assert 0 < part.rest < 1
    assert part.rest + sum(part.probs.values()) == pytest.approx(1, abs=1e-5)
    assert all(whole.probs[text] == pytest.approx(prob, abs=1e-6) for text, prob in part.probs.items())
    assert all(part.possible(text) for text in whole.probs)


def test_least_seen_deviation_is_detected() -> None:
    """The hardest case: every probability is off by the same fraction."""
    samples, level = 2000, 0.001
    exact = {(token,): 0.25 for token in range(4)}
    off = least_seen(4, samples, level)
    assert off is not None
    shifted = {text: prob + (off / 2 if text[0] < 2 else -off / 2) for text, prob in exact.items()}
    found = [not fit(draw(shifted, samples, seed), Distribution(1, exact)).clean(level) for seed in range(400)]
    assert 0.91 < sum(found) / len(found) < 0.985, "0.95 within four standard deviations"
    assert least_seen(1, samples, level) is None
    assert least_seen(4, 4 * samples, level) == pytest.approx(off / 2)


def draw(probs: dict[tuple[int, ...], float], samples: int, seed: int) -> Counter[tuple[int, ...]]:
    texts, generator = list(probs), torch.Generator().manual_seed(seed)
    picks = torch.multinomial(torch.tensor([*probs.values()]), samples, True, generator=generator)
    return Counter(texts[pick] for pick in picks.tolist())


def test_honest_samples_fit_and_others_do_not(target: Target) -> None:
    exact = enumerate_texts(target, PROMPT, SamplingOptions(temperature=1.0, top_p=0.9), depth=2)
    fits = [fit(draw(exact.probs, 2000, seed), exact) for seed in range(200)]
    assert 0.02 < sum(result.p_value < 0.1 for result in fits) / 200 < 0.2, "about a tenth"
    assert all(result.clean(1e-4) for result in fits)
    noise = sum(result.total_variation for result in fits) / 200
    assert noise == pytest.approx(fits[0].expected_variation, rel=0.1)
    other = enumerate_texts(target, PROMPT, SamplingOptions(temperature=1.15, top_p=0.9), depth=2)
    shared = {text: prob for text, prob in other.probs.items() if text in exact.probs}
    wrong = fit(draw(shared, 2000, 0), exact)
    assert not wrong.clean(1e-3)
    assert wrong.total_variation > 1.5 * wrong.expected_variation


def test_impossible_sample_is_caught() -> None:
    exact = Distribution(1, {(0,): 0.5, (1,): 0.5}, 0.0, {(): frozenset({0, 1})})
    assert fit({(0,): 50, (1,): 50}, exact).clean(0.01)
    caught = fit({(0,): 50, (1,): 49, (7,): 1}, exact)
    assert caught.impossible == 1
    assert not caught.clean(0.01)


def test_rare_cells_are_pooled() -> None:
    probs = {(0,): 0.9, (1,): 0.06, **{(token,): 0.001 for token in range(2, 42)}}
    exact = Distribution(1, probs, 0.0, {(): frozenset(range(42))})
    assert fit({(0,): 900, (1,): 60, (5,): 40}, exact).cells == 3
    assert fit({(0,): 96, (1,): 4}, exact).cells == 2, "the pool of 4 joins the least likely cell"
    only = fit({(0,): 3}, Distribution(1, {(0,): 1.0}, 0.0, {(): frozenset({0})}))
    assert (only.cells, only.p_value, only.total_variation) == (1, 1.0, 0.0)


def test_p_values_match_the_tables() -> None:
    for statistic, freedom, p_value in ((6.635, 1, 0.01), (23.209, 10, 0.01), (124.342, 100, 0.05)):
        assert chi_square_p(statistic, freedom) == pytest.approx(p_value, rel=2e-3)
    assert expected_variation(torch.tensor([1.0]), 10) == 0
