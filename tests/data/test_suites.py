"""Question sets by name, from local copies and files. `tests/hub/test_hub.py` tests the downloads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from headstart.data.prompts.questions import SUITES, Question, find_questions
from headstart.errors import UserError
from headstart.model.model import Target
from tests.hub.helpers import export
from tests.test_cli import refused, works

MT_BENCH = [
    {"question_id": 81, "category": "writing", "prompt": ["Write.", "Again."], "reference": []},
    {"question_id": 111, "category": "math", "prompt": ["What is 1 + 1?", "And 2 + 2?"], "reference": ["2", "4"]},
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def table(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


FILES = {
    ("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl"): lines(MT_BENCH),
    ("openai/openai_humaneval", "openai_humaneval/test-00000-of-00001.parquet"): table(
        [{"task_id": "HumanEval/0", "prompt": "def one():\n", "test": "assert", "entry_point": "one"}]
    ),
    ("openai/gsm8k", "main/test-00000-of-00001.parquet"): table(
        [{"question": f"How many are {number}?", "answer": str(number)} for number in range(90)]
    ),
    ("tatsu-lab/alpaca", "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"): table(
        [
            {"instruction": "Translate.", "input": "Haus", "output": "house", "text": "Below is"},
            {"instruction": "Greet.", "input": "", "output": "Hello", "text": "Below is"},
        ]
    ),
    **{
        ("RedHatAI/speculator_benchmarks", f"{task}.jsonl"): lines([{"prompt": f"{task} {n}"} for n in range(2)])
        for task in ("translation", "summarization", "qa", "math_reasoning", "rag")
    },
}


def test_local_copy_is_asked_turn_by_turn(
    tiny_target: Target, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (part,) = SUITES["mt-bench"]
    assert part.local_copy.is_relative_to(tmp_path)
    part.local_copy.parent.mkdir(parents=True)
    part.local_copy.write_bytes(lines(MT_BENCH))
    export(tmp_path / "heads", Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    asked = ("--suite", "mt-bench", "--out", "out", "--max-new-tokens", 4, "--dtype", "float32", "--limit", 1)
    assert "heads on mt-bench" in works("eval", tmp_path / "heads", *asked).stdout
    results = json.loads(Path("out/results.json").read_text())
    assert [(row["id"], row["category"]) for row in results["per_prompt"]] == [("81", "writing"), ("81/2", "writing")]
    part.local_copy.write_bytes(lines([{"prompt": [""]}]))
    with pytest.raises(UserError, match=r"record 1: in which the user says nothing. .*delete it and try again"):
        find_questions("mt-bench")


def test_files_come_first_and_unknown_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").write_text('{"turns": ["one", "two"]}\n')
    assert find_questions("gsm8k") == ([Question(1, "", ["one", "two"])], False)
    line = refused("eval", "heads", "--suite", "mt-bensh", "--out", "out")
    assert "No file at mt-bensh. Did you mean mt-bench?" in line
