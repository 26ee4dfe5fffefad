"""Drafters of the audit: honest ones change no token, and a broken verifier is caught."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.decode.texts import Generation
from headstart.decode.verify import GreedyVerifier
from headstart.drafters.heads import HeadDrafter
from headstart.eval.audit import (
    AlwaysWrongDrafter,
    decode_in_batches,
    random_weights,
    tokens_that_differ,
    unused_tokens,
)
from headstart.eval.divergence import first_difference
from headstart.heads.base import DraftHead
from headstart.kernels.draft_kernels import argmax
from headstart.model.model import Target, TargetOutput
from headstart.tree.tree import Committed, TreeBatch, TreeShape, build_commit
from tests.eval.sources import warm_heads
from tests.tiny import tiny_model

NEW = 16
SHAPE = TreeShape.from_paths([(0, 0), (1, 0), (0, 1)])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=101))


@pytest.fixture(scope="module")
def heads(target: Target) -> DraftHead:
    return warm_heads(target)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, 101) for _ in range(rng.randrange(2, 20))] for _ in range(7)]


def plain(target: Target, prompts: list[list[int]], batch_size: int) -> list[list[int]]:
    return [output.tokens for output in decode_in_batches(DecodeLoop(target), prompts, NEW, batch_size)]


def test_honest_drafters_change_nothing(target: Target, heads: DraftHead, prompts: list[list[int]]) -> None:
    answers, batches = plain(target, prompts, 3), list[int]()
    assert answers == plain(target, prompts, 1) == plain(target, prompts, 7), "answers do not depend on the batch"
    wrong = AlwaysWrongDrafter(SHAPE, unused_tokens(answers, target.vocab_size, SHAPE.width))
    for drafter in (HeadDrafter(heads, SHAPE), HeadDrafter(random_weights(heads), SHAPE), wrong):
        outputs = decode_in_batches(DecodeLoop(target, drafter), prompts, NEW, 3, advance=batches.append)
        counts = tokens_that_differ(answers, outputs)
        assert counts["tokens"] == sum(map(len, answers))
        assert counts["different_tokens"] == 0
    assert counts["drafts_accepted"] == 0
    assert counts["rounds"] == sum(len(answer) - 1 for answer in answers), "one token per round"
    assert batches == [3, 3, 1] * 3


def test_blind_acceptance_is_caught(target: Target, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GreedyVerifier.accept

    def accept(self: GreedyVerifier, batch: TreeBatch, out: TargetOutput) -> tuple[Committed, TreeBatch]:
        if batch.size == 1:
            return honest(self, batch, out)
        choice = argmax(out.logits_BTV).tolist()
        paths, tokens = [[0, 1] for _ in choice], [row[1] for row in choice]
        return build_commit(batch, paths, tokens, out.aux_hidden_states, out.logits_BTV)

    answers = plain(target, prompts, 4)
    wrong = AlwaysWrongDrafter(SHAPE, unused_tokens(answers, target.vocab_size, 2))
    monkeypatch.setattr(GreedyVerifier, "accept", accept)
    outputs = decode_in_batches(DecodeLoop(target, wrong), prompts, NEW, 4)
    assert tokens_that_differ(answers, outputs)["different_tokens"] >= len(prompts)
    differences = [first_difference(0, answer, output.tokens) for answer, output in zip(answers, outputs, strict=True)]
    assert all(difference and difference.position == 1 for difference in differences), "the first draft"


def test_missing_and_surplus_tokens_differ() -> None:
    outputs = [Generation([1, 5]), Generation([4, 5, 6])]
    assert tokens_that_differ([[1, 2, 3], [4]], outputs)["different_tokens"] == 2 + 2


def test_random_weights_leave_the_original_alone(heads: DraftHead) -> None:
    before = [parameter.clone() for parameter in heads.parameters()]
    noisy = random_weights(copy.deepcopy(heads).requires_grad_(False), seed=1)  # frozen, as when loaded
    assert all(torch.equal(*pair) for pair in zip(before, heads.parameters(), strict=True))
    assert not any(torch.equal(*pair) for pair in zip(before, noisy.parameters(), strict=True))
    again = random_weights(heads, seed=1)
    assert all(torch.equal(*pair) for pair in zip(noisy.parameters(), again.parameters(), strict=True))


def test_random_weights_share_the_targets_tensors(target: Target) -> None:
    heads = warm_heads(target, family="eagle", draft_vocab_size=30)
    noisy = random_weights(heads)
    assert noisy._embedding_VE.data_ptr() == target.embedding_weight.data_ptr()
    assert noisy.lm_head_DE.data_ptr() == heads.lm_head_DE.data_ptr()
    options = DecodeOptions(max_new_tokens=NEW, ignore_end=True)
    (output,) = DecodeLoop(target, HeadDrafter(noisy, TreeShape.chain(2))).generate([[3, 4]], options)
    assert output.drafter_error is None
