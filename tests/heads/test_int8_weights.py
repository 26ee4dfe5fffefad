"""Prepacked and int8 weights for drafting: close to the full weights, and never stale."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.heads import int8_weights
from headstart.heads.int8_weights import Linear, drop_int8, linear, to_int8, unstack
from headstart.heads.io import load_heads, save_heads
from headstart.kernels import prepacked
from headstart.kernels.prepacked import MAX_ROWS, can_pack
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    """A target with all of its heads' matrices packed, however small."""
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    return Target(tiny_model("llama", vocab_size=64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 12])
def test_few_rows_are_close_to_the_full_product(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(0)
    layer = Linear(512, 160).to(dtype)
    x = torch.randn(1, rows, 512, dtype=dtype)
    full = layer(x)
    to_int8(layer)
    quick = layer(x)
    assert quick.shape == full.shape and quick.dtype == dtype
    # Each number of a row of weights is off by half a 127th of the row's largest: .2 % of a weight's size here at most.
    error = (quick.float() - full.float()).square().mean().sqrt() / full.float().square().mean().sqrt()
    assert 0 < error < 0.01


def test_numbers_are_off_by_half_a_step() -> None:
    weight = torch.nn.Parameter(torch.randn(256, 256) * torch.logspace(-3, 2, 256)[:, None])
    to_int8(holder := torch.nn.ParameterList([weight]))
    form = holder[0].int8
    assert form.rows().dtype == torch.int8
    off = (form.rows().float() * form.scale_N[:, None] - weight).abs()
    assert (off <= 0.5001 * form.scale_N[:, None]).all()


def test_many_rows_take_the_full_weights() -> None:
    layer, x = Linear(256, 256), torch.randn(4, 8, 256)
    full = layer(x)
    to_int8(layer)
    assert torch.equal(layer(x), full)


@pytest.mark.parametrize("outputs", [320, 250], ids=["whole blocks", "padded outputs"])
def test_rows_of_any_layout(outputs: int) -> None:
    """Not contiguous, in two dimensions, none, and one."""
    torch.manual_seed(0)
    layer = Linear(320, outputs)
    inputs = [
        torch.randn(1, 320, 4).transpose(1, 2),
        torch.randn(2, 3, 320),
        torch.zeros(0, 320),
        torch.zeros(2, 0, 320),
    ]
    inputs.append(torch.zeros(320))
    full = [layer(x) for x in inputs]
    to_int8(layer)
    for x, wanted in zip(inputs, full, strict=True):
        torch.testing.assert_close(layer(x), wanted, rtol=0, atol=0.02)


def test_operations_are_counted() -> None:
    layer, x = Linear(256, 320, bias=False), torch.randn(3, 256)
    counts = []
    for prepare in (drop_int8, to_int8):
        prepare(layer)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        counts.append(counter.get_total_flops())
    assert counts == [2 * 3 * 256 * 320] * 2


@pytest.mark.parametrize("shape", [(256, 300), (16, 16)])
def test_sizes_that_the_product_cannot_read_stay_full(shape: tuple[int, int]) -> None:
    weight = torch.nn.Parameter(torch.randn(shape))
    to_int8(torch.nn.ParameterList([weight]))
    x = torch.randn(2, shape[1])
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_stacks_become_int8_matrix_by_matrix() -> None:
    stack = torch.nn.Parameter(torch.randn(3, 256, 256))
    to_int8(torch.nn.ParameterList([stack]))
    x = torch.randn(2, 256)
    for part, complete in zip(unstack(stack), stack, strict=True):
        assert hasattr(part, "int8")
        torch.testing.assert_close(linear(x, part), F.linear(x, complete), rtol=0, atol=0.5)


def test_another_dtype_than_was_converted_takes_the_full_weights() -> None:
    layer, x = Linear(256, 256), torch.randn(2, 256)
    to_int8(layer)
    layer.bfloat16()
    assert torch.equal(layer(x.bfloat16()), F.linear(x.bfloat16(), layer.weight, layer.bias))


@pytest.mark.parametrize("prepare", [to_int8, drop_int8])
def test_autocast_has_its_own_dtype(prepare: Callable[[torch.nn.Module], object]) -> None:
    layer, x = Linear(256, 256), torch.randn(2, 256)
    prepare(layer)
    with torch.inference_mode():
        layer(x), layer(x)  # prepacked, where it is not in 8 bits
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("stacked", [False, True])
def test_int8_weights_are_dropped_after_an_in_place_change(stacked: bool) -> None:
    torch.manual_seed(0)
    shape = (2, 256, 256) if stacked else (256, 256)
    holder, other = (torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape))]) for _ in range(2))
    x = torch.randn(2, 256)

    def product() -> torch.Tensor:
        return linear(x, unstack(holder[0])[1] if stacked else holder[0])

    def full() -> torch.Tensor:
        return F.linear(x, holder[0][1] if stacked else holder[0])

    to_int8(holder)
    assert not torch.equal(product(), full()), "8 bits are used"
    holder.load_state_dict(other.state_dict())
    assert torch.equal(product(), full()), "the full weights, which are the new ones"
    to_int8(holder)
    assert not torch.equal(product(), full())
    torch.testing.assert_close(product(), full(), rtol=0, atol=0.5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_a_dtype_without_such_a_product_stays_full(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(256, 256).to(dtype), requires_grad=False)
    to_int8(torch.nn.ParameterList([weight]))
    assert not hasattr(weight, "int8")


def test_training_drops_the_int8_weights(target: Target) -> None:
    heads = shake(build("eagle3", target)).eval()
    to_int8(heads)
    assert any(hasattr(weight, "int8") for weight in heads.parameters())
    heads.train()
    assert not any(hasattr(weight, "int8") for weight in heads.parameters())


def test_files_keep_the_full_weights(target: Target, tmp_path: Path) -> None:
    heads = shake(build("hydra", target)).eval()
    before = copy.deepcopy(heads.state_dict())
    to_int8(heads)
    save_heads(heads, tmp_path / "heads")
    saved = load_heads(tmp_path / "heads", target).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", CASES)
def test_every_family_drafts_alike_and_decodes_the_same_tokens(name: str, target: Target) -> None:
    heads = shake(build(name, target)).eval()
    prompt = [3, 9, 14, 27, 33, 8, 40, 12]
    states = target.hidden_states([prompt], heads.aux_layers)[0]
    drafted = {}
    for prepare in (drop_int8, to_int8):
        prepare(heads)
        session = heads.prefill([prompt], {aux_layer: state[None] for aux_layer, state in states.items()})
        root = torch.tensor([[5]])
        drafted[prepare] = heads.draft_step(session, root, torch.zeros_like(root), 0)
    assert not torch.equal(drafted[drop_int8], drafted[to_int8]), "the packed weights are used"
    together = torch.stack([drafted[drop_int8].flatten(), drafted[to_int8].flatten()])
    both = together.isfinite().all(0)  # some families exclude tokens
    assert int(both.sum()) > 5 and torch.corrcoef(together[:, both])[0, 1] > 0.99
    loop = DecodeLoop(target, HeadDrafter(heads, TreeShape.chain(heads.draft_steps)))
    plain = DecodeLoop(target).generate([prompt, prompt[:3]], DecodeOptions(24))
    for row, other in zip(loop.generate([prompt, prompt[:3]], DecodeOptions(24)), plain, strict=True):
        assert row.tokens == other.tokens


# -- prepacked ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every product with prepacked weights."""
    if not can_pack(torch.zeros(32, 32)):
        pytest.skip("C for AVX2 and AVX-512")
    seen: list[int] = []
    own = prepacked.product

    def counted(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[:-1].numel())
        return own(x, *more)

    monkeypatch.setattr(prepacked, "product", counted)
    return seen


@torch.inference_mode()
def test_drafts_multiply_with_prepacked_weights(products: list[int]) -> None:
    """From the second product on: weights that are used once are not packed."""
    layer = Linear(256, 256)
    for rows in (3, 3, MAX_ROWS, MAX_ROWS + 1):
        x = torch.randn(1, rows, 256)
        # Sums of 256 products of size 0.06, in another order.
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
    assert products == [3, MAX_ROWS]


@torch.no_grad()
def test_changed_weights_are_prepacked_anew(products: list[int]) -> None:
    layer, x = Linear(256, 256), torch.randn(2, 256)
    for _ in range(3):
        layer(x)
    layer.weight.mul_(2)
    for _ in range(3):
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5, rtol=1e-5)
    assert len(products) == 4
    assert torch.equal(copy.deepcopy(layer)(x), F.linear(x, layer.weight, layer.bias)), "a copy packs its own"


def test_training_and_passing_views_take_the_weights_as_they_are(products: list[int]) -> None:
    layer, x = Linear(256, 256), torch.randn(2, 256)
    for _ in range(3):
        layer(x)
    with torch.no_grad():
        for _ in range(3):
            linear(x, layer.weight[:])
    assert not products


@torch.inference_mode()
def test_heads_in_another_dtype_are_prepacked_anew(products: list[int]) -> None:
    layer = Linear(256, 256)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        layer.to(dtype)
        for _ in range(3):
            x = torch.randn(2, 256, dtype=dtype)
            torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))
    assert len(products) >= 4


def test_prefill_repacks_weights_that_changed_unseen(products: list[int], target: Target) -> None:
    heads = shake(build("hydra", target)).eval()
    drafter, prompt = HeadDrafter(heads, TreeShape.chain(2)), [3, 9, 14, 27]
    states = {layer: state[None] for layer, state in target.hidden_states([prompt], heads.aux_layers)[0].items()}
    drafted = []
    with torch.inference_mode():
        for _ in range(2):
            for _ in range(3):
                session = drafter.prefill([prompt], states)
                logits = heads.draft_step(session, torch.tensor([[5]]), torch.zeros(1, 1, dtype=torch.long), 0)
            drafted.append(logits)
            for weight in heads.parameters():
                weight.data.mul_(2)
    assert products and not torch.equal(*drafted)
