"""The conditions under which costs are measured, with and without a device."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.decode.costs import Conditions, core_count, cpu_model
from headstart.model.model import Target
from headstart.tuning.stopwatch import Timing, draft_ms
from tests.heads.test_contract import build, shake
from tests.standin import CUDA, StandIn, clock_of_captures
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    ("info", "name"),
    [
        ("processor\t: 0\nmodel name\t: AMD EPYC 9654: 96-Core\nmodel name\t: other\n", "AMD EPYC 9654: 96-Core"),
        ("processor\t: 0\nCPU part\t: 0xd40\n", "armv9"),  # as on ARM, which names no model
        (None, "armv9"),
    ],
)
def test_processors_are_named_by_model_or_kind(info: str | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(path: Path, **_: Any) -> str:
        if info is None:
            raise FileNotFoundError(path)
        return info

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "armv9")
    assert cpu_model.__wrapped__() == name


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert core_count() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert core_count() == 64


def test_on_a_device_its_name_counts_and_threads_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"H200 number {device.index}")
    here = Conditions.of(Target(tiny_model("llama")))
    with StandIn():
        there = Conditions.of(Target(tiny_model("llama").to(CUDA)))
    assert (there.machine, there.device, there.threads) == ("H200 number 0", "cuda", 0)
    assert (here.device, here.threads) == ("cpu", torch.get_num_threads()) and here.machine.endswith(" cores")
    assert there.difference(here).startswith("machine=H200 number 0, device=cuda")
    assert Conditions.from_json(there.to_json()) == there


def test_drafting_time_excludes_graph_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = clock_of_captures(monkeypatch, "headstart.tuning.stopwatch")
    with StandIn():
        target = Target(tiny_model("llama", vocab_size=61).to(CUDA))
        heads = shake(build("eagle3", Target(tiny_model("llama", vocab_size=61)))).to(CUDA)
        heads.bind(target)
        drafting = draft_ms(target, heads, [(0,), (1,), (0, 0)], Timing(context=64))
    assert spent() > 2, "something was captured"
    assert drafting.draft_ms == pytest.approx(1) and drafting.read_ms == pytest.approx(0, abs=1e-9)
