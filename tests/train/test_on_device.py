"""Training on the stand-in CUDA device: the golden losses, and a bounded number of host waits."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from headstart.model.model import Target
from headstart.support.files import read_jsonl
from headstart.train import trainer
from tests.spies import spy
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.conftest import Train
from tests.train.test_golden import GOLDEN, HEADS


def on_device() -> Target:
    tokenizer = tiny_tokenizer()
    return Target(tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).to(CUDA), tokenizer, "tiny")


@pytest.mark.parametrize("name", HEADS)
def test_golden_run_on_a_device(name: str, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, validations and checkpoints of the golden run."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: CUDA))
    with StandIn() as device:
        run(tmp_path, target=on_device(), heads=HEADS[name], steps=6, eval_every=1, lr=1e-3)
    assert device.launched["aten::_fused_adamw_"], "the heads learned there"
    losses = [row["loss"] for _, row in read_jsonl(tmp_path / "metrics.jsonl")][1:]
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-3)


WAITS = {"medusa": 9, "hydra": 9, "eagle": 23, "eagle3": 23, "mtp": 23, "dflash": 13, "dspark": 13}
"""Upper bounds per step; they may only go down."""


@pytest.mark.parametrize("name", HEADS)
def test_device_waits_per_training_step(name: str, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the loss, one for the gradient norm, and some for the number of positions per draft step; batches never
    wait."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: CUDA))
    counts = spy(monkeypatch, trainer._Trainer, "_step", lambda *_: device.counts)
    settings: dict[str, Any] = {"steps": 5, "eval_every": 100, "save_every": 100, "lr": 1e-3}
    with StandIn() as device:
        run(tmp_path, target=on_device(), heads=HEADS[name], **settings)
    steps = [after - before for before, after in pairwise(counts)]
    assert len(steps) == 4
    for step in steps:
        events = "\n".join(f"{event.where} {event.operation}" for event in device.events[-80:])
        assert step.slow_uploads == 0 and step.waits <= WAITS[name], events
