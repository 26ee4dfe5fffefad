"""Rules that decide all rows of a batch side by side: as their references for single rows, and lossless themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from headstart.decode import rules
from headstart.decode.loop import Engine
from headstart.decode.options import DecodeOptions, SamplingOptions
from headstart.decode.rules import RULES
from headstart.decode.sampling import warp
from headstart.decode.verify import Accepted, Outcome, Row, RuleVerifier, Streams, Visited, streams
from headstart.drafters.ngram import NgramDrafter
from headstart.support.rng import Numbers, draw_at
from headstart.target.model import Target
from headstart.tree.proposal import Proposal, ProposedTree
from tests.decode.drafters import ReplayDrafter
from tests.decode.proofs import chi_square_p
from tests.decode.tables import KINDS, SHAPES, VOCAB, Draft, Grower, exact_joint, p_table
from tests.standin import CUDA, StandIn
from tests.tiny import tiny_model

TOGETHER = [name for name, rule in RULES.items() if rule.next_tokens is not None]
PLAIN = SamplingOptions(temperature=1.0)


def drafts(kind: str, shape: str, rows: int, seed: int = 0) -> list[Draft]:
    rng = random.Random(seed)

    def pick(_: str, weights: list[float]) -> int:
        return rng.choices(range(len(weights)), weights)[0]

    grower = Grower(KINDS[kind], SHAPES[shape])
    # Logits are the logarithms of the target's distribution, so that a softmax gives it back.
    with patch("tests.decode.tables.logits_table", lambda prefix: p_table(prefix).log()):
        return [grower.grow((), pick) for _ in range(rows)]


def batch(grown: list[Draft]) -> tuple[ProposedTree, Tensor]:
    """A tree of all rows, shorter ones padded, and the logits after its nodes."""
    sampled = [draft.sampled for draft in grown] if any(draft.sampled for draft in grown) else None
    tokens, parents = [draft.tokens for draft in grown], [list(draft.parents) for draft in grown]
    tree = Proposal(tokens, parents, sampled=sampled).on("cpu")
    logits = [torch.stack([*draft.logits, *[draft.logits[0]] * (tree.size - len(draft.logits))]) for draft in grown]
    return tree, torch.stack(logits).float()


def verifier(rule: str, rows: int, seed: int = 0, sampling: SamplingOptions = PLAIN) -> RuleVerifier:
    return RuleVerifier(RULES[rule], sampling, [[1]] * rows, [streams(seed + row)[0] for row in range(rows)])


def by_reference(rule: str, draft: Draft, logits_NV: Tensor, seed: int) -> Accepted:
    """The rule for one row, each visited node with the next number of each stream."""
    own, _ = streams(seed)
    numbers = {name: Numbers(stream) for name, stream in vars(own).items()}
    depths: list[int] = []

    class Counting(Row):
        def p_target(self, node: int) -> Tensor:
            if node not in self._known:
                depths.append(node)
            return super().p_target(node)

    def number(stream: Any) -> float:
        return numbers[stream].peek(len(depths))[-1]

    def sampled(probs_V: Tensor, stream: Any) -> int:
        return int(draw_at(probs_V[None], torch.tensor([number(stream)]))[0])

    row = Counting(draft.tokens, draft.parents, draft.sampled, logits_NV, lambda logits_V, _: warp(PLAIN, logits_V))
    with patch.multiple(rules, uniform=number, draw=sampled):
        return RULES[rule].accept_row(row, Streams("accept", "residual"))  # type: ignore[arg-type]  # names of streams


@pytest.mark.parametrize("rule", TOGETHER)
@pytest.mark.parametrize("shape", ["root only", "chain of 3", "bushy"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_side_by_side_do_as_alone(rule: str, kind: str, shape: str) -> None:
    grown = drafts(kind, shape, rows=60)
    tree, logits_BNV = batch(grown)
    together = verifier(rule, 60).accept(tree, logits_BNV).rows
    for seed, (draft, accepted) in enumerate(zip(grown, together, strict=True)):
        assert accepted == by_reference(rule, draft, logits_BNV[seed], seed)


@pytest.mark.parametrize("rule", TOGETHER)
@pytest.mark.parametrize("kind", ["top", "top and drawn", "drawn, guesses"])
def test_on_a_device_rows_do_the_same_with_one_wait(rule: str, kind: str) -> None:
    """Rows that have ended stay there, and are ignored."""
    for rows in (1, 16):
        tree, logits_BNV = batch(drafts(kind, "bushy", rows))
        expected = verifier(rule, rows).accept(tree, logits_BNV).rows
        with StandIn() as device:
            tree = replace(tree.proposal, sampled=moved(tree)).on(CUDA)
            there, logits_BNV = verifier(rule, rows), logits_BNV.to(CUDA)
            before = device.counts
            assert there.accept(tree, logits_BNV).rows == expected
            assert (device.counts - before).waits == 1
            # Random numbers, which children were drawn, what was accepted.
            assert (device.counts - before).uploads <= 3


def moved(tree: ProposedTree) -> Any:
    if tree.sampled is None:
        return None
    return [{node: replace(one, q_draft_D=one.q_draft_D.to(CUDA)) for node, one in row.items()} for row in tree.sampled]


# -- the distribution -------------------------------------------------------------------------------------------------

ROWS = 6_000


def first_two(accept: Callable[[ProposedTree, Tensor], Outcome], kind: str, shape: str) -> np.ndarray[Any, Any]:
    """Counts of the first two tokens after trees grown at random; what a round leaves open the target decides."""
    rng = random.Random(1)
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for accepted in accept(*batch(drafts(kind, shape, ROWS))).rows:
        first, *more = accepted.tokens
        second = more[0] if more else rng.choices(range(VOCAB), p_table((first,)).tolist())[0]
        counts[first, second] += 1
    return counts


@pytest.mark.parametrize("rule", TOGETHER)
@pytest.mark.parametrize(("kind", "shape"), [("top", "bushy"), ("top and drawn", "wide"), ("drawn", "chain of 3")])
def test_lossless_side_by_side(rule: str, kind: str, shape: str) -> None:
    assert chi_square_p(first_two(verifier(rule, ROWS).accept, kind, shape), exact_joint((), 2)) > 1e-6


def greedy_draft_with(**changed: Callable[[Visited], Any]) -> RuleVerifier:
    """A verifier whose rule sees something else than it should."""

    def next_tokens(visited: Visited) -> Tensor:
        return rules.next_by_greedy_draft(replace(visited, **{name: of(visited) for name, of in changed.items()}))

    made = verifier("greedy_draft", ROWS)
    made.rule = replace(made.rule, next_tokens=next_tokens)
    return made


MISTAKES: dict[str, dict[str, Callable[[Visited], Any]]] = {
    "accept and residual share noise": {"residual_M": lambda visited: visited.accept_M},
    "q is not what the draft was drawn from": {"q_draft_MV": lambda visited: visited.q_draft_MV.roll(1, 1)},
    "every draft is accepted": {"accept_M": lambda visited: torch.zeros_like(visited.accept_M)},
    "the raw distribution": {"p_target_MV": lambda visited: visited.p_target_MV.sqrt()},
    "drafts count as top-k": {"accept_M": lambda visited: torch.ones_like(visited.accept_M)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_proof_notices(mistake: str) -> None:
    wrong = greedy_draft_with(**MISTAKES[mistake])
    assert chi_square_p(first_two(wrong.accept, "drawn", "chain of 3"), exact_joint((), 2)) < 1e-6


def test_a_rejection_by_rounding_stays_within_the_target() -> None:
    """q a little above p everywhere leaves no rest; p then decides."""
    p_target_MV = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 2)
    visited = Visited(
        p_target_MV.clone(),
        torch.full((2,), 1 - 2**-53).double(),
        torch.tensor([0.2, 0.7]).double(),
        torch.tensor([1, 1]),
        p_target_MV * 1.0000002,
    )
    assert rules.next_by_greedy_draft(visited).tolist() == [0, 1]


# -- drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, 256, 700, 1024])
def test_numbers_fall_where_cumulative_sums_say(size: int) -> None:
    random_numbers = torch.Generator().manual_seed(size)
    weights_MV = torch.rand(400, size, generator=random_numbers, dtype=torch.float64) ** 8
    weights_MV[:, ::3] = 0.0
    number_M = torch.rand(400, generator=random_numbers, dtype=torch.float64)
    cumulative_MV = weights_MV.cumsum(1)
    expected_M1 = torch.searchsorted(cumulative_MV, number_M[:, None] * cumulative_MV[:, -1:], right=True)
    token_M, sum_M = draw_at(weights_MV, number_M)
    assert token_M.tolist() == expected_M1[:, 0].tolist()
    torch.testing.assert_close(sum_M, cumulative_MV[:, -1])


@pytest.mark.parametrize("size", [5, 256, 700, 1024])
def test_the_last_number_falls_on_the_last_token_that_may_be(size: int) -> None:
    weights_MV = torch.zeros(size, size).fill_diagonal_(1e-30)  # one possible token each
    for number in (0.0, 0.5, 1 - 2**-53):
        token_M, _ = draw_at(weights_MV, torch.full((size,), number).double())
        assert token_M.tolist() == list(range(size))


# -- texts ------------------------------------------------------------------------------------------------------------

TEXTS = [[3, 9, 14, 3, 9, 14, 3, 9], [8, 40, 12, 5, 51, 22], [7, 7, 7, 7]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


def test_drafts_that_do_not_depend_on_the_batch_leave_a_rows_text_to_itself(target: Target) -> None:
    def options(seed: int) -> DecodeOptions:
        return DecodeOptions(max_new_tokens=16, temperature=0.4, seed=seed, ignore_end=True)

    together = [row.tokens for row in Engine(target, NgramDrafter()).generate(TEXTS, options(5))]
    alone = [Engine(target, NgramDrafter()).generate([text], options(5 + row))[0] for row, text in enumerate(TEXTS)]
    assert together == [row.tokens for row in alone]
    assert any(step.nodes > 1 for row in alone for step in row.rounds)


def test_top_k_draws_the_text_that_plain_sampling_draws(target: Target) -> None:
    """Each token takes its own number, whether a draft holds it or not."""
    options = DecodeOptions(max_new_tokens=20, temperature=1.0, seed=3, ignore_end=True, verifier="top_k")
    plain = [row.tokens for row in Engine(target).generate(TEXTS, options)]
    drafted = Engine(target, ReplayDrafter(plain, 61, 0.7)).generate(TEXTS, options)
    assert [row.tokens for row in drafted] == plain
    assert sum(len(row.rounds) for row in drafted) < 3 * 19, "some drafts were accepted"


@pytest.mark.parametrize("rule", ["top_k", "greedy_draft"])
def test_processors_see_each_rows_own_text(rule: str, target: Target) -> None:
    def last_but_one(input_ids: Tensor, scores: Tensor) -> Tensor:
        only = torch.full_like(scores, float("-inf"))
        return only.scatter(1, (input_ids[:, -2:-1] + 1) % 61, 0.0)

    options = DecodeOptions(
        max_new_tokens=12, temperature=1.0, ignore_end=True, verifier=rule, processors=(last_but_one,)
    )
    expected = []
    for text in TEXTS:
        whole = list(text)
        for _ in range(12):
            whole.append((whole[-2] + 1) % 61)
        expected.append(whole[len(text) :])
    drafted = Engine(target, ReplayDrafter(expected, 61, 0.8)).generate(TEXTS, options)
    assert [row.tokens for row in drafted] == expected
    assert sum(len(row.rounds) for row in drafted) < 3 * 11
