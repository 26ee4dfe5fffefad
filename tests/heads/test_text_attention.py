"""Attention in parts equals attention over all scores at once, in linear memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from headstart.heads.parts import text_attention
from headstart.heads.parts.text_attention import (
    Part,
    VisibleRange,
    attend,
    by_row,
    causal_attention,
    chain_attention,
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


@pytest.fixture(params=["in parts", "flex"])
def flex(request: pytest.FixtureRequest) -> bool:
    """Whether attention runs by flex attention, uncompiled; else in parts."""
    chosen: str = request.param
    request.getfixturevalue("flex_on_cpu" if chosen == "flex" else "in_parts")
    return chosen == "flex"


def visible_range(packed: bool, flex: bool = False) -> VisibleRange:
    """Queries of some positions; the second row has fewer and is padded, as by `by_row`."""
    index_BA = torch.stack([torch.arange(3, 49, 2), torch.tensor([*range(10, 30), 29, 29, 29])])
    return VisibleRange(index_BA, LENGTH, STARTS.gather(1, index_BA) if packed else None, flex=flex)


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
def test_attention_equals_one_table(flex: bool, steps: int, packed: bool) -> None:
    visible = visible_range(packed, flex)
    assert len(visible.parts(KV_HEADS * GROUPS)) == 1 + 3 * (not flex)
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


@pytest.mark.parametrize(("window", "slots"), [(0, 1), (0, 3), (9, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_block_masks_cover_what_queries_see(
    packed: bool, window: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flex attention skips blocks outside the mask, and masks nothing in complete ones."""
    monkeypatch.setattr(text_attention, "_FLEX_BLOCK", size := 4)
    index_BA = torch.stack([torch.arange(2, LENGTH), torch.tensor([*range(10, 30), *[29] * 28])])
    visible = VisibleRange(index_BA, LENGTH, STARTS.gather(1, index_BA) if packed else None, (window, slots))
    hidden = visible.hidden_BAT if window else visible.hidden_BAT[:, :, None].expand(-1, -1, slots, -1)
    sees_BQT = ~hidden.flatten(1, 2)
    queries = sees_BQT.shape[1]
    mask = visible.block_mask
    rows, query, position = torch.meshgrid(*map(torch.arange, (ROWS, queries, LENGTH)), indexing="ij")
    assert torch.equal(mask.mask_mod(rows, torch.zeros_like(rows), query, position), sees_BQT)
    beyond = (0, -LENGTH % size, 0, -queries % size)
    blocks = torch.nn.functional.pad(sees_BQT, beyond).unfold(1, size, size).unfold(2, size, size)
    some, every = blocks.flatten(3).any(-1), blocks.flatten(3).all(-1)
    assert every.any() and not some.all()
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    complete = BlockMask.from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=size)
    partial = BlockMask.from_kv_blocks(mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=size)
    assert torch.equal(complete.to_dense()[:, 0].bool(), every)
    computed = partial.to_dense()[:, 0].bool() | every
    assert (computed >= some).all() and (computed.sum() <= 1.5 * some.sum())
    assert not (partial.to_dense()[:, 0].bool() & every).any()


@pytest.mark.usefixtures("in_parts")
def test_memory_beside_drafts_grows_linearly() -> None:
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
        index_BA, real_BA = by_row(torch.arange(45, 65), torch.Size([2, LENGTH]), "cpu")
    ends = {end for part in ranges[1].parts(KV_HEADS * GROUPS) for end in (part.positions.start, part.positions.stop)}
    assert ends <= {0, 16, 32, 48, LENGTH} and ends & {16, 32, 48}
    assert index_BA.shape[1] == 16 and index_BA[0].tolist() == [45, 46, 47, 48, *[49] * 12]
    assert real_BA.sum(1).tolist() == [5, 15] and index_BA[1].tolist() == [*range(15), 14]


def test_a_row_of_conversations_attends_as_each_alone(flex: bool) -> None:
    complete = VisibleRange(torch.arange(LENGTH).expand(ROWS, LENGTH), LENGTH, STARTS, flex=flex)
    queries, keys, values, _ = read(complete, 0)
    found = causal_attention(queries, keys, values, complete)
    for row, ends in enumerate([(0, 20, 25, 50), (0, 40, 50)]):
        for start, stop in pairwise(ends):
            one = slice(row, row + 1)
            alone = causal_attention(
                queries[one, :, :, start:stop], keys[one, :, start:stop], values[one, :, start:stop]
            )
            torch.testing.assert_close(found[one, :, :, start:stop], alone, **SINGLE)
