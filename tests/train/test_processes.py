"""The device of each training process, and launcher settings that are refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from headstart.errors import UserError
from headstart.model.model import Target
from headstart.train import processes
from tests.train.conftest import MakeRecipe, Train


class Gpus:
    """Two fake GPUs for torch and accelerate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(processes, "PartialState", self.state)

    def launch(self, rank: int, ranks: int) -> None:
        self._patch.setenv("LOCAL_RANK", str(rank))
        self._patch.setenv("WORLD_SIZE", str(ranks))

    def state(self, cpu: bool = False, **_: Any) -> Any:
        """Return `cuda:<local rank>` under a launcher, else `cuda`, the current GPU."""
        launched = os.environ.get("LOCAL_RANK")
        device = "cpu" if cpu else "cuda" if launched is None else f"cuda:{launched}"
        return SimpleNamespace(device=torch.device(device))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


@pytest.mark.parametrize(("device", "taken"), [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cpu", "cpu")])
def test_launched_processes_take_their_own_gpu_or_the_cpu(gpus: Gpus, device: str, taken: str) -> None:
    gpus.launch(1, 2)
    assert processes.join_processes(device) == taken


def test_lone_process_takes_the_gpu_of_its_recipe(gpus: Gpus) -> None:
    assert processes.join_processes("cuda:1") is None


def test_one_gpu_for_two_processes_is_refused(gpus: Gpus) -> None:
    gpus.launch(0, 2)
    with pytest.raises(UserError, match=r"target\.device=cuda:1 is one GPU, and 2 processes train") as refused:
        processes.join_processes("cuda:1")
    assert "target.device=auto" in refused.value.remedy and "CUDA_VISIBLE_DEVICES" in refused.value.remedy


def test_target_on_another_device_is_refused(
    recipe: MakeRecipe, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "Accelerator", lambda **_: SimpleNamespace(device=torch.device("meta")))
    with pytest.raises(UserError, match="The target is on cpu, and this process trains on meta"):
        processes.make_accelerator(recipe(), tiny_target, tmp_path)


def test_refused_device_leaves_no_state_of_accelerate(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next training of the process may choose another precision."""

    class Elsewhere(Accelerator):
        device = property(lambda _: torch.device("meta"))

    monkeypatch.setattr(processes, "Accelerator", Elsewhere)
    with pytest.raises(UserError, match="this process trains on meta"):
        run(tmp_path, steps=1)
    assert not AcceleratorState._shared_state


def test_fsdp_is_refused_before_the_target_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="the launcher asks for FSDP"):
        processes.join_processes("cpu")
