"""int8 products for writing data: their rounding, and targets that use them."""

from __future__ import annotations

import gc

import pytest
import torch

from headstart.kernels import prepacked
from headstart.kernels.prepacked import can_pack, prepack, product
from headstart.model.model import Target
from tests.kernels.test_prepacked import logits
from tests.tiny import tiny_model

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(
    not can_pack(torch.zeros(32, 32), int8=True), reason="this CPU has no products in 8 bits"
)


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable AMX tiles, which multiply bfloat16 weights without rounding."""
    monkeypatch.setattr(prepacked, "uses_tiles", lambda _: False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 8, 21])
def test_small_integers_are_exact(rows: int, threads: int, dtype: torch.dtype) -> None:
    """Rows hold 0 and the largest value of each group, weights up to 127. All sums are exact."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    for inputs, outputs in ((4, 32), (128, 70), (300, 5)):
        x, weight = 127 * torch.randint(-1, 2, (rows, inputs)), torch.randint(-127, 128, (outputs, inputs))
        x[:, ::4], weight[:, 0] = 127, -127
        bias = torch.randint(-9, 9, (outputs,)).to(dtype)
        packed = prepack(weight.to(dtype), int8=True)
        got = product(x.to(dtype)[None], packed, bias)[0]
        assert torch.equal(got, ((x @ weight.T).float() + bias).to(dtype))


def test_rows_are_rounded_separately_and_outliers_stay_local() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 256), torch.randn(64, 256)
    packed = prepack(weight, int8=True)
    plain = product(x, packed, None)
    assert torch.equal(product(x[3:4], packed, None)[0], plain[3])
    exact = x @ weight.T
    error = (plain - exact).norm() / exact.norm()
    assert 0.001 < error < 0.02, "steps of 1/127 of about 3 sigma, in rows and weights: 0.009; without VNNI 0.011"
    x[3, 200], weight[:, 128:] = 1000.0, 0.0
    near, exact = product(x, prepack(weight, int8=True), None)[3], x[3] @ weight.T
    assert (near - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_nan_stays_nan_and_zero_stays_zero(wrong: float) -> None:
    packed = prepack(torch.randn(32, 256), int8=True)
    x = torch.randn(3, 256)
    x[0], x[1, 200] = 0.0, wrong
    out = product(x, packed, None)
    assert out[0].eq(0).all() and out[1].isnan().all() and out[2].isfinite().all()


def test_sizes_not_divisible_by_four_are_not_rounded() -> None:
    weight, x = torch.randn(32, 34), torch.randn(2, 34)
    torch.testing.assert_close(product(x, prepack(weight, int8=True), None), x @ weight.T)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox"])
def test_int8_target_differs_by_rounding_and_leaves_the_original(kind: str) -> None:
    target = Target(tiny_model(kind))
    before = logits(target)
    rounded = target.in_int8()
    assert rounded is not target and rounded.eager is None
    difference = (logits(rounded) - before).norm() / before.norm()
    assert 1e-4 < difference < 0.05, "about 1 % per product"
    assert torch.equal(logits(target), before)


def test_changed_weights_are_rounded_again() -> None:
    target = Target(tiny_model("llama"))
    rounded = target.in_int8()
    before = logits(rounded)
    with torch.no_grad():
        for weight in target.model.parameters():
            weight.mul_(0.5)
    after, exact = logits(rounded), logits(target)
    assert (after - exact).norm() < 0.05 * exact.norm() < (after - before).norm()


def in_8_bits(target: Target) -> list[str]:
    """Names of weights with an int8 copy of their own."""
    copies = ((name, prepacked._COPIES.get(weight)) for name, weight in target.model.named_parameters())
    return [name for name, kinds in copies if kinds and True in kinds]


def test_all_lengths_share_one_copy_that_is_freed_with_it() -> None:
    target = Target(tiny_model("llama"))
    rounded, rows = target.in_int8(), [[1 + (n * k) % 30 for n in range(150)] for k in (1, 2, 3)]
    read, exact = (of.prefill(of.new_cache(3, 200), rows).logits_BTV for of in (rounded, target))
    assert 1e-4 < (read - exact).norm() / exact.norm() < 0.05
    logits(rounded)
    assert in_8_bits(target) == ["lm_head.weight"]
    del rounded
    gc.collect()
    assert not in_8_bits(target)


def test_int8_replay_has_its_own_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    target.record()
    monkeypatch.setattr("headstart.model.checking._FLOAT32", 0.0)
    monkeypatch.setattr("headstart.model.checking._SHORT", 0.0)
    assert target.in_int8() is not target
    monkeypatch.setattr("headstart.model.checking._INT8", 0.0)
    assert target.in_int8() is target, "its replay is refused"


def test_unsupported_target_returns_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.replay.patch.fits", lambda _: False)
    target = Target(tiny_model("llama"))
    assert target.in_int8() is target, "weights are not prepacked"
    monkeypatch.undo()
    monkeypatch.setattr("headstart.model.model.can_pack", lambda *_, **__: False)
    target = Target(tiny_model("llama"))
    assert target.in_int8() is target, "a processor without products in 8 bits"
    monkeypatch.undo()
    monkeypatch.setattr(prepacked, "uses_tiles", lambda _: True)
    target = Target(tiny_model("llama"))
    assert target.prepacked and target.in_int8() is target, "tiles are faster"
