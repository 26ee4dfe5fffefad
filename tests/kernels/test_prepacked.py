"""Prepacked weights: equal results, used only by our own forwards, and never stale."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headstart.decode.costs import Conditions
from headstart.kernels import prepacked as module
from headstart.kernels.prepacked import MAX_ROWS, PrepackedCopy, copy_of, prepacked_linear
from headstart.model.model import Target
from headstart.replay.products import PrepackedForward, can_prepack
from headstart.replay.recorded import Recorded
from headstart.tree.tree import Tree, TreeBatch
from tests.spies import spy
from tests.tiny import tiny_model

pytestmark = pytest.mark.skipif(not can_prepack(nn.Linear(32, 32)), reason="C for AVX2 and AVX-512")
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""For sums of 64 numbers of size 1 in another order; in bfloat16 one unit in the last place."""


def logits(target: Target) -> Tensor:
    cache = target.new_cache(2, 16)
    read = target.prefill(cache, [[5, 9, 2], [4, 4, 8, 1]]).logits_BTV
    batch = TreeBatch.of([Tree(tokens, [-1, 0, 0, 1]) for tokens in ([1, 2, 3, 4], [5, 6, 7, 8])])
    return torch.cat([read, target.forward_tree(cache, batch).logits_BTV], 1).float()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_logits_match(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases and without."""
    packed = Target(tiny_model(kind).to(dtype))
    assert packed.prepacked
    assert any(isinstance(layer.bias, Tensor) for layer in packed._patch.matrices) == (kind == "gpt_neox")
    monkeypatch.setattr("headstart.replay.patch.fits", lambda _: False)
    plain = Target(tiny_model(kind).to(dtype))
    assert not plain.prepacked
    torch.testing.assert_close(logits(packed), logits(plain), atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


def test_stock_forwards_do_not_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy(monkeypatch, module, "product", lambda rows, *_: rows.shape)
    target = Target(tiny_model("llama"))
    seen.clear()
    target.model(torch.tensor([[1, 2, 3]]))
    assert not seen
    logits(target)
    assert seen


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("rows", "threads", "int8"),
    [*((rows, threads, False) for rows in (1, 5, 13, 40, 70) for threads in (1, 2)), (1, 1, True), (19, 1, True)],
)
def test_fused_norm_gate_and_sum(
    rows: int, threads: int, int8: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-exact against separate operators, also with outputs that do not fill a panel."""
    if int8:
        monkeypatch.setattr(module, "uses_tiles", lambda _: False)
        if not module.can_pack(torch.zeros(32, 32), int8=True):
            pytest.skip("this CPU has no products in 8 bits")
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    x, norm_I = torch.randn(1, rows, 48).to(dtype), torch.randn(48).to(dtype)
    for outputs in (128, 70):
        weight, bias = torch.randn(outputs, 48).to(dtype), torch.randn(outputs).to(dtype)
        packed, added = module.prepack(weight, int8), torch.randn(1, rows, outputs).to(dtype)
        normed = module.product(x, module.prepack(torch.eye(48, dtype=dtype)), None, norm=(norm_I, 1e-5))
        plain = module.product(normed, packed, bias)
        assert torch.equal(module.product(x, packed, bias, norm=(norm_I, 1e-5), added=added), added + plain)
        assert module.can_gate([weight]) == (outputs == 128)
        if outputs == 128:
            gated = module.product(plain, module.prepack(torch.eye(outputs, dtype=dtype)), None, gates=True)
            assert torch.equal(module.product(x, packed, bias, (norm_I, 1e-5), gates=True), gated)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_few_rows_have_the_bits_of_single_rows(dtype: torch.dtype) -> None:
    """For every number of rows, and over more inputs than one partial sum (see `weights_dense.h`)."""
    torch.manual_seed(0)
    packed = module.prepack(torch.randn(70, 1100).to(dtype))
    x = torch.randn(70, 1100).to(dtype)
    alone = torch.cat([module.product(row[None], packed, None) for row in x])
    for count in range(len(x) + 1):
        assert torch.equal(module.product(x[:count], packed, None), alone[:count]), f"{count} rows"


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_have_the_bits_of_single_rows(threads: int, dtype: torch.dtype) -> None:
    """In groups of unequal size, beside NaN and infinite rows, with inputs that do not fill a tile."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    for inputs in (2, 34, 64):
        weight, x = torch.randn(70, inputs).to(dtype), torch.randn(256, inputs).to(dtype)
        packed = module.prepack(weight)
        alone = torch.cat([module.product(row[None], packed, None) for row in x])
        x[20], x[40, 1] = float("nan"), float("inf")
        for count in (50, 97, 129, 256):
            found, numbers = module.product(x[:count], packed, None), torch.ones(count, dtype=torch.bool)
            numbers[[20, 40]] = False
            assert torch.equal(found[numbers], alone[:count][numbers]), f"{count} rows of {inputs}"
            assert found[20].isnan().all() and not found[40].isfinite().any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("outputs", [192, 70])
def test_bfloat16_values_take_half_the_memory_with_the_same_bits(outputs: int, threads: int) -> None:
    """Against weights that differ in one number of the first output, which bfloat16 cannot hold."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    weight, bias, norm_I = torch.randn(outputs, 1100).bfloat16().float(), torch.randn(outputs), torch.randn(1100)
    weight[3, 5], weight[4], weight[5, 7], weight[6, 1] = -0.0, 2.0**-130, float("nan"), float("inf")
    x, added = torch.randn(30, 1100), torch.randn(30, outputs)
    other = weight.clone()
    other[0, 0] += 2**-20
    assert module.stored_as_bfloat16(weight) and not module.stored_as_bfloat16(weight / 3)
    halves, whole = module.prepack(weight), module.prepack(other)
    assert isinstance(halves, module.Panels) and isinstance(whole, module.Panels)
    assert whole.data.nbytes - 64 == 2 * (halves.data.nbytes - 64), "apart from the header"
    ways: list[dict[str, Any]] = [{"norm": (norm_I, 1e-5), "added": added}]
    ways += [{"gates": True}] if module.can_gate([weight]) else []
    for around in ways:
        for rows in (1, 5, 6, 7, 12, 13, 30):
            of_rows = around | ({"added": added[:rows]} if "added" in around else {})
            got, expected = (module.product(x[:rows], packed, bias, **of_rows)[:, 1:] for packed in (halves, whole))
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), f"{rows} rows"


def test_more_rows_are_not_prepacked() -> None:
    weight = torch.randn(32, 32)
    torch.testing.assert_close(prepacked_linear(x := torch.randn(1, MAX_ROWS, 32), weight, None), x @ weight.T)
    assert prepacked_linear(torch.randn(1, MAX_ROWS + 1, 32), weight, None) is None


def test_gradients_and_other_dtypes_are_not_prepacked() -> None:
    weight, bias, x = torch.randn(32, 32), torch.randn(32), torch.randn(3, 32)
    assert prepacked_linear(x, weight, bias) is not None
    assert prepacked_linear(x.bfloat16(), weight, bias) is None, "as under autocast"
    for part in (x, weight, bias):
        part.requires_grad_()
        assert prepacked_linear(x, weight, bias) is None
        with torch.no_grad():
            assert prepacked_linear(x, weight, bias) is not None
        part.requires_grad_(False)


def _doubled_in_place(weight: Tensor) -> None:
    """Change in place, as `load_state_dict` and merged adapters do."""
    weight.mul_(2)


def _with_other_numbers(weight: Tensor) -> None:
    weight.data = torch.randn(32, 32)


def _in_another_dtype(weight: Tensor) -> None:
    weight.data = weight.data.bfloat16()


@pytest.mark.parametrize("change", [_doubled_in_place, _with_other_numbers, _in_another_dtype])
def test_changed_weights_are_packed_again(change: Callable[[Tensor], None]) -> None:
    weight = torch.randn(32, 32)
    prepacked_linear(torch.randn(3, 32), weight, None)
    change(weight)
    x = torch.randn(3, 32, dtype=weight.dtype)
    out, rounding = prepacked_linear(x, weight, None), 8 * ROUNDING[weight.dtype]
    if out is None:
        assert not module.can_pack(weight)
    else:
        torch.testing.assert_close(out, x @ weight.T, atol=rounding, rtol=rounding)


def test_weight_has_one_copy_that_is_freed_with_it() -> None:
    gc.collect()
    weight, packed = torch.randn(32, 32), len(module._COPIES)
    first = copy_of(weight).of([weight])
    assert first is not None and copy_of(weight).of([weight]) is first and len(module._COPIES) == packed + 1
    alive = weakref.ref(first)
    del first, weight
    gc.collect()
    assert alive() is None and len(module._COPIES) == packed


def test_weights_in_training_are_packed_once_they_last() -> None:
    weight, keeper = torch.randn(32, 32), PrepackedCopy()
    for _ in range(3):
        weight.mul_(2)
        assert keeper.of([weight], if_stable=True) is None
    alive = weakref.ref(packed := keeper.of([weight], if_stable=True))
    assert keeper.of([weight], if_stable=True) is packed is not None
    weight.mul_(2)
    del packed
    assert keeper.of([weight], if_stable=True) is None and alive() is None, "a stale copy is freed at once"


def test_replayed_decoder_keeps_one_copy() -> None:
    target = Target(tiny_model("llama"))
    target.record()
    logits(target)
    packed = [name for name, weight in target.model.named_parameters() if weight in module._COPIES]
    assert target.prepacked and packed == ["lm_head.weight"]


def test_deleted_target_leaves_no_copies() -> None:
    target = Target(tiny_model("llama"))
    logits(target)
    model = target.model
    assert model.lm_head.weight in module._COPIES
    del target
    gc.collect()
    assert not any(weight in module._COPIES for weight in model.parameters())


@pytest.mark.parametrize(
    ("kind", "name", "part"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight", (slice(None), slice(None))),
        ("llama", "model.layers.1.mlp.down_proj.weight", (7, slice(None))),
        ("llama", "model.layers.1.mlp.down_proj.weight", (slice(None), 3)),
        ("gpt_neox", "gpt_neox.layers.1.mlp.dense_4h_to_h.bias", 3),
    ],
)
def test_untracked_changes_are_packed_again(kind: str, name: str, part: Any) -> None:
    """Changes through `data`, which PyTorch does not count: all numbers, a row, a column, one bias."""
    target = Target(tiny_model(kind))
    before = logits(target)
    target.model.get_parameter(name).data[part] += 0.5
    after = logits(target)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, logits(Target(target.model)), atol=1e-5, rtol=1e-5)
    changed = tiny_model(kind)
    changed.get_parameter(name).data[part] += 0.5
    torch.testing.assert_close(after, logits(Target(changed)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["self_attn.o_proj", "self_attn.q_proj"])
def test_changes_within_a_text_are_packed_again(name: str) -> None:
    """A weight of its own product and one of a merged product, as counted by PyTorch."""
    target = Target(tiny_model("llama"))
    batch = TreeBatch.of([Tree([1, 2], [-1, 0])])

    def twice(factor: float) -> list[Tensor]:
        weight, outputs = target.model.get_parameter(f"model.layers.0.{name}.weight"), []
        cache = target.new_cache(1, 16)
        target.prefill(cache, [[5, 9, 2]])
        for by in (1.0, factor):
            weight.mul_(by)
            outputs.append(target.forward_tree(cache, batch).logits_BTV)
        weight.mul_(1 / factor)
        return outputs

    before, after = twice(2.0)
    assert not torch.equal(before, after)
    target._recorded = Recorded(refused="the modules are the reference")
    torch.testing.assert_close(after, twice(2.0)[1], atol=1e-5, rtol=1e-5)


def test_prepacked_models_can_be_copied() -> None:
    target = Target(tiny_model("llama"))
    before = logits(target)
    copied = copy.deepcopy(target.model)
    for weight in copied.parameters():
        weight.data.mul_(0.5)
    assert torch.equal(logits(target), before), "the copy is another model"
    assert not torch.equal(logits(Target(copied)), before)


def test_special_layers_are_left_alone() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    assert not can_prepack(Own(32, 32)) and not can_prepack(nn.Linear(32, 32).half())
    assert not can_prepack(nn.Linear(32, 32, device="meta"))


def test_foreign_forward_still_runs() -> None:
    model, calls = tiny_model("llama"), []
    layer = model.model.layers[0].mlp.down_proj
    own = layer.forward
    layer.forward = lambda x: calls.append(x.shape) or own(x)
    target = Target(model)
    calls.clear()
    logits(target)
    assert calls
    target.release()
    assert not isinstance(vars(layer)["forward"], PrepackedForward)


def test_no_copies_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    weights = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(module, "free_bytes", lambda _: weights // 2)
    target = Target(model)
    assert not target.prepacked and Conditions.of(target).prepacked is False


def test_costs_record_prepacking() -> None:
    here = Conditions.of(Target(tiny_model("llama")))
    assert here.prepacked and Conditions.from_json(here.to_json()) == here
    assert here.difference(replace(here, prepacked=False)) == "prepacked=True"
