"""Thread counts beside other programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.model.loading import load_target
from headstart.support.cores import FreeCores, busy_seconds


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_busy_seconds_exclude_idle_waiting_and_stolen_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 1000 500 4 6 700 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\n"
        "cpu10 9 9 9 9 9 9 9 9 0 0\nintr 1 2\n"
    )
    assert busy_seconds(stat, [0]) == pytest.approx(1.6)
    assert busy_seconds(stat, [0, 1]) == pytest.approx(1.65)
    assert busy_seconds(tmp_path / "none", [0]) == 0


class _Loaded(FreeCores):
    """Sees `others` busy cores on a machine with this many cores."""

    def __init__(self, cores: int) -> None:
        self.seconds = self.busy = self.others = 0.0
        super().__init__()
        self._cores = list(range(cores))
        self._free = cores

    def _read(self) -> tuple[float, float, float]:
        self.seconds, self.busy = self.seconds + 1, self.busy + self.others
        return self.seconds, self.busy, 0.0

    def threads(self, others: float) -> int:
        self.others = others
        self.update()
        return torch.get_num_threads()


@pytest.mark.usefixtures("two_threads")
def test_threads_follow_the_free_cores() -> None:
    cores = _Loaded(2)
    with cores.limited():
        assert cores.threads(0.3) == 2, "a light load is not worth a thread"
        assert cores.threads(0.5) == 1, "a busy loop beside two spinning threads gets half a core"
        assert cores.threads(1.0) == 1
        assert cores.threads(0.3) == 1, "between the two bounds nothing changes"
        assert cores.threads(0.1) == 2
        assert cores.threads(3.0) == 1, "one thread always remains"
    assert torch.get_num_threads() == 2
    with cores.limited():  # the next text starts with the last limit
        assert torch.get_num_threads() == 1
        assert cores.threads(0.0) == 1, "half of this measurement is of the busy end of the text before"
        assert cores.threads(0.0) == 2
    with cores.limited():
        assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_other_programs_on_other_cores_take_no_thread() -> None:
    cores = _Loaded(16)
    with cores.limited():
        assert [cores.threads(others) for others in (0.0, 12.0, 14.3, 14.6, 14.3, 14.0)] == [2, 2, 2, 1, 1, 2]


class _Quiet(FreeCores):
    """Sees no other program."""

    def _read(self) -> tuple[float, float, float]:
        return perf_counter(), 0.0, 0.0


@pytest.mark.usefixtures("two_threads")
def test_short_texts_add_up_to_a_measurement() -> None:
    """Texts without a full window each do not stay with one thread after a busy moment."""
    cores, threads = _Quiet(), list[int]()
    cores._free = 1.0
    for _ in range(20):
        with cores.limited():
            sleep(0.02)
            cores.update()
            threads.append(torch.get_num_threads())
    assert threads[0] == 1 and threads[-1] == 2


@pytest.mark.usefixtures("two_threads")
def test_a_busy_program_takes_a_thread_away_and_the_block_gives_it_back() -> None:
    cores = FreeCores()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other, cores.limited():
        start = perf_counter()
        while not cores.update():
            assert perf_counter() - start < 30, "a busy loop was not noticed"
        assert torch.get_num_threads() == 1
        other.kill()
    assert torch.get_num_threads() == 2


class _Changing(FreeCores):
    """Sees other programs come and go from one round to the next."""

    seconds = busy = changes = 0

    def update(self) -> bool:
        changed = super().update()
        self.changes += changed
        return changed

    def _read(self) -> tuple[float, float, float]:
        self.seconds += 1
        self.busy += 2 * (self.seconds % 2)
        return float(self.seconds), float(self.busy), 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_is_independent_of_threads(tiny_target_folder: Path, dtype: str, request: pytest.FixtureRequest) -> None:
    target = load_target(str(tiny_target_folder), dtype)
    prompts, options = [[3, 5, 7, 11]], DecodeOptions(12, ignore_end=True)
    (steady,) = DecodeLoop(target).generate(prompts, options)
    changing = DecodeLoop(target)
    changing.free_cores = cores = _Changing()
    request.getfixturevalue("two_threads")
    (changed,) = changing.generate(prompts, options)
    assert steady.tokens == changed.tokens
    assert cores.changes > 8
