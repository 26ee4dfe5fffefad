"""Differences explained by rounding: planted ones on both sides of the margin, in float32 and bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.eval import divergence
from headstart.eval.divergence import EXACT_MARGIN, Judge, first_difference, gap_error, in_float32
from headstart.model.model import Target
from tests.tiny import KINDS, tiny_model

PROMPTS = [[5, 9, 7], [30, 2, 2, 8]]


def targets() -> tuple[Target, Target]:
    """Return targets in float32 and bfloat16 with the same bfloat16 weights."""
    model = tiny_model("llama", vocab_size=61).to(torch.bfloat16)
    return Target(copy.deepcopy(model).float()), Target(model)


def plain(target: Target) -> list[list[int]]:
    options = DecodeOptions(max_new_tokens=10, ignore_end=True)
    return [output.tokens for output in DecodeLoop(target).generate(PROMPTS, options)]


def ranked(target: Target, prefix: list[int]) -> tuple[torch.Tensor, list[int]]:
    with torch.inference_mode():
        logits_V = target.model(torch.tensor([prefix])).logits[0, -1].float()
    return logits_V, logits_V.argsort(descending=True).tolist()


def test_equal_outputs_have_no_margins() -> None:
    exact, _ = targets()
    answers = plain(exact)
    found = Judge(exact).judge(PROMPTS, answers, answers)
    none = {"count": 0, "unexplained": 0, "margin_limit": None, "largest_margin": None}
    assert found.to_json() == {"prompts": 2, "tokens_compared": 20, **none}


@pytest.mark.parametrize("kind", KINDS)
def test_float32_without_a_copy_is_bit_exact(kind: str) -> None:
    model = tiny_model(kind, vocab_size=61).to(torch.bfloat16)
    target = Target(model)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    text = torch.arange(3, 40)[None]
    with torch.inference_mode():
        rounded, exact = model(text).logits, copy.deepcopy(model).float()(text).logits
        with in_float32(model, target.layers):
            found = model(text).logits
        assert torch.equal(found, exact) and found.dtype == torch.float32
        assert not torch.equal(rounded.float(), exact)
        assert torch.equal(model(text).logits, rounded), "the model is restored"
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name][0] and torch.equal(tensor, before[name][1])


def test_float32_without_a_copy_converts_one_part_at_a_time() -> None:
    """While a part runs, all others keep their own dtype; also after an error."""
    model = tiny_model("llama", vocab_size=61).to(torch.bfloat16)
    target, maximum = Target(model), 0

    def look(*_: object) -> None:
        nonlocal maximum
        sizes = {tensor.data_ptr(): tensor.numel() for tensor in model.parameters() if tensor.dtype == torch.float32}
        maximum = max(maximum, sum(sizes.values()))

    parts = [*target.layers, model.get_output_embeddings(), model.get_input_embeddings()]
    with torch.inference_mode(), in_float32(model, target.layers):
        hooks = [part.register_forward_pre_hook(look) for part in parts]
        model(torch.tensor([[5, 9, 7]]))
        for hook in hooks:
            hook.remove()
        largest = max(sum(tensor.numel() for tensor in part.parameters()) for part in parts)
        assert maximum == largest
        broken = target.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="broken"):
            model(torch.tensor([[5, 9, 7]]))
        broken.remove()
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}


def fail(*_: object) -> None:
    raise ValueError("broken")


def test_judging_copies_no_model_and_caches_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rounded = targets()
    answers = plain(rounded)
    other = [[*answers[0][:4], (answers[0][4] + 1) % 61], answers[1]]
    prefix = torch.tensor([PROMPTS[0] + answers[0][:4]])
    with torch.inference_mode():
        logits_V = copy.deepcopy(rounded.model).float()(prefix, logits_to_keep=1).logits[0, -1]

    def copied(*_: object) -> None:
        raise AssertionError("the whole model was copied")

    monkeypatch.setattr(type(rounded.model), "__deepcopy__", copied, raising=False)
    judge = Judge(rounded)
    judge.judge(PROMPTS, answers, answers)
    for _ in range(2):
        found = judge.judge(PROMPTS, answers, other)
        monkeypatch.setattr(divergence, "in_float32", copied)  # the second call uses the cache
    assert found.differences[0].margin == float(logits_V.max() - logits_V[[answers[0][4], other[0][4]]].min())


def test_any_other_token_is_unexplained_in_float32() -> None:
    exact, _ = targets()
    answers = plain(exact)
    other = [answers[0], [*answers[1][:4], (answers[1][4] + 1) % 61]]
    found = Judge(exact).judge(PROMPTS, answers, other)
    assert found.margin_limit == EXACT_MARGIN
    assert found.tokens_compared == 10 + 5
    (verdict,) = found.differences
    logits_V, _ = ranked(exact, PROMPTS[1] + answers[1][:4])
    assert (verdict.prompt, verdict.position, verdict.explained) == (1, 4, False)
    assert verdict.margin == pytest.approx(float(logits_V.max() - logits_V[other[1][4]]), abs=1e-5)
    assert found.to_json()["unexplained"] == 1


def test_near_tie_is_explained_and_a_wrong_token_is_not() -> None:
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
    near, wrong = found.differences
    assert (near.explained, near.margin) == (True, 0.0)
    assert not wrong.explained
    assert found.margin_limit is not None
    assert wrong.margin > found.margin_limit > 0
    assert found.to_json()["unexplained"] == 1


def test_early_end_is_unexplained() -> None:
    exact, _ = targets()
    answers = plain(exact)
    found = Judge(exact).judge(PROMPTS, answers, [answers[0][:-1], answers[1]])
    assert found.differences[0].margin is None
    assert not found.differences[0].explained


def test_first_difference() -> None:
    assert first_difference(0, [1, 2], [1, 2]) is None
    assert first_difference(3, [1, 2], [1, 2, 9]).tokens == (None, 9)


def test_common_shift_of_the_logits_is_no_error() -> None:
    exact = torch.tensor([[1.0, 0.9, 0.1, 0.0]])
    assert gap_error(exact + 5, exact, torch.bfloat16) == pytest.approx(2**-7, rel=0.01), "one step of bfloat16 at 1"


def test_rounding_is_measured_at_the_largest_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rounded = targets()
    judge, seen = Judge(rounded), []
    gaps = dict(zip(range(40), torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist(), strict=True))
    monkeypatch.setattr(judge, "margin", lambda prompt, answer, tokens: gaps[prompt[0]])
    monkeypatch.setattr(judge, "limit", lambda texts: seen.extend(prompt[0] for prompt, _ in texts) or 0.5)
    found = judge.judge([[number] for number in range(40)], [[1]] * 40, [[2]] * 40)
    assert seen == sorted(gaps, key=gaps.__getitem__, reverse=True)[:16]
    assert [verdict.explained for verdict in found.differences] == [gaps[number] <= 0.5 for number in range(40)]


def test_every_token_is_judged_after_its_own_prefix() -> None:
    """In one text a token with the best one's logit, and later the worst token."""
    _, rounded = targets()
    text, lm_head_VE = plain(rounded)[0][:8], rounded.model.lm_head.weight
    twin = next(token for token in range(61) if token not in text)
    with torch.no_grad():
        lm_head_VE[twin] = lm_head_VE[text[2]]
    exact, best = Target(copy.deepcopy(rounded.model).float()), [*text]
    text[2] = twin
    text[7] = ranked(exact, PROMPTS[0] + text[:7])[1][-1]
    found = Judge(rounded).judge_each([PROMPTS[0]], [best], [text])
    assert found.tokens_compared == 8 and found.margin_limit is not None
    near, far = found.differences
    assert (near.position, near.tokens, near.margin, near.explained) == (2, (best[2], twin), 0.0, True)
    assert (far.position, far.explained) == (7, False) and far.margin is not None and far.margin > found.margin_limit
    logits_V, _ = ranked(exact, PROMPTS[0] + text[:7])
    assert far.margin == pytest.approx(float(logits_V.max() - logits_V[text[7]]), abs=1e-4)
