"""The reference's output follows the target's distribution, whatever the drafts and the shape of their tree."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import numpy as np
import pytest
import torch

from headstart.support.rng import draw
from tests import reference
from tests.decode.mutants import MUTANTS
from tests.decode.proofs import chi_square_p, prove_by_sampling, prove_exactly, sample_texts, sample_texts_plainly
from tests.decode.tables import KINDS, SHAPES, VOCAB, Draft, Grower, exact_joint
from tests.reference import Chance, Node


def stands_for_itself(kind: str, shape: str) -> bool:
    """Return whether no other case has the same trees."""
    if shape == "root only":
        return kind in ("top", "top and sampled, guesses")
    return not KINDS[kind].adaptive or shape == "bushy"


CASES = [(kind, shape) for kind, shape in itertools.product(KINDS, SHAPES) if stands_for_itself(kind, shape)]


class SingleDraft(Draft):
    """Distributions in float32, as decoding has them."""

    def p_target(self, path: list[int]) -> torch.Tensor:  # type: ignore[override]
        return super().p_target(path).float()

    @property
    def root(self) -> Node:
        root = super().root
        waiting = [root]
        for node in waiting:
            node.q_draft_V = node.q_draft_V.float() if node.q_draft_V is not None else None
            waiting += node.children
        return root


class SingleGrower(Grower):
    draft_type = SingleDraft


# -- the proofs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_lossless_by_enumeration(kind: str, shape: str) -> None:
    prove_exactly(Grower(KINDS[kind], SHAPES[shape]))


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_lossless_by_sampling(kind: str, shape: str) -> None:
    prove_by_sampling(sample_texts(Grower(KINDS[kind], SHAPES[shape])))


@pytest.mark.parametrize("kind", ["top", "top and sampled"])
def test_lossless_in_float32(kind: str) -> None:
    # Every probability is a product of about ten factors with relative errors of 6e-8.
    prove_exactly(SingleGrower(KINDS[kind], SHAPES["bushy"]), tolerance=1e-6)


@pytest.mark.parametrize("kind", ["top", "top and sampled"])
def test_remembered_choices_change_nothing(kind: str) -> None:
    """The sampling proof replays choices that it has met before; made afresh each time, they give the same texts."""
    grower = Grower(KINDS[kind], SHAPES["bushy"])
    np.testing.assert_array_equal(sample_texts(grower, 3, samples=500), sample_texts_plainly(grower, 3, samples=500))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_proofs_notice(mutant: str) -> None:
    wrong = MUTANTS[mutant]
    grower = wrong.grower(KINDS[wrong.kind], SHAPES[wrong.shape])
    with patch.dict(vars(reference), wrong.patches):
        counts = sample_texts(grower, same_noise=wrong.same_noise)
        with pytest.raises(AssertionError, match="differs from the target"):
            prove_by_sampling(counts)
        if not wrong.same_noise:
            with pytest.raises(AssertionError, match="differs from the target"):
                prove_exactly(grower)


def test_right_samples_give_evenly_spread_p_values() -> None:
    """The chi-square test itself: over many right samples its p-values are as often above as below each quantile."""
    exact, random = exact_joint((), 3), np.random.default_rng(0)
    values = [chi_square_p(random.multinomial(20_000, exact.flatten()).reshape(exact.shape), exact) for _ in range(400)]
    for quantile in (0.1, 0.5, 0.9):  # standard deviation of each share: at most .025
        assert abs(np.mean(np.array(values) < quantile) - quantile) < 0.1


# -- single nodes ------------------------------------------------------------------------------------------------------


def test_equal_distributions_accept_everything() -> None:
    p_target_V = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for token in range(4):
        assert reference.next_token(p_target_V, Node(token, p_target_V), Chance(1.0 - 2**-53, 0.5)) == token


def test_a_rejection_by_rounding_stays_within_the_target() -> None:
    """q a little above p everywhere leaves no residual; p then decides, so impossible tokens stay impossible."""
    p_target_V = torch.tensor([0.5, 0.5, 0.0, 0.0])
    for number in (0.2, 0.7):
        chance = Chance(1.0 - 2**-53, number)
        assert reference.next_token(p_target_V, Node(1, p_target_V * 1.0000002), chance) == int(number > 0.5)


def test_draw_follows_the_distribution() -> None:
    probs_V, stream = torch.tensor(exact_joint((), 1)), torch.Generator().manual_seed(4)
    prove_by_sampling(np.bincount([draw(probs_V, stream) for _ in range(100_000)], minlength=VOCAB))
