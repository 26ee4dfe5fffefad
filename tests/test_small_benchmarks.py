"""The benchmark scripts that need no heads, each with next to nothing to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.files import read_json
from tests.test_benchmarks import script


def test_device_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "waits.json"
    script("device_waits", monkeypatch).main(
        ["--families", "medusa", "--rows", "2", "--tokens", "8", "--where", "--out", str(out)]
    )
    rounds = read_json(out)["rows"]
    assert [(row["drafter"], row["temperature"]) for row in rounds] == [
        (drafter, temperature) for drafter in ("none", "ngram", "medusa", "medusa+ngram") for temperature in (0.0, 1.0)
    ]
    assert all(1 <= row["waits"]["mean"] <= row["waits"]["max"] for row in rounds)


def test_sampling_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "step.json"
    arguments = ["--rows", "2", "--vocab", "300", "--repeats", "1", "--rules", "top_k", "greedy_draft"]
    script("sampling_step", monkeypatch).main([*arguments, "--out", str(out)])
    assert len(read_json(out)["rows"]) == 4


def test_verification_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rules.json"
    script("verification_rules", monkeypatch).main(["--rounds", "3", "--temperatures", "1", "--out", str(out)])
    for row in read_json(out)["rows"]:
        assert all(mean >= 1 for mean, _ in row["tokens"].values())


def test_forward(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "forward.json"
    arguments = ["--target", str(tiny_target_folder), "--batches", "1", "--widths", "1", "4", "--repeats", "1"]
    script("forward", monkeypatch).main([*arguments, "--context", "16", "--dtype", "float32", "--out", str(out)])
    assert [row["width"] for row in read_json(out)["rows"]] == [1, 4]
