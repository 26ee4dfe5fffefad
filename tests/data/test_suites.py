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


TO_FETCH = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
"""Start of the prompts that SPEED-Bench leaves to NVIDIA's script."""


def speed_bench(categories: str, turns: list[str], placeholders: str = "") -> list[dict[str, Any]]:
    """Two records per category, as published; of those in `placeholders` the second is one."""
    return [
        {
            "question_id": f"{category}{number}",
            "category": category,
            "turns": [f"{TO_FETCH}\n\n{{article}}"] if number and category in placeholders else turns,
            "source": "cais/hle",
            "multiturn": len(turns) > 1,
        }
        for category in categories.split()
        for number in range(2)
    ]


QUALITATIVE = "coding humanities math multilingual qa rag reasoning roleplay stem summarization writing"
SPEED_BENCH = "nvidia/SPEED-Bench"
FILES = {
    (SPEED_BENCH, "qualitative/test-00000-of-00001.parquet"): table(speed_bench(QUALITATIVE, ["One.", "Two."], "rag")),
    **{
        (SPEED_BENCH, f"throughput_{length}/test-00000-of-00001.parquet"): table(
            speed_bench("high_entropy low_entropy mixed", [f"Of {length}."])
        )
        for length in ("1k", "2k", "8k", "16k", "32k")
    },
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


def test_speed_bench_by_category_and_as_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders are refused with the command that fetches their texts; its file is read as it writes it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    part = SUITES["speed-bench"][0]
    part.local_copy.parent.mkdir(parents=True)
    rows = speed_bench(QUALITATIVE, ["One.", "Two."], "rag")
    for row in rows:  # as prepare.py does
        row["messages"] = [{"role": "user", "content": turn} for turn in row.pop("turns")]
    part.local_copy.write_bytes(lines(rows))
    found, of_suite = find_questions("speed-bench", 11)
    assert of_suite and [question.category for question in found] == QUALITATIVE.split(), "one of each"
    assert found[0] == Question("coding0", "coding", ["One.", "Two."])
    assert [each.question_id for each in find_questions("speed-bench:math")[0]] == ["math0", "math1"]
    for name in ("speed-bench", "speed-bench:rag"):
        with pytest.raises(UserError, match=r"question rag1: only a placeholder, for a text of cais/hle") as error:
            find_questions(name)
        assert "prepare.py | python3 - --config qualitative --output_dir" in error.value.remedy
        assert str(part.local_copy) in error.value.remedy
    with pytest.raises(
        UserError, match=r"no part 'maths'. Did you mean speed-bench:math\? .*one of coding, humanities"
    ):
        find_questions("speed-bench:maths")
    with pytest.raises(UserError, match=r"mt-bench has no parts, and 'mt-bench:math' names one. Write mt-bench\."):
        find_questions("mt-bench:math")


def test_files_come_first_and_unknown_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").write_text('{"turns": ["one", "two"]}\n')
    assert find_questions("gsm8k") == ([Question(1, "", ["one", "two"])], False)
    line = refused("eval", "heads", "--suite", "mt-bensh", "--out", "out")
    assert "No file at mt-bensh. Did you mean mt-bench?" in line
