"""Which device each process of a training takes, and what accelerate may be asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headstart.errors import UserError
from headstart.model.model import Target
from headstart.recipes.recipe import Recipe
from headstart.train import processes


class Gpus:
    """Two GPUs, as torch and accelerate see them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(processes, "PartialState", self.state)

    def launch(self, rank: int, ranks: int) -> None:
        self._patch.setenv("LOCAL_RANK", str(rank))
        self._patch.setenv("WORLD_SIZE", str(ranks))

    def state(self, cpu: bool = False) -> Any:
        """`cuda:<local rank>` under a launcher and `cuda`, which is the current GPU, without one."""
        launched = os.environ.get("LOCAL_RANK")
        device = "cpu" if cpu else "cuda" if launched is None else f"cuda:{launched}"
        return SimpleNamespace(device=torch.device(device))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_process_of_a_launcher_takes_a_gpu_of_its_own(gpus: Gpus, device: str) -> None:
    gpus.launch(1, 2)
    assert processes.join_processes(device) == "cuda:1"


def test_a_process_alone_takes_the_gpu_of_its_recipe(gpus: Gpus) -> None:
    assert processes.join_processes("cuda:1") is None


def test_one_gpu_for_several_processes_is_refused(gpus: Gpus) -> None:
    gpus.launch(0, 2)
    with pytest.raises(UserError, match=r"target\.device=cuda:1 is one GPU, and 2 processes train") as refused:
        processes.join_processes("cuda:1")
    assert "target.device=auto" in refused.value.remedy and "CUDA_VISIBLE_DEVICES" in refused.value.remedy


def test_a_cpu_among_gpus_trains_on_the_cpu(gpus: Gpus) -> None:
    gpus.launch(1, 2)
    assert processes.join_processes("cpu") == "cpu"


def test_a_target_elsewhere_than_its_training_is_refused(
    recipe: Callable[..., Recipe], tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(**_: Any) -> Any:
        return SimpleNamespace(device=torch.device("meta"))

    monkeypatch.setattr(processes, "Accelerator", elsewhere)
    with pytest.raises(UserError, match="The target is on cpu, and this process trains on meta"):
        processes.make_accelerator(recipe(), tiny_target, tmp_path)


def test_fsdp_is_refused_before_the_target_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="the launcher asks for FSDP"):
        processes.join_processes("cpu")
