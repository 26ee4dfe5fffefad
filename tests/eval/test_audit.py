"""The audit finds nothing on honest drafters and everything on a broken verifier."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from headstart.decode.loop import Engine
from headstart.decode.options import DecodeOptions
from headstart.decode.verify import Verifier, _decided, argmax
from headstart.drafters.heads import HeadDrafter
from headstart.eval.audit import AlwaysWrongDrafter, audit, plain_answers, random_weights, unused_tokens
from headstart.heads.base import DraftHead, family, make_config
from headstart.target.model import Target, TargetOutput
from headstart.tree.tree import Committed, TreeBatch, TreeShape
from tests.tiny import tiny_model

NEW = 16
SHAPE = TreeShape.from_paths([(0, 0), (1, 0), (0, 1)])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=101))


@pytest.fixture(scope="module")
def heads(target: Target) -> DraftHead:
    heads = family("medusa")(make_config({"family": "medusa", "num_heads": 2}, target))
    heads.warm_start(target)
    return heads


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, 101) for _ in range(rng.randrange(2, 20))] for _ in range(7)]


def test_honest_drafters_change_nothing(target: Target, heads: DraftHead, prompts: list[list[int]]) -> None:
    seen: list[tuple[str, int]] = []
    answers = plain_answers(target, prompts, NEW, batch_size=3)
    wrong = AlwaysWrongDrafter(SHAPE, unused_tokens(answers, target.vocab_size, SHAPE.width))
    results = audit(
        target,
        {
            "heads": HeadDrafter(heads, SHAPE),
            "random": HeadDrafter(random_weights(heads), SHAPE),
            "always wrong": wrong,
        },
        prompts,
        NEW,
        batch_size=3,
        answers=answers,
        advance=lambda name, count: seen.append((name, count)),
    )
    for name, result in results.items():
        assert result.prompts == 7
        assert result.tokens == sum(map(len, answers))
        assert result.different_tokens == result.different_prompts == 0, (name, result.differences)
    assert results["always wrong"].accepted == 0
    assert results["always wrong"].rounds == sum(len(answer) - 1 for answer in answers), "one token a round"
    assert [count for name, count in seen if name == "random"] == [3, 3, 1]


def test_answers_do_not_depend_on_the_batch(target: Target, prompts: list[list[int]]) -> None:
    assert plain_answers(target, prompts, NEW, batch_size=1) == plain_answers(target, prompts, NEW, batch_size=7)


def test_a_verifier_that_accepts_anything_is_caught(
    target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Verifier.accept

    def accept(self: Verifier, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        if batch.size == 1:
            return honest(self, batch, out)
        choice = argmax(out.logits_BTV).tolist()
        return _decided(batch, out, [[0, 1] for _ in choice], [row[1] for row in choice])

    answers = plain_answers(target, prompts, NEW, batch_size=4)
    wrong = AlwaysWrongDrafter(SHAPE, unused_tokens(answers, target.vocab_size, 2))
    monkeypatch.setattr(Verifier, "accept", accept)
    result = audit(target, {"wrong": wrong}, prompts, NEW, batch_size=4)["wrong"]
    assert result.different_prompts == len(prompts)
    assert result.different_tokens >= len(prompts)
    assert {one.position for one in result.differences} == {1}, "the first draft of the first round"


def test_random_weights_leave_the_original_alone(heads: DraftHead) -> None:
    before = [parameter.clone() for parameter in heads.parameters()]
    noisy = random_weights(copy.deepcopy(heads).requires_grad_(False), seed=1)  # frozen, as they are when loaded
    assert all(torch.equal(one, two) for one, two in zip(before, heads.parameters(), strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(before, noisy.parameters(), strict=True))
    again = random_weights(heads, seed=1)
    assert all(torch.equal(one, two) for one, two in zip(noisy.parameters(), again.parameters(), strict=True))


def test_random_weights_share_what_is_the_targets(target: Target) -> None:
    heads = family("eagle")(make_config({"family": "eagle", "draft_vocab_size": 30}, target))
    heads.warm_start(target)
    noisy = random_weights(heads)
    assert noisy._embedding_VE.data_ptr() == target.embedding_weight.data_ptr()
    assert noisy.lm_head_DE.data_ptr() == heads.lm_head_DE.data_ptr()
    options = DecodeOptions(max_new_tokens=NEW, ignore_end=True)
    (output,) = Engine(target, HeadDrafter(noisy, TreeShape.chain(2))).generate([[3, 4]], options)
    assert output.drafter_error is None
