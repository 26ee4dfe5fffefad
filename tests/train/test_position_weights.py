"""Position weights on tiny drafts, by hand."""

from __future__ import annotations

import pytest
import torch

from headstart.train.losses import dpace, exponential

# Drafts start at 0, 1 and 5 of a text; the draft from 5 has one step, the draft from 1 has two.
ORIGINS = [torch.tensor([0, 1, 5]), torch.tensor([0, 1]), torch.tensor([0])]


def test_exponential_weights_depend_on_the_step_alone() -> None:
    assert [weight_M.tolist() for weight_M in exponential(ORIGINS, 0.5)] == [[1, 1, 1], [0.5, 0.5], [0.25]]


def test_dpace_weighs_a_step_by_what_follows_it() -> None:
    alphas = [torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.5, 1.0]), torch.tensor([0.2])]
    # Smoothed factors: origin 0: 1, .75, .6; origin 1: .5, 1; origin 5: .75.
    expected = [[1 + 0.75 + 0.75 * 0.6, 0.5 + 0.5, 0.75], [0.75 + 0.75 * 0.6, 0.5], [0.75 * 0.6]]
    for weight_M, values in zip(dpace(ORIGINS, alphas), expected, strict=True):
        torch.testing.assert_close(weight_M, torch.tensor(values))


def test_dpace_is_the_gradient_of_the_expected_length() -> None:
    """The derivation: w_k is the derivative, by log(factor k), of the sum over j of the product of the first j
    factors."""
    torch.manual_seed(0)
    alphas = [torch.rand(1, dtype=torch.float64) for _ in range(4)]
    logs = [(0.5 * alpha + 0.5).log().requires_grad_() for alpha in alphas]
    length = torch.stack(logs).cumsum(0).exp().sum()
    gradient = torch.autograd.grad(length, logs)
    for weight_M, expected_M in zip(dpace([torch.tensor([3])] * 4, alphas), gradient, strict=True):
        torch.testing.assert_close(weight_M.double(), expected_M, rtol=1e-6, atol=0)  # weights are float32


@pytest.mark.parametrize("steps", [1, 2])
def test_no_drafts_have_no_weights(steps: int) -> None:
    origins = [torch.zeros(0, dtype=torch.long)] * steps
    for weights in (exponential(origins, 0.8), dpace(origins, [torch.zeros(0)] * steps)):
        assert [weight_M.tolist() for weight_M in weights] == [[]] * steps
