"""The moving average of the weights: what it is, that it is what is judged and kept, and that it goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headstart.errors import UserError
from headstart.recipes.recipe import parse_recipe
from headstart.train import trainer
from headstart.train.optimizers import Ema
from tests.train.conftest import Train
from tests.train.results import assert_same, metrics, weights


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(()), requires_grad=False)


def test_it_follows_quickly_at_first_and_then_by_its_decay() -> None:
    heads: Any = One()
    ema = Ema(heads, 0.5)
    expected = 0.0
    for step in range(1, 15):
        with torch.no_grad():
            heads.weight.fill_(step)
        ema.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        with ema.applied():
            assert heads.weight.item() == pytest.approx(expected, rel=1e-6)
        assert heads.weight.item() == step
    assert decay == 0.5 and expected < 14
    again = Ema(heads, 0.5)
    again.load_state_dict(ema.state_dict())
    assert again.state_dict() == ema.state_dict()


def test_weights_come_back_when_what_is_done_with_the_averages_fails() -> None:
    heads: Any = One()
    ema = Ema(heads, 0.9)
    with torch.no_grad():
        heads.weight.fill_(3)
    with pytest.raises(UserError), ema.applied():
        assert heads.weight.item() == 0
        raise UserError("The disk is full.", "Make room.")
    assert heads.weight.item() == 3


def test_what_is_kept_is_the_average_of_the_weights_of_every_step(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    take = trainer._Trainer._step

    def noted(self: Any, *args: Any) -> float:
        if not seen:
            seen.append({name: p.detach().clone() for name, p in self.heads.named_parameters()})
        loss = take(self, *args)
        seen.append({name: p.detach().clone() for name, p in self.heads.named_parameters()})
        return loss

    monkeypatch.setattr(trainer._Trainer, "_step", noted)
    run(tmp_path / "ema", steps=6, ema=0.3, lr=0.01)
    monkeypatch.undo()
    average = seen[0]
    for step, now in enumerate(seen[1:], 1):
        decay = min(0.3, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * now[name] for name in now}
    kept = weights(tmp_path / "ema" / "last")
    for name, wanted in average.items():
        torch.testing.assert_close(kept[name], wanted, rtol=1e-5, atol=1e-7)
    # The weights themselves learn as without it, and what is judged is not they.
    run(tmp_path / "plain", steps=6, lr=0.01)
    plain, judged = (metrics(tmp_path / name) for name in ("plain", "ema"))
    assert [row["loss"] for row in plain] == [row["loss"] for row in judged]
    unaveraged = weights(tmp_path / "plain" / "last")
    assert all(torch.equal(unaveraged[name], seen[-1][name]) for name in average)


def test_it_goes_on_exactly(run: Train, tmp_path: Path) -> None:
    settings = {"ema": 0.8, "warmup": 0, "min_lr_ratio": 1, "eval_every": 4}
    for name, steps in (("cut", 4), ("cut", 8), ("whole", 8)):
        run(tmp_path / name, steps=steps, **settings)
    for heads in ("last", "best"):
        assert_same(tmp_path / "cut" / heads, tmp_path / "whole" / heads)
    with pytest.raises(UserError, match=r"trained with train.ema = 0.8, and now it is None"):
        run(tmp_path / "cut", steps=9, warmup=0, min_lr_ratio=1)


def test_the_decay_lies_between_0_and_1() -> None:
    for ema in (0, 1):
        with pytest.raises(UserError, match=r"train\.ema"):
            parse_recipe({"name": "x", "heads": {"family": "medusa"}, "train": {"ema": ema}})
