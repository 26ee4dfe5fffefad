"""`headstart race` on toy heads: decoding, from a report, as a picture; and which words a chat shows as drafted."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headstart.decode.batch import Row
from headstart.decode.engine import Ticket
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.model.model import Target
from headstart.streaming import Answer, Inbox, Stream
from headstart.support.detokenizer import IncrementalDetokenizer
from tests.hub.helpers import export
from tests.test_cli import refused, works
from tests.tiny import tiny_tokenizer

ASKED = ("--prompt", "one two one two", "--max-new-tokens", 12, "--dtype", "float32")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target, tiny_target_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("race") / "heads"
    export(folder, Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    return folder


def test_a_race_decodes_both_ways(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/headstart", "race", "heads"])
    result = works("race", heads, *ASKED, "--draft", "on", "--out", tmp_path / "race.svg")
    plain, drafted, last, where = result.stdout.splitlines()
    assert re.fullmatch(r"plain: [\d.]+ tokens/s · τ 1.00 · 12 tokens · [\d.]+ s", plain)
    assert re.fullmatch(r"heads \+ n-gram: [\d.]+ tokens/s · τ [\d.]+ · 12 tokens · [\d.]+ s", drafted)
    assert last.startswith("heads + n-gram: ") and last.endswith("the speed of plain, the same text.")
    assert str(tmp_path / "race.svg") in where
    picture = (tmp_path / "race.svg").read_text()
    assert "<metadata>Made by: headstart race " in picture and datetime.now(UTC).strftime("%B %Y") in picture
    assert "one two one two" in picture and drafted.split(": ")[1] in picture and last in picture


def test_a_report_is_raced_again(heads: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["one two one two"]}\n{"turns": ["hello"]}\n')
    works("eval", heads, "--questions", questions, "--out", tmp_path, "--max-new-tokens", 6, "--dtype", "float32")
    shown = works("race", "--from", tmp_path, "--prompt-id", 1, "--out", tmp_path / "race.svg").stdout
    (race,) = (race for race in json.loads((tmp_path / "results.json").read_text())["replays"] if race["id"] == "1")
    seconds = race["answers"][0]["steps"][-1]["ms"] / 1e3
    assert f"· {len(race['answers'][0]['tokens'])} tokens · {seconds:.2f} s" in shown
    assert race["question"] in (tmp_path / "race.svg").read_text()
    page = (tmp_path / "report.html").read_text()
    assert page.count('class="race-lane"') == 6, "two prompts, three ways"


def test_bad_races_are_refused(heads: Path, tmp_path: Path) -> None:
    assert "needs heads or a report" in refused("race")
    assert "needs heads or a report" in refused("race", heads, "--from", tmp_path)
    assert "There is no prompt" in refused("race", heads)
    assert "The prompt is empty" in refused("race", heads, "--prompt", " ")
    assert "Nothing drafts with --drafter none" in refused("race", heads, *ASKED, "--drafter", "none")
    assert str(tmp_path / "results.json") in refused("race", "--from", tmp_path)


def test_a_stream_reports_the_drafted_part_of_a_piece(tiny_target: Target) -> None:
    tokenizer = tiny_tokenizer()
    one, two, three, four = (tokenizer.encode(text) for text in ("one", " two", " é", " four"))
    answer = Answer("one two é four", [*one, *two, *three, *four], "length", 2.0, 1.0, 1.0)
    rounds = [(one, 0), ([*two, *three], len(two)), (four, len(four))]  # the end cut off the target's own token

    def submit(inbox: Inbox) -> Ticket:
        for message in (*rounds, answer, None):
            inbox.put(message)
        ticket = Ticket(DecodeLoop(tiny_target), Row([1], DecodeOptions(seed=0), 0.0), inbox.put)
        ticket.left.set()
        return ticket

    stream = Stream(submit, IncrementalDetokenizer(tokenizer))
    shown = [(piece, piece[: stream.drafted]) for piece in stream]
    assert shown == [("one", ""), (" two é", " two"), (" four", " four")]


def test_chat_colours_accepted_drafts_when_asked(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("chat", heads, "--max-new-tokens", 12, "--dtype", "float32", "--draft", "on")
    monkeypatch.setenv("FORCE_COLOR", "1")
    without = works(*asked, stdin="one two\n\n").stdout
    coloured = works(*asked, stdin="/drafts\none two\n/drafts\n/new\none two\n\n").stdout
    escapes = re.compile(r"\x1b\[[\d;]*m")
    assert not escapes.search(without)
    assert "\x1b[1;36m" in coloured
    assert escapes.sub("", coloured) == without + without
    assert not escapes.search(coloured[len(coloured) - len(without) :]), "no longer"
