"""Prompts that give a question of the report away are left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headstart.data.conversations import batch_generator
from headstart.data.conversations.building import build_conversations
from headstart.data.conversations.identity import identity
from headstart.data.prompts.overlap import OVERLAP_WORDS, OVERLAPPING, SAME, Excluded
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.recipes.sections import DataSection
from tests.data.loading import load, write_rows

LONG = " ".join(f"word{i}" for i in range(OVERLAP_WORDS + 10))
CHINESE = "".join(chr(0x4E00 + i) for i in range(OVERLAP_WORDS))


@pytest.fixture
def questions(tmp_path: Path) -> str:
    rows = [{"turns": ["What is 2 + 2?", "Why?"]}, {"turns": [LONG]}, {"turns": ["Translate: " + CHINESE]}]
    return write_rows(tmp_path / "questions.jsonl", *rows)


def words(start: int, count: int) -> str:
    return ", ".join(f"WORD{i}" for i in range(start, start + count))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (["what is  2 + 2"], SAME),
        (["What is 2 + 3?"], None),
        (["Tell me: what is 2 + 2?"], None),
        (["Why?"], None),
        (["Say something.", "What is 2 + 2?"], None),
        ([f"Look: {words(5, OVERLAP_WORDS)}!"], OVERLAPPING),
        (["Say something.", words(0, OVERLAP_WORDS)], OVERLAPPING),
        ([words(5, OVERLAP_WORDS - 1)], None),
        ([f"{words(0, 40)} and {words(40, 20)}"], None),
        (["看" + CHINESE], OVERLAPPING),
        (["看" + CHINESE[:-1]], None),
    ],
)
def test_overlap_with_a_question(questions: str, turns: list[str], reason: str | None) -> None:
    assert Excluded([questions]).reason(turns) == reason
    assert Excluded([]).reason(turns) is None


def test_overlapping_prompts_are_left_out_and_counted(questions: str, tmp_path: Path) -> None:
    rows = [{"turns": ["What is 2 + 2"]}, {"turns": ["Hello"]}, {"prompt": f"Look: {LONG}"}]
    path = write_rows(tmp_path / "p.jsonl", *rows, {"prompt": "what is 2 + 2?"})
    found = load(path, "train", exclude=[questions])
    assert [prompt.turns for prompt in found.prompts] == [["Hello"]]
    assert found.left_out.counts == {SAME: 2, OVERLAPPING: 1}
    with pytest.raises(UserError, match=r"No file at .*none\.jsonl"):
        load(path, "train", exclude=["none.jsonl"])


def test_overlapping_self_prompts_are_left_out(
    questions: str, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate_prompts(_target: Any, count: int, _breadth: str, seed: int, **_rest: Any) -> Any:
        asked = ["What is 2 + 2?", *(f"Question {seed} {i}" for i in range(1, count))]
        return [(text, "why") for text in asked]

    monkeypatch.setattr(batch_generator, "generate_prompts", generate_prompts)
    sizes = {"conversations": 6, "heldout": 2, "validation": 2, "max_new_tokens": 8, "batch_size": 8}
    for excluded in ((), (questions,)):
        data = DataSection.model_validate({**sizes, "exclude": excluded})
        splits = build_conversations(tiny_target, data, tmp_path / f"data{len(excluded)}")
        asked = [item.messages[0]["content"] for item in (*splits.heldout, *splits.validation, *splits.train)]
        assert ("What is 2 + 2?" in asked) is (not excluded) and len(asked) == 10


def test_identity_follows_the_questions_not_their_path(questions: str, tiny_target: Target, tmp_path: Path) -> None:
    def of(**settings: Any) -> dict[str, Any]:
        return identity(tiny_target, DataSection.model_validate(settings))

    copy = tmp_path / "copy.jsonl"
    copy.write_text(Path(questions).read_text())
    assert of(exclude=[questions]) == of(exclude=str(copy)) != of()
    copy.write_text('{"turns": ["Other"]}\n')
    assert of(exclude=[questions]) != of(exclude=[str(copy)])
