"""Tuning chooses the best tree, weights and calibration for the measured acceptance and costs."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import pytest
import torch

import headstart.tuning.tune as tune_module
from headstart.decode.costs import Costs, Measured
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.heads import int8_weights
from headstart.heads.base import family, make_config
from headstart.heads.medusa import head_hidden
from headstart.model.model import Target
from headstart.pipeline.actions import describe_kinds
from headstart.recipes.sections import TuneSection
from headstart.replay.patch import FINAL
from headstart.tree.calibration import Calibration
from headstart.tree.tree import TreeShape
from headstart.tuning.acceptance import Drafts, Text, measure_drafts, sampled_answers
from headstart.tuning.calibrate import fit_calibration
from headstart.tuning.stopwatch import Drafting
from headstart.tuning.tune import Tuning, by_kind, choose, path_values, tune
from tests.data.test_store import poison
from tests.tiny import tiny_model

TOKENS = [3, 50, 7, 8, 20, 44, 9, 11]
SECTION = TuneSection(widths=(1, 4), context=16, max_nodes=6, max_rank=4)


def trained_like(target: Target) -> torch.nn.Module:
    heads = family("medusa")(make_config({"family": "medusa", "num_heads": 3, "draft_vocab_size": 40}, target))
    heads.set_draft_vocabulary(torch.arange(5, 45))
    heads.warm_start(target)
    return heads


def test_no_tree_of_equal_size_is_accepted_more() -> None:
    rng = random.Random(0)
    ranks = torch.tensor([[rng.choice((0, 0, 0, 1, 1, 2)), rng.choice((0, 0, 1, 2))] for _ in range(400)])
    values = path_values(ranks, max_rank=3)
    ordered = sorted(values, key=lambda path: (-values[path], len(path), path))
    for size in (1, 2, 3, 4):
        chosen = ordered[:size]
        assert TreeShape.from_paths(chosen).size == size + 1, "the best nodes form a tree"
        best = max(
            sum(values[path] for path in paths)
            for paths in itertools.combinations(values, size)
            if TreeShape.from_paths(paths).size == size + 1
        )
        assert sum(values[path] for path in chosen) == pytest.approx(best)


def test_costs_decide_the_size() -> None:
    accept_probs = [1.0, 1.6, 1.96, 2.16]
    free, _ = choose(accept_probs, Costs((1, 8), (10.0, 10.0)), [0, 1, 2, 2])
    steep, curve = choose(accept_probs, Costs((1, 2, 4), (10.0, 20.0, 40.0)), [0, 1, 2, 2])
    assert free == 4
    assert steep == 1, "not drafting is a choice"
    assert curve[1] == [2.0, pytest.approx(0.8)]


def test_expensive_levels_make_wide_trees() -> None:
    accept_probs, flat = [1.0, 1.5, 1.9, 2.1], ((1, 8), (10.0, 10.0))
    assert choose(accept_probs, Costs(*flat, 3.0, 0.0, 3), [0, 1, 1, 3])[0] == 4
    assert choose(accept_probs, Costs(*flat, 9.0, 3.0, 3), [0, 1, 1, 3])[0] == 3


def test_ranks_of_the_true_tokens(target: Target, heads: Any) -> None:
    tokens, text = TOKENS, Text.of(TOKENS[:2], TOKENS[2:])
    ranks = measure_drafts(target, heads, [text], max_rank=10).ranks_OK
    assert ranks.shape == (3, 3)  # origins 1, 2, 3 see all three steps supervised
    final = target.hidden_states([tokens], (FINAL,))[0][FINAL]
    for origin, row in zip((1, 2, 3), ranks.tolist(), strict=True):
        for step in range(3):
            *body, lm_head = heads.parts()[step]
            logits = (head_hidden(final[origin][None], *body) @ lm_head.T)[0]
            truth = tokens[origin + step + 2]
            order = heads.draft_to_target_D[logits.argsort(descending=True)].tolist()
            expected = order.index(truth) if truth in order else 10
            assert row[step] == min(expected, 10)


@pytest.fixture
def heads(target: Target) -> Any:
    return trained_like(target)


@pytest.fixture(scope="module")
def four_texts() -> list[Text]:
    rng = random.Random(1)
    return [Text([rng.randrange(61) for _ in range(20)], [False] * 6 + [True] * 14) for _ in range(4)]


@pytest.fixture(scope="module")
def tuned(target: Target, four_texts: list[Text]) -> dict[str, Any]:
    return tune(target, trained_like(target), four_texts, SECTION).to_json()


@pytest.fixture
def found(tuned: dict[str, Any]) -> Tuning:
    """A tuning of random heads; each test gets a copy to change."""
    return Tuning.from_json(copy.deepcopy(tuned))


def test_tuning_round_trips_and_predicts_no_slowdown(found: Tuning) -> None:
    assert found.predicted["speedup"] >= 1.0
    assert found.shape.size <= 6
    assert found.verify_ms[0] <= found.verify_ms[1]
    assert Tuning.from_json(found.to_json()) == found


@pytest.mark.parametrize(("in_8_bits", "chosen"), [(3.0, True), (3.8, False), (5.0, False)])
def test_faster_weights_are_chosen(in_8_bits: float, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_weights, "_MIN", 1)
    target = Target(tiny_model("llama", vocab_size=64))
    heads = family("medusa")(make_config({"family": "medusa", "num_heads": 3}, target))
    heads.warm_start(target)

    def is_packed() -> bool:
        return any(hasattr(weight, "int8") for weight in heads.parameters())

    timed = "headstart.tuning.stopwatch.draft_ms"
    monkeypatch.setattr(timed, lambda *_: Drafting(in_8_bits if is_packed() else 4.0, 1.0, 0.1))
    found = tune(target, heads, texts_of(1), SECTION)
    assert found.packed is chosen and found.draft_ms == (in_8_bits if chosen else 4.0)
    assert not is_packed()
    found = Tuning.from_json(json.loads(json.dumps(found.to_json())))
    found.paths = ((0,),)
    assert found.drafter(heads) is not None and is_packed() is chosen


def test_heads_without_int8_are_timed_once_per_turn(
    target: Target, heads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns before and two after the target is measured, so that a slow phase does not affect all."""
    times = iter([4.0, 4.5, 2.0, 3.0])
    monkeypatch.setattr("headstart.tuning.stopwatch.draft_ms", lambda *_: Drafting(next(times), 1.0, 0.1))
    found = tune(target, heads, texts_of(1), SECTION)  # heads too small for int8
    assert not found.packed and found.draft_ms == 2.0 and next(times, None) is None


def test_not_finite_text_is_left_out(target: Target, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [Text.of(tokens[:2], tokens[2:]) for tokens in (TOKENS, TOKENS[::-1])]
    poison(target, monkeypatch, TOKENS[::-1])
    with pytest.warns(UserWarning, match="Text 1 .* not finite"):
        drafts = measure_drafts(target, heads, texts, max_rank=5)
    assert torch.equal(drafts.ranks_OK, measure_drafts(target, heads, texts[:1], max_rank=5).ranks_OK)


def test_sampling_probabilities_by_hand(target: Target, heads: Any) -> None:
    """The target's probability of each draft; for a sampled child, its overlap with q after the better drafts are
    removed."""
    tokens, text = TOKENS, Text.of(TOKENS[:2], TOKENS[2:])
    drawn, drafts = (measure_drafts(target, heads, [text], max_rank=5, sampling=way) for way in (True, False))
    likely, sampled = drawn.likely_OKR, drawn.sampled_OKR
    assert likely is not None and sampled is not None
    assert likely.shape == drawn.log_probs_OKR.shape == (3, 3, 5) and sampled.shape == (3, 3, 4)
    torch.testing.assert_close(drawn[:2], drafts[:2])
    final = target.hidden_states([tokens], (FINAL,))[0][FINAL]
    for row, origin in enumerate((1, 2, 3)):
        for step in range(3):
            *body, lm_head = heads.parts()[step]
            logits_D = (head_hidden(final[origin][None], *body) @ lm_head.T)[0]
            best = logits_D.topk(5).indices
            own_D = target.lm_head(final[origin + step + 1]).softmax(-1)[heads.draft_to_target_D]
            torch.testing.assert_close(likely[row, step], own_D[best], rtol=1e-4, atol=1e-6)
            for rank in range(4):
                q_draft_D = logits_D.softmax(-1)
                q_draft_D[best[:rank]] = 0
                shared = torch.minimum(own_D, q_draft_D / q_draft_D.sum())
                torch.testing.assert_close(sampled[row, step, rank], shared.sum(), rtol=1e-4, atol=1e-6)


def test_sampling_is_calibrated_on_sampled_answers(target: Target, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of(16, answer=20)
    seen: list[tuple[list[int], list[bool]]] = []
    honest = tune_module.measure_drafts

    def watched(*args: Any, sampling: bool = False) -> Any:
        if sampling:
            seen.extend((text.tokens, text.supervised) for text in args[2])
        return honest(*args, sampling=sampling)

    monkeypatch.setattr(tune_module, "measure_drafts", watched)
    found = tune(target, heads, texts, SECTION)
    prompts = [text.tokens[:6] for text in texts]
    answers = DecodeLoop(target).generate(prompts, DecodeOptions(20, temperature=1.0, seed=0))
    assert seen == [
        (prompt + answer.tokens, [False] * 6 + [True] * len(answer.tokens))
        for prompt, answer in zip(prompts, answers, strict=True)
        if len(answer.tokens) > heads.draft_steps + 1
    ]
    again = Tuning.from_json(json.loads(json.dumps(found.to_json())))
    again.paths = ((0,),)
    drafter = again.drafter(heads, "dynamic")
    assert drafter is not None and drafter._sampled is not None and drafter._sampled.sampled is not None
    assert [list(knots) for knots in drafter._sampled.sampled.accepted] == found.calibration["sampled_drawn_accepted"]


def texts_of(count: int, answer: int = 14) -> list[Text]:
    texts = [[3 + (7 * i + j) % 58 for j in range(6 + answer)] for i in range(count)]
    return [Text.of(tokens[:6], tokens[6:]) for tokens in texts]


def test_short_sampled_answers_are_joined_by_the_given_ones(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of(3)
    given = [(text.tokens, text.supervised) for text in texts]

    def found(length: int) -> list[tuple[list[int], list[bool]]]:
        monkeypatch.setattr(DecodeLoop, "generate", lambda _, prompts, __: [Generation([2] * length) for _ in prompts])
        return [(text.tokens, text.supervised) for text in sampled_answers(target, texts, minimum=5)]

    assert found(4) == given
    few = [(tokens[:6] + [2] * 5, [False] * 6 + [True] * 5) for tokens, _ in given]
    assert found(5) == [*few, *given], "15 tokens are too few to calibrate on"
    assert len(found(99)) == 3 and found(99)[0][0] == given[0][0][:6] + [2] * 99


def test_answers_are_sampled_in_batches_that_fit(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def generate(self: DecodeLoop, prompts: list[list[int]], options: DecodeOptions) -> list[Generation]:
        asked.append(len(prompts))
        if len(prompts) > room:
            raise UserError("Too many.", "Fewer.")
        return [Generation([options.seed + row] * 20) for row in range(len(prompts))]

    monkeypatch.setattr(DecodeLoop, "generate", generate)
    room = 24
    at_once = [text.tokens for text in sampled_answers(target, texts_of(40), minimum=5)]
    assert asked == [24] and at_once[20] == texts_of(40)[20].tokens[:6] + [20] * 20, "one seed per row"
    room, asked[:] = 5, []
    assert [text.tokens for text in sampled_answers(target, texts_of(40), minimum=5)] == at_once
    assert asked == [24, 12, 6, *[3] * 8]
    room = 0
    with pytest.raises(UserError, match="Too many"):
        sampled_answers(target, texts_of(40), minimum=5)


def test_prompts_without_room_for_an_answer_are_left_out(target: Target) -> None:
    long = Text([3] * target.max_length, [False] * (target.max_length - 3) + [True] * 3)
    texts = [long, *texts_of(20)]
    found = sampled_answers(target, texts, minimum=1)
    assert all(text.tokens[:6] in [one.tokens[:6] for one in texts_of(20)] for text in found[:-21])
    assert len(found) >= 20 and max(sum(text.supervised) for text in found) == 14


def test_trees_use_the_calibration_of_the_temperature(found: Tuning, target: Target, heads: Any) -> None:
    """Greedy acceptance at temperature 0, sampled acceptance from 1 on, interpolated in between."""
    found.paths = ((0,),)
    found.calibration["reached"], found.calibration["sampled_reached"] = [[0.8, 0.4, 0.2]], [[0.4, 0.2, 0.0]]
    seen = []

    class Watched(HeadDrafter):
        def _calibration_at(self, temperature: float) -> Calibration:
            seen.append((temperature, super()._calibration_at(temperature).any_child_accepted))
            return super()._calibration_at(temperature)

    drafter = found.drafter(heads, "dynamic")
    assert drafter is not None
    drafter.__class__ = Watched
    for temperature in (0.0, 0.5, 1.0, 1.5):
        options = DecodeOptions(4, temperature=temperature, draft="on", ignore_end=True)  # always drafts
        DecodeLoop(target, drafter).generate([[3, 4, 5]], options)
    found_at = dict(seen)
    assert found_at[0.0] == (0.8, 0.4, 0.2)
    assert found_at[0.5] == pytest.approx((0.6, 0.3, 0.1))
    assert found_at[1.0] == found_at[1.5] == pytest.approx((0.4, 0.2, 0.0))


def test_kinds_report_the_targets_entropy(target: Target, heads: Any, four_texts: list[Text]) -> None:
    drafts = measure_drafts(target, heads, four_texts, 4)
    assert drafts.text_O is not None and drafts.entropy_O is not None
    assert drafts.text_O.tolist() == sorted(drafts.text_O.tolist()) and set(drafts.text_O.tolist()) == {0, 1, 2, 3}
    first = four_texts[0]
    final = target.hidden_states([first.tokens], (FINAL,))[0][FINAL]
    said = torch.distributions.Categorical(logits=target.lm_head(final).float()).entropy()
    start = first.supervised.index(True)  # its state predicts the first token after the root
    of_first = drafts.entropy_O[drafts.text_O == 0]
    torch.testing.assert_close(of_first, said[start : start + len(of_first)])


def test_worst_kind_comes_right_after_the_total() -> None:
    always, never = torch.zeros(120, 2, dtype=torch.long), torch.ones(120, 2, dtype=torch.long)
    drafts = Drafts(
        torch.cat([always, never, always[:10]]),
        torch.zeros(250, 2, 1),
        text_O=torch.tensor([0] * 60 + [1] * 60 + [2] * 120 + [3] * 10),
        entropy_O=torch.tensor([1.0] * 120 + [2.0] * 120 + [9.0] * 10),
    )
    of_all, *kinds = by_kind(drafts, ["sums", "sums", "poems", "rare"])
    assert of_all["kind"] == "" and (of_all["texts"], of_all["positions"]) == (4, 250)
    assert kinds == [
        {"kind": "poems", "texts": 1, "positions": 120, "tau": 1.0, "entropy": 2.0},
        {"kind": "sums", "texts": 2, "positions": 120, "tau": 3.0, "entropy": 1.0},
    ]
    assert "τ 1.00 on poems (entropy of the target 2.00 nats) to 3.00 on sums" in describe_kinds([of_all, *kinds])


def test_acceptance_by_level_is_saved(found: Tuning, target: Target, heads: Any, four_texts: list[Text]) -> None:
    drafts = measure_drafts(target, heads, four_texts, 4)
    assert found.calibration["reached"] == [list(fit_calibration(*drafts.arrays).any_child_accepted)]
    found.paths, found.calibration["reached"] = ((0,),), [[0.5, 0.25, 0.125]]
    again = Tuning.from_json(json.loads(json.dumps(found.to_json()))).drafter(heads, "dynamic")
    assert again is not None and again.calibration.any_child_accepted == (0.5, 0.25, 0.125)


def test_untuned_trees_are_refused_or_left_out(found: Tuning, heads: Any) -> None:
    found.paths, found.chain = ((0,), (1,)), 2
    chain = found.drafter(heads, "chain")
    assert chain is not None and chain.shape == TreeShape.chain(2)
    found.chain = 0
    assert found.drafter(heads, "chain") is None, "no chain pays"
    assert found.drafter(heads, "static") is not None
    found.calibration = {}
    with pytest.raises(UserError, match=r"no calibration for dynamic trees\. Tune them: headstart tune HEADS"):
        found.drafter(heads, "dynamic")
    found.paths, found.chain = (), 2
    assert found.drafter(heads, "chain") is None, "nothing pays"


def test_prediction_is_for_the_static_tree(target: Target, heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two nodes, at 3 tokens in 11 ms; a plain round takes 10."""
    measured = Measured(Costs((1, 4), (10.0, 10.0), 1.0, 0.0, 3), packed=False)
    monkeypatch.setattr(tune_module, "measure_costs", lambda *_: measured)
    monkeypatch.setattr(tune_module, "replay", lambda ranks, paths: 1.0 + len(paths))
    texts = texts_of(2)
    monkeypatch.setattr(tune_module, "sampled_answers", lambda *_: texts)
    found = tune(target, heads, texts, TuneSection(widths=(1, 4), context=16, max_nodes=3, max_rank=4))
    assert (found.tree, found.shape.size) == ("dynamic", 3)
    assert found.predicted == pytest.approx(
        {"tokens_per_round": 3.0, "speedup": 30 / 11, "tokens_per_second": 3e3 / 11}
    )


@pytest.mark.parametrize("name", ["medusa", "hydra", "eagle"])
def test_short_answers_are_left_out(name: str, target: Target) -> None:
    """Some families end where a step has no origin."""
    heads = family(name)(make_config({"family": name}, target))
    heads.warm_start(target)
    long = Text.of(range(3, 9), range(9, 27))
    short = [Text.of([3, 4], range(7, 7 + size)) for size in (1, 2, 3)]
    expected = measure_drafts(target, heads, [long], 4)
    torch.testing.assert_close(measure_drafts(target, heads, [*short, long], 4)[:2], expected[:2])
    with pytest.raises(UserError, match="No calibration answer is longer"):
        measure_drafts(target, heads, short, 4)


def test_too_short_answers_are_refused(target: Target, heads: Any) -> None:
    with pytest.raises(UserError, match="No calibration answer is longer than the 4 tokens"):
        measure_drafts(target, heads, [Text.of([1], [2, 3])], 10)
