"""Attention in parts equals attention over all scores at once, in linear memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headstart.heads.parts import text_attention
from headstart.heads.parts.text_attention import (
    Part,
    VisibleRange,
    attend,
    by_row,
    causal_attention,
    chain_attention,
    chain_attention_fused,
)
from tests.train.test_long_texts import Largest

ROWS, KV_HEADS, GROUPS, WIDTH, LENGTH = 2, 2, 3, 8, 50
SINGLE = {"rtol": 1e-5, "atol": 1e-5}
STARTS = torch.tensor([[0] * 20 + [20] * 5 + [25] * 25, [0] * 40 + [40] * 10])


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_attention, "_MAX_SCORES", 0)
    monkeypatch.setattr(text_attention, "_MAX_ROWS", 7)
    monkeypatch.setattr(text_attention, "_MIN_ROWS", 3)


def visible_range(packed: bool) -> VisibleRange:
    """Queries of some positions; the second row has fewer and is padded, as by `by_row`."""
    index_BA = torch.stack([torch.arange(3, 49, 2), torch.tensor([*range(10, 30), 29, 29, 29])])
    return VisibleRange(index_BA, LENGTH, STARTS.gather(1, index_BA) if packed else None)


def read(visible: VisibleRange, steps: int) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)

    count = visible.index_BA.shape[1]
    queries = random(ROWS, KV_HEADS, GROUPS, count)
    keys, values = (random(ROWS, KV_HEADS, LENGTH) for _ in range(2))
    chain = [(random(ROWS, KV_HEADS, count), random(ROWS, KV_HEADS, count)) for _ in range(steps)]
    return queries, keys, values, chain


def by_definition(visible: VisibleRange, *operands: Tensor, chain: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attend with an explicit mask of every query and position; the softmax is in float32."""
    starts = torch.zeros_like(visible.index_BA) if visible.starts_BA is None else visible.starts_BA
    rows = [
        [[not start <= position <= index for position in range(LENGTH)] for index, start in zip(*one, strict=True)]
        for one in zip(visible.index_BA.tolist(), starts.tolist(), strict=True)
    ]
    queries, keys, values = operands
    return chain_attention(queries, keys, values, torch.tensor(rows), *(tensor for pair in chain for tensor in pair))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kernel", [chain_attention, chain_attention_fused])
@pytest.mark.usefixtures("in_parts")
def test_parts_equal_one_table(monkeypatch: pytest.MonkeyPatch, kernel: object, steps: int, packed: bool) -> None:
    monkeypatch.setattr(text_attention, "chain_attention", kernel)
    visible = visible_range(packed)
    assert len(visible.parts(KV_HEADS * GROUPS)) == 4
    queries, keys, values, chain = read(visible, steps)
    every = [queries, keys, values, *(tensor for pair in chain for tensor in pair)]
    wanted = by_definition(visible, queries, keys, values, chain=chain)
    found = attend(queries, keys, values, visible, chain)
    torch.testing.assert_close(found, wanted, **SINGLE)
    weights = torch.randn(wanted.shape, dtype=wanted.dtype)
    gradients = torch.autograd.grad((wanted * weights).sum(), every)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), every), gradients, strict=True):
        torch.testing.assert_close(one, other, **SINGLE)
    with torch.no_grad():
        torch.testing.assert_close(attend(queries, keys, values, visible, chain), wanted, **SINGLE)


@pytest.mark.parametrize("kernel", [chain_attention, chain_attention_fused])
@pytest.mark.usefixtures("in_parts")
def test_memory_beside_drafts_grows_linearly(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    """Although the fused kernel has a column for each draft of each query of a part."""
    monkeypatch.setattr(text_attention, "chain_attention", kernel)
    most = []
    for length in (200, 400):
        tensors = [torch.randn(1, heads, length, WIDTH, requires_grad=True) for heads in (KV_HEADS,) * 15]
        queries, (keys, values, *chain) = tensors[0][:, :, None].expand(-1, -1, GROUPS, -1, -1), tensors[1:]
        visible = VisibleRange(torch.arange(length)[None], length)
        with Largest() as largest:
            attend(queries, keys, values, visible, list(zip(chain[::2], chain[1::2], strict=False))).sum().backward()
        most.append(largest.numbers)
    assert most[1] <= 2 * most[0] < 200 * 6 * 200


def test_parts_skip_positions_that_no_query_sees(in_parts: None) -> None:
    index_BA = torch.arange(20, 34)[None]
    assert VisibleRange(index_BA, LENGTH).parts(1) == [
        Part(slice(0, 7), slice(0, 27)),
        Part(slice(7, 14), slice(0, 34)),
    ]
    packed = VisibleRange(index_BA, LENGTH, torch.tensor([[20] * 5 + [25] * 9]))
    assert [part.positions for part in packed.parts(1)] == [slice(20, 27), slice(25, 34)]


@pytest.mark.parametrize("packed", [False, True])
def test_in_bfloat16_on_a_cpu_shapes_are_few(packed: bool, in_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast leaves float64 as it is, and only signals that shapes are going to be compiled."""
    monkeypatch.setattr(text_attention, "_MULTIPLE", 16)
    ranges = [visible_range(packed) for _ in range(2)]
    queries, keys, values, chain = read(ranges[0], 1)
    wanted = attend(queries, keys, values, ranges[0], chain)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend(queries, keys, values, ranges[1], chain), wanted, **SINGLE)
        index_BA, real_BA = by_row(torch.arange(45, 65), torch.Size([2, LENGTH]))
    ends = {end for part in ranges[1].parts(KV_HEADS * GROUPS) for end in (part.positions.start, part.positions.stop)}
    assert ends <= {0, 16, 32, 48, LENGTH} and ends & {16, 32, 48}
    assert index_BA.shape[1] == 16 and index_BA[0].tolist() == [45, 46, 47, 48, *[49] * 12]
    assert real_BA.sum(1).tolist() == [5, 15] and index_BA[1].tolist() == [*range(15), 14]


@pytest.mark.usefixtures("in_parts")
def test_a_row_of_conversations_attends_as_each_alone() -> None:
    index_BT = torch.arange(LENGTH).expand(ROWS, LENGTH)
    queries, keys, values, _ = read(VisibleRange(index_BT, LENGTH), 0)
    found = causal_attention(queries, keys, values, STARTS)
    for row, ends in enumerate([(0, 20, 25, 50), (0, 40, 50)]):
        for start, stop in pairwise(ends):
            one = slice(row, row + 1)
            alone = causal_attention(
                queries[one, :, :, start:stop], keys[one, :, start:stop], values[one, :, start:stop]
            )
            torch.testing.assert_close(found[one, :, :, start:stop], alone, **SINGLE)
