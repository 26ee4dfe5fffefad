"""The optimiser of each weight, and Muon against torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from headstart.heads.base import families, family, make_config
from headstart.model.model import Target
from headstart.recipes.sections import TrainSection
from headstart.train.optimizers import Muon, make_optimizers, orthogonalise

OTHERS: dict[str, Any] = {
    "eagle3": {"aux_layers": [1, 2, 3]},
    "peagle": {"aux_layers": [1, 2, 3], "train_embeddings": True},
}


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_updates_match_torch(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Momentum, scale and weight decay, with our orthogonalisation in both."""
    module = import_module("torch.optim._muon")
    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", lambda update, *_: orthogonalise(update))
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
        # At most one bfloat16 rounding apart, in case batched products sum in another order.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 * 0.2 * 40**0.5 * 2**-8)


def test_stack_is_several_matrices() -> None:
    torch.manual_seed(0)
    stack = torch.randn(2, 3, 16, 24)
    alone = torch.stack([torch.stack([orthogonalise(matrix) for matrix in row]) for row in stack])
    torch.testing.assert_close(orthogonalise(stack), alone, rtol=0, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 64), (64, 48)])
@pytest.mark.parametrize("spread", [1, 4, 100])
def test_singular_values_are_near_one(
    shape: tuple[int, int], spread: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directions stay. The polynomials reach 1 +- 0.083 from 0.005 of the norm on, and bfloat16 rounds. Machines
    without bfloat16 products take float32."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": dtype == torch.bfloat16})
    assert orthogonalise(torch.eye(2)).dtype == dtype
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    sizes = torch.linspace(1, 1 / spread, 48)
    made = orthogonalise(left @ torch.diag(sizes) @ right).float()
    assert sizes[-1] / sizes.norm() > 0.002
    kept = sizes > 0.006 * sizes.norm()
    found = left.T @ made @ right.T
    assert float((found.diagonal()[kept] - 1).abs().max()) < 0.12
    assert float((found - torch.diag(found.diagonal())).abs().max()) < 0.05
    assert float(torch.linalg.svdvals(made).max()) < 1.1


def test_rank_one_matrix_stays_bounded() -> None:
    """Its singular value is its norm, where polynomials outside their range would diverge."""
    made = orthogonalise(torch.outer(torch.linspace(-1, 1, 40), torch.linspace(0.5, 2, 30))).float()
    assert 0.9 < float(torch.linalg.svdvals(made).max()) < 1.1


def test_row_blocks_are_separate_matrices() -> None:
    """Rows outside every block stay unchanged, also by weight decay."""
    torch.manual_seed(0)
    start, gradient = torch.randn(12, 6), torch.randn(12, 6)
    parts = [slice(0, 4), slice(6, 12)]
    weight = nn.Parameter(start.clone())
    weight.grad = gradient.clone()
    Muon([weight], lr=0.1, weight_decay=0.1, rows={weight: parts}).step()
    for rows in parts:
        alone = nn.Parameter(start[rows].clone())
        alone.grad = gradient[rows].clone()
        Muon([alone], lr=0.1, weight_decay=0.1).step()
        assert torch.equal(weight[rows], alone)
    assert torch.equal(weight[4:6], start[4:6])


def test_matrices_that_take_turns_move_as_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a constant gradient, each moves in every other step, by two updates; half of them in each step."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # in float32
    torch.manual_seed(0)
    start, gradient = torch.randn(12, 6), torch.randn(12, 6)
    parts = [slice(0, 4), slice(4, 12)]
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    each, in_turns = (
        Muon([weight], lr=0.1, rows={weight: parts}, every=every) for weight, every in zip(weights, (1, 2), strict=True)
    )
    for step in range(4):
        before = weights[1].detach().clone()
        for weight, muon in zip(weights, (each, in_turns), strict=True):
            weight.grad = gradient.clone()
            muon.step()
        moved = [bool((weights[1] != before)[rows].any()) for rows in parts]
        assert moved == [step % 2 == 0, step % 2 == 1]
    torch.testing.assert_close(*weights)


def test_zero_gradient_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.zeros(4, 6)
    Muon([weight], lr=1.0).step()
    assert torch.equal(weight, torch.ones(4, 6))


@pytest.mark.parametrize("name", sorted(families()))
def test_every_weight_has_one_optimizer(name: str, tiny_target: Target) -> None:
    """AdamW takes LM heads, embeddings, norms, biases, pair tables, confidence weights and kernels; Muon the rest."""
    config = make_config({"family": name, "draft_vocab_size": 40, **OTHERS.get(name, {})}, tiny_target)
    heads = family(name)(config)
    trained = {id(weight): key for key, weight in heads.named_parameters() if weight.requires_grad}
    both = make_optimizers(heads, TrainSection(optimizer="muon"))
    by_muon, by_adamw = (
        [id(w) for one in both if isinstance(one, kind) for group in one.param_groups for w in group["params"]]
        for kind in (Muon, torch.optim.AdamW)
    )
    assert sorted(by_muon + by_adamw) == sorted(trained)
    apart = ("lm_head", "embedding", "norm", "bias", "parents", "drafts", "confidence", "mask_hidden", "base_kernel")
    assert not [trained[key] for key in by_muon if any(part in trained[key] for part in apart)]
    assert not [trained[key] for key in by_adamw if not any(part in trained[key] for part in apart)]
    (only,) = make_optimizers(heads, TrainSection())
    assert isinstance(only, torch.optim.AdamW)


def test_frozen_rows_do_not_decay(tiny_target: Target) -> None:
    settings = {"family": "eagle3", "init": "transition", "aux_layers": [1, 2], "draft_vocab_size": 40}
    heads = family("eagle3")(make_config(settings, tiny_target))
    layer: Any = heads.get_submodule("layers.0")
    for own, kept in ((0, []), (1, [layer.qkv.weight])):
        layer.own_heads = own
        (adamw,) = make_optimizers(heads, TrainSection(weight_decay=0.1))
        decay = {group["weight_decay"]: group["params"] for group in adamw.param_groups}
        assert [id(weight) for weight in decay.get(0.0, [])] == [id(weight) for weight in kept]
        assert len(decay[0.1]) + len(kept) == sum(weight.requires_grad for weight in heads.parameters())
