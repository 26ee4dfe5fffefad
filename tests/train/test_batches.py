"""Batching: grouping, order, ranks, padding, subsampling and anchors."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.data.states.store import Sample
from headstart.heads.base import HeadBatch, origins
from headstart.replay.patch import FINAL
from headstart.train.batches import (
    count_predictions,
    epoch_batches,
    epoch_steps,
    rank_slice,
    read_batch,
    sample_anchors,
    subsample,
)

LENGTHS = [random.Random(0).randrange(20, 400) for _ in range(300)]


@pytest.mark.parametrize("packing", [False, True])
def test_batches_cover_every_conversation_within_the_budget(packing: bool) -> None:
    for epoch in range(3):
        batches = epoch_batches(LENGTHS, 2048, 0, epoch, packing)
        assert sorted(index for batch in batches for index in batch) == list(range(300))
        lengths = [[LENGTHS[index] for index in batch] for batch in batches]
        used = [sum(batch) if packing else len(batch) * max(batch) for batch in lengths]
        assert max(used) <= 2048
        assert sum(LENGTHS) > 0.9 * (2048 * len(batches) if packing else sum(used)), "full, or little padding"
    assert sorted(epoch_batches([10, 5000, 12], 64, 0, 0, packing), key=len)[0] == [1], "longer than the budget"


@pytest.mark.parametrize("packing", [False, True])
def test_order_depends_on_seed_and_epoch_and_count_does_not(packing: bool) -> None:
    first = epoch_batches(LENGTHS, 2048, 0, 0, packing)
    assert first == epoch_batches(LENGTHS, 2048, 0, 0, packing)
    for seed, epoch in ((0, 1), (0, 2), (1, 0)):
        other = epoch_batches(LENGTHS, 2048, seed, epoch, packing)
        assert other != first and len(other) == len(first)
        assert {frozenset(batch) for batch in other} != {frozenset(batch) for batch in first}, "regrouped"


def test_ranks_get_equal_slices_of_each_step() -> None:
    steps = epoch_steps([[i] for i in range(11)], ranks=2, gradient_accumulation_steps=2)
    assert len(steps) == 2 and all(len(group) == 4 for group in steps)
    assert [rank_slice(steps[0], rank, 2) for rank in range(2)] == [[[0], [2]], [[1], [3]]]


def test_batch_is_right_padded_and_reads_only_the_aux_layers() -> None:
    def get(index: int) -> Sample:
        length = index + 2
        states = {FINAL: torch.full((length, 3), float(index)), 4: torch.zeros(length, 3)}
        return Sample(torch.arange(length), torch.ones(length).bool(), states)

    store: Any = SimpleNamespace(samples=lambda indices, layers: [get(index) for index in indices])
    batch = read_batch(store, [2, 0], [FINAL]).on(torch.device("cpu"), torch.bfloat16)
    assert batch.tokens_BT.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch.supervised_BT.tolist() == [[True] * 4, [True, True, False, False]]
    assert list(batch.states) == [FINAL]
    assert batch.states[FINAL].dtype == torch.bfloat16
    assert batch.states[FINAL][0, :, 0].tolist() == [2.0] * 4 and batch.states[FINAL][1, 2:].abs().sum() == 0


def test_predictions_count_the_first_draft_step() -> None:
    supervised_BT = torch.tensor([[False, True, True, True, False], [True, True, False, True, False]])
    # Row 0 predicts tokens 2 and 3. In row 1 token 0 has no predecessor, and token 3 follows no supervised token.
    assert count_predictions(HeadBatch(torch.zeros(2, 5).long(), supervised_BT, {})) == 2


def batch_of(rows: int, tokens: int) -> HeadBatch:
    """A batch with all tokens supervised."""
    return HeadBatch(torch.zeros(rows, tokens).long(), torch.ones(rows, tokens, dtype=torch.bool), {})


def steps_of(batch: HeadBatch) -> torch.Tensor:
    assert batch.subsampled_steps_BT is not None
    return batch.subsampled_steps_BT


def test_subsampling_keeps_the_given_fraction_of_drafts() -> None:
    batch = batch_of(40, 500)
    steps_BT = steps_of(subsample(batch, 0.8, [0, 1, 2]))
    assert int(steps_BT.min()) == 1, "every origin learns its first step"
    for step in range(5):
        # Four standard deviations of 20000 draws.
        assert abs(float((steps_BT > step).float().mean()) - 0.8**step) <= 4 * (0.25 / 20000) ** 0.5
    assert torch.equal(steps_BT, steps_of(subsample(batch, 0.8, [0, 1, 2])))
    assert not torch.equal(steps_BT, steps_of(subsample(batch, 0.8, [0, 1, 3])))
    assert subsample(batch, 1.0, [0]).subsampled_steps_BT is None


def test_anchors_per_conversation() -> None:
    supervised_BT = torch.ones(3, 60, dtype=torch.bool)
    supervised_BT[1, 6:] = False  # five positions to start from
    starts_BT = torch.zeros(3, 60, dtype=torch.long)
    starts_BT[2, 20:] = 20  # and a row of two conversations
    supervised_BT[2, 20] = False
    batch = HeadBatch(torch.zeros(3, 60).long(), supervised_BT, {}, starts_BT=starts_BT)
    drawn = sample_anchors(batch, 8, [0, 1, 2])
    origin_M = origins(drawn, 0)
    assert count_predictions(batch, 8) == len(origin_M) == 8 + 4 + 8 + 8
    rows = [
        origin_M[(origin_M >= low) & (origin_M < high)] for low, high in ((0, 60), (60, 120), (120, 140), (140, 180))
    ]
    assert [len(row) for row in rows] == [8, 4, 8, 8]
    assert torch.isin(origin_M, origins(batch, 0)).all()
    assert set(origins(drawn, 3).tolist()) == set(origin_M.tolist()) & set(origins(batch, 3).tolist())
    assert torch.equal(origin_M, origins(sample_anchors(batch, 8, [0, 1, 2]), 0))
    assert not torch.equal(origin_M, origins(sample_anchors(batch, 8, [0, 1, 3]), 0))
    assert torch.equal(origins(sample_anchors(batch, 99, [0]), 0), origins(batch, 0))


def test_anchors_are_uniform() -> None:
    batch = batch_of(400, 42)
    counts_T = torch.zeros(42)
    for step in range(10):
        counts_T.index_add_(0, origins(sample_anchors(batch, 10, [0, step]), 0) % 42, torch.ones(4000))
    # 4000 draws a position with probability 1/4: 1000, and five standard deviations of 27.
    assert counts_T[:40].sub(1000).abs().max() < 140 and not counts_T[40:].any()


def test_anchors_come_from_positions_that_learn() -> None:
    """An earlier draw left no step to every second position; the requested number of anchors still learns."""
    steps_BT = (torch.arange(50) % 2).expand(4, 50) * 3
    batch = replace(batch_of(4, 50), subsampled_steps_BT=steps_BT.contiguous())
    origin_M = origins(sample_anchors(batch, 10, [1]), 0)
    assert torch.equal(torch.bincount(origin_M // 50), torch.full((4,), 10)) and (origin_M % 2 == 1).all()
    assert count_predictions(batch) == 4 * 24 and count_predictions(batch, 10) == 40


def test_anchors_keep_earlier_draws() -> None:
    subset = subsample(batch_of(4, 50), 0.5, [1])
    before_BT, after_BT = steps_of(subset), steps_of(sample_anchors(subset, 10, [1]))
    assert int((after_BT > 0)[:, :48].sum()) == 40
    assert torch.equal(after_BT[after_BT > 0], before_BT[after_BT > 0])
