"""The benchmark scripts of stored hidden states, each with a training of two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.data.conversations.records import read_conversations
from headstart.data.states.shards import Work, build_store
from headstart.pipeline.run import CONVERSATIONS
from headstart.target.fitting import FINAL
from headstart.target.loading import load_target
from tests.test_benchmarks import common, path, script, written_by

__all__ = ["path"]  # a fixture


def test_stored_states(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(path / "medusa.yaml"), "--steps", "2", *common(path, tiny_target_folder)]
    script("stored_states", monkeypatch).main(arguments)
    auto, int8, fp8 = written_by("stored_states", path / "out")["rows"]
    assert (auto["name"], auto["of_auto"], auto["lost"]) == ("auto", 1.0, {"FINAL": 0.0})
    for row in (int8, fp8):
        assert row["bytes"] < 0.3 * auto["bytes"]
        assert 0 < row["lost"]["FINAL"] < 0.05
        assert 0.9 < row["of_auto"] < 1.1
    assert "| fp8 |" in (path / "out" / "stored_states.md").read_text()


def test_states_from_vllm(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With states that vLLM is taken to have computed before; no server is started for them."""
    target = load_target(str(tiny_target_folder), "float32", "cpu")
    for split in ("train", "calibration"):
        texts = read_conversations(path / "run" / CONVERSATIONS / f"{split}.jsonl")
        shards = path / "out" / "vllm" / "shards"
        build_store(
            path / "theirs", texts, target, [1, 2, FINAL], budget_bytes=10**9, shards=shards, work=Work(batch_tokens=64)
        )
    arguments = [str(path / "eagle3.yaml"), "--steps", "2", "--exact", "2", *common(path, tiny_target_folder)]
    script("states_from_vllm", monkeypatch).main(arguments)
    written = written_by("states_from_vllm", path / "out")
    assert [row["name"] for row in written["rows"]] == ["vllm", "ours"]
    assert {row["layer"] for row in written["details"]["layers"]} == {1, 2, FINAL}
    assert all(row["max"] < 1e-4 and row["vllm_from_float32"]["max"] < 1e-4 for row in written["details"]["layers"])
    assert "| FINAL |" in (path / "out" / "states_from_vllm.md").read_text()
