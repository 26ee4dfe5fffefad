"""Prefetching batches: same batches, same order, errors at their step, no threads left behind."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.data.states.shards import build_store
from headstart.errors import UserError
from headstart.heads.base import HeadBatch
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.train.batches import BatchSchedule, ReadBatch, read_ahead, read_batch
from headstart.train.checkpoint import TrainerState
from tests.standin import CUDA, StandIn
from tests.train.conftest import MakeRecipe, Train, conversations, on_read
from tests.train.results import assert_same


def batch_of(number: int) -> list[HeadBatch]:
    return [HeadBatch(torch.tensor([[number]]), torch.ones(1, 1).bool(), {0: torch.zeros(1, 1, 2)})]


def numbers(found: Any) -> list[tuple[int, int]]:
    return [(step, int(batches[0].tokens_BT)) for step, batches, _ in found]


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_steps_come_in_order_with_their_batches(ahead: int) -> None:
    assert numbers(read_ahead(range(7), batch_of, ahead)) == [(step, step) for step in range(7)]
    assert numbers(read_ahead([], batch_of, ahead)) == []


def test_next_steps_are_read_while_one_computes() -> None:
    read = [threading.Event() for _ in range(9)]
    where = set()

    def note(step: int) -> list[HeadBatch]:
        where.add(threading.current_thread().name)
        read[step].set()
        return batch_of(step)

    steps = read_ahead(range(9), note, 2)
    next(steps)
    assert read[2].wait(60), "two steps ahead of the first"
    steps.close()
    assert not any(event.is_set() for event in read[3:])
    assert where.isdisjoint({threading.current_thread().name, *(thread.name for thread in threading.enumerate())})


def test_steps_are_read_concurrently() -> None:
    at_once = threading.Barrier(3)

    def meet(step: int) -> int:
        at_once.wait(60)
        return step

    assert [(step, made) for step, made, _ in read_ahead(range(6), meet, 3)] == [(step, step) for step in range(6)]


def test_read_error_is_raised_at_its_step() -> None:
    def refuse(step: int) -> list[HeadBatch]:
        if step == 3:
            raise UserError("The shard is gone.", "Build it again.")
        return batch_of(step)

    seen = []
    with pytest.raises(UserError, match="The shard is gone"):
        for step, _, following in read_ahead(range(9), refuse, 2):
            assert following is None or int(following[0].tokens_BT) == step + 1 != 3
            seen.append(step)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("states_dtype", ["auto", "int8", "fp8"])
def test_next_batch_is_on_the_device_before_its_step(
    states_dtype: str, tiny_target: Target, recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One-byte states are copied as bytes and decoded on the device to the same numbers."""
    kept, layers = conversations(24, 0, tiny_target.vocab_size), (1, FINAL)
    store = build_store(tmp_path, kept, tiny_target, layers, budget_bytes=10**8, states_dtype=states_dtype)
    schedule, total = BatchSchedule(store, recipe(batch_tokens=64).train, rank=0, ranks=1), 5
    read, copied, sizes, steps = Counter[str](), Counter[str](), set[int](), list[tuple[Any, HeadBatch]]()

    def noted(store: Any, batch: list[int], packed: bool) -> ReadBatch:
        made = read_batch(store, batch, layers)
        sizes.update(state_BTE.itemsize for state_BTE in made.batch.states.values())
        read["steps"] += 1
        return made

    def on(self: ReadBatch, *where: Any) -> HeadBatch:
        copied["steps"] += 1
        return own(self, *where)

    own = ReadBatch.on
    monkeypatch.setattr(ReadBatch, "on", on)
    with StandIn() as device:
        for group, (batch,) in schedule.batches(TrainerState(), total, noted, CUDA, torch.float32):
            steps.append((group, batch.each(Tensor.cpu)))
            assert copied["steps"] == min(total, len(steps) + 1) or len(steps) == 1
            while read["steps"] < min(total, len(steps) + 2):
                sleep(0.01)
            sleep(0.05)
    assert device.counts.uploads and sizes == {4 if states_dtype == "auto" else 1}
    monkeypatch.undo()
    for group, batch in steps:
        for row, sample in enumerate(store.samples(group[0])):
            for layer in layers:
                assert torch.equal(batch.states[layer][row, : len(sample.tokens_T)], sample.states[layer])


def test_prefetch_does_not_change_the_heads(run: Train, tmp_path: Path) -> None:
    for ahead in (0, 3):
        run(tmp_path / str(ahead), steps=7, prefetch=ahead)
    assert_same(tmp_path / "0" / "last", tmp_path / "3" / "last")
    run(tmp_path / "cut", steps=4, prefetch=3, warmup=0, min_lr_ratio=1)
    run(tmp_path / "cut", steps=7, prefetch=1, warmup=0, min_lr_ratio=1)
    run(tmp_path / "whole", steps=7, warmup=0, min_lr_ratio=1)
    assert_same(tmp_path / "cut" / "last", tmp_path / "whole" / "last")


def test_store_error_ends_the_training(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[HeadBatch] = []

    def fail(_: Any, batch: HeadBatch) -> None:
        read.append(batch)
        if len(read) > 3:
            raise UserError("A shard is cut short.", "Build the states again.")

    on_read(monkeypatch, "train", fail)
    with pytest.raises(UserError, match="A shard is cut short"):
        run(tmp_path)
    assert not [thread for thread in threading.enumerate() if "headstart-batches" in thread.name]
