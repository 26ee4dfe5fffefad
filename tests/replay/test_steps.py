"""Steps of a forward joined into one C call: the numbers of the operators on torch, with current weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from headstart.kernels import prepacked
from headstart.model.model import Target
from headstart.replay.steps import Steps
from headstart.support.compiled import compiler
from headstart.tree.tree import Tree, TreeBatch
from tests.replay.test_recorded import CLOSE, TEXTS, replay_of, rounds, through_modules
from tests.spies import spy
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    not compiler() or not prepacked.can_pack(torch.zeros(32, 32)), reason="C for AVX2 and AVX-512"
)


@contextmanager
def logged_calls() -> Iterator[list[int]]:
    """Log the number of steps of each joined call."""
    with pytest.MonkeyPatch.context() as patch:
        yield spy(patch, Steps, "__call__", lambda steps, *_: len(steps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("llama", [15]),
        ("qwen3", [15]),
        ("mistral", [15]),  # with a sliding window
        ("mixtral", [3, 3, 3]),  # attention, and the products around it
        ("phi3", [2, 2, 2, 2, 2]),  # partial rotary positions: attention on torch
        ("gemma3", []),
        ("gpt_neox", [2, 2, 2]),
    ],
)
def test_joined_steps_match_the_operators_on_torch(kind: str, calls: list[int], dtype: torch.dtype) -> None:
    """Logits and states of all layers, for a token, a tree, and rows of several lengths."""
    in_steps, alone = (Target(tiny_model(kind).to(dtype)) for _ in range(2))
    (replay,) = replay_of(in_steps)._replays.values()
    assert list(map(len, replay.steps)) == calls
    for rows, width in ((1, 1), (1, 7), (3, 5)):
        with logged_calls() as taken:
            found = rounds(in_steps, rows, width)
        with mock.patch("headstart.replay.recorded.group_steps", return_value=[]):
            expected = rounds(alone, rows, width)
        assert len(taken) == 4 * len(calls), "prefill included"
        torch.testing.assert_close(found, expected, **CLOSE[dtype])


def test_wide_forwards_run_step_by_step() -> None:
    target = Target(tiny_model("llama"))
    cache = target.new_cache(1, 300)
    target.prefill(cache, [[1, 2, 3]])
    with logged_calls() as taken:
        assert target.forward_tree(cache, TreeBatch.of([Tree.chain_of([5] * 257)])).logits_BTV.isfinite().all()
    assert not taken, "torch attends over so wide a tree"


def _in_place(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _elsewhere(weight: Tensor) -> None:
    weight.data = weight.data * 2


@pytest.mark.parametrize("name", ["mlp.down_proj.weight", "input_layernorm.weight", "self_attn.q_norm.weight"])
@pytest.mark.parametrize("change", [_in_place, _elsewhere])
def test_changed_weights_are_used(change: Callable[[Tensor], None], name: str) -> None:
    """After a change in place at the next forward; in new memory at the next text."""
    target = Target(tiny_model("qwen3"))
    rounds(target, 1, 4)
    cache = target.new_cache(1, 20)
    target.prefill(cache, [[5, 9, 2]])
    change(target.model.get_parameter(f"model.layers.1.{name}"))
    changed = tiny_model("qwen3")
    changed.get_parameter(f"model.layers.1.{name}").data.mul_(2)
    expected = Target(changed)
    if change is _in_place:  # after keys of the old weights
        read = expected.new_cache(1, 20)
        unchanged = Target(tiny_model("qwen3"))
        unchanged.record()
        unchanged.prefill(read, [[5, 9, 2]])
        batch = TreeBatch.roots([7])
        ours, theirs = (t.forward_tree(c, batch).logits_BTV for t, c in ((target, cache), (expected, read)))
        assert torch.equal(ours, theirs)
    assert all(map(torch.equal, rounds(target, 1, 4), rounds(expected, 1, 4)))


class Other(nn.Module):
    """A wrapper that changes the shapes or the dtype of an MLP."""

    def __init__(self, mlp: nn.Module, how: str) -> None:
        super().__init__()
        self.mlp, self.how, self.extra = mlp, how, nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "flat":  # products over rows without a batch dimension
            y = self.mlp(x.reshape(-1, x.shape[-1]))
            return (y / (1 + y.norm(dim=1, keepdim=True))).view(x.shape)  # type: ignore[no-any-return]
        if self.how == "broadcast":
            return self.mlp(x) + self.extra * 2  # type: ignore[no-any-return]
        return self.mlp(x.float()).to(x.dtype)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["flat", "broadcast", "float32"])
def test_layers_of_other_shapes_and_dtypes(how: str) -> None:
    """Recorded and replayed, joined as far as possible, and equal to the modules."""
    model = tiny_model("llama").to(torch.bfloat16 if how == "float32" else torch.float32)
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp = Other(layer.mlp.float(), how).eval()
    target = Target(model)
    with logged_calls() as taken:
        found = rounds(target, 1, 7)
    assert target.eager is None and taken
    with through_modules(target):
        expected = rounds(target, 1, 7)
    close = {"rtol": 0.05, "atol": 0.05} if how == "float32" else {"rtol": 1e-4, "atol": 1e-4}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **close)


def test_replaced_layer_is_released() -> None:
    """Its weights may be empty, as after offloading, and are not read."""
    target = Target(tiny_model("llama"))
    rounds(target, 1, 4)
    mlp: Any = target.model.model.layers[1].mlp
    old, new = mlp.down_proj, nn.Linear(96, 64, bias=False)
    new.weight.data = old.weight.data * 2
    mlp.down_proj, old.weight.data = new, torch.empty(0)
    found = rounds(target, 1, 4)
    with through_modules(target):
        expected = rounds(target, 1, 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_replays_share_one_copy_of_the_weights() -> None:
    """For any number of replays and changes; a norm's weight may be non-contiguous."""
    target = Target(tiny_model("llama"))

    def bytes_of_panels() -> int:
        gc.collect()
        return sum(part.data.nbytes for part in gc.get_objects() if isinstance(part, prepacked.Panels))

    def read(*aux_layers: int) -> Tensor:
        cache = target.new_cache(1, 8)
        target.prefill(cache, [[3, 4]])
        return target.forward_tree(cache, TreeBatch.roots([5]), aux_layers).logits_BTV

    layer: Any = target.model.model.layers[0]
    before = [read(*layers) for layers in ((), (0,), (1,), (2, 3))]
    assert all(torch.equal(one, before[0]) for one in before)
    held = bytes_of_panels()
    for layers in ((), (1,), (2, 3)):
        with torch.no_grad():
            layer.mlp.up_proj.weight.mul_(1.5)
        after = read(*layers)
        assert not torch.equal(after, before[0]) and bytes_of_panels() == held
    layer.input_layernorm.weight.data = torch.stack([layer.input_layernorm.weight.data] * 2, dim=1)[:, 0]
    assert torch.equal(read(), after) and not layer.input_layernorm.weight.is_contiguous()


def test_results_hold_no_memory_of_other_steps() -> None:
    target = Target(tiny_model("llama"))
    cache = target.new_cache(1, 16)
    target.prefill(cache, [[3, 4]])
    states = target.forward_tree(cache, TreeBatch.of([Tree.chain_of([5] * 4)]), (1, 2)).aux_hidden_states
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in states.values())


def test_caches_that_shrink_or_grow() -> None:
    """After rows left, in a part of a cache, and after growing: equal to separate steps."""

    def read(target: Target) -> list[Tensor]:
        cache = target.new_cache(3, 16)
        target.prefill(cache, TEXTS[:3])
        seen = []
        for step in ("all", "reordered", "part", "more room"):
            if step == "reordered":
                cache.reorder([0, 2])
            elif step == "part":
                cache = cache.slice_rows(1, 2)
            elif step == "more room":
                cache = cache.with_room(64, target.new_cache)
            batch = TreeBatch.of([Tree.chain_of([7, 8])] * cache.rows)
            seen.append(target.forward_tree(cache, batch).logits_BTV)
            cache.commit([[0]] * cache.rows)
        return seen

    found = read(Target(tiny_model("mistral")))
    with mock.patch("headstart.replay.recorded.group_steps", return_value=[]):
        torch.testing.assert_close(found, read(Target(tiny_model("mistral"))), rtol=1e-5, atol=1e-5)
