"""`evaluate` on a tiny target: schema, answers of each method, batches, turns, sampling, and bad input."""

from __future__ import annotations

import io
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.api import Decoder
from headstart.data.prompts.chat import prompt_tokens
from headstart.data.prompts.questions import Question
from headstart.decode import memory
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UserError
from headstart.eval.divergence import Judgement
from headstart.eval.evaluate import _after_document, _texts, evaluate, make_methods
from headstart.eval.labels import METHODS
from headstart.eval.methods import Ours, _TokenTimes, warm_up
from headstart.eval.options import EvalOptions
from headstart.eval.report import write_report
from headstart.model.model import Target
from headstart.replay.cuda_graphs import capture_count
from headstart.tree.tree import TreeShape
from tests.eval.sources import Drafts
from tests.hub.helpers import TUNING, make_heads
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model, tiny_tokenizer

SPEEDUPS = ("speedup_vs_plain", "speedup_vs_transformers", "speedup_vs_prompt_lookup")
QUESTIONS = [
    Question(81, "writing", ["Write a line.", "Again, shorter."]),
    Question("b", "math", ["What is one and one and one?"]),
    Question(83, "writing", ["Hello"]),
]


@pytest.fixture(scope="module")
def results(tiny_target: Target, drafter: HeadDrafter) -> dict[str, Any]:
    options = EvalOptions(max_new_tokens=12, heads_name="tiny heads")
    calibration = {"predicted": {"speedup": 1.25}, "settings": {"dtype": "float32"}}
    return evaluate(Drafts(tiny_target, drafter, calibration=calibration), QUESTIONS, options)


def test_schema(results: dict[str, Any]) -> None:
    json.dumps(results)
    assert results["schema_version"] == 2
    summary = results["summary"]
    assert set(summary["tokens_per_second"]) == set(METHODS)
    for key in SPEEDUPS:
        assert summary[key]["mean"] > 0 and summary[key]["low"] is None, "three prompts have no interval"
    assert 1 <= summary["tokens_per_round"] <= 3
    assert all(0 <= share <= 1 for share in summary["acceptance_by_position"])
    assert 1 <= len(summary["acceptance_by_position"]) <= 2
    assert set(summary["round_ms"]) == {"draft", "verify", "host"}
    assert (summary["drafter"], summary["drafter_error"]) == ("heads", None)
    assert [row["name"] for row in results["compare"]] == list(METHODS)
    assert summary["nodes_per_round"] == 4
    assert summary["predicted_speedup"] == 1.25
    for row in results["compare"]:
        assert row["ttft_ms"]["count"] == 3 and 0 < row["inter_token_ms"]["p50"] <= row["inter_token_ms"]["p95"]
    assert sum(rounds for _, rounds in summary["node_counts"]) == summary["rounds"]
    assert sum(row["rounds"] for row in results["places"]) == summary["rounds"]
    assert sum(row["prompts"] for row in results["prompt_lengths"]) == 3
    assert results["tuned"] is None, "no costs were measured"
    assert [row["category"] for row in results["categories"]] == ["writing", "math"]
    assert [row["prompts"] for row in results["categories"]] == [2, 1]
    assert results["settings"]["heads_name"] == "tiny heads"
    assert results["settings"]["questions"] == 3
    environment = results["environment"].keys()
    assert {"cpu", "cores", "threads", "dtype", "device", "date"} <= environment
    assert {"torch", "transformers", "python", "headstart"} <= environment
    assert [row["id"] for row in results["per_prompt"]] == ["81", "b", "83"]
    assert all(set(row["seconds"]) == set(METHODS) for row in results["per_prompt"])


def test_rounds_record_their_depth(tiny_target: Target, drafter: HeadDrafter) -> None:
    options = DecodeOptions(max_new_tokens=12, ignore_end=True, draft="on")
    for loop, depth in ((DecodeLoop(tiny_target, drafter), 2), (DecodeLoop(tiny_target), 0)):
        outputs = loop.generate([[5, 9], [7, 8, 9]], options)
        assert {done.depth for output in outputs for done in output.rounds} == {depth}


def rates_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compute the tokens per second of each method over these prompts."""
    tokens, seconds = ({name: sum(row[key][name] for row in rows) for name in METHODS} for key in ("tokens", "seconds"))
    return {name: tokens[name] / seconds[name] for name in METHODS}


def test_figures_follow_from_the_rows(results: dict[str, Any]) -> None:
    rates = rates_of(results["per_prompt"])
    assert results["summary"]["tokens_per_second"] == pytest.approx(rates)
    assert results["summary"]["speedup_vs_plain"]["mean"] == pytest.approx(rates["heads"] / rates["plain"])


def test_float32_answers_agree(results: dict[str, Any]) -> None:
    for row in results["compare"]:
        found = row["divergences"]
        assert found["prompts"] == 3
        assert found["count"] == found["unexplained"] == 0, row["name"]
    plain = sum(row["tokens"]["plain"] for row in results["per_prompt"])
    assert results["summary"]["divergences"]["tokens_compared"] == plain
    assert all(row["divergence"] is None for row in results["per_prompt"])


def test_both_texts_are_kept_at_a_difference() -> None:
    assert _texts(None, [1, 2, 3, 4], [1, 2, 9], 2) == {"before": " 1 2", "plain": " 3 4", "drafted": " 9"}
    assert _texts(None, [1, 2], [1], 1) == {"before": " 1", "plain": " 2", "drafted": ""}, "one answer ended"


def test_batches_omit_prompt_lookup(tiny_target: Target, drafter: HeadDrafter) -> None:
    results = evaluate(Drafts(tiny_target, drafter), QUESTIONS, EvalOptions(max_new_tokens=8, batch_size=2))
    summary = results["summary"]
    assert summary["speedup_vs_prompt_lookup"] is None
    assert summary["tokens_per_second"]["transformers_prompt_lookup"] is None
    assert [row["divergences"]["count"] for row in results["compare"]] == [0, 0, 0]
    assert [row["unit"] for row in results["per_prompt"]] == [0, 0, 1]
    assert results["per_prompt"][0]["seconds"] == results["per_prompt"][1]["seconds"], "an equal share of the batch"
    assert results["categories"][0]["speedup_vs_plain"] is None, "categories share batches"


def test_sweep_measures_other_batch_sizes(tiny_target: Target, drafter: HeadDrafter, tmp_path: Path) -> None:
    source = Drafts(tiny_target, drafter, {"ngram": NgramDrafter()})
    options = EvalOptions(max_new_tokens=8, compare=("ngram",), sweep_batch=(2, 3))
    results = evaluate(source, QUESTIONS, options)
    swept = [(row["batch_size"], row["name"]) for row in results["batches"]]
    assert swept == [(2, "heads"), (2, "ngram"), (3, "heads"), (3, "ngram")]
    for row in results["batches"]:
        ratio = row["tokens_per_second"] / row["plain_tokens_per_second"]
        assert row["speedup_vs_plain"]["mean"] == pytest.approx(ratio)
        assert row["name"] == "ngram" or row["tokens_per_round"] == results["summary"]["tokens_per_round"]
    write_report(results, tmp_path)
    for text in ((tmp_path / name).read_text() for name in ("report.html", "report.md")):
        assert "summed over rows" in text and "n-gram" in text


def test_long_prompts_end_with_the_question(tiny_target: Target, drafter: HeadDrafter, tmp_path: Path) -> None:
    """Lengths double up to the context, less the answer; documents are the other questions, with measured answers."""
    asked = [Question(number, "", [f"Tell me what {number} and {number} are."], system="Sum.") for number in range(60)]
    source = Drafts(tiny_target, drafter, {"ngram": NgramDrafter()})
    options = EvalOptions(max_new_tokens=8, compare=("ngram",), limit=2, long_context=10**6, baselines=False)
    console = Console(record=True, file=io.StringIO())
    results = evaluate(source, asked, options, console)
    swept = [(row["prompt_tokens"], row["name"], row["prompts"]) for row in results["contexts"]]
    assert swept == [(512, "heads", 2), (512, "ngram", 2), (1016, "heads", 2), (1016, "ngram", 2)]
    for row in results["contexts"]:
        ratio = row["tokens_per_second"] / row["plain_tokens_per_second"]
        assert row["speedup_vs_plain"]["mean"] == pytest.approx(ratio) and row["ttft_ms"]["count"] == 2
    assert "prompts of 512 tokens are measured; the longer ones take about" in console.export_text()
    assert results["settings"]["questions"] == 2 and len(results["per_prompt"]) == 2
    document = "".join(f"Line {number}.\n" for number in range(200))
    for length in (120, 121, 700):
        long = _after_document(asked[7], document, length, tiny_target.tokenizer)
        kept, _, question = long.turns[0].rpartition("\n\n")
        assert question == asked[7].turns[0] and document.endswith(kept)
        assert len(prompt_tokens(long.messages(1), tiny_target.tokenizer)) == length, "one token is one byte here"


def test_long_prompts_that_do_not_fit_are_left_out(
    tiny_target: Target, drafter: HeadDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = EvalOptions(max_new_tokens=8, baselines=False, long_context=1000, limit=1)
    few = evaluate(Drafts(tiny_target, drafter), QUESTIONS, options)["contexts"]
    assert [row["prompt_tokens"] for row in few] == [512, 1000]
    assert "Question 81 has" in few[0]["left_out"] and "after the texts of all others" in few[0]["left_out"]
    asked = [Question(number, "", [f"What is {number}?" * 5]) for number in range(30)]
    free = next(free for free in count(10**5, 10**4) if fits(tiny_target, 600, free))
    assert not fits(tiny_target, 1000, free)
    monkeypatch.setattr(memory, "free_bytes", lambda _: free)
    rows = evaluate(Drafts(tiny_target, drafter), asked, options)["contexts"]
    assert [(row["prompt_tokens"], row["left_out"] == "") for row in rows] == [(512, True), (1000, False)]
    assert "are usable on cpu" in rows[1]["left_out"]


def fits(target: Target, length: int, free: int) -> bool:
    """Whether a prompt and its answer fit into so much memory."""
    try:
        return memory.reserve(target, [[5] * length], 8, 4, free=free) > 0
    except UserError:
        return False


def test_sampling_compares_no_tokens(tiny_target: Target, drafter: HeadDrafter) -> None:
    results = evaluate(Drafts(tiny_target, drafter), QUESTIONS, EvalOptions(max_new_tokens=6, temperature=1.0, limit=2))
    assert results["summary"]["divergences"] == Judgement().to_json()
    assert results["summary"]["divergences"]["prompts"] == 0
    assert len(results["per_prompt"]) == 2
    rates = rates_of(results["per_prompt"])
    ratio = rates["heads"] / rates["transformers_prompt_lookup"]
    assert results["summary"]["speedup_vs_prompt_lookup"]["mean"] == pytest.approx(ratio), "sampling is still timed"


def test_transformers_is_compared_on_some_prompts(tiny_target: Target, drafter: HeadDrafter, tmp_path: Path) -> None:
    questions = [Question(number, "", [f"Say {number}."]) for number in range(10)]
    results = evaluate(Drafts(tiny_target, drafter), questions, EvalOptions(max_new_tokens=4))
    rows, asked = {row["name"]: row for row in results["compare"]}, results["per_prompt"]
    assert [row["seconds"]["transformers"] is not None for row in asked] == [True, False] * 5
    assert [rows[name]["prompts"] for name in METHODS] == [10, 10, 5, 5]
    assert rows["transformers"]["divergences"]["prompts"] == 5 and rows["heads"]["divergences"]["prompts"] == 10
    rates = rates_of(asked[::2])
    over = rows["heads"]["speedup_vs_transformers"]
    assert over["mean"] == pytest.approx(rates["heads"] / rates["transformers"]) and over["low"] is not None
    write_report(results, tmp_path)
    for text in ((tmp_path / name).read_text() for name in ("report.html", "report.md")):
        assert "transformers and prompt lookup: 5 of the 10 prompts" in text


def test_later_turns_read_the_plain_answers(tiny_target: Target, drafter: HeadDrafter) -> None:
    options = EvalOptions(max_new_tokens=6, multi_turn=True, baselines=False, batch_size=2)
    console = Console(quiet=True)
    results = evaluate(Drafts(tiny_target, drafter), QUESTIONS, options, console)
    assert results["summary"]["speedup_vs_transformers"] is None, "no baselines"
    assert [row["id"] for row in results["per_prompt"]] == ["81", "b", "81/2", "83"]
    tokenizer = tiny_target.tokenizer
    asked = [{"role": "user", "content": QUESTIONS[0].turns[0]}]
    first = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    answer = DecodeLoop(tiny_target).generate([first], DecodeOptions(max_new_tokens=6))[0].tokens
    text = tokenizer.decode(answer, skip_special_tokens=True)
    asked += [{"role": "assistant", "content": text}, {"role": "user", "content": QUESTIONS[0].turns[1]}]
    second = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert results["per_prompt"][2]["prompt_tokens"] == len(second)


def test_questions_include_their_system_message(tiny_target: Target, drafter: HeadDrafter) -> None:
    options = EvalOptions(max_new_tokens=4, multi_turn=True, baselines=False)
    asked = [Question(i, "", ["Summarise.", "Shorter."], system=f"Text {'x' * 9 * i}") for i in range(2)]
    results = evaluate(Drafts(tiny_target, drafter), asked, options, Console(quiet=True))
    messages = [{"role": "system", "content": asked[1].system}, {"role": "user", "content": "Summarise."}]
    read = tiny_target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    lengths = {row["id"]: row["prompt_tokens"] for row in results["per_prompt"]}
    assert lengths["1"] == len(read) and lengths["1/2"] > len(read) + len("Shorter.")


@pytest.mark.parametrize("batch", [1, 3])
def test_every_method_stops_at_the_end_of_the_turn(batch: int, drafter: HeadDrafter) -> None:
    """A model with a planted end token: every method stops there and keeps it."""
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model("llama", vocab_size=len(tokenizer), max_length=256), tokenizer, "tiny")
    text = [5, 9, 7, 30]
    free = DecodeLoop(target).generate([text], DecodeOptions(max_new_tokens=20, ignore_end=True))[0].tokens
    end = free[6]
    target.__dict__["end_tokens"] = frozenset({end})
    # Defaults of the model that would change the output if used.
    target.model.generation_config.repetition_penalty = 5.0
    expected = free[: free.index(end) + 1]
    for name, method in make_methods(Drafts(target), [drafter], {}, EvalOptions(batch_size=batch)).items():
        prompts = [text, [4, *text], [8, 8]][:batch]
        run = method.run(prompts, 20, seed=0)
        assert run.tokens[0] == expected, name
        for row, times in zip(run.tokens, run.token_ms, strict=True):
            assert len(times) == len(row)
            assert times == sorted(times)
            assert times[-1] <= 1e3 * run.seconds
    assert target.model.generation_config.repetition_penalty == 5.0, "the model's settings are restored"


def test_clock_counts_tokens_per_row() -> None:
    clock = _TokenTimes(2)
    clock.put(torch.zeros(2, 5))  # the prompt
    clock.put(torch.zeros(2))
    single = _TokenTimes(1)
    single.put(torch.zeros(1, 5))
    single.put(torch.zeros(1, 3))
    single.put(torch.zeros(2))
    assert len(clock.token_ms) == 1
    assert [single.token_ms.count(ms) for ms in dict.fromkeys(single.token_ms)] == [3, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"sweep_batch": (4, 0)}, "sweep_batch is 0"),
        ({"long_context": 100}, "long_context is 100.*at least 512"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"max_new_tokens": 1020}, "Question 81 .* plus 1020 new tokens exceeds"),
        ({"max_new_tokens": 500, "multi_turn": True}, "Question 81 .* plus 1000 new tokens exceeds"),
        ({"drafter": "ngrm"}, "ngram"),
        ({"compare": ("ngrm",)}, "ngram"),
        ({"verifier": "topk"}, "Did you mean 'top_k'"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": -1.0}, "min_p is -1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
    ],
)
def test_bad_options_are_refused(tiny_target: Target, options: dict[str, Any], message: str) -> None:
    decoder = Decoder(tiny_target, make_heads(tiny_target), TreeShape.from_paths(TUNING["paths"]), TUNING)
    with pytest.raises(UserError, match=message):
        evaluate(decoder, QUESTIONS, EvalOptions(**options))


def test_bad_questions_and_targets_are_refused(tiny_target: Target, drafter: HeadDrafter) -> None:
    with pytest.raises(UserError, match="no questions"):
        evaluate(Drafts(tiny_target, drafter), [])
    with pytest.raises(UserError, match="no turns"):
        evaluate(Drafts(tiny_target, drafter), [Question(1, "", [])])
    mute = Target(tiny_model("llama"), None, "mute")
    with pytest.raises(UserError, match="no chat template"):
        evaluate(Drafts(mute, drafter), QUESTIONS)


@pytest.mark.parametrize("there", [False, True])
def test_graphs_are_captured_before_measuring(there: bool) -> None:
    """On a GPU the warm-up decodes the complete first answer with drafts, so the measured run captures nothing."""
    with StandIn():
        target = Target(tiny_model("llama").to(CUDA) if there else tiny_model("llama"))
        method, prompt = Ours(target, (NgramDrafter(),), DecodeOptions(ignore_end=True)), [5, 9, 14] * 4
        asked: list[DecodeOptions] = []
        generate = method._loop.generate
        method._loop.generate = lambda prompts, options: (asked.append(options), generate(prompts, options))[1]  # type: ignore[method-assign]
        warm_up(method, [prompt], 48, 0)
        assert [(one.max_new_tokens, one.draft) for one in asked] == [(48, "on") if there else (32, "auto")]
        before = capture_count()
        method.run([prompt], 48, 0)
        assert capture_count() == before and (before > 0 or not there)
