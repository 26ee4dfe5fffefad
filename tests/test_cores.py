"""Thread counts beside other programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.support.cores import FreeCores, busy_seconds, threads_beside
from headstart.target.loading import load_target


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_busy_seconds_are_of_the_given_cores_without_idle_waiting_and_stolen_time(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 100 20 30 1000 500 4 6 700 0 0\ncpu1 1 1 1 1 1 1 1 1 0 0\n"
        "cpu10 9 9 9 9 9 9 9 9 0 0\nintr 1 2\n"
    )
    assert busy_seconds(stat, [0]) == pytest.approx(1.6)
    assert busy_seconds(stat, [0, 1]) == pytest.approx(1.65)
    assert busy_seconds(tmp_path / "none", [0]) == 0


@pytest.mark.parametrize(
    ("others", "threads", "most", "wanted"),
    [
        (0.0, 2, 2, 2),
        (0.3, 2, 2, 2),  # a light load is not worth a thread
        (0.5, 2, 2, 1),  # a busy loop beside two spinning threads gets half a core at first,
        (1.0, 1, 2, 1),  # and a whole one once a thread is given up
        (0.3, 1, 2, 1),  # between the two thresholds nothing changes
        (0.1, 1, 2, 2),
        (3.0, 2, 2, 1),  # one thread always remains
        (1.0, 16, 16, 15),
        (1.0, 15, 16, 15),
    ],
)
def test_threads_beside(others: float, threads: int, most: int, wanted: int) -> None:
    assert threads_beside(others, threads, most) == wanted


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
    with cores.limited():  # the next text starts with the last limit
        assert torch.get_num_threads() == 1
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
def test_text_does_not_depend_on_when_threads_change(
    tiny_target_folder: Path, dtype: str, request: pytest.FixtureRequest
) -> None:
    target = load_target(str(tiny_target_folder), dtype)
    prompts, options = [[3, 5, 7, 11]], DecodeOptions(12, ignore_end=True)
    (steady,) = DecodeLoop(target).generate(prompts, options)
    changing = DecodeLoop(target)
    changing.free_cores = cores = _Changing()
    request.getfixturevalue("two_threads")
    (changed,) = changing.generate(prompts, options)
    assert steady.tokens == changed.tokens
    assert cores.changes > 8
