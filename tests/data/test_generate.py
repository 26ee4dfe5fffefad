"""On-policy conversations: exact tokens, disjoint splits, resuming, budgets."""

from __future__ import annotations

import io
import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import decoders

from headstart.data.conversations import batch_generator, building
from headstart.data.conversations.batches import ConversationBatch, TimeBudget
from headstart.data.conversations.building import Splits, build_conversations
from headstart.data.conversations.masks import encode
from headstart.data.generation.generator import Continuation
from headstart.data.generation.in_process import CACHE_PEAK, InProcess, next_tokens
from headstart.data.prompts import self_prompts
from headstart.data.prompts.loading import LeftOut
from headstart.data.prompts.self_prompts import SEED_PROMPTS
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.errors import UserError
from headstart.model.model import Target, TargetOutput
from headstart.recipes.sections import DataSection
from headstart.replay.cache import TreeCache
from headstart.support.terminal import Bar
from tests.data.loading import everything, turns, write_rows
from tests.spies import spy
from tests.tiny import CHATML, tiny_model, tiny_tokenizer

DROPS_THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def given(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    return write_rows(folder / "prompts.jsonl", *rows)


def prompt_file(folder: Path, count: int = 24) -> str:
    rows = [{"turns": [f"Question number {i}: why {'so ' * (i % 5)}?"], "category": f"c{i % 3}"} for i in range(count)]
    return given(folder, rows)


def section(prompts: str, **over: object) -> DataSection:
    values = {"conversations": 10, "heldout": 4, "validation": 3, "max_new_tokens": 12, "batch_size": 5}
    return DataSection.model_validate({"prompts": prompts, **values, **over})


def told(target: Target, data: DataSection, tmp_path: Path, name: str = "data", **how: Any) -> tuple[Splits, str]:
    """Build the conversations in a folder of this name; return them and the console's text."""
    shown = io.StringIO()
    return build_conversations(target, data, tmp_path / name, Console(file=shown, width=400), **how), shown.getvalue()


def test_only_training_answers_are_int8(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = copy(tiny_target)
    wrote = spy(monkeypatch, InProcess, "continue_rows", lambda one, rows, _: (one._target is rounded, len(rows)))
    monkeypatch.setattr(Target, "in_int8", lambda _: rounded)
    for dtype in ("auto", "int8"):
        wrote.clear()
        settings = section(prompt_file(tmp_path), writing_dtype=dtype)
        splits = build_conversations(tiny_target, settings, tmp_path / dtype)
        in_full = sum(rows for is_rounded, rows in wrote if not is_rounded)
        assert sum(rows for _, rows in wrote) == 13 and len(splits.train) == 10, "held-out prompts get no answers"
        assert in_full == (13 if dtype == "auto" else 3)


def test_answers_are_the_targets_greedy_tokens(tiny_target: Target, tmp_path: Path) -> None:
    splits = build_conversations(tiny_target, section(prompt_file(tmp_path)), tmp_path / "data")
    assert len(splits.train) == 10
    for item in splits.train[:4]:
        first = item.supervised.index(True)
        answer = list(item.tokens[first:])
        assert all(item.supervised[first:]), "everything after the prompt is the target's"
        plain = DecodeLoop(tiny_target).generate([item.tokens[:first]], DecodeOptions(max_new_tokens=12))[0].tokens
        assert answer == plain
        asked = [{"role": "user", "content": item.messages[0]["content"]}]
        rendered = tiny_target.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert tiny_target.tokenizer.decode(item.tokens[:first]) == rendered


def test_sampled_fraction_applies_to_training_alone(tiny_target: Target, tmp_path: Path) -> None:
    settings = section(prompt_file(tmp_path), sampled_fraction=0.4)
    splits = build_conversations(tiny_target, settings, tmp_path / "data")
    assert [item.sampling["temperature"] for item in splits.validation] == [0.0] * 3
    assert [item.sampling["temperature"] for item in splits.train].count(1.0) == 4
    for item in splits.train + splits.validation:
        first = item.supervised.index(True)
        plain = DecodeLoop(tiny_target).generate([item.tokens[:first]], DecodeOptions(max_new_tokens=12))[0].tokens
        assert (list(item.tokens[first:]) == plain) is (item.sampling["temperature"] == 0)


def test_splits_do_not_overlap(tiny_target: Target, tmp_path: Path) -> None:
    splits = build_conversations(tiny_target, section(prompt_file(tmp_path)), tmp_path / "data")
    asked = [[item.messages[0]["content"] for item in part] for part in (splits.heldout, splits.validation)]
    asked.append([item.messages[0]["content"] for item in splits.train])
    assert [len(part) for part in asked] == [4, 3, 10]
    assert len(set().union(*asked)) == 17
    assert not any(any(item.supervised) for item in splits.heldout), "held-out prompts need no answer"


def test_resumed_run_gives_the_same(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompt_file(tmp_path)
    whole = build_conversations(tiny_target, section(prompts), tmp_path / "whole")
    calls = 0
    real = building.write_batch

    def dies(*arguments: Any, **more: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(building, "write_batch", dies)
        with pytest.raises(KeyboardInterrupt):
            build_conversations(tiny_target, section(prompts), tmp_path / "cut")
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut" / "batches").glob("*.jsonl")}
    assert len(written) == 3
    assert everything(build_conversations(tiny_target, section(prompts), tmp_path / "cut")) == everything(whole)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items()), "complete parts are kept"


def test_existing_parts_are_never_rewritten(tiny_target: Target, tmp_path: Path) -> None:
    """Also when a part was moved away, and when the batch size changes."""
    prompts = prompt_file(tmp_path, 60)
    parts = tmp_path / "data" / "batches"
    build_conversations(tiny_target, section(prompts), tmp_path / "data")
    written = {path.name: path.read_bytes() for path in parts.glob("*.jsonl")}
    moved = sorted(written)[2]
    (parts / moved).unlink()
    splits = build_conversations(tiny_target, section(prompts, conversations=14, batch_size=2), tmp_path / "data")
    assert len(splits.train) == 14
    assert all((parts / name).read_bytes() == text for name, text in written.items() if name != moved)
    asked = [item.messages[0]["content"] for part in (splits.train, splits.validation, splits.heldout) for item in part]
    assert len(set(asked)) == len(asked)


def test_time_budget_cuts_training_conversations_only(tiny_target: Target, tmp_path: Path) -> None:
    short = section(prompt_file(tmp_path, 60), conversations=50, minutes=1e-6)
    for _ in range(2):  # written, then reused
        splits, notice = told(tiny_target, short, tmp_path)
        assert len(splits.heldout) == 4
        assert len(splits.validation) == 3
        assert 1 <= len(splits.train) <= 5, "one part, then the budget is spent"
        assert f"{len(splits.train)} of the 50 conversations asked for: data.minutes=1e-06 is spent" in notice
    assert "spent" not in told(tiny_target, section(short.prompts), tmp_path)[1], "without a budget"


def test_the_time_of_earlier_sessions_counts_once_for_batches_written_at_once(tmp_path: Path) -> None:
    """Two batches of half a minute that were written side by side took half a minute of the budget."""
    batches = [ConversationBatch(number, "train", (0, 0), 30.0, 2, [], LeftOut()) for number in range(9)]

    def taken(minutes: float | None) -> int:
        clock = TimeBudget(minutes, tmp_path / "clocks.json")
        count = sum(clock.admit(batch, is_new=False) for batch in batches)
        clock.stop()
        return count

    assert taken(1.0) == 4 and taken(None) == 9
    batches[:] = [replace(batch, seconds=90.0) for batch in batches]
    assert taken(1.0) == 4, "a budget ends where it ended before"
    assert taken(2.0) == 3


def test_progress_ends_at_the_budget(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = spy(monkeypatch, Bar, "update", lambda _bar, _done, total: total)
    prompts = prompt_file(tmp_path, 60)
    build_conversations(tiny_target, section(prompts, conversations=20), tmp_path / "all")
    assert set(totals) == {4 + 3 + 20}
    totals.clear()
    spent = property(lambda clock: clock._admitted / 16 if clock._budget < math.inf else 0.0)
    monkeypatch.setattr(TimeBudget, "fraction_spent", spent)
    asked = section(prompts, conversations=20, batch_size=1, minutes=1000)
    build_conversations(tiny_target, asked, tmp_path / "some")
    assert totals[:7] == [27] * 7 and totals[7:23] == [4 + 3 + 16] * 16, "each takes a sixteenth of the time"


def test_notice_when_prompts_run_out(tiny_target: Target, tmp_path: Path) -> None:
    def notice(conversations: int) -> str:
        return told(tiny_target, section(prompt_file(tmp_path), conversations=conversations), tmp_path)[1]

    assert "no more" not in notice(16)
    ran_out = "17 of the 50 conversations asked for: there are no more prompts in"
    for _ in range(2):  # written, then reused
        assert f"{ran_out} {tmp_path / 'prompts.jsonl'}. Give more of them." in notice(50)
    assert "no more" not in notice(16), "fewer than there are"


def test_notice_when_the_cache_is_full(tiny_target: Target, tmp_path: Path) -> None:
    data = section(prompt_file(tmp_path, 60), conversations=50)
    for _ in range(2):  # written, then reused
        splits, notice = told(tiny_target, data, tmp_path, max_tokens=400)
        count = len(splits.train)
        assert 1 <= count < 50
        assert f"{count} of the 50 conversations asked for: data.cache_gigabytes=4 is full. Raise it" in notice


@pytest.fixture
def says_fine(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the target answer "Fine." to everything and end its turn."""
    answer = [*tiny_target.tokenizer.encode("Fine."), tiny_target.tokenizer.eos_token_id]
    monkeypatch.setattr(InProcess, "continue_rows", lambda _self, rows, _how: [list(answer) for _ in rows])


@pytest.mark.usefixtures("says_fine")
def test_every_user_turn_is_answered_with_exact_tokens(tiny_target: Target, tmp_path: Path) -> None:
    rows = [{"turns": [f"First {i}", f"Second {i}"]} for i in range(17)]
    splits = build_conversations(tiny_target, section(given(tmp_path, rows)), tmp_path / "data")
    for item in splits.train:
        assert [turn["content"] for turn in item.messages[1::2]] == ["Fine.", "Fine."]
        tokens, supervised = encode(item.messages, tiny_target.tokenizer)
        # The template writes the line break after an answer only when another turn follows.
        assert (list(item.tokens), list(item.supervised)) == (tokens[:-1], supervised[:-1])


@pytest.mark.usefixtures("says_fine")
@pytest.mark.parametrize("rows", [1, 5])
def test_prompts_with_one_beginning_stay_in_one_split(tiny_target: Target, tmp_path: Path, rows: int) -> None:
    """All of them are answered there, also by parts written after a restart."""
    path = given(tmp_path, [{"turns": [f"First {i % 18}", f"Second {i}"]} for i in range(72)])
    for conversations, folder in ((10, "data"), (60, "data"), (60, "at once")):
        data = section(path, conversations=conversations, batch_size=rows)
        splits, notice = told(tiny_target, data, tmp_path, folder)
        begun = [{item.messages[0]["content"] for item in part} for part in (splits.heldout, splits.validation)]
        begun.append({item.messages[0]["content"] for item in splits.train})
        assert sum(map(len, begun)) == len(set().union(*begun))
    assert len(splits.train) == 4 * len(begun[2]), "all prompts with one beginning"
    assert len(begun[0]) <= 4 and len(begun[1]) <= 3 and len(begun[2]) >= 11
    skipped = 72 - len(splits.train) - 4 - 3
    assert f"{skipped} that begin like a prompt of another split" in notice
    assert "lower data.heldout or data.validation" in notice
    assert "conversations asked for: there are no more prompts in" in notice


@pytest.mark.usefixtures("says_fine")
def test_documents_in_system_messages_count_as_beginnings(tiny_target: Target, tmp_path: Path) -> None:
    rows = [{"messages": turns("Summarise.", system=f"Text {i}")} for i in range(17)]
    splits = build_conversations(tiny_target, section(given(tmp_path, rows)), tmp_path / "data")
    asked = [item.messages[0]["content"] for part in (splits.heldout, splits.validation, splits.train) for item in part]
    assert sorted(asked) == sorted(row["messages"][0]["content"] for row in rows)


@pytest.mark.usefixtures("says_fine")
@pytest.mark.parametrize("regenerate", [False, True])
@pytest.mark.parametrize("limit", [{"max_prompt_tokens": 40}, {"max_new_tokens": 900}, {}])
def test_turn_over_limit_ends_it(tiny_target: Target, tmp_path: Path, limit: dict[str, int], regenerate: bool) -> None:
    """Also with given answers. No text is kept after the last answer, and the notice counts turns."""
    long = "and " * (60 if limit else 700)
    path = given(
        tmp_path, [{"messages": turns(f"First {i}", "One.", long, "Two.", "Third", "Three.")} for i in range(17)]
    )
    data = section(path, **{"max_prompt_tokens": 4000, **limit}, regenerate=regenerate)
    splits, notice = told(tiny_target, data, tmp_path)
    assert len(splits.train) == 10
    if not regenerate and "max_new_tokens" in limit:
        assert all(len(item.supervised_spans) == 3 for item in splits.train) and not notice
        return
    for item in splits.train:
        assert len(item.supervised_spans) == 1 and item.supervised_spans[0][1] == len(item.tokens)
        assert item.tokens[-1] == tiny_target.tokenizer.eos_token_id
    context = f"that a context of {tiny_target.max_length} tokens does not hold"
    why = "over 40 tokens" if "max_prompt_tokens" in limit else context
    assert f"Left out: 26 later turns {why}. To keep them: " in notice
    assert ("raise data.max_prompt_tokens" in notice) is ("max_prompt_tokens" in limit)


def test_cut_answers_are_counted_with_their_later_turns(tiny_target: Target, tmp_path: Path) -> None:
    """A random target never ends its turn."""
    path = given(tmp_path, [{"turns": [f"First {i}", "Second", "Third"][: 1 + 2 * (i % 2)]} for i in range(20)])
    splits, notice = told(tiny_target, section(path, conversations=19, heldout=0, validation=1), tmp_path)
    assert {len(item.messages) for item in splits.train} == {2}
    assert (
        "Left out: 20 ends of answers over 12 tokens, 20 later turns after an answer over 12 tokens. To keep them: "
        "raise data.max_new_tokens."
    ) in notice


def test_given_answer_is_cut_at_the_context(tiny_target: Target, tmp_path: Path) -> None:
    path = given(tmp_path, [{"messages": turns(f"Hi {i}", "and " * 700, "And?", "never read")} for i in range(11)])
    splits, notice = told(tiny_target, section(path, heldout=0, validation=1, regenerate=False), tmp_path)
    window = tiny_target.max_length
    assert all(len(item.tokens) == window == item.supervised_spans[-1][1] for item in splits.train)
    counted = f"a context of {window} tokens does not hold"
    assert f"11 ends of answers that {counted}, 11 later turns that {counted}" in notice


def test_rows_with_invalid_utf8_are_left_out(tiny_target: Target, tmp_path: Path) -> None:
    path = Path(prompt_file(tmp_path))
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "nice \ud83d"}) + "\n" + json.dumps({"prompt": "x", "id": "\udc00"}))
    splits, notice = told(tiny_target, section(str(path), conversations=30), tmp_path)
    assert len(splits.train) == 17 and "2 with text that is not UTF-8" in notice


def _conversations_in(text: str | bytes) -> int:
    return text.count('"tokens"') if isinstance(text, str) else text.count(b'"tokens"')


def test_restart_parses_no_conversation(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, folder = section(prompt_file(tmp_path)), tmp_path / "data"
    before = everything(build_conversations(tiny_target, data, folder))
    with monkeypatch.context() as patch:
        parsed = spy(patch, json, "loads", _conversations_in)
        splits = build_conversations(tiny_target, data, folder)
    assert sum(parsed) == 0 and everything(splits) == before
    part = sorted((folder / "batches").glob("*-train.jsonl"))[0]
    part.write_text(part.read_text()[:-9])
    with pytest.raises(UserError, match=rf"{part.name} is not a batch of conversations .it is damaged.*Move it away"):
        build_conversations(tiny_target, data, folder)
    part.write_text("{}\n")
    with pytest.raises(UserError, match=rf"{part.name} is not a batch of conversations"):
        build_conversations(tiny_target, data, folder)


def test_every_split_of_a_sorted_file_has_all_kinds(tiny_target: Target, tmp_path: Path) -> None:
    rows = [{"turns": [f"{'ab'[i // 30]}: question {i}"], "category": "ab"[i // 30]} for i in range(60)]
    sizes = {"conversations": 36, "heldout": 12, "validation": 12, "max_new_tokens": 8, "batch_size": 32}
    splits = build_conversations(tiny_target, section(given(tmp_path, rows), **sizes), tmp_path / "data")
    for part in (splits.heldout, splits.validation, splits.train):
        assert {item.category for item in part} == {"a", "b"}


@pytest.mark.usefixtures("says_fine")
def test_duplicate_costs_no_extra_batch(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate_prompts(_target: Target, count: int, _breadth: str, seed: int, **_rest: Any) -> Any:
        return [("Why?" if i == 0 else f"Question {seed} {i}", "why") for i in range(count)]

    monkeypatch.setattr(batch_generator, "generate_prompts", generate_prompts)
    sizes = {"conversations": 40, "heldout": 8, "validation": 8, "batch_size": 32}
    splits = build_conversations(tiny_target, section("self", **sizes), tmp_path / "data")
    assert [len(part) for part in (splits.heldout, splits.validation, splits.train)] == [8, 8, 40]
    assert [path.name for path in (tmp_path / "data" / "batches").glob("*-validation*")] == ["00001-validation.jsonl"]


def test_given_answers_can_be_kept(tiny_target: Target, tmp_path: Path) -> None:
    path = given(tmp_path, [{"messages": turns(f"Hi {i}", f"Hello {i}!")} for i in range(20)])
    splits = build_conversations(tiny_target, section(path, regenerate=False), tmp_path / "data")
    item = splits.train[0]
    said = [token for token, mine in zip(item.tokens, item.supervised, strict=True) if mine]
    assert tiny_target.tokenizer.decode(said) == item.messages[1]["content"] + "<|im_end|>"


def test_rewritten_given_answers_are_counted_and_not_learned(tiny_target: Target, tmp_path: Path) -> None:
    target = Target(tiny_target.model, tiny_tokenizer(DROPS_THINKING), "thinking")
    answers = ["No" if i % 3 else "<think>so</think>Yes" for i in range(27)]
    rows = [{"messages": turns(f"Hi {i}", answer, "And?", "Bye.")} for i, answer in enumerate(answers)]
    sizes = {"conversations": 26, "heldout": 0, "validation": 1, "batch_size": 27, "regenerate": False}
    data = section(given(tmp_path, rows), **sizes)
    splits, notice = told(target, data, tmp_path)
    learned = {
        (item.messages[1]["content"], *(target.tokenizer.decode(item.tokens[a:b]) for a, b in item.supervised_spans))
        for item in splits.train
    }
    assert learned == {("No", "No<|im_end|>", "Bye.<|im_end|>"), ("<think>so</think>Yes", "Bye.<|im_end|>")}
    assert "Left out: 9 earlier answers that the chat template rewrites. To keep them: set data." in notice

    opens = Target(tiny_target.model, tiny_tokenizer(CHATML.replace("assistant\n'", "assistant\n<think>\n'")), "opens")
    with pytest.raises(
        UserError, match=r"No training conversation .* Left out: 27 in which the chat template rewrites"
    ):
        build_conversations(opens, data, tmp_path / "none")


@pytest.mark.usefixtures("says_fine")
def test_turn_refused_by_the_template_ends_only_its_conversation(tiny_target: Target, tmp_path: Path) -> None:
    refuses = "{% for m in messages %}{% if 'bad' in m['content'] %}{{ raise_exception('bad') }}{% endif %}{% endfor %}"
    target = Target(tiny_target.model, tiny_tokenizer(refuses + CHATML), "picky")
    rows = [{"turns": [f"First {i}", "bad" if i % 2 else "good"]} for i in range(17)]
    splits = build_conversations(target, section(given(tmp_path, rows)), tmp_path / "data")
    assert len(splits.train) == 10
    for item in splits.train:
        assert len(item.messages) == (2 if int(item.id.split("-")[1]) % 2 == 0 else 4)


def test_shared_system_message_does_not_make_prompts_equal(tiny_target: Target, tmp_path: Path) -> None:
    rows = [{"messages": turns(f"Hi {i}", system="Be brief.")} for i in range(17)]
    splits = build_conversations(tiny_target, section(given(tmp_path, rows)), tmp_path / "data")
    assert len(splits.train) == 10
    assert splits.train[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_too_few_prompts_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No training conversation could be written"):
        build_conversations(tiny_target, section(prompt_file(tmp_path, 3)), tmp_path / "data")
    with pytest.raises(UserError, match=r"No usable prompt in .*: 3 read, 3 over 8 tokens"):
        build_conversations(tiny_target, section(prompt_file(tmp_path, 3), max_prompt_tokens=8), tmp_path / "long")


def test_self_prompts_start_with_their_seed_prompt(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_prompts, "acceptable", lambda text, special: True)
    # More end tokens: a random model seldom writes the only one.
    monkeypatch.setitem(vars(tiny_target), "end_tokens", frozenset(range(0, tiny_target.vocab_size, 9)))
    prompts = self_prompts.generate_prompts(tiny_target, 12, "broad", seed=1)
    assert len(prompts) > 6 and len({category for _, category in prompts}) > 3
    starts = {
        category: [text.split("{topic}")[0].strip() for text in texts] for category, texts in SEED_PROMPTS.items()
    }
    assert all(any(text.startswith(start) for start in starts[category]) for text, category in prompts)
    assert prompts == self_prompts.generate_prompts(tiny_target, 12, "broad", seed=1)
    assert prompts != self_prompts.generate_prompts(tiny_target, 12, "broad", seed=2)


def test_unended_self_prompts_are_left_out(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_prompts, "acceptable", lambda text, special: True)
    monkeypatch.setattr(self_prompts, "_MAX_PROMPT_TOKENS", 3)
    monkeypatch.setitem(vars(tiny_target), "end_tokens", frozenset())
    assert self_prompts.generate_prompts(tiny_target, 4, "broad", seed=1) == []


def test_blank_after_a_seed_prompt_is_kept(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """SentencePiece tokenizers drop the blank before the first word they decode."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    target = Target(tiny_target.model, tokenizer)
    answer = [*tokenizer.encode(" of the sea"), tokenizer.eos_token_id]
    assert tokenizer.decode(answer[:-1]) == "of the sea"
    monkeypatch.setattr(InProcess, "continue_rows", lambda _self, rows, _how: [answer for _ in rows])
    monkeypatch.setattr(self_prompts, "SEED_PROMPTS", {"writing": ["Write a poem"]})
    ((text, _),) = self_prompts.generate_prompts(target, 1, "broad", seed=0)
    assert text == "Write a poem of the sea"


def test_seed_prompts_cover_many_kinds() -> None:
    assert len(SEED_PROMPTS) >= 10


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Explain how a bicycle stays upright.", True),
        ("Hi", False),
        ("What is <|im_end|> for you", False),
        ("word " * 400, False),
        ("a b " * 20, False),
        ("broken \ufffd characters in this text", False),
    ],
)
def test_quality_filter(text: str, good: bool) -> None:
    assert self_prompts.acceptable(text, ["<|im_end|>"]) is good


def test_target_without_template_cannot_prompt_itself(tiny_target: Target) -> None:
    class Bare:
        chat_template = None

    with pytest.raises(UserError, match="no chat template"):
        self_prompts.user_prefix(Bare())


def sample_rows(target: Target, rows: list[list[int]], **how: Any) -> list[list[int]]:
    return InProcess(target).continue_rows(rows, Continuation(**how))


def test_rows_of_a_batch_are_independent(tiny_target: Target) -> None:
    rows = [[5, 6, 7], [8] * 9, [9, 10]]
    common: dict[str, Any] = {"max_new_tokens": 10, "top_p": 1.0, "ends": frozenset[int](), "seed": 0}
    together = sample_rows(tiny_target, rows, temperatures=[0.0] * 3, **common)
    for row, tokens in zip(rows, together, strict=True):
        assert sample_rows(tiny_target, [row], temperatures=[0.0], **common)[0] == tokens


SAMPLED: dict[str, Any] = {"max_new_tokens": 10, "top_p": 0.95, "ends": frozenset({1}), "seed": 3}


def test_sampled_row_does_not_depend_on_other_rows(tiny_target: Target) -> None:
    rows = [[5, 6, 7], [8] * 9, [9, 10]]
    warm = sample_rows(tiny_target, rows, temperatures=[1.0] * 3, **SAMPLED)
    mixed = sample_rows(tiny_target, [*rows[:2], [4] * 30], temperatures=[1.0, 0.0, 1.0], **SAMPLED)
    assert warm[0] == mixed[0]
    assert warm[1] != mixed[1], "greedy"
    assert sample_rows(tiny_target, [rows[0]] * 2, temperatures=[1.0] * 2, **SAMPLED)[0] == warm[0]
    twins = sample_rows(tiny_target, [rows[0]] * 2, temperatures=[1.0] * 2, **SAMPLED)
    assert twins[0] != twins[1], "each row draws for itself"


@pytest.mark.parametrize(
    ("error", "late"),
    [(torch.cuda.OutOfMemoryError("x"), True), (MemoryError(), False), (RuntimeError("can't allocate memory"), True)],
)
def test_batch_over_memory_is_written_in_halves(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch, error: Exception, late: bool
) -> None:
    """Memory runs out at the allocation of the cache, or while decoding. The answers stay the same."""
    rng = random.Random(0)
    rows = [[rng.randrange(3, 200) for _ in range(rng.randrange(2, 9))] for _ in range(11)]
    temperatures = [float(i % 2) for i in range(11)]
    expected = sample_rows(tiny_target, rows, temperatures=temperatures, **SAMPLED)

    tried: list[int] = []
    new_cache, forward = Target.new_cache, Target.forward_tree

    def small(self: Target, rows: int, capacity: int) -> TreeCache:
        tried.append(rows)
        if rows > 3 and not late:
            raise error
        return new_cache(self, rows, capacity)

    def breaks(self: Target, cache: TreeCache, tree: Any, aux_layers: Any = ()) -> TargetOutput:
        if cache.rows > 3 and late and max(cache.lengths) > 12:
            raise error
        return forward(self, cache, tree, aux_layers)

    monkeypatch.setattr(Target, "new_cache", small)
    monkeypatch.setattr(Target, "forward_tree", breaks)
    writer = InProcess(tiny_target)
    for _ in range(2):
        assert writer.continue_rows(rows, Continuation(temperatures=temperatures, **SAMPLED)) == expected
    assert tried.count(11) == 1, "a size that failed is not tried again"


def test_one_row_over_memory_is_a_user_error(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    failure: Exception = MemoryError()

    def fails(*_arguments: Any) -> None:
        raise failure

    monkeypatch.setattr(Target, "new_cache", fails)
    with pytest.raises(UserError, match=r"A text of 12 tokens does not fit the memory of cpu.*data\.max_new_tokens"):
        sample_rows(tiny_target, [[5, 6]] * 4, temperatures=[0.0] * 4, **SAMPLED)
    failure = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        sample_rows(tiny_target, [[5, 6]] * 4, temperatures=[0.0] * 4, **SAMPLED)


def test_batch_over_free_memory_is_split_up_front(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[5, 6, 7 + i] for i in range(8)]
    expected = sample_rows(tiny_target, rows, temperatures=[0.0] * 8, **SAMPLED)
    tried = spy(monkeypatch, Target, "new_cache", lambda _target, rows, capacity: rows * capacity)
    free = 100 * tiny_target.kv_bytes_per_token
    monkeypatch.setattr("headstart.data.generation.in_process.free_bytes", lambda _device: free)
    assert sample_rows(tiny_target, rows, temperatures=[0.0] * 8, **SAMPLED) == expected
    assert max(tried) * CACHE_PEAK <= 100 / 2, "two workers share a CPU"

    tried.clear()
    monkeypatch.setattr(Target, "spare_bytes", 1000 * free)  # freed by the batch before
    assert sample_rows(tiny_target, rows, temperatures=[0.0] * 8, **SAMPLED) == expected
    assert max(tried) > 100, "all rows at once"


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt_neox", "gpt2"])
def test_common_prefix_is_read_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also past the sliding window: every row continues as it does alone."""
    target = Target(tiny_model(kind, vocab_size=61))
    target.record()  # recording itself reads a text
    rng = torch.Generator().manual_seed(0)
    words = torch.randint(3, 61, (40,), generator=rng).tolist()
    rows = [words[:12] + words[20:23], words[:12] + words[30:], words[:13], words[:12] + words[33:]]
    read = spy(monkeypatch, Target, "prefill", lambda _target, _cache, rows, *_: list(map(len, rows)))
    common: dict[str, Any] = {"max_new_tokens": 9, "top_p": 1.0, "ends": frozenset({1}), "seed": 0}
    together = sample_rows(target, rows, temperatures=[0.0] * 4, **common)
    assert read == [[12], [1, 3, 7, 10]], "shortest first"
    for row, tokens in zip(rows, together, strict=True):
        assert sample_rows(target, [row], temperatures=[0.0], **common)[0] == tokens


def test_sampling_follows_the_temperature(tiny_target: Target) -> None:
    rows = [[5, 6, 7]] * 400
    common: dict[str, Any] = {"max_new_tokens": 1, "ends": frozenset[int](), "seed": 0}
    cold = sample_rows(tiny_target, rows, temperatures=[0.0] * 400, top_p=1.0, **common)
    warm = sample_rows(tiny_target, rows, temperatures=[1.0] * 400, top_p=1.0, **common)
    tight = sample_rows(tiny_target, rows, temperatures=[1.0] * 400, top_p=1e-6, **common)
    assert len({row[0] for row in cold}) == 1
    assert tight == cold
    cache = tiny_target.new_cache(1, 8)
    logits_V = tiny_target.prefill(cache, rows[:1]).logits_BTV[0, 0].double()
    top = logits_V.topk(64)
    probs = dict(zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True))
    drawn = Counter(row[0] for row in warm)
    assert set(drawn) <= set(probs)
    # Pearson's statistic over the ten likeliest tokens and the rest: at 10 degrees of freedom, p = 0.001 is 29.6.
    leading = sorted(probs, key=lambda token: -probs[token])[:10]
    pairs = [(drawn[token], 400 * probs[token]) for token in leading]
    pairs.append((400 - sum(found for found, _ in pairs), 400 - sum(wanted for _, wanted in pairs)))
    assert sum((found - wanted) ** 2 / wanted for found, wanted in pairs) < 29.6


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_draws_follow_the_nucleus(top_p: float) -> None:
    logits_V = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.9])
    count = 20_000
    numbers = [(index + 0.5) / count for index in range(count)]
    drawn_B = torch.tensor(next_tokens(logits_V.expand(count, -1), [1.5] * count, top_p, numbers))
    probs_V = (logits_V.double() / 1.5).softmax(-1)
    order = probs_V.argsort(descending=True)
    before = probs_V[order].cumsum(-1) - probs_V[order]
    probs_V[order[before >= top_p]] = 0
    shares_V = torch.bincount(drawn_B, minlength=5) / count
    assert torch.allclose(shares_V.double(), probs_V / probs_V.sum(), atol=2e-4)
