"""Training on long texts: chunked computation gives the same loss and gradients in memory linear in the length."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.base import DraftHead, HeadBatch
from headstart.heads.parts import text_attention
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.train import fused_loss
from headstart.train.fused_loss import Teacher, batch_loss
from headstart.train.losses import soft_ce
from headstart.train.wrapped import Unrolled
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


def long_batch(heads: DraftHead, length: int, rows: int = 1) -> HeadBatch:
    torch.manual_seed(1)
    layers = {*heads.aux_layers, FINAL}
    states = {layer: torch.randn(rows, length, heads.config.hidden_size) for layer in sorted(layers)}
    supervised_BT = torch.rand(rows, length) < 0.95
    return HeadBatch(torch.randint(61, (rows, length)), supervised_BT, states)


def learn(target: Target, heads: DraftHead, batch: HeadBatch, **settings: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a batch and its gradients."""
    teacher_logits = Teacher(target, heads.draft_to_target_D).logits(batch)
    consume = partial(batch_loss, loss=soft_ce, teacher_logits=teacher_logits, step_weight=0.8, **settings)
    heads.zero_grad()
    loss = Unrolled(heads)(batch, consume)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in heads.named_parameters() if p.grad is not None}


def cut_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower all limits so that a short text is computed in chunks."""
    monkeypatch.setattr(text_attention, "_MAX_SCORES", 0)
    monkeypatch.setattr(text_attention, "_MAX_ROWS", 16)
    monkeypatch.setattr(fused_loss, "_TABLE", {"cpu": 0})
    monkeypatch.setattr(fused_loss, "_BLOCK", {"cpu": 0})
    monkeypatch.setattr(fused_loss, "_BLOCK_ROWS", 32)


def assert_same_step(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Compare float32 sums in another order: exact to 1e-7 of their terms, and gradients are differences of such sums.
    Attending to one position too many changes them by 1 % or more."""
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=0)
    assert one[1].keys() == other[1].keys()
    for name, wanted in other[1].items():
        size = float(wanted.abs().max())
        torch.testing.assert_close(one[1][name], wanted, rtol=0, atol=max(1e-4 * size, 1e-7), msg=name)


@pytest.mark.parametrize("name", CASES)
def test_chunked_loss_and_gradients_are_the_same(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shake(build(name, target))
    batch = long_batch(heads, 90, rows=2)
    complete = learn(target, heads, batch)
    cut_up(monkeypatch)
    assert_same_step(learn(target, heads, batch), complete)


def test_chunked_position_weights_are_the_same(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shake(build("eagle3", target))
    batch = long_batch(heads, 90)
    complete = learn(target, heads, batch, position_weight="dpace")
    cut_up(monkeypatch)
    assert_same_step(learn(target, heads, batch, position_weight="dpace"), complete)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor created inside."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor) and one.layout == torch.strided:
                self.numbers = max(self.numbers, one.untyped_storage().nbytes() // one.itemsize)
        return made


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle", "eagle3-deep-normed", "dspark", "dflash2"])
def test_no_table_is_quadratic_in_the_length(name: str, target: Target) -> None:
    heads = build(name, target)
    length = 1600
    batch = long_batch(heads, length)
    with Largest() as largest:
        learn(target, heads, batch)
    assert largest.numbers < length**2 // 2


def test_no_table_holds_all_logits(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_up(monkeypatch)
    wide = Target(tiny_model("llama", vocab_size=2000))
    for name in ("medusa", "eagle3"):
        heads = build(name, wide)
        batch = long_batch(heads, 400)
        with Largest() as largest:
            learn(wide, heads, batch)
        most = max(p.numel() for p in heads.parameters())
        assert largest.numbers <= max(most, 400 * 2000 // 4)


def kept_bytes(target: Target, heads: DraftHead, batch: HeadBatch) -> int:
    """Count bytes saved for the backward pass, each storage once, without the weights."""
    own = {p.untyped_storage().data_ptr() for p in heads.parameters()}
    kept: dict[int, int] = {}
    tensors = []  # keeps addresses from being reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)
        return tensor

    teacher_logits = Teacher(target, heads.draft_to_target_D).logits(batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Unrolled(heads)(batch, partial(batch_loss, loss=soft_ce, teacher_logits=teacher_logits, step_weight=0.8))
    return sum(kept.values())


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle", "eagle3-deep-normed", "dspark", "dflash2"])
def test_gradient_checkpointing_saves_memory_bit_exactly(name: str, target: Target) -> None:
    heads = shake(build(name, target))
    batch = long_batch(heads, 200)
    plain, kept = learn(target, heads, batch), kept_bytes(target, heads, batch)
    heads.gradient_checkpointing = True
    light, kept_now = learn(target, heads, batch), kept_bytes(target, heads, batch)
    assert torch.equal(plain[0], light[0])
    for key, gradient in plain[1].items():
        assert torch.equal(gradient, light[1][key]), key
    assert kept_now < 0.8 * kept, (kept_now, kept)
