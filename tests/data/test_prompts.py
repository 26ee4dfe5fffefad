"""Prompts of every accepted shape, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from headstart.data.prompts import Prompt, deduplicate, load_prompts
from headstart.data.questions import Question, read_questions
from headstart.errors import UserError
from tests.tiny import tiny_tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"turns": ["a", "b"]}, [user("a"), user("b")]),
        ({"messages": [user("a"), assistant("b")]}, [user("a"), assistant("b")]),
        (
            {"messages": [{"role": "developer", "content": "s"}, user("a")]},
            [{"role": "system", "content": "s"}, user("a")],
        ),
        (
            {
                "conversations": [
                    {"from": "gpt", "value": "hi"},
                    {"from": "human", "value": "a"},
                    {"from": "gpt", "value": "b"},
                ]
            },
            [user("a"), assistant("b")],
        ),
        ({"conversations": [user("a")]}, [user("a")]),
        ({"instruction": "a", "input": "", "output": "b"}, [user("a"), assistant("b")]),
        ({"instruction": "a", "input": "x"}, [user("a\n\nx")]),
        ({"prompt": "a"}, [user("a")]),
        ({"prompt": [user("a")]}, [user("a")]),
    ],
)
def test_shapes(tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    expected = [Prompt(messages, "", "p-1")]
    assert load_prompts(write(tmp_path / "p.jsonl", row), "train") == expected
    (tmp_path / "p.json").write_text(json.dumps([row]))
    assert load_prompts(str(tmp_path / "p.json"), "train") == expected


def test_id_category_and_parts(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")], "question_id": 81}
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", {**row, "category": "maths"}), "train")
    assert (prompt.id, prompt.category) == ("81", "maths")
    assert prompt.opening == row["messages"][:2]
    assert prompt.turns == ["a", "c"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "a"}, r'unknown shape with the keys text\. Accepted records: {"turns"'),
        ({}, "unknown shape with the keys .none."),
        ({"turns": "a"}, "'turns' is a str, not a list"),
        ({"turns": [1]}, "a text in 'turns' is a int"),
        ({"messages": "a"}, "'messages' is a str"),
        ({"messages": ["a"]}, "message 1 of 'messages' is a str"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "has the role 'wizard'; known: system"),
        ({"messages": [{"role": "user", "content": None}]}, "a text in 'messages' is a NoneType"),
        ({"prompt": 3}, "a text in 'prompt' is a int"),
        ({"prompt": " "}, "the user says nothing"),
        ({"turns": []}, "the user says nothing"),
        ({"messages": [assistant("a")]}, "the user says nothing"),
    ],
)
def test_malformed_record(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"p\.jsonl, line 2: .*{reason}"):
        load_prompts(write(tmp_path / "p.jsonl", {"prompt": "fine"}, row), "train")
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": "fine"}, row]))
    with pytest.raises(UserError, match=rf"p\.json, record 2: .*{reason}"):
        load_prompts(str(tmp_path / "p.json"), "train")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, text, match in [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt', r"a\.jsonl, line 2: not valid JSON"),
        ("b.jsonl", "[1]\n", r"b\.jsonl, line 1: a list, not an object"),
        ("c.jsonl", "\n", "No usable prompt .*none there"),
        ("d.json", '{"prompt": "x"}', "holds a dict, not a list"),
        ("e.json", "[3]", r"e\.json, record 1: a int, not an object"),
        ("f.txt", "hello", r"neither .jsonl nor .json"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=match):
            load_prompts(str(tmp_path / name), "train")
    for missing in ("no.jsonl", "no.json"):
        with pytest.raises(UserError, match="Check the path"):
            load_prompts(str(tmp_path / missing), "train")


def test_duplicates_and_limit(tmp_path: Path) -> None:
    texts = ["What is 2 + 2?", "what is  2 + 2", "What is 2 - 2?", "!?", "??", "Hello", "Bye"]
    path = write(tmp_path / "p.jsonl", *({"prompt": text} for text in texts))
    kept = ["What is 2 + 2?", "What is 2 - 2?", "!?", "??", "Hello", "Bye"]
    assert [prompt.turns[0] for prompt in load_prompts(path, "train")] == kept
    assert [prompt.turns[0] for prompt in load_prompts(path, "train", limit=2)] == kept[:2]
    assert deduplicate([Prompt([user(text)]) for text in texts]) == [Prompt([user(text)]) for text in kept]


def test_a_shared_system_message_makes_no_duplicates() -> None:
    system = {"role": "system", "content": "s"}
    assert len(deduplicate([Prompt([system, user("a")]), Prompt([system, user("b")])])) == 2


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "x" * 100}, {"prompt": "short"})
    tokenizer = tiny_tokenizer()
    assert [prompt.turns for prompt in load_prompts(path, "train", tokenizer, max_tokens=40)] == [["short"]]
    with pytest.raises(UserError, match=r"2 read, all over 3 tokens.*max_prompt_tokens"):
        load_prompts(path, "train", tokenizer, max_tokens=3)
    with pytest.raises(UserError, match="no chat template"):
        load_prompts(path, "train", tiny_tokenizer(None), max_tokens=40)


class TestDatasets:
    def test_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[tuple[Any, ...]] = []

        def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, Any]]:
            asked.append((name, config, split, streaming))
            return [{"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"prompt": "c"}]

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        prompts = load_prompts("someone/chats:small", "test", limit=2)
        assert [(prompt.id, prompt.turns) for prompt in prompts] == [("test-0", ["a"]), ("test-2", ["b"])]
        assert asked == [("someone/chats", "small", "test", True)]

    def test_a_folder_with_the_real_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "data").mkdir()
        write(tmp_path / "data" / "train.jsonl", {"messages": [user("a"), assistant("b")]}, {"messages": [user("c")]})
        prompts = load_prompts(str(tmp_path / "data"), "train")
        assert [prompt.messages for prompt in prompts] == [[user("a"), assistant("b")], [user("c")]]
        with pytest.raises(UserError, match=r"split 'nope': .*nope"):
            load_prompts(str(tmp_path / "data"), "nope")

    def test_unknown_shape(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_options: [{"text": "a"}])
        with pytest.raises(UserError, match=r"'wiki', split 'train', row 0: unknown shape.*Accepted records"):
            load_prompts("wiki", "train")

    def test_unreachable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load_dataset(*_args: Any, **_options: Any) -> None:
            raise FileNotFoundError("Dataset 'no/such' doesn't exist.\nmore")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(UserError, match=r"'no/such'.*FileNotFoundError: Dataset 'no/such' doesn't exist\. Give"):
            load_prompts("no/such", "train")


class TestQuestions:
    def test_read(self, tmp_path: Path) -> None:
        write(tmp_path / "q.jsonl", {"turns": ["a", "b"], "category": "c", "question_id": 81}, {"turns": ["d"]})
        assert read_questions(tmp_path / "q.jsonl") == [Question(81, "c", ["a", "b"]), Question(2, "", ["d"])]

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({}, "'turns' is missing"),
            ({"turns": []}, "'turns' is not a list of texts"),
            ({"turns": "a"}, "'turns' is not a list of texts"),
            ({"turns": ["a", " "]}, "'turns' is not a list of texts"),
            ({"turns": ["a"], "question_id": True}, "'question_id' is a text or a whole number"),
            ({"turns": ["a"], "category": 3}, "'category' a text"),
        ],
    )
    def test_malformed(self, tmp_path: Path, row: dict[str, Any], reason: str) -> None:
        write(tmp_path / "q.jsonl", {"turns": ["a"]}, row)
        with pytest.raises(UserError, match=rf"q\.jsonl, line 2: .*{reason}"):
            read_questions(tmp_path / "q.jsonl")

    def test_missing_and_empty(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"No file at .*q\.jsonl"):
            read_questions(tmp_path / "q.jsonl")
        (tmp_path / "q.jsonl").write_text("")
        with pytest.raises(UserError, match="holds no question"):
            read_questions(tmp_path / "q.jsonl")
