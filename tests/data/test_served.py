"""The request log: its contents and bounds, and reading logs of engines with unusable rows."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.loading import LeftOut
from headstart.data.served.log import RequestLog, Served, prune, segments, template_version
from headstart.data.served.reading import choose_requests, read_log, to_conversation
from headstart.decoder import Decoder
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from tests.data.loading import write_rows
from tests.hub.helpers import make_heads

ONE = Served([5, 6, 7], [8, 9, 10, 11, 2], "end", 1.0)
MESSAGES = [{"role": "user", "content": "who are you"}]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in segments(folder) for line in file.read_text().splitlines()]


def exchange(choice: dict[str, Any], request: dict[str, Any] | None = None, **reply: Any) -> dict[str, Any]:
    asked = {"messages": MESSAGES, **(request or {})}
    return {"request": asked, "response": {"created": 7, "choices": [{"finish_reason": "stop", **choice}], **reply}}


def left_out_of(rows: list[Any], folder: Path, target: Target) -> tuple[list[Served], dict[str, int]]:
    folder.mkdir(exist_ok=True)
    write_rows(folder / "given.jsonl", *rows)
    served, left_out = read_log(folder, target)
    return served, left_out.counts


# -- writing -----------------------------------------------------------------------------------------------------------


def test_decoder_logs_answers_without_text(tiny_target: Target, tmp_path: Path) -> None:
    heads = make_heads(tiny_target)
    heads.version = "abc"
    decoder = Decoder(tiny_target, heads, TreeShape.chain(2))
    decoder.generate("who are you", max_new_tokens=8)
    decoder.log = RequestLog(tmp_path / "log")
    first = decoder.generate("who are you", max_new_tokens=8, source="anna")
    pair = decoder.generate_batch(["the sun", [3, 4, 5]], max_new_tokens=8, temperature=0.7, seed=3)
    stream = decoder.stream("what is rice", max_new_tokens=8, source="ben")
    words = "".join(stream)
    rows = lines(tmp_path / "log")
    assert len(rows) == 4 and stream.answer is not None and words == stream.answer.text
    assert [row["answer"] for row in rows] == [first.tokens, *(answer.tokens for answer in pair), stream.answer.tokens]
    assert [row["source"] for row in rows] == ["anna", "", "", "ben"]
    assert rows[0]["prompt"] == decoder.tokens("who are you") and rows[0]["sampling"] == {}
    assert rows[1]["sampling"]["temperature"] == 0.7 and rows[0]["heads"] == "abc" == first.heads
    assert "who" not in "".join(file.read_text() for file in segments(tmp_path / "log")), "no text is kept"
    assert {file.stat().st_mode & 0o777 for file in segments(tmp_path / "log")} == {0o600}
    other = RequestLog(tmp_path / "other")
    decoder.log, log = other, decoder.log
    for setting in ({"logit_bias": {3: 1.0}}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}):
        decoder.generate("who", max_new_tokens=2, **cast(Any, setting))
    assert [row["sampling"] for row in lines(tmp_path / "other")] == [{"processed": True}] * 3, "not learnt from"
    decoder.log = log
    served, left_out = read_log(tmp_path / "log", tiny_target)
    assert [asdict(item) for item in served] == rows and not left_out.counts


def test_filter_drops_prompts_and_names_sources(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, keep=lambda served: None if 5 in served.prompt else replace(served, source="anna"))
    log.add(ONE)
    log.add(replace(ONE, prompt=[6]))
    assert [(row["prompt"], row["source"]) for row in lines(tmp_path)] == [([6], "anna")]


def test_raising_filter_keeps_nothing(tmp_path: Path) -> None:
    log = RequestLog(tmp_path, keep=lambda served: served if served.sampling["user"] else None)
    with pytest.warns(RuntimeWarning, match="filter of the log raised KeyError"):
        log.add(ONE)
    assert not lines(tmp_path)


def test_log_is_bounded_in_bytes_and_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(json.dumps(asdict(replace(ONE, time=100.0)), separators=(",", ":"))) + 1
    log = RequestLog(tmp_path, gigabytes=40 * size / 1e9, days=2)
    for number in range(200):
        monkeypatch.setattr(time, "time", lambda number=number: 1e9 + number)
        log.add(replace(ONE, time=float(number)))
    kept = [row["time"] for row in lines(tmp_path)]
    assert kept == sorted(kept) and kept[-1] == 199.0 and 32 <= len(kept) <= 41
    assert sum(file.stat().st_size for file in segments(tmp_path)) <= 40 * size
    for file in segments(tmp_path):
        os.utime(file, (1e9, 1e9))
    monkeypatch.setattr(time, "time", lambda: 1e9 + 2.1 * 86400)
    prune(tmp_path)
    assert not segments(tmp_path)
    log.add(ONE)  # the open segment was deleted: a new one begins
    assert len(lines(tmp_path)) == 1


def test_bounds_persist_until_others_are_given(tmp_path: Path) -> None:
    def bounds() -> dict[str, float]:
        return dict(json.loads((tmp_path / "log.json").read_text()))

    RequestLog(tmp_path, gigabytes=10, days=365).add(ONE)
    RequestLog(tmp_path)
    assert bounds() == {"gigabytes": 10, "days": 365}
    RequestLog(tmp_path, days=7)
    assert bounds() == {"gigabytes": 10, "days": 7}


def test_pending_update_expires_with_its_requests(tmp_path: Path) -> None:
    RequestLog(tmp_path, days=2)
    plan = tmp_path / "update" / "plan.json"
    plan.parent.mkdir()
    plan.write_text("{}")
    prune(tmp_path)
    assert plan.exists()
    os.utime(plan, (1e9, 1e9))
    prune(tmp_path)
    assert not plan.parent.exists()


def test_full_disk_does_not_stop_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(tmp_path)
    log.add(ONE)
    write = os.write

    def full(file: int, data: bytes) -> int:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headstart.data.served.log.os.write", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        log.add(ONE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.add(ONE)  # warns once only
    monkeypatch.setattr("headstart.data.served.log.os.write", write)
    log.add(replace(ONE, time=2.0))
    assert log.lost == 2 and [row["time"] for row in lines(tmp_path)] == [1.0, 2.0], "no half line is left"


def test_threads_write_complete_lines(tmp_path: Path) -> None:
    log = RequestLog(tmp_path)
    work = [threading.Thread(target=lambda: [log.add(ONE) for _ in range(50)]) for _ in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(lines(tmp_path)) == 400


# -- reading -----------------------------------------------------------------------------------------------------------


def test_logs_of_all_engines_are_read(tiny_target: Target, tmp_path: Path) -> None:
    tokenizer = tiny_target.tokenizer
    prompt, text = prompt_tokens(MESSAGES, tokenizer), "I am the user"
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
    vllm = exchange({"token_ids": ids, "message": {"content": text}}, {"user": "anna"}, prompt_token_ids=prompt)
    sglang = {
        "request": {"input_ids": prompt},
        "response": {"output_ids": ids, "text": text, "meta_info": {"finish_reason": {"type": "stop"}}},
        "time": 7,
    }
    llama = {"request": {"prompt": prompt}, "response": {"content": text, "tokens": ids, "stop_type": "eos"}, "time": 7}
    alone = exchange({"message": {"content": text}})
    served, counts = left_out_of([vllm, sglang, llama, alone], tmp_path, tiny_target)
    assert not counts
    assert [(item.prompt, item.answer, item.finish) for item in served] == [(prompt, ids, "end")] * 4
    assert len({item.source for item in served}) == 2 and not any("anna" in item.source for item in served)


def test_stop_text_and_reasoning_come_from_token_ids(tiny_target: Target, tmp_path: Path) -> None:
    ids = tiny_target.tokenizer.encode("I am the user in")
    stopped = exchange({"token_ids": ids, "message": {"content": "I am the"}, "stop_reason": "user in"})
    thought = {"content": "the user in", "reasoning": "I am"}
    served, counts = left_out_of([stopped, exchange({"token_ids": ids, "message": thought})], tmp_path, tiny_target)
    assert [item.answer for item in served] == [ids, ids] and not counts
    assert served[0].finish == "stop"
    assert not left_out_of([exchange({"message": thought})], tmp_path, tiny_target)[0], "text alone loses reasoning"


def test_truncated_text_loses_its_last_token(tiny_target: Target, tmp_path: Path) -> None:
    text = "I am the user in"
    cut = exchange({"message": {"content": text}, "finish_reason": "length"})
    (served,), counts = left_out_of([cut], tmp_path, tiny_target)
    assert served.finish == "length" and not counts
    assert served.answer == tiny_target.tokenizer.encode(text)[:-1]


def test_unusable_rows_are_named_and_counted(tiny_target: Target, tmp_path: Path) -> None:
    good, template = asdict(ONE), template_version(tiny_target.tokenizer)
    text = {"message": {"content": "I am the user"}}
    rows = [
        good,
        {**good, "target": "another"},
        {**good, "answer": [8, 9, 10, 100_000]},
        {**good, "template": "another"},
        {**good, "template": template},
        {**good, "sampling": {"processed": True}},
        {**good, "prompt": [5] * tiny_target.max_length},
        {**good, "answer": [8]},
        {"prompt": [5]},
        [1, 2],
        exchange({**text, "token_ids": [40, 41, 42, 43]}),
        exchange(text, {"logit_bias": {"5": 1}}),
        exchange(text, {"repetition_penalty": 1.2}),
        exchange(text, {"response_format": {"type": "json_object"}}),
        exchange({**text, "finish_reason": "abort"}),
        exchange({"message": {"content": "", "tool_calls": [{}]}, "finish_reason": "tool_calls"}),
        {"request": {"messages": "?"}, "response": {"error": "busy"}},
        {"request": {"prompt": [5]}, "response": {"tokens": [8, 9, 10, 11], "stop_type": "eos"}},
        {"custom_id": "1", "response": exchange(text)["response"]},
    ]
    served, counts = left_out_of(rows, tmp_path, tiny_target)
    assert len(served) == 2
    assert counts == {
        "of another target": 1,
        "with token ids that the target does not have": 1,
        "under another chat template": 1,
        "under penalties, logits processors or a grammar": 4,
        f"over the window of {tiny_target.max_length} tokens": 1,
        "with an answer of fewer than 4 tokens": 1,
        "of a shape that is not understood": 3,
        'without a time (add "time", in seconds since 1970)': 1,
        "with token ids of another target: they do not spell the text": 1,
        "that were broken off": 2,
        "with reasoning or tool calls, and no token ids": 1,
    }


def test_damaged_lines_are_counted(tiny_target: Target, tmp_path: Path) -> None:
    whole = json.dumps(asdict(ONE)).encode()
    (tmp_path / "served-1-1.jsonl").write_bytes(whole + b"\n" + b"\xff\xfe{\n" + whole + b"\n" + whole[:20])
    served, left_out = read_log(tmp_path, tiny_target)
    assert len(served) == 2 and left_out.counts == {"lines that are damaged": 1, "lines that are half-written": 1}
    assert "line 4" in left_out.examples["lines that are half-written"]


def test_prompts_and_sources_are_capped() -> None:
    flood = [replace(ONE, source="mallory", prompt=[5, number], time=float(number)) for number in range(1000)]
    equal = [replace(ONE, time=2000.0 + number) for number in range(50)]
    others = [replace(ONE, source=f"user {number}", prompt=[6, number], time=3000.0) for number in range(5)]
    left_out = LeftOut()
    kept = choose_requests([*flood, *equal, *others], 8, left_out)
    assert [item.source for item in kept].count("mallory") == 8 and len(kept) == 14
    assert left_out.counts == {"beyond 8 of one source": 992, "that repeat a prompt": 49}
    assert kept[0].time == 992.0, "the newest of a source"


def test_served_request_becomes_a_conversation() -> None:
    made = to_conversation(replace(ONE, source="anna"))
    assert (
        list(made.tokens) == [5, 6, 7, 8, 9, 10, 11, 2]
        and made.supervised_spans == [(3, 8)]
        and made.category == "anna"
    )


def test_missing_or_empty_log_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--log FOLDER"):
        read_log(tmp_path / "none", tiny_target)
    with pytest.raises(UserError, match="is empty"):
        read_log(tmp_path, tiny_target)
    with pytest.raises(UserError, match="holds nothing"):
        RequestLog(tmp_path, days=0)
