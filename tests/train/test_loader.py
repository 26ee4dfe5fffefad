"""Batches read ahead: the same ones in the same order, errors where they belong, and nothing left behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.errors import UserError
from headstart.heads.base import HeadBatch
from headstart.train import trainer
from headstart.train.batches import collate, read_ahead
from tests.train.conftest import Train
from tests.train.results import assert_same


def batch_of(number: int) -> list[HeadBatch]:
    return [HeadBatch(torch.tensor([[number]]), torch.ones(1, 1).bool(), {0: torch.zeros(1, 1, 2)})]


def numbers(found: Any) -> list[tuple[int, int]]:
    return [(step, int(batches[0].tokens_BT)) for step, batches in found]


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_steps_come_in_order_each_with_its_batches(ahead: int) -> None:
    assert numbers(read_ahead(range(7), batch_of, ahead)) == [(step, step) for step in range(7)]
    assert numbers(read_ahead([], batch_of, ahead)) == []


def test_the_next_steps_are_read_while_one_computes() -> None:
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
    assert not any(event.is_set() for event in read[3:]) and len(where) == 1
    assert where.isdisjoint({threading.current_thread().name, *(thread.name for thread in threading.enumerate())})


def test_an_error_of_reading_comes_at_its_step() -> None:
    def refuse(step: int) -> list[HeadBatch]:
        if step == 3:
            raise UserError("The shard is gone.", "Build it again.")
        return batch_of(step)

    seen = []
    with pytest.raises(UserError, match="The shard is gone"):
        for step, _ in read_ahead(range(9), refuse, 2):
            seen.append(step)
    assert seen == [0, 1, 2]


def test_heads_are_the_same_however_far_is_read_ahead(run: Train, tmp_path: Path) -> None:
    for ahead in (0, 3):
        run(tmp_path / str(ahead), steps=7, prefetch=ahead)
    assert_same(tmp_path / "0" / "last", tmp_path / "3" / "last")
    run(tmp_path / "cut", steps=4, prefetch=3, warmup=0, min_lr_ratio=1)
    run(tmp_path / "cut", steps=7, prefetch=1, warmup=0, min_lr_ratio=1)
    run(tmp_path / "whole", steps=7, warmup=0, min_lr_ratio=1)
    assert_same(tmp_path / "cut" / "last", tmp_path / "whole" / "last")


def test_what_the_store_refuses_ends_the_training_as_it_is_said(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def broken(store: Any, *args: Any) -> HeadBatch:
        nonlocal read
        read += store.folder.name == "train"
        if read > 3:
            raise UserError("A shard is cut short.", "Build the states again.")
        return collate(store, *args)

    monkeypatch.setattr(trainer, "collate", broken)
    with pytest.raises(UserError, match="A shard is cut short"):
        run(tmp_path)
    assert not [thread for thread in threading.enumerate() if "headstart-batches" in thread.name]
