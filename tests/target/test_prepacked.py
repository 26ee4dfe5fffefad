"""Prepacked weights: the same numbers, for forwards of ours alone, and never those of other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.decode.costs import Conditions
from headstart.target import products as module
from headstart.target.model import Target
from headstart.target.products import MAX_ROWS, Matrix, Prepacked, can_prepack
from headstart.tree.tree import Tree, TreeBatch
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    not can_prepack(nn.Linear(32, 32)), reason="this build of torch has no oneDNN, so nothing is prepacked"
)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Sums of 64 numbers of size 1 in another order; in bfloat16 a unit in the last place."""


def logits(target: Target) -> Tensor:
    cache = target.new_cache(2, 16)
    target.prefill(cache, [[5, 9, 2], [4, 4, 8, 1]])
    batch = TreeBatch.of([Tree(tokens, [-1, 0, 0, 1]) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])])
    return target.forward_tree(cache, batch).logits_BTV.float()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_the_same_numbers(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases and without them."""
    if not can_prepack(nn.Linear(32, 32, dtype=dtype)):
        pytest.skip(f"oneDNN prepacks no {dtype} on this CPU")
    packed = Target(tiny_model(kind).to(dtype))
    assert packed.prepacked
    assert any(isinstance(layer.bias, Tensor) for layer in packed._fitting.matrices) == (kind == "gpt_neox")
    monkeypatch.setattr("headstart.target.fitting.fits", lambda _: False)
    plain = Target(tiny_model(kind).to(dtype))
    assert not plain.prepacked
    torch.testing.assert_close(logits(packed), logits(plain), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def test_only_forwards_of_ours_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "product", _counted(module.product, seen))
    target = Target(tiny_model("llama"))
    seen.clear()
    target.model(torch.tensor([[1, 2, 3]]))
    assert not seen
    logits(target)
    assert seen


def test_many_rows_are_multiplied_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "product", _counted(module.product, seen))
    layer = nn.Linear(32, 32).requires_grad_(False)
    forward = Prepacked(layer, layer.forward)
    for rows in (MAX_ROWS, MAX_ROWS + 1):
        torch.testing.assert_close(forward(x := torch.randn(1, rows, 32)), layer(x))
    assert seen == [MAX_ROWS]


def test_what_needs_gradients_or_another_dtype_runs_as_it_is() -> None:
    layer = nn.Linear(32, 32).requires_grad_(False)
    forward = Prepacked(layer, layer.forward)
    x = torch.randn(3, 32, requires_grad=True)
    forward(x).sum().backward()
    assert x.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert forward(torch.randn(3, 32).bfloat16()).dtype == torch.bfloat16


def test_other_weights_are_packed_again() -> None:
    """Weights that are changed in place, as `load_state_dict` and merged adapters do, and others in their place."""
    layer = nn.Linear(32, 32).requires_grad_(False)
    forward, x = Prepacked(layer, layer.forward), torch.randn(3, 32)
    forward(x)
    layer.weight.mul_(2)
    torch.testing.assert_close(forward(x), layer(x))
    layer.weight = nn.Parameter(torch.randn(32, 32), requires_grad=False)
    torch.testing.assert_close(forward(x), layer(x))


@pytest.mark.parametrize("part", [(slice(None), slice(None)), (7, slice(None)), (slice(None), 3)])
def test_weights_that_were_changed_unseen_are_packed_again(part: Any) -> None:
    """Through `data`, which PyTorch does not count: all of them, a row, a column."""
    target = Target(tiny_model("llama"))
    before = logits(target)
    target.model.model.layers[1].mlp.down_proj.weight.data[part] += 0.5
    after = logits(target)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, logits(Target(target.model)), atol=1e-5, rtol=1e-5)
    changed = tiny_model("llama")
    changed.model.layers[1].mlp.down_proj.weight.data[part] += 0.5
    torch.testing.assert_close(after, logits(Target(changed)), atol=1e-5, rtol=1e-5)


def test_models_with_prepacked_weights_can_be_copied() -> None:
    target = Target(tiny_model("llama"))
    before = logits(target)
    copied = copy.deepcopy(target.model)
    for weight in copied.parameters():
        weight.data.mul_(0.5)
    assert torch.equal(logits(target), before), "the copy is another model"
    assert not torch.equal(logits(Target(copied)), before)


def test_layers_that_are_not_plain_are_left_alone() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    assert not can_prepack(Own(32, 32)) and not can_prepack(nn.Linear(32, 32).half())
    assert not can_prepack(nn.Linear(32, 32, device="meta"))


def test_a_forward_that_somebody_put_there_still_runs() -> None:
    model, calls = tiny_model("llama"), []
    layer = model.model.layers[0].mlp.down_proj
    own = layer.forward
    layer.forward = lambda x: calls.append(x.shape) or own(x)
    target = Target(model)
    calls.clear()
    logits(target)
    assert calls
    target.release()
    assert not isinstance(vars(layer)["forward"], Matrix)


def test_no_copies_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    weights = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(module, "free_bytes", lambda _: weights // 2)
    target = Target(model)
    assert not target.prepacked and Conditions.of(target).prepacked is False


def test_costs_say_whether_weights_were_prepacked() -> None:
    here = Conditions.of(Target(tiny_model("llama")))
    assert here.prepacked and Conditions.from_json(here.to_json()) == here
    assert here.beside(replace(here, prepacked=False)) == "prepacked=True"


def _counted(own: Callable[..., Tensor], seen: list[int]) -> Callable[..., Tensor]:
    def product(rows: Tensor, *more: Any) -> Tensor:
        seen.append(rows.shape[:-1].numel())
        return own(rows, *more)

    return product
