"""Training on a stand-in for a CUDA device, as accelerate would find one: the same losses, and no tensors of two
devices in one operation."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from headstart.data.states.store import StateStore
from headstart.model.model import Target
from headstart.recipes.recipe import Recipe
from headstart.support.files import read_jsonl
from headstart.train import trainer
from headstart.train.trainer import train
from tests.standin import CUDA, Counts, StandIn
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.test_golden import GOLDEN, HEADS


@pytest.mark.parametrize("name", HEADS)
def test_a_training_of_every_family(
    name: str,
    recipe: Callable[..., Recipe],
    train_store: StateStore,
    valid_store: StateStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps, validations and checkpoints of the golden run."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: CUDA))
    settings = recipe(heads={"family": name, **HEADS[name]}, steps=6, eval_every=1, lr=1e-3)
    with StandIn() as device:
        tokenizer = tiny_tokenizer()
        model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).to(CUDA)
        train(settings, Target(model, tokenizer, "tiny"), train_store, valid_store, tmp_path, None)
    assert device.launched["aten::_fused_adamw_"], "the heads learned there"
    losses = [row["loss"] for _, row in read_jsonl(tmp_path / "metrics.jsonl")][1:]
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-3)


WAITS = {"medusa": 9, "hydra": 9, "eagle": 23, "eagle3": 23, "mtp": 23, "dflash": 13, "dspark": 13}
"""Of a step, at most; it may go down, and not up."""


@pytest.mark.parametrize("name", HEADS)
def test_waits_of_a_training_step(
    name: str,
    recipe: Callable[..., Recipe],
    train_store: StateStore,
    valid_store: StateStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the loss, the norm of the gradient, and how many positions learn at each draft step; no batch waits."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: CUDA))
    settings = recipe(heads={"family": name, **HEADS[name]}, steps=5, eval_every=100, save_every=100, lr=1e-3)
    counts: list[Counts] = []
    take = trainer._Trainer._step

    def noted(run: Any, *args: Any) -> float:
        counts.append(device.counts)
        return take(run, *args)

    monkeypatch.setattr(trainer._Trainer, "_step", noted)
    with StandIn() as device:
        tokenizer = tiny_tokenizer()
        model = tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).to(CUDA)
        train(settings, Target(model, tokenizer, "tiny"), train_store, valid_store, tmp_path, None)
    steps = [after - before for before, after in pairwise(counts)]
    assert len(steps) == 4
    for step in steps:
        events = "\n".join(f"{event.where} {event.operation}" for event in device.events[-80:])
        assert step.slow_uploads == 0 and step.waits <= WAITS[name], events
