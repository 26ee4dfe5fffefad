"""Concurrent jobs: equal results, nothing left running, the thread count restored."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.conversations.building import build_conversations
from headstart.data.generation.in_process import InProcess
from headstart.data.workers import Workers
from headstart.model.model import Target
from headstart.recipes.sections import DataSection
from headstart.servers.client import Stopped
from tests.data.loading import everything
from tests.spies import spy

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


def test_two_workers_write_the_same(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: Any = {"conversations": 10, "heldout": 5, "validation": 5, "batch_size": 4, "max_new_tokens": 8}
    section = DataSection(seed_prompts="none", seed=1, sampled_fraction=0.5, **sizes)
    monkeypatch.setattr("headstart.data.prompts.self_prompts.acceptable", lambda text, special: True)
    # More end tokens: a random model seldom writes the only one.
    monkeypatch.setattr(tiny_target, "end_tokens", frozenset(range(0, tiny_target.vocab_size, 5)))
    writers = spy(monkeypatch, InProcess, "continue_rows", lambda *_: threading.current_thread().name)
    both = build_conversations(tiny_target, section, tmp_path / "two")
    assert len(both.train) == 10
    assert {"worker_0", "worker_1"} <= set(writers)
    writers.clear()
    monkeypatch.setattr("headstart.data.workers._MAX", 1)
    torch.set_num_threads(1)
    assert everything(build_conversations(tiny_target, section, tmp_path / "one")) == everything(both)
    assert set(writers) == {"worker_0"}


def test_jobs_share_and_return_the_threads() -> None:
    with Workers(CPU, 5) as workers:
        assert workers.count == 2
        waiting = [workers.begin(torch.get_num_threads) for _ in range(2)]
        assert [one.result() for one in waiting] == [1, 1]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("device", "jobs"), [("cpu", 1), ("cuda", 5)])
def test_single_worker_has_all_threads(device: str, jobs: int) -> None:
    with Workers(torch.device(device), jobs) as workers:
        assert workers.count == 1
        name = workers.begin(lambda: (threading.current_thread().name, torch.get_num_threads())).result()
    assert name == ("worker_0", 2)


def test_exit_stops_running_jobs() -> None:
    ended: list[str] = []
    begun = threading.Semaphore(0)

    def endless(workers: Workers) -> None:
        begun.release()
        try:
            while True:
                workers.check()
        except Stopped:
            ended.append("stopped")
            raise

    with pytest.raises(KeyboardInterrupt), Workers(CPU, 2) as workers:
        jobs = [workers.begin(lambda: endless(workers)) for _ in range(3)]
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60), "both are running"
        raise KeyboardInterrupt
    assert ended == ["stopped", "stopped"], "the third has not begun"
    with pytest.raises(Stopped):
        jobs[0].result()
    assert torch.get_num_threads() == 2
