"""The leaderboard: its questions, its rules, and an entry at toy size from the command to the table."""

from __future__ import annotations

import copy
import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headstart.data.prompts.overlap import SAME, Excluded, normalise
from headstart.data.prompts.questions import read_questions
from headstart.data.prompts.self_prompts import SEED_PROMPTS
from headstart.errors import UserError
from headstart.eval.audit import PROMPTS
from headstart.recipes.recipe import load_recipe
from tests.test_benchmarks import script
from tests.test_plan import prompt_file


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("leaderboard", monkeypatch)


def test_there_are_forty_different_questions_of_ten_kinds(board: ModuleType) -> None:
    questions = read_questions(board.QUESTIONS)
    assert [question.question_id for question in questions] == list(range(1, 41)) and board.RULES.questions == 40
    assert set(Counter(question.category for question in questions).values()) == {4}
    assert len({normalise(question.turns[0]) for question in questions}) == 40


def test_no_question_is_trained_on(board: ModuleType) -> None:
    """No seed prompt shares eight words with one, no audit prompt equals one, and data exclude equal prompts."""
    questions = [normalise(question.turns[0]) for question in read_questions(board.QUESTIONS)]
    seeds = " | ".join(normalise(seed) for seeds in SEED_PROMPTS.values() for seed in seeds)
    words = [question.split() for question in questions]
    assert not [at for text in words for at in range(len(text) - 7) if " ".join(text[at : at + 8]) in seeds]
    assert not {normalise(prompt) for prompt in PROMPTS} & set(questions)
    recipe = board.entered(load_recipe("eagle3"), "mine")
    assert recipe.data.exclude == (str(board.QUESTIONS),)
    assert all(Excluded(recipe.data.exclude).reason([question.upper()]) == SAME for question in questions)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ("target=HuggingFaceTB/SmolLM2-360M", "the target is smollm2-135m as it is"),
        ("target.adapter=lora", "the target is smollm2-135m as it is"),
        ("target.quantization=int8", "the target is smollm2-135m as it is"),
        ("data.prompts=asked.jsonl", "the target writes the answers"),
        ("data.server=http://localhost:8000", "nothing is computed elsewhere"),
        ("train.start_from=heads", "from the target alone"),
    ],
)
def test_a_recipe_that_breaks_a_rule_is_refused_before_any_work(change: str, rule: str, board: ModuleType) -> None:
    assert board.broken_by(board.entered(load_recipe("eagle3"), "mine")) == []
    with pytest.raises(UserError, match=rule):
        board.main(["eagle3", change, "--name", "mine", "--by", "me"])


@pytest.fixture
def toy(
    board: ModuleType,
    tmp_path: Path,
    tiny_target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[Any, dict[str, Any]]:
    """An entry of the tiny target for a few questions, and the rules that it keeps to."""
    asked = prompt_file(tmp_path, 1)
    rules = board.Rules(target=str(tiny_target_folder), prompts=(asked,), questions=3, max_new_tokens=8)
    monkeypatch.setattr(board, "pin", lambda cores: None)
    monkeypatch.setattr(importlib.import_module("record"), "commit", lambda: "c0ffee")
    settings = f"""
        target={tiny_target_folder} target.dtype=float32 heads.num_heads=2 heads.draft_vocab_size=64
        data.prompts={asked} data.conversations=6 data.heldout=0 data.validation=2 data.max_new_tokens=12
        data.minutes=null data.batch_size=4 train.minutes=null train.steps=2 train.batch_tokens=256
        train.eval_every=2 tune.widths=[1,2] tune.context=16
    """
    words = f"medusa {settings} --name mine --by me --out {tmp_path / 'out'}"
    board.main(words.split(), rules=rules)
    assert "Not valid" not in capsys.readouterr().out
    return rules, json.loads((tmp_path / "out" / "mine.json").read_text())


def test_entries_and_their_broken_rules(board: ModuleType, toy: tuple[Any, dict[str, Any]], tmp_path: Path) -> None:
    rules, entry = toy
    assert board.problems(entry, rules) == []
    (row,) = entry["rows"]
    assert len(row["acceptance_by_position"]) <= 2, "a chain as deep as two Medusa heads draft"
    assert 1 <= row["tokens_per_round"] <= 3 and row["outputs_different"] == 0 and 0 < row["seconds"] < 600
    details = entry["details"]
    assert details["recipe"]["train"]["steps"] == 2 and details["recipe"]["name"] == "mine"
    assert set(details["stages"]) == {"target", "conversations", "states", "train", "tune", "export"}
    assert "torch" in details["provenance"]["versions"] and details["target_fingerprint"]
    assert "--name mine" in entry["command"] and entry["commit"] == "c0ffee" and entry["machine"]["cpu"]
    faults = {
        "it took too long": lambda bad: bad["rows"][0].update(seconds=3601),
        "its questions have changed": lambda bad: bad["details"]["files"].clear(),
        "its answers differ from plain decoding": lambda bad: bad["rows"][0].update(outputs_different=1),
        "some questions are unanswered": lambda bad: bad["details"]["per_prompt"].pop(),
        "its code is not committed": lambda bad: bad.update(commit="c0ffee+"),
        "its rules have changed": lambda bad: bad["settings"].update(max_new_tokens=9),
        "it used more cores": lambda bad: bad["machine"].update(threads=64),
        "the questions are in data.exclude": lambda bad: bad["details"]["recipe"]["data"].update(exclude=[]),
    }
    for problem, spoil in faults.items():
        spoil(spoiled := copy.deepcopy(entry))
        assert board.problems(spoiled, rules) == [problem]
    out = tmp_path / "out"
    words = f"medusa target={rules.target} data.prompts={rules.prompts[0]} --name mine --by me --out {out}"
    with pytest.raises(UserError, match="exists already"):
        board.main(words.split(), rules)


def test_every_entry_keeps_the_rules(board: ModuleType) -> None:
    for file in board.ENTRIES.glob("*.json"):
        assert board.problems(json.loads(file.read_text(encoding="utf-8"))) == [], file.name
