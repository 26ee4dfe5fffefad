"""Which differences rounding explains: planted ones on both sides of the margin, in float32 and bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch

from headstart.decode.loop import DecodeOptions, Engine
from headstart.eval.divergence import EXACT_MARGIN, Judge, difference, gap_error
from headstart.target import Target
from tests.tiny import tiny_model

PROMPTS = [[5, 9, 7], [30, 2, 2, 8]]


def targets() -> tuple[Target, Target]:
    """The same weights, those of bfloat16, in float32 and in bfloat16."""
    model = tiny_model("llama", vocab_size=61).to(torch.bfloat16)
    return Target(copy.deepcopy(model).float()), Target(model)


def plain(target: Target) -> list[list[int]]:
    options = DecodeOptions(max_new_tokens=10, ignore_end=True)
    return [output.tokens for output in Engine(target).generate(PROMPTS, options)]


def ranked(target: Target, prefix: list[int]) -> tuple[torch.Tensor, list[int]]:
    with target.stock() as model, torch.inference_mode():
        logits_V = model(torch.tensor([prefix])).logits[0, -1].float()
    return logits_V, logits_V.argsort(descending=True).tolist()


def test_equal_outputs_need_no_judge() -> None:
    exact, _ = targets()
    judge = Judge(exact)
    answers = plain(exact)
    found = judge.judge(PROMPTS, answers, answers)
    assert found.to_json() == {
        "prompts": 2,
        "tokens_compared": 20,
        "count": 0,
        "unexplained": 0,
        "margin_limit": None,
        "largest_margin": None,
    }
    assert judge._reference is None, "the float32 copy is made only when it is needed"


def test_any_other_token_is_unexplained_in_float32() -> None:
    exact, _ = targets()
    answers = plain(exact)
    other = [answers[0], [*answers[1][:4], (answers[1][4] + 1) % 61]]
    found = Judge(exact).judge(PROMPTS, answers, other)
    assert found.margin_limit == EXACT_MARGIN
    assert found.tokens_compared == 10 + 5
    (verdict,) = found.verdicts
    logits_V, _ = ranked(exact, PROMPTS[1] + answers[1][:4])
    assert (verdict.prompt, verdict.position, verdict.explained) == (1, 4, False)
    assert verdict.margin == pytest.approx(float(logits_V.max() - logits_V[other[1][4]]), abs=1e-5)
    assert found.to_json()["unexplained"] == 1


def test_a_near_tie_is_explained_and_a_wrong_token_is_not() -> None:
    exact, rounded = targets()
    answers = plain(rounded)
    # Tie the runner-up with the best by giving both the same row of the LM head.
    _, order = ranked(exact, PROMPTS[0] + answers[0][:3])
    with torch.no_grad():
        head = rounded.lm_head_weight
        head[order[1]] = head[order[0]]
    answers = plain(rounded)
    position = answers[0].index(order[0]) if order[0] in answers[0] else answers[0].index(order[1])
    twin = order[1] if answers[0][position] == order[0] else order[0]
    worst = ranked(rounded, PROMPTS[1] + answers[1][:2])[1][-1]
    other = [[*answers[0][:position], twin], [*answers[1][:2], worst, 3, 3]]
    found = Judge(rounded).judge(PROMPTS, answers, other)
    near, wrong = found.verdicts
    assert (near.explained, near.margin) == (True, 0.0)
    assert not wrong.explained
    assert found.margin_limit is not None
    assert wrong.margin > found.margin_limit > 0
    assert found.to_json()["unexplained"] == 1


def test_an_output_that_ends_early_is_unexplained() -> None:
    exact, _ = targets()
    answers = plain(exact)
    found = Judge(exact).judge(PROMPTS, answers, [answers[0][:-1], answers[1]])
    assert found.verdicts[0].margin is None
    assert not found.verdicts[0].explained


def test_first_difference() -> None:
    assert difference(0, [1, 2], [1, 2]) is None
    assert difference(3, [1, 2], [1, 2, 9]).tokens == (None, 9)


def test_common_shift_of_the_logits_is_no_error() -> None:
    exact = torch.tensor([[1.0, 0.9, 0.1, 0.0]])
    assert gap_error(exact + 5, exact, torch.bfloat16) == pytest.approx(2**-7, rel=0.01), "one step of bfloat16 at 1"


def test_rounding_is_measured_where_the_gaps_are_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rounded = targets()
    judge, seen = Judge(rounded), []
    gaps = dict(zip(range(40), torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist(), strict=True))
    monkeypatch.setattr(judge, "margin", lambda prefix, tokens: gaps[prefix[0]])
    monkeypatch.setattr(judge, "limit", lambda texts: seen.extend(prompt[0] for prompt, _ in texts) or 0.5)
    found = judge.judge([[number] for number in range(40)], [[1]] * 40, [[2]] * 40)
    assert seen == sorted(gaps, key=gaps.__getitem__, reverse=True)[:16]
    assert [verdict.explained for verdict in found.verdicts] == [gaps[number] <= 0.5 for number in range(40)]
