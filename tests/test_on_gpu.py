"""The acceptance on a GPU at toy size."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headstart.support.files import read_json
from tests.standin import CUDA, StandIn
from tests.test_benchmarks import script

SECTIONS = ["training", "quickstart", "decoding", "correctness", "forwards", "splitting", "waits"]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("on_gpu", monkeypatch)


def test_every_section_at_toy_size(on_gpu: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "on_gpu.json"
    on_gpu.main(["--device", "cpu", "--quick", "--out", str(out)])
    results = read_json(out)
    outcomes = {row["name"]: row["outcome"] for row in results["rows"] if "outcome" in row}
    assert list(outcomes.items()) == [(name, "passed") for name in SECTIONS], "the most informative first"
    rows = {row["name"]: row for row in results["rows"]}
    assert rows["waits, waits and launches"]["counted"].startswith("not counted")
    speeds = [row["train_tokens_per_second"] for name, row in rows.items() if name.startswith("training, pa")]
    assert len(speeds) == 2 and min(speeds) > 0
    assert rows["decoding, batch 1"]["reserved_gigabytes"] > 0 and rows["decoding, batch 1"]["over_plain"] > 0
    assert rows["splitting, counted before"]["batches"] == [4, 2, 2]
    assert results["machine"]["forward"] == "replayed"


def test_a_section_that_fails_loses_no_other(
    on_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "on_gpu.json"

    def broken(bench: Any) -> None:
        """It fails half way."""
        bench.note("begun", step_ms=1.0)
        assert [row["name"] for row in read_json(out)["rows"]] == ["waits, waits and launches", "waits"], "written"
        raise RuntimeError("no kernel image")

    chosen = {"waits": on_gpu.waits, "broken": broken, "again": on_gpu.waits}
    monkeypatch.setattr(on_gpu, "SECTIONS", {**chosen, "unasked": broken})
    with pytest.raises(SystemExit) as ended:
        on_gpu.main(["--device", "cpu", "--quick", "--sections", *chosen, "--out", str(out)])
    assert ended.value.code == 1
    rows = {row["name"]: row for row in read_json(out)["rows"]}
    assert rows["broken"]["outcome"] == "failed: RuntimeError: no kernel image"
    assert rows["broken, begun"]["step_ms"] == 1.0
    assert rows["waits"]["outcome"] == rows["again"]["outcome"] == "passed"


def test_forwards_on_the_device(on_gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA graphs, too, on the stand-in."""
    bench_of = sys.modules[on_gpu.Bench.__module__]
    made, host = bench_of.random_model, torch.device("cpu")
    monkeypatch.setattr(bench_of, "random_model", lambda sizes, dtype, _: made(sizes, dtype, host).to(CUDA))
    few = {"batches": (1,), "widths": (2,), "context": 8, "repeats": 1}
    monkeypatch.setattr(bench_of, "QUICK", dataclasses.replace(bench_of.QUICK, **few))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    bench = on_gpu.Bench(argparse.Namespace(device="cuda", quick=True, heads=None, target=None, out=None))
    with StandIn():
        on_gpu.forwards(bench)
    (row,) = bench.rows
    assert row["forward"]["own_ms"] > 0 and row["forward"]["modules_ms"] > 0
    assert 0 < row["forward"]["largest_difference"] < 0.1, "two ways of computing the same logits"


@pytest.mark.parametrize("arguments", [["--device", "cpu"], ["--quick"]])
def test_toy_figures_are_no_results(on_gpu: ModuleType, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        on_gpu.main(arguments)
    assert ended.value.code == 2
