"""Replays hold the measured tokens and times, through rejected drafts, cut ends and restarts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.data.prompts.questions import Question
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Round
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.eval.evaluate import evaluate
from headstart.eval.figures import Prompt, Unit
from headstart.eval.methods import Run
from headstart.eval.options import EvalOptions
from headstart.eval.replay import SHOWN, Race, contestants, end_ms, races, replay, state_at, truncate
from headstart.model.model import Target
from tests.eval.sources import Drafts


def drafted_run(seconds: float = 0.1) -> Run:
    """A token of the prefill, two accepted drafts and a bonus token, a round that accepts another path, a cut end."""
    rounds = [
        Round(4, 3, 10.0, 20.0, 1.0, depth=2, likeliest=(5, 6)),
        Round(4, 2, 10.0, 20.0, 1.0, depth=2, likeliest=(9, 9)),
        Round(4, 3, 10.0, 20.0, 1.0, depth=2, likeliest=(11, 12)),
    ]
    scale = seconds / 0.1
    times = [10.0, 40.0, 40.0, 40.0, 70.0, 70.0, 99.0, 99.0]
    return Run([[4, 5, 6, 7, 8, 10, 11, 12]], seconds, [[scale * ms for ms in times]], [rounds])


def plain_run(seconds: float = 0.16) -> Run:
    rounds = [Round(1, 1, 0.0, 20.0, 0.0) for _ in range(7)]
    times = [1e3 * seconds * (number + 1) / 8 for number in range(8)]
    return Run([[4, 5, 6, 7, 8, 10, 11, 12]], seconds, [times], [rounds])


def unit(number: int, seconds: float = 0.16) -> Unit:
    prompt = Prompt(str(number), "", [1], f"Question {number}?")
    return Unit(number, [prompt], {"heads": drafted_run(), "plain": plain_run(seconds)})


def planted(count: int = 1) -> list[Race]:
    """Make races; the plain answer takes longer the higher the number."""
    return races([unit(number, 0.16 + 0.01 * number) for number in range(count)], None, "heads")


def test_round_is_drafted_then_decided() -> None:
    answer = replay("heads", drafted_run(), 0, None)
    assert answer["tokens"] == [4, 5, 6, 7, 8, 10, 11, 12]
    assert answer["pieces"] == [f" {token}" for token in answer["tokens"]]
    first, second, third, last = answer["steps"]
    assert (first["tokens"], first["nodes"], first["accepted"], first["ms"]) == (1, 0, 0, 10.0)
    assert second == {
        "ms": 40.0, "tokens": 3, "drafted_ms": 20.0, "nodes": 3, "kept": 2, "accepted": 2, "rejected": "",
    }  # fmt: skip
    assert third["rejected"] == " 9 9"
    assert (third["kept"], third["accepted"], third["tokens"]) == (0, 1, 2), "another path than shown was accepted"
    assert (last["kept"], last["accepted"], last["tokens"]) == (2, 2, 2), "the bonus token was cut off"


def test_clock_matches_the_measurement() -> None:
    answer = replay("heads", drafted_run(), 0, None)
    at_30, at_40, at_end = (state_at(answer, ms) for ms in (30, 40, end_ms(answer)))
    assert (at_30.tokens, at_30.drafting) == (1, answer["steps"][1])
    assert (at_40.tokens, at_40.drafting, at_40.tokens_per_round) == (4, None, 3.0)
    assert at_40.tokens_per_second(40) == 100
    assert (at_end.tokens, at_end.drafting) == (8, None)
    assert state_at(answer, 5).tokens_per_round == 1
    assert state_at(truncate(answer, 5), 1e9).tokens == 4, "complete rounds"


def test_prompts_range_from_the_highest_speedup_to_the_lowest() -> None:
    shown = planted(12)
    assert len(shown) == SHOWN
    assert [race["id"] for race in shown][:: SHOWN - 1] == ["11", "0"]
    assert [race["rank"] for race in shown][:: SHOWN - 1] == [1, 12]
    assert [answer["name"] for answer in contestants(shown[0])] == ["plain", "heads"]


def test_inconsistent_answers_are_left_out() -> None:
    """A row restarted after running out of memory has one token more than its rounds."""
    again = unit(0)
    again.runs["heads"].rounds[0].pop(0)
    assert races([again], None, "heads") == []


QUESTIONS = [Question(number, "", [text]) for number, text in enumerate(("one two one two", "hello", "write a line"))]


@pytest.fixture(scope="module")
def results(tiny_target: Target, drafter: HeadDrafter) -> dict[str, Any]:
    source = Drafts(tiny_target, drafter, {"heads+ngram": NgramDrafter()})
    return evaluate(source, QUESTIONS, EvalOptions(max_new_tokens=12, compare=("heads+ngram",), baselines=False))


def test_replays_match_the_report(tiny_target: Target, results: dict[str, Any]) -> None:
    assert json.loads(json.dumps(results["replays"])) == results["replays"]
    assert {race["id"] for race in results["replays"]} == {"0", "1", "2"}
    for race in results["replays"]:
        row = next(row for row in results["per_prompt"] if row["id"] == race["id"])
        assert race["question"] == QUESTIONS[int(race["id"])].turns[0]
        assert [answer["name"] for answer in race["answers"]] == ["plain", "heads", "heads+ngram"]
        (plain,) = DecodeLoop(tiny_target).generate(
            [tiny_target.tokenizer.apply_chat_template([{"role": "user", "content": race["question"]}],
             add_generation_prompt=True, return_dict=False)], DecodeOptions(max_new_tokens=12),
        )  # fmt: skip
        for answer in race["answers"]:
            assert answer["tokens"] == plain.tokens
            assert "".join(answer["pieces"]) == tiny_target.tokenizer.decode(plain.tokens, skip_special_tokens=True)
            assert sum(step["tokens"] for step in answer["steps"]) == len(answer["tokens"])
            assert 0 < end_ms(answer) <= 1e3 * row["seconds"].get(answer["name"], 1e9)
            for before, step in zip([None, *answer["steps"]], answer["steps"], strict=False):
                assert (before["ms"] if before else 0) <= step["drafted_ms"] <= step["ms"]
                assert step["kept"] <= step["accepted"] <= step["nodes"]
        assert race["answers"][1]["steps"][1]["nodes"] == 3
        assert {step["nodes"] for step in race["answers"][0]["steps"]} == {0}


def test_rows_of_a_batch_have_their_own_clocks(tiny_target: Target, drafter: HeadDrafter) -> None:
    options = EvalOptions(max_new_tokens=6, batch_size=3, baselines=False)
    shown = evaluate(Drafts(tiny_target, drafter), QUESTIONS, options)["replays"]
    assert {race["id"] for race in shown} == {"0", "1", "2"}
