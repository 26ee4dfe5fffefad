"""Jobs side by side: the same results, nothing left running, the threads as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from headstart.data.generate import build_conversations
from headstart.data.lanes import Lanes, Stopped
from headstart.target import Target
from headstart.train.config import DataSection

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_two_lanes_write_what_one_writes(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = DataSection(
        conversations=10, heldout=3, calibration=3, batch_size=4, max_new_tokens=8, openers="none", seed=1
    )
    monkeypatch.setattr("headstart.data.selfprompt.acceptable", lambda text, special: True)
    # A random model hardly ever ends a turn: let every eighth token do that.
    monkeypatch.setitem(tiny_target.__dict__, "end_tokens", frozenset(range(2, tiny_target.vocab_size, 8)))
    both = build_conversations(tiny_target, section, tmp_path / "two")
    assert len(both.train) == 10
    monkeypatch.setattr("headstart.data.lanes._MOST", 1)
    assert build_conversations(tiny_target, section, tmp_path / "one") == both


def test_jobs_share_the_threads_and_give_them_back() -> None:
    with Lanes(CPU, 5) as lanes:
        assert lanes.count == 2
        waiting = [lanes.submit(torch.get_num_threads) for _ in range(2)]
        assert [result() for result in waiting] == [1, 1]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("device", "jobs"), [("cpu", 1), ("cuda", 5)])
def test_a_single_lane_works_when_it_is_asked(device: str, jobs: int) -> None:
    done: list[int] = []
    with Lanes(torch.device(device), jobs) as lanes:
        assert lanes.count == 1
        result = lanes.submit(lambda: done.append(1))
        assert not done
        result()
    assert done


def test_leaving_stops_the_jobs_under_way() -> None:
    under_way, ended = threading.Semaphore(0), list[str]()

    def endless(lanes: Lanes) -> None:
        under_way.release()
        try:
            while True:
                lanes.check()
        except Stopped:
            ended.append("stopped")
            raise

    with pytest.raises(KeyboardInterrupt), Lanes(CPU, 2) as lanes:
        for _ in range(2):
            lanes.submit(lambda: endless(lanes))
        for _ in range(2):
            assert under_way.acquire(timeout=60), "both jobs run"
        raise KeyboardInterrupt
    assert ended == ["stopped", "stopped"]
    assert torch.get_num_threads() == 2
