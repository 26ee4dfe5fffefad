"""A target without a chat template: prompts are beginnings of texts, and heads learn from its continuations."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.data.conversations.building import build_conversations
from headstart.data.conversations.identity import identity
from headstart.data.conversations.records import read_conversations
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.loading import CHAT
from headstart.data.prompts.questions import Question, read_questions
from headstart.errors import UserError
from headstart.eval.evaluate import evaluate
from headstart.eval.options import EvalOptions
from headstart.model.model import Target
from headstart.pipeline.plan import make_plan
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import STAGES
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.recipes.sections import DataSection
from headstart.support.files import read_json
from tests.data.loading import load
from tests.eval.sources import Drafts
from tests.tiny import tiny_model, tiny_tokenizer

SIZES = {"conversations": 8, "heldout": 4, "validation": 4, "max_new_tokens": 12, "batch_size": 4, "prefix_tokens": 16}


@pytest.fixture(scope="module")
def base(tiny_target: Target) -> Target:
    return Target(tiny_target.model, tiny_tokenizer(None), "base")


def texts(path: Path, count: int = 24) -> str:
    rows = [
        {"text": f"{i} is the number of the day — {i * i} the next. " * 4, "category": f"c{i % 2}"}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_are_beginnings_and_everything_written_is_supervised(base: Target, tmp_path: Path) -> None:
    path = texts(tmp_path / "t.jsonl")
    data = DataSection.model_validate({"prompts": path, **SIZES})
    splits = build_conversations(base, data, tmp_path / "data")
    written = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]
    for item in (*splits.train, *splits.validation):
        prefix, answer = (message["content"] for message in item.messages)
        assert any(text.startswith(prefix) for text in written)
        tokens = base.tokenizer.encode(prefix)
        assert len(tokens) == 16 == item.supervised.index(True)
        assert list(item.tokens[:16]) == tokens
        assert all(item.supervised[16:])
        assert base.tokenizer.decode(item.tokens[16:], skip_special_tokens=True) == answer
    assert [len(splits.train), len(splits.validation), len(splits.heldout)] == [8, 4, 4]
    for item in splits.heldout:
        assert list(item.tokens) == prompt_tokens(item.messages, base.tokenizer) and not any(item.supervised)


def test_short_texts_are_prompts_as_they_are_and_alike_beginnings_repeat(base: Target, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    alike = "The same beginning of both, long enough: "
    rows = [{"text": "the user"}, {"text": alike + "one"}, {"text": alike + "two"}, {"text": "é" * 40}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load(str(path), "train", base.tokenizer, max_prompt_tokens=40, prefix_tokens=9)
    first, second, third = (prompt.turns[0] for prompt in found.prompts)
    assert first == "the user" and alike.startswith(second) and third == "é" * 5, "no character is cut"
    assert found.left_out.counts == {"repeated": 1}


def test_chats_are_left_out_or_refused(base: Target, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"text": "the user is"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    found = load(str(path), "train", base.tokenizer, max_prompt_tokens=40)
    assert [prompt.turns for prompt in found.prompts] == [["the user is"]]
    assert found.left_out.notice.startswith(f"Left out: 2 {CHAT}. To keep them: give rows of plain text")
    path.write_text('{"prompt": "a"}\n' * 1001)
    with pytest.raises(UserError, match=r"1000 read.*no chat template.*rows of plain text .{\"text\""):
        load(str(path), "train", base.tokenizer, max_prompt_tokens=40)


def test_prefix_length_identifies_data_of_base_targets_only(base: Target, tiny_target: Target) -> None:
    def of(target: Target, count: int) -> dict[str, Any]:
        return identity(target, DataSection(prefix_tokens=count))

    assert of(base, 64) != of(base, 32)
    assert of(tiny_target, 64) == of(tiny_target, 32)


def recipe(folder: Path, **data: Any) -> Recipe:
    model = folder / "base"
    tokenizer = tiny_tokenizer(None)
    tiny_model("llama", vocab_size=len(tokenizer), max_length=1024).save_pretrained(model)
    tokenizer.save_pretrained(model)
    return parse_recipe(
        {
            "name": "base",
            "target": {"spec": str(model), "dtype": "float32", "device": "cpu"},
            "data": {"prompts": texts(folder / "t.jsonl"), **SIZES, **data},
            "heads": {"family": "medusa", "num_heads": 2},
            "train": {"steps": 2, "batch_tokens": 256, "eval_every": 2, "save_every": 2},
            "tune": {"widths": [1, 2], "context": 16, "max_nodes": 2, "max_rank": 2},
            "eval": {"limit": 2, "max_new_tokens": 8, "compare": []},
        }
    )


def test_a_run_from_texts_to_the_report(tmp_path: Path) -> None:
    run = Run(recipe(tmp_path), tmp_path / "run", Console(quiet=True))
    assert make_plan(run).facts
    execute(run, STAGES)
    questions = read_questions(tmp_path / "run" / "data" / "heldout.jsonl")
    held_out = read_conversations(tmp_path / "run" / "data" / "conversations" / "heldout.jsonl")
    tokenizer = run.target.tokenizer
    assert [tokenizer.encode(question.turns[0]) for question in questions] == [list(item.tokens) for item in held_out]
    results = read_json(tmp_path / "run" / "report" / "results.json")
    assert [row["prompt_tokens"] for row in results["per_prompt"]] == [len(item.tokens) for item in held_out[:2]]
    assert results["summary"]["tokens_per_round"] >= 1


@pytest.mark.parametrize("work", [lambda run: execute(run, STAGES), make_plan])
def test_it_cannot_write_its_own_prompts(tmp_path: Path, work: Callable[[Run], Any]) -> None:
    with pytest.raises(UserError, match=r"no chat template, so it cannot write its own prompts.*plain text"):
        work(Run(recipe(tmp_path, prompts="self"), tmp_path / "run", Console(quiet=True)))


def test_questions_are_continued_and_several_turns_are_refused(base: Target) -> None:
    questions = [Question(1, "", ["the user is", "and then"])]
    console = Console(file=io.StringIO(), width=200)
    options = EvalOptions(max_new_tokens=4, baselines=False)
    results = evaluate(Drafts(base), questions, options, console)
    assert results["per_prompt"][0]["prompt_tokens"] == len(base.tokenizer.encode("the user is"))
    assert isinstance(console.file, io.StringIO)
    assert "base has no chat template: it continues the text of each question" in console.file.getvalue()
    with pytest.raises(UserError, match="no chat template"):
        evaluate(Drafts(base), questions, EvalOptions(max_new_tokens=4, multi_turn=True))
