"""Which weights learn by which optimiser, and that Muon is Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from headstart.heads import families, family, make_config
from headstart.recipe import TrainSection
from headstart.target import Target
from headstart.train.optimizers import Muon, make_optimizers, orthogonal

AUX_LAYERS: dict[str, Any] = {"eagle3": {"aux_layers": [1, 2, 3]}}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_updates_are_those_of_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape))
    theirs = nn.Parameter(ours.detach().clone())
    mine = Muon([ours], lr=1e-2, weight_decay=0.1)
    reference = torch.optim.Muon([theirs], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
        # One rounding of bfloat16 apart at most, should batched products be added up in another order.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 * 0.2 * 40**0.5 * 2**-8)


def test_a_stack_is_so_many_matrices() -> None:
    torch.manual_seed(0)
    stack = torch.randn(2, 3, 16, 24)
    alone = torch.stack([torch.stack([orthogonal(matrix) for matrix in row]) for row in stack])
    torch.testing.assert_close(orthogonal(stack), alone, rtol=0, atol=2**-8)


def test_singular_values_come_close_to_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(48, 64)).float())
    assert float((values - 1).abs().max()) < 0.4  # the iteration's own band


def test_a_gradient_of_nothing_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.zeros(4, 6)
    Muon([weight], lr=1.0).step()
    assert torch.equal(weight, torch.ones(4, 6))


@pytest.mark.parametrize("name", sorted(families()))
def test_every_weight_has_one_optimizer_and_lm_heads_norms_and_biases_have_adamw(
    name: str, tiny_target: Target
) -> None:
    config = make_config({"family": name, "draft_vocab_size": 40, **AUX_LAYERS.get(name, {})}, tiny_target)
    heads = family(name)(config)
    trained = {id(weight): key for key, weight in heads.named_parameters() if weight.requires_grad}
    muon, adamw = make_optimizers(heads, TrainSection(optimizer="muon"))
    by_muon, by_adamw = ([id(w) for group in one.param_groups for w in group["params"]] for one in (muon, adamw))
    assert sorted(by_muon + by_adamw) == sorted(trained)
    assert isinstance(muon, Muon) and isinstance(adamw, torch.optim.AdamW)
    apart = ("lm_head", "norm", "bias")
    assert not [trained[key] for key in by_muon if any(part in trained[key] for part in apart)]
    assert not [trained[key] for key in by_adamw if not any(part in trained[key] for part in apart)]
    (only,) = make_optimizers(heads, TrainSection())
    assert isinstance(only, torch.optim.AdamW)
