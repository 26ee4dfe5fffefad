"""Training on the stand-in CUDA device: the golden losses, and a bounded number of host waits."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from headstart.errors import UserError
from headstart.heads.base import HeadBatch
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.support.files import read_jsonl
from headstart.train import trainer
from tests.spies import spy
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.conftest import Train, on_read
from tests.train.test_golden import GOLDEN, HEADS


def on_device() -> Target:
    tokenizer = tiny_tokenizer()
    return Target(tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).to(CUDA), tokenizer, "tiny")


@pytest.mark.parametrize("name", HEADS)
def test_golden_run_on_a_device(name: str, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, validations and checkpoints of the golden run."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: CUDA))
    with StandIn() as device:
        run(tmp_path, target=on_device(), compile=False, heads=HEADS[name], steps=6, eval_every=1, lr=1e-3)
    assert device.launched["aten::_fused_adamw_"], "the heads learned there"
    losses = [row["loss"] for _, row in read_jsonl(tmp_path / "metrics.jsonl")][1:]
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-3)


@pytest.mark.parametrize("settings", [{}, {"anchors": 3, "packing": True}, {"position_weight": "subsampled"}], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_training_steps_do_not_wait_for_the_device(
    name: str, settings: dict[str, Any], run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for losses nor for numbers of positions. The only wait is not one on a GPU: clipping looks up the
    gradients' device in C++, where a stand-in tensor is on the CPU."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: CUDA))
    counts = spy(monkeypatch, trainer._Trainer, "_step", lambda *_: device.counts)
    with StandIn() as device:
        rare = {"eval_every": 100, "save_every": 100}
        run(tmp_path, target=on_device(), compile=False, heads=HEADS[name], steps=5, lr=1e-3, **rare, **settings)
    steps = [after - before for before, after in pairwise(counts)]
    assert len(steps) == 4
    for step in steps:
        waits = [f"{event.where} {event.operation}" for event in device.events if event.kind == "wait"]
        assert step.slow_uploads == 0 and step.waits == 1, waits


def test_not_finite_steps_are_named_later(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are read rarely, but before anything learned from them is validated or saved."""
    monkeypatch.setattr(Accelerator, "device", property(lambda _: CUDA))

    def poison(indices: list[int], batch: HeadBatch) -> None:
        if 7 in indices:
            batch.states[FINAL][indices.index(7)] = math.nan

    on_read(monkeypatch, "train", poison)
    rare = {"eval_every": 100, "save_every": 100, "log_every": 100}
    with StandIn(), pytest.raises(UserError, match=r"not finite at step \d .*conversations .*\b7\b") as raised:
        run(tmp_path, target=on_device(), compile=False, steps=9, **rare)
    assert "step 9" not in str(raised.value), "other steps followed"
    assert not list(tmp_path.glob("checkpoints/*")) and not (tmp_path / "last").exists()
    assert len(list(read_jsonl(tmp_path / "metrics.jsonl"))) == 1
