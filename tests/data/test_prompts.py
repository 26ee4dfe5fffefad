"""Reading prompts: accepted record shapes, filters and their counts, and errors that name file and line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import huggingface_hub
import pytest

from headstart.data.prompts.loading import PLAIN, load_prompts
from headstart.data.prompts.questions import Question, read_questions
from headstart.data.prompts.shapes import Prompt, parse_prompt
from headstart.data.prompts.sources import Origin, find_origin
from headstart.errors import UserError
from headstart.recipes.sections import DataSection, PromptSource
from tests.data.loading import load, write_rows
from tests.spies import raising
from tests.tiny import CHATML, tiny_tokenizer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


def sharegpt(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


def calls(**function: Any) -> dict[str, Any]:
    return {**assistant(""), "tool_calls": [{"function": function}]}


RESULT = {"role": "tool", "content": "2", "tool_call_id": "1"}
WRITTEN_CALL = {"function": {"name": "f", "arguments": '{"x": 1}'}, "id": None}
ANSWER = {"role": "assistant", "content": None}
PARTS = [{"type": "text", "text": "a"}, {"text": " b"}, " c"]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"turns": ["a", "b"]}, [user("a"), user("b")]),
        (chat(user("a"), assistant("b")), [user("a"), assistant("b")]),
        (chat({"role": "developer", "content": "s"}, user("a")), [SYSTEM, user("a")]),
        (sharegpt(("gpt", "hi"), ("human", "a"), ("gpt", "b")), [user("a"), assistant("b")]),
        ({"conversations": [user("a")]}, [user("a")]),
        ({"instruction": "a", "input": "", "output": "b"}, [user("a"), assistant("b")]),
        ({"instruction": "a", "input": "x"}, [user("a\n\nx")]),
        ({"prompt": "a"}, [user("a")]),
        ({"prompt": [user("a")]}, [user("a")]),
        (chat({"role": "user", "content": PARTS}), [user("a b c")]),
        (
            chat(user("a"), {**ANSWER, "tool_calls": [{"name": "f"}]}, user("b")),
            [user("a"), calls(name="f"), user("b")],
        ),
        (
            chat(
                user("a"),
                {"role": "assistant", "tool_calls": [WRITTEN_CALL]},
                RESULT,
                {**assistant("b"), "tool_calls": None},
            ),
            [user("a"), calls(name="f", arguments={"x": 1}), RESULT, assistant("b")],
        ),
        (chat(user("a"), {**ANSWER, "function_call": {"name": "f"}}), [user("a"), calls(name="f")]),
        (chat(SYSTEM, user("a"), assistant("b")), [SYSTEM, user("a"), assistant("b")]),
        (sharegpt(("system", "s"), ("Human", "a"), ("ChatGPT", "b")), [SYSTEM, user("a"), assistant("b")]),
        ({"conversation": [{"from": "user", "value": "a"}], "system": "s"}, [SYSTEM, user("a")]),
        ({"instruction": "a", "input": "x", "output": "b", "system": "s"}, [SYSTEM, user("a\n\nx"), assistant("b")]),
        ({"instruction": "a", "input": None, "output": None, "system": " "}, [user("a")]),
        ({"messages": None, "prompt": "a"}, [user("a")]),
        (
            chat(user("a"), {**assistant("b"), "reasoning_content": "r", "tool_calls": []}),
            [user("a"), {**assistant("b"), "reasoning_content": "r"}],
        ),
    ],
)
def test_every_record_shape_is_read(tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    expected = [Prompt(messages, "", "p-1")]
    assert load(write_rows(tmp_path / "p.jsonl", row), "train").prompts == expected
    (tmp_path / "p.json").write_text(json.dumps([row]))
    assert load(str(tmp_path / "p.json"), "train").prompts == expected


def test_id_category_and_roles(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "s"}, user("a"), assistant("b"), user("c")], "question_id": 81}
    (prompt,) = load(write_rows(tmp_path / "p.jsonl", {**row, "category": "maths"}), "train").prompts
    assert (prompt.id, prompt.category) == ("81", "maths")
    assert prompt.opening == row["messages"][:2]
    assert prompt.turns == ["a", "c"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"body": "a"}, r"unknown shape with the keys body"),
        ({}, "unknown shape with the keys .none."),
        ({"turns": "a"}, "'turns' is a str, not a list"),
        ({"messages": "a"}, "'messages' is a str"),
        ({"messages": ["a"]}, "message 1 of 'messages' is a str"),
        ({"\ud83d": "a"}, r"unknown shape with the keys \\ud83d"),
    ],
)
def test_unknown_shape_is_counted_and_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    found = load(write_rows(tmp_path / "p.jsonl", {"prompt": "fine"}, row, {"prompt": "b"}, row), "train")
    assert [prompt.turns for prompt in found.prompts] == [["fine"], ["b"]]
    assert re.search(rf"2 of a shape that is not understood .the first: line 2: {reason}", found.left_out.notice)
    (tmp_path / "p.json").write_text(json.dumps([row]))
    with pytest.raises(UserError, match=rf"p\.json: 1 read, .*record 1: .*{reason}.*Accepted records: {{\"turns\""):
        load(str(tmp_path / "p.json"), "train")


@pytest.mark.parametrize("tools", ["f()", ["f"], {"a": 1}, [{"a": 1}], [], None])
def test_malformed_tools_column_is_ignored(tools: Any, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps([{"prompt": "a", "tools": tools}]))
    (prompt,) = load(str(tmp_path / "p.json"), "train").prompts
    assert prompt.messages == [user("a")]


UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"messages": [user("a"), {"role": "tool", "content": "b"}]}, "1 with a message of the role 'tool'"),
    (
        chat(user("a"), {"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}),
        "1 with tool arguments that are not JSON",
    ),
    ({"messages": [user("a"), {"role": "assistant", "tool_calls": "f"}]}, "1 with tool calls that are not a list"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "1 with a message of the role 'wizard'"),
    ({"messages": [{"role": "user", "content": None}]}, "1 with a message without text"),
    ({"messages": [user("a"), {"role": "user"}]}, "1 with a message without text"),
    ({"prompt": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "1 with image content"),
    ({"messages": [{"role": ["user"], "content": "a"}]}, "1 with a message of the role ['user']"),
    ({"conversations": [{"from": "observation", "value": "a"}]}, "1 with a message of the role 'tool'"),
    (chat(user("a"), {"role": "assistant", "content": {"text": "b"}}), "1 with a dict where text is expected"),
    ({"prompt": None}, "1 with a message without text"),
    ({"text": "a"}, f"1 {PLAIN}"),
    ({"text": " "}, "1 without text"),
    ({"prompt": 3}, "1 with an int where text is expected"),
    ({"turns": ["a", 1]}, "1 with an int where text is expected"),
    ({"prompt": " "}, "1 in which the user says nothing"),
    *(
        ({"messages": [user("a"), assistant("b")], **row}, "1 with text that is not UTF-8")
        for row in (
            {"messages": [user("nice \ud83d")]},
            chat({**SYSTEM, "content": "\ud83d"}, user("a")),
            {"messages": [user("a"), assistant("\udc00")]},
            {"tools": [{"name": "f", "description": "\ud83d"}]},
            {"id": "\ud83d"},
            {"category": "\ud83d"},
        )
    ),
    ({"turns": []}, "1 in which the user says nothing"),
    ({"messages": [assistant("a")]}, "1 in which the user says nothing"),
]


ANSWERER = [user("a"), {"role": "claude-9", "content": "b"}, user("c"), {"role": "claude-9", "content": "d"}]
WITH_RESULT = [user("a"), assistant("f()"), {"role": "ipython", "content": "1"}, assistant("b"), user("c")]


def test_answer_roles_are_checked_only_when_answers_are_kept(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", {"messages": ANSWERER}, {"messages": WITH_RESULT}, {"prompt": "fine"})
    asked = load(path, "train").prompts
    assert [[message["content"] for message in prompt.without_answers] for prompt in asked] == [
        ["a", "c"],
        ["a"],
        ["fine"],
    ]
    kept = load(path, "train", regenerate=False)
    assert kept.left_out.counts == {"with a message of the role 'claude-9'": 1, "with a message of the role 'tool'": 1}
    path = write_rows(tmp_path / "q.jsonl", {"messages": ANSWERER})
    with pytest.raises(UserError, match=r"'claude-9'.*name speakers .* or set data\.regenerate=true") as told:
        load(path, "train", regenerate=False)
    assert "max_prompt_tokens" not in str(told.value)


def test_tool_calls_in_sharegpt(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [("human", "a"), ("function_call", json.dumps(call)), ("observation", "2"), ("gpt", "b")]
    (prompt,) = load(write_rows(tmp_path / "p.jsonl", sharegpt(*turns)), "train", regenerate=False).prompts
    assert prompt.messages == [user("a"), calls(**call), {"role": "tool", "content": "2"}, assistant("b")]


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        ([{"prompt": "x" * 100}], r"To use them: raise data\.max_prompt_tokens\.$"),
        (
            [{"messages": [user("a"), {"role": "tool", "content": "b"}]}],
            r"To use them: name speakers .*regenerate=true\.$",
        ),
        ([{"prompt": "\ud83d"}], r"To use them: replace lone surrogates .half of an emoji.\.$"),
        ([{"prompt": " "}], "in which the user says nothing .the first: line 1.. Accepted records"),
    ],
)
def test_the_remedy_fits_the_reason(rows: list[dict[str, Any]], remedy: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=remedy):
        load(write_rows(tmp_path / "p.jsonl", *rows), "train", tiny_tokenizer(), max_prompt_tokens=40)
    # Every prompt of the second source is in the first.
    both = (PromptSource(source=write_rows(tmp_path / f"{name}.jsonl", {"prompt": "a"})) for name in "ab")
    with pytest.raises(UserError, match=r"1 repeated .*To use them: let them differ in system message, tools or turns"):
        load_prompts(DataSection(prompts=tuple(both)))


@pytest.mark.parametrize("written", [False, True])
def test_tool_definitions(tmp_path: Path, written: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": None, "y": [{"z": 1, "n": None}]}}}]
    row = {"prompt": "a", "tools": json.dumps(tools) if written else tools}
    (prompt,) = load(write_rows(tmp_path / "p.jsonl", row), "train").prompts
    assert prompt.tools == [{"type": "function", "function": {"name": "f", "parameters": {"y": [{"z": 1}]}}}]


@pytest.mark.parametrize(("row", "reason"), UNUSABLE)
def test_unusable_record_is_left_out_and_counted(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    path = write_rows(tmp_path / "p.jsonl", {"prompt": "fine"}, row, {"prompt": "fine as well"})
    found = load(path, "train")
    assert [prompt.turns for prompt in found.prompts] == [["fine"], ["fine as well"]]
    assert found.left_out.notice.startswith(f"Left out: {reason}.")
    with pytest.raises(UserError, match=rf"No usable prompt in .*: 1 read, {re.escape(reason)} .the first: line 1."):
        load(write_rows(tmp_path / "p.jsonl", row), "train")


def test_notice_counts_by_reason(tmp_path: Path) -> None:
    tool = {"messages": [user("a"), {"role": "tool", "content": "b"}]}
    path = write_rows(tmp_path / "p.jsonl", tool, {"prompt": "a"}, tool, {"prompt": "A."}, {"prompt": "a" * 99}, tool)
    found = load(path, "train", tiny_tokenizer(), max_prompt_tokens=40)
    assert found.left_out.notice == (
        "Left out: 3 with a message of the role 'tool', 1 repeated, 1 over 40 tokens. To keep them: name speakers "
        "system, user, assistant or tool, or set data.regenerate=true; let them differ in system message, tools or "
        "turns; raise data.max_prompt_tokens."
    )
    assert len(found.prompts) == 1


def test_prompts_refused_by_the_template_are_left_out(tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system') }}{% endif %}" + CHATML
    system = {"messages": [{"role": "system", "content": "s"}, user("a")]}
    path = write_rows(tmp_path / "p.jsonl", system, {"prompt": "b"})
    found = load(path, "train", tiny_tokenizer(template), max_prompt_tokens=40)
    assert [prompt.turns for prompt in found.prompts] == [["b"]]
    assert found.left_out.notice.startswith("Left out: 1 that the chat template refuses. To keep them: start with")


def test_shuffled_order_spans_the_file_and_extends(tmp_path: Path) -> None:
    """Among repeated and overlong prompts."""
    rows = [{"prompt": f"{i % 30} " + "long " * (20 * (i % 7 == 0))} for i in range(60)]
    path = write_rows(tmp_path / "p.jsonl", *rows)

    def drawn(limit: int | None, seed: int = 1) -> list[str]:
        found = load(path, "train", tiny_tokenizer(), max_prompt_tokens=40, limit=limit, seed=seed)
        return [prompt.turns[0] for prompt in found.prompts]

    everything = drawn(None)
    assert sorted(everything) == sorted({row["prompt"] for row in rows if "long" not in row["prompt"]})
    for limit in range(1, len(everything) + 1):
        assert drawn(limit) == everything[:limit]
    assert everything != drawn(None, seed=2)
    ids = [prompt.id for prompt in load(path, "train", limit=12, seed=1).prompts]
    assert max(int(name.split("-")[1]) for name in ids) > 40, "not the first records"


def test_file_identity_is_its_content(tmp_path: Path) -> None:
    one = find_origin(write_rows(tmp_path / "a.jsonl", {"prompt": "a"}))
    same = find_origin(write_rows(tmp_path / "b.jsonl", {"prompt": "a"}))
    other = find_origin(write_rows(tmp_path / "a.jsonl", {"prompt": "b"}))
    assert one.identity == same.identity != other.identity
    with pytest.raises(UserError, match=r"has no revisions.*data\.revision"):
        find_origin(str(tmp_path / "a.jsonl"), "main")


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    for name, text, match in [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt', r"a\.jsonl, line 2: not valid JSON"),
        ("b.jsonl", "[1]\n", r"b\.jsonl, line 1: a list, not an object"),
        ("c.jsonl", "\n", "No usable prompt .*there is none"),
        (
            "g.jsonl",
            b'\xef\xbb\xbf{"prompt": "x"}\n\n{"prompt": "\xff"}',
            r"g\.jsonl, line 3: not UTF-8 .invalid start",
        ),
        ("d.json", '{"prompt": "x"}', "holds a dict, not a list"),
        ("e.json", "[3]", r"e\.json, record 1: a int, not an object"),
        ("f.txt", "hello", r"neither .jsonl nor .json"),
    ]:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(UserError, match=match):
            load(str(tmp_path / name), "train")
    for missing in ("no.jsonl", "no.json"):
        with pytest.raises(UserError, match="Check the path"):
            load(str(tmp_path / missing), "train")


def test_duplicates_and_limit(tmp_path: Path) -> None:
    texts = ["What is 2 + 2?", "what is  2 + 2", "What is 2 - 2?", "!?", "??", "Hello", "Bye"]
    path = write_rows(tmp_path / "p.jsonl", *({"prompt": text} for text in texts))
    kept = ["What is 2 + 2?", "What is 2 - 2?", "!?", "??", "Hello", "Bye"]
    assert [prompt.turns[0] for prompt in load(path, "train").prompts] == kept
    assert [prompt.turns[0] for prompt in load(path, "train", limit=2).prompts] == kept[:2]


def test_duplicates_match_in_everything_rendered(tmp_path: Path) -> None:
    """System message, tools and every turn; answers only when they are kept."""
    documents = [{"messages": [{"role": "system", "content": f"d{i}"}, user("Summarise.")]} for i in range(9)]
    tools = [{"prompt": "Call.", "tools": [{"name": f"f{i}"}]} for i in range(9)]
    later = [{"turns": ["Hello", f"then {i}"]} for i in range(9)]
    answers = [{"messages": [user("Why?"), assistant(f"b{i}")]} for i in range(9)]
    path = write_rows(tmp_path / "p.jsonl", *documents, *tools, *later, *answers, *documents)
    found = load(path, "train")
    assert (len(found.prompts), found.left_out.counts) == (28, {"repeated": 17})
    kept = load(path, "train", regenerate=False)
    assert (len(kept.prompts), kept.left_out.counts) == (36, {"repeated": 9})


def test_long_prompts_are_left_out(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "p.jsonl", {"prompt": "x" * 100}, {"prompt": "short"})
    tokenizer = tiny_tokenizer()
    assert [prompt.turns for prompt in load(path, "train", tokenizer, max_prompt_tokens=40).prompts] == [["short"]]
    with pytest.raises(UserError, match=r"2 read, 2 over 3 tokens.*max_prompt_tokens"):
        load(path, "train", tokenizer, max_prompt_tokens=3)
    with pytest.raises(UserError, match="no chat template"):
        load(path, "train", tiny_tokenizer(None), max_prompt_tokens=40)


OLD, NEW = "1" * 40, "2" * 40


class FakeHub:
    """A data set of 50 rows with two revisions, behind `datasets` and `huggingface_hub`; records the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[dict[str, Any]] = []
        self.bytes = 1000
        self.error: Exception | None = None
        self.rows: list[dict[str, Any]] = [{"prompt": f"row {i}"} for i in range(50)]
        self.downloaded = OLD
        monkeypatch.setattr(
            huggingface_hub.HfApi, "dataset_info", lambda _self, *args, **named: self.info(*args, **named)
        )
        monkeypatch.setattr(datasets, "load_dataset", self.load_dataset)
        monkeypatch.setattr(datasets, "load_dataset_builder", self.load_dataset_builder)

    def info(self, name: str, *, revision: str | None, files_metadata: bool, timeout: float) -> Any:
        if self.error is not None:
            raise self.error
        sha = {None: NEW, "main": NEW, "v1": OLD, OLD: OLD, NEW: NEW}[revision]
        return SimpleNamespace(sha=sha, siblings=[SimpleNamespace(size=self.bytes), SimpleNamespace(size=None)])

    def load_dataset(self, name: str, config: str | None, **options: Any) -> Any:
        self.asked.append({"name": name, "config": config, **options})
        table = datasets.Dataset.from_list(self.rows)
        return table.to_iterable_dataset(num_shards=5) if options["streaming"] else table

    def load_dataset_builder(self, name: str, config: str | None) -> Any:
        return SimpleNamespace(hash=self.downloaded)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(monkeypatch)


class TestDatasets:
    def test_revision_is_pinned_and_returned(self, hub: FakeHub) -> None:
        found = load("someone/chats:small", "test", limit=2)
        assert find_origin("someone/chats:small") == Origin("someone/chats:small", commit=NEW)
        assert hub.asked == [
            {"name": "someone/chats", "config": "small", "split": "test", "streaming": False, "revision": NEW}
        ]
        assert [(prompt.id, prompt.turns) for prompt in found.prompts] == [("test-1", ["row 0"]), ("test-2", ["row 1"])]
        load("someone/chats", "test", revision="v1")
        older = find_origin("someone/chats", "v1")
        assert older.commit == OLD == hub.asked[-1]["revision"]
        assert older.identity != find_origin("someone/chats").identity

    @pytest.mark.parametrize("size", [1000, 10**12])
    def test_shuffled_order_spans_the_data_set(self, hub: FakeHub, size: int) -> None:
        """A small data set is downloaded, a large one streamed."""
        hub.bytes = size
        hub.rows += [{"prompt": "Row 7"}, {"prompt": "long " * 30}]

        def drawn(limit: int | None, seed: int = 0) -> list[str]:
            found = load(
                "someone/chats", "train", tiny_tokenizer(), max_prompt_tokens=40, limit=limit, seed=seed, revision=OLD
            )
            return [prompt.turns[0] for prompt in found.prompts]

        everything = drawn(None)
        assert len(everything) == 50 and everything[:10] != [f"row {i}" for i in range(10)]
        assert any(int(text.split()[1]) > 40 for text in everything[:10]), "also from the end"
        for limit in (1, 10, 30, 50):
            assert drawn(limit) == everything[:limit]
        assert drawn(None, seed=3) != everything
        assert {asked["streaming"] for asked in hub.asked} == {size > 1000}

    def test_first_rows_are_streamed(self, hub: FakeHub) -> None:
        found = load("someone/chats", "train", limit=3, stream=True)
        assert [prompt.turns for prompt in found.prompts] == [["row 0"], ["row 1"], ["row 2"]]
        assert hub.asked[0]["streaming"] is True

    def test_unusable_rows_are_counted(self, hub: FakeHub) -> None:
        chats = [
            [user("a")],
            [user("b"), {"role": "tool", "content": "c"}],
            [{"role": "user", "content": None}],
            [user(" ")],
            [user("a")],
        ]
        hub.rows = [{"messages": chat} for chat in chats] + [{"messages": None}]
        found = load("someone/chats", "train")
        assert [prompt.turns for prompt in found.prompts] == [["a"]]
        assert found.left_out.counts == {
            "with a message of the role 'tool'": 1,
            "with a message without text": 1,
            "in which the user says nothing": 1,
            "repeated": 1,
            "of a shape that is not understood": 1,
        }

    def test_offline_uses_the_downloaded_revision(self, hub: FakeHub) -> None:
        hub.error = ConnectionError("no network")
        assert find_origin("someone/chats").commit == OLD and len(load("someone/chats", limit=1).prompts) == 1
        assert len(load("someone/chats", limit=1, revision=OLD).prompts) == 1
        with pytest.raises(UserError, match=f"of 'someone/chats' only revision {OLD} was downloaded before, not {NEW}"):
            load("someone/chats", "train", limit=1, revision=NEW)
        with pytest.raises(UserError, match="does not answer, so revision 'v1' of 'someone/chats' cannot be looked up"):
            load("someone/chats", "train", limit=1, revision="v1")

    def test_folder_with_the_real_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        (tmp_path / "data").mkdir()
        write_rows(tmp_path / "data" / "train.jsonl", chat(user("a"), assistant("b")), chat(user("c")))
        found = load(str(tmp_path / "data"), "train")
        assert [prompt.messages for prompt in found.prompts] == [[user("a"), assistant("b")], [user("c")]]
        monkeypatch.setenv("HOME", str(tmp_path))
        assert load("~/data", "train").prompts == found.prompts
        origin = find_origin(str(tmp_path / "data"))
        assert origin.commit is None
        with pytest.raises(UserError, match=r"split 'nope': .*nope"):
            load(str(tmp_path / "data"), "nope")
        write_rows(tmp_path / "data" / "train.jsonl", {"messages": [user("d")]})
        assert origin.identity != find_origin(str(tmp_path / "data")).identity

    def test_files_of_a_folder_may_differ_in_columns(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        folder = tmp_path / "data"
        folder.mkdir()
        write_rows(folder / "train-0.jsonl", *({"prompt": f"a{i}"} for i in range(3)))
        write_rows(folder / "train-1.jsonl", *({"prompt": f"b{i}", "score": i} for i in range(3)))
        found = load(str(folder), "train").prompts
        assert [prompt.turns[0] for prompt in found] == ["a0", "a1", "a2", "b0", "b1", "b2"]
        assert len({prompt.id for prompt in found}) == 6
        drawn = load(str(folder), "train", seed=1).prompts
        assert [prompt.id for prompt in drawn] != [prompt.id for prompt in found]
        (folder / "train-1.jsonl").write_text('{"prompt": "x", "score": 1}\n{"prompt')
        with pytest.raises(UserError, match=r"train-1\.jsonl, line 2: not valid JSON"):
            load(str(folder), "train")
        (folder / "train-1.jsonl").unlink()
        (folder / "train-1.json").write_text('[{"prompt": "x", "score": 1}]')
        with pytest.raises(UserError, match="column names don't match"):
            load(str(folder), "train")

    def test_unknown_shape_is_refused_early(self, hub: FakeHub) -> None:
        hub.rows = [{"body": "a"}] * 3000
        with pytest.raises(UserError, match=r"'wiki', split 'train': 1000 read, .*row 1: unknown shape.*Accepted"):
            load("wiki", "train")

    def test_load_error_is_reported(self, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            datasets, "load_dataset", raising(FileNotFoundError("Dataset 'no/such' doesn't exist.\nmore"))
        )
        with pytest.raises(UserError, match=r"'no/such'.*FileNotFoundError: Dataset 'no/such' doesn't exist\. Give"):
            load("no/such", "train")


class TestQuestions:
    def test_questions_are_read(self, tmp_path: Path) -> None:
        rows = {"turns": ["a", "b"], "category": "c", "question_id": 81}, {"turns": ["d"]}, {"prompt": "e"}
        write_rows(tmp_path / "q.jsonl", *rows)
        questions = read_questions(tmp_path / "q.jsonl")
        assert questions == [Question(81, "c", ["a", "b"]), Question(2, "", ["d"]), Question(3, "", ["e"])]
        assert [question.turns for question in questions] == [parse_prompt(row, "").turns for row in rows], (
            "as generate"
        )
        tools = [{"name": "f"}]
        write_rows(tmp_path / "q.jsonl", {"turns": ["a", "b"], "system": "s", "tools": tools})
        (question,) = read_questions(tmp_path / "q.jsonl")
        assert question.messages(1) == [SYSTEM, user("a")] and question.tools == tools

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({}, "'turns' is missing"),
            ({"turns": []}, "'turns' is not a list of texts"),
            ({"turns": "a"}, "'turns' is not a list of texts"),
            ({"turns": ["a", " "]}, "'turns' is not a list of texts"),
            ({"prompt": " "}, "'prompt' is not a text"),
            ({"prompt": ["a"]}, "'prompt' is not a text"),
            ({"turns": ["a"], "question_id": True}, "'question_id' must be text or a whole number"),
            ({"turns": ["a"], "category": 3}, "'category' and 'system' text"),
            ({"turns": ["nice \ud83d"]}, "a question with text that is not UTF-8"),
            ({"turns": ["a"], "question_id": "\ud83d"}, "a question with text that is not UTF-8"),
        ],
    )
    def test_malformed_questions_are_refused(self, tmp_path: Path, row: dict[str, Any], reason: str) -> None:
        write_rows(tmp_path / "q.jsonl", {"turns": ["a"]}, row)
        with pytest.raises(UserError, match=rf"q\.jsonl, line 2: .*{reason}"):
            read_questions(tmp_path / "q.jsonl")

    def test_questions_from_a_pipe(self) -> None:
        """Such as /dev/stdin or <(a command)."""
        reads, writes = os.pipe()
        os.write(writes, b'{"turns": ["a"]}\n')
        os.close(writes)
        assert read_questions(Path(f"/dev/fd/{reads}")) == [Question(1, "", ["a"])]
        os.close(reads)

    def test_missing_and_empty_files_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"No file at .*q\.jsonl"):
            read_questions(tmp_path / "q.jsonl")
        (tmp_path / "q.jsonl").write_text("")
        with pytest.raises(UserError, match="holds no question"):
            read_questions(tmp_path / "q.jsonl")
