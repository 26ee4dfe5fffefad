"""Several drafters in one evaluation: names, rows, options that reach every method, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch

from headstart.api import Decoder
from headstart.data.prompts.questions import Question
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, SamplingOptions
from headstart.decode.sampling import process, warp
from headstart.decode.texts import Round
from headstart.eval.divergence import Judge
from headstart.eval.evaluate import evaluate, make_methods
from headstart.eval.figures import Prompt, Unit, method_figures
from headstart.eval.labels import HEADS, METHODS, PLAIN
from headstart.eval.methods import ALL, Ours, Run, Transformers, expand
from headstart.eval.options import EvalOptions
from headstart.eval.report import remarks
from headstart.model.model import Target
from headstart.tree.tree import Request, Tree, TreeBatch, TreeShape
from tests.decode.drafters import IdleDrafter
from tests.eval.sources import Drafts
from tests.hub.helpers import TUNING, make_heads
from tests.tiny import tiny_model

QUESTIONS = [Question(1, "", ["one two one two one two"]), Question(2, "", ["Hello"])]


@pytest.fixture(scope="module")
def decoder(tiny_target: Target) -> Decoder:
    shape = TreeShape.from_paths(TUNING["paths"])
    return Decoder(tiny_target, make_heads(tiny_target), shape, {**TUNING, "chain": 2})


def test_drafter_names() -> None:
    assert expand(["all"], "static") == tuple(name for name in ALL if name != "static")
    assert expand(["plain,transformers, ngram ,", "memory:a"], "heads") == ("ngram", "memory:a")
    assert expand([], "heads") == ()


def test_every_drafter_in_one_table(decoder: Decoder) -> None:
    options = EvalOptions(max_new_tokens=10, compare=("static,chain", "ngram", "heads+ngram"))
    results = evaluate(decoder, QUESTIONS, options)
    rows = {row["name"]: row for row in results["compare"]}
    assert list(rows) == [*METHODS, "static", "chain", "ngram", "heads+ngram"]
    assert results["settings"]["compare"] == ("static", "chain", "ngram", "heads+ngram")
    assert set(results["summary"]["tokens_per_second"]) == set(METHODS), "the summary keeps its four methods"
    for name, row in rows.items():
        assert row["drafter_error"] is None
        assert row["divergences"]["count"] == 0, name
        assert row["divergences"]["tokens_compared"] == rows["plain"]["divergences"]["tokens_compared"]
        for key in ("speedup_vs_plain", "speedup_vs_transformers"):
            of_itself = name == key.removeprefix("speedup_vs_")
            assert (row[key] is None) == of_itself, (name, key)
            assert of_itself or (row[key]["mean"] > 0 and row[key]["low"] is row[key]["high"] is None), (name, key)
    assert rows["plain"]["tokens_per_round"] == 1
    assert rows["transformers"]["tokens_per_round"] is None
    assert rows["chain"]["nodes_per_round"] <= 3
    assert results["summary"]["speedup_vs_plain"] == rows["heads"]["speedup_vs_plain"]


def test_another_drafter_may_replace_the_heads(decoder: Decoder) -> None:
    options = EvalOptions(max_new_tokens=6, baselines=False, drafter="ngram", compare=("heads",))
    results = evaluate(decoder, QUESTIONS[:1], options)
    assert [row["name"] for row in results["compare"]] == ["ngram", "plain", "heads"]
    assert results["summary"]["drafter"] == "ngram"
    assert results["summary"]["predicted_speedup"] is None, "tuning predicts heads"
    chained = evaluate(decoder, QUESTIONS[:1], EvalOptions(max_new_tokens=4, baselines=False, tree="chain"))
    assert chained["summary"]["drafter"] == "chain"


class Failing(IdleDrafter):
    """A drafter that raises in its first round."""

    name = "failing"
    max_nodes = 4

    def propose(self, session: None, roots: TreeBatch, request: Request) -> list[Tree]:
        raise ValueError("nothing to say")


@pytest.mark.drafter_fails
def test_failing_drafter_is_reported(tiny_target: Target) -> None:
    options = EvalOptions(max_new_tokens=6, baselines=False, compare=("good",))
    results = evaluate(Drafts(tiny_target, Failing(), {"good": None}), QUESTIONS, options)
    assert results["summary"]["drafter_error"] == "ValueError: nothing to say"
    assert [row["drafter_error"] for row in results["compare"]] == ["ValueError: nothing to say", None, None]
    assert results["summary"]["divergences"]["count"] == 0, "decoding continues without drafts"


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(temperature=0.8, top_p=0.5),
        SamplingOptions(temperature=1.3, top_k=3),
        SamplingOptions(temperature=1.0, min_p=0.2),
        SamplingOptions(temperature=1.0, top_k=5, repetition_penalty=3.0),
    ],
)
def test_both_loops_draw_from_the_same_tokens(tiny_target: Target, sampling: SamplingOptions) -> None:
    """First tokens of many samples: each loop draws every likely token the settings leave, and no other."""
    prompt = [5, 9, 7, 30]
    with torch.inference_mode():
        logits_V = tiny_target.model(torch.tensor([prompt])).logits[0, -1]
    sharp = warp(sampling, process(sampling, 8 * logits_V, prompt))
    left = set(sharp.nonzero()[:, 0].tolist())
    assert 1 < len(left) < 60
    scaled = Target(tiny_model("llama", vocab_size=tiny_target.vocab_size, max_length=1024), tiny_target.tokenizer, "t")
    scaled.model.lm_head.weight.data *= 8
    options = DecodeOptions(**asdict(sampling))

    def firsts(method: Any, seeds: Sequence[int]) -> set[int]:
        return {row[0] for seed in seeds for row in method.run([prompt] * 64, 1, seed).tokens}

    for method in (Ours(scaled, options=options), Transformers(scaled, options)):
        sampled = firsts(method, range(0, 640, 64))
        assert sampled <= left
        likely = {token for token in left if sharp[token] > 0.02}
        assert likely <= sampled


def test_every_method_respects_stop_tokens_and_minimum_length(decoder: Decoder) -> None:
    """The stop token occurs in the text, and is ignored before the minimum length."""
    prompt = decoder.tokens(QUESTIONS[0].turns[0])
    (plain,) = Ours(decoder.target).run([prompt], 8, 0).tokens
    place = next(place for place in range(2, 8) if plain[place] not in plain[:place])
    lookups = {"ngram": decoder.drafters("ngram")}
    for least in (0, place + 3):
        options = EvalOptions(max_new_tokens=20, stop_token_ids=[plain[place]], min_new_tokens=least)
        methods = make_methods(decoder, decoder.drafters("heads"), lookups, options)
        (text, *others) = [method.run([prompt], 20, 0).tokens[0] for method in methods.values()]
        assert others == [text] * 4
        if least:
            assert len(text) > least and plain[place] not in text[:least]
        else:
            assert text == plain[: place + 1]
    results = evaluate(decoder, QUESTIONS, options)
    assert results["settings"]["stop_token_ids"] == [plain[place]]
    assert results["settings"]["min_new_tokens"] == place + 3
    assert [row["divergences"]["count"] for row in results["compare"]] == [0] * 4


def test_minimum_length_above_the_warm_up(decoder: Decoder) -> None:
    options = EvalOptions(max_new_tokens=40, min_new_tokens=38, baselines=False)
    assert evaluate(decoder, QUESTIONS[:1], options)["settings"]["min_new_tokens"] == 38


@pytest.mark.parametrize("setting", ["stop_token_ids", "repetition_penalty", "presence_penalty"])
def test_margins_follow_the_settings(tiny_target: Target, setting: str) -> None:
    """End tokens before the minimum length and repeated tokens are not the best: the chosen token is."""
    prompt, loop = [5, 9, 7, 30], DecodeLoop(tiny_target)
    plain = loop.generate([prompt], DecodeOptions(max_new_tokens=12))[0].tokens
    options = DecodeOptions(max_new_tokens=12, stop_token_ids=plain, min_new_tokens=12)
    if setting != "stop_token_ids":
        options = DecodeOptions(max_new_tokens=12, **{setting: 1.5})
    answer = loop.generate([prompt], options)[0].tokens
    assert setting != "stop_token_ids" or not set(answer) & set(plain), "the ban has an effect"
    judge = Judge(tiny_target, options)
    for index, token in enumerate(answer):
        assert judge.margin(prompt, answer[:index], [token]) < 1e-4


@pytest.mark.parametrize("batch_size", [1, 2])
def test_transformers_penalises_alike(tiny_target: Target, batch_size: int) -> None:
    for settings in (
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 0.3, "logit_bias": {40: 1.5}},
    ):
        options = EvalOptions(max_new_tokens=12, batch_size=batch_size, compare=("same",), **settings)
        results = evaluate(Drafts(tiny_target), QUESTIONS, options)
        assert all(row["divergences"]["count"] == 0 for row in results["compare"])


def test_report_counts_prompts_without_drafts() -> None:
    kinds = ((1, True), (3, False), (1, False))
    paused, drafted, empty = (Round(nodes, 1, 0, 1, 0, paused=pause) for nodes, pause in kinds)
    prompts = [Prompt(str(number), "none", [1]) for number in range(4)]
    rounds = [[paused, paused], [drafted, paused], [empty, empty], [paused]]
    runs = {name: Run([[5]] * 4, 1.0, [[1.0]] * 4, rounds) for name in (HEADS, PLAIN)}
    figures = {name: method_figures([Unit(0, prompts, runs)], name, 0) for name in runs}
    assert (figures[HEADS]["undrafted_prompts"], figures[PLAIN]["undrafted_prompts"]) == (2, None)
    compared = [{"name": name, **figures[name]} for name in runs]
    (sentence,) = remarks({"compare": compared, "per_prompt": prompts, "settings": {}})
    assert sentence == "heads: nothing was drafted for 2 of 4 prompts, where plain decoding was expected to be faster."
