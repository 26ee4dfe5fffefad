"""Sampling decides all rows of a batch at once: as the reference decides a single row, and losslessly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from headstart.decode import sampling, verify
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, SamplingOptions
from headstart.decode.sampling import _count
from headstart.decode.verify import SamplingVerifier, accept_or_draw, row_generators
from headstart.drafters.ngram import NgramDrafter
from headstart.model.model import Target, TargetOutput
from headstart.support.rng import UniformStream, draw_at
from headstart.tree.tree import Tree, TreeBatch
from tests import reference
from tests.decode.drafters import ReplayDrafter
from tests.decode.proofs import chi_square_p
from tests.decode.tables import KINDS, SHAPES, VOCAB, Draft, Grower, exact_joint, p_table
from tests.decode.test_sampling import by_hand
from tests.standin import CUDA, StandIn

PLAIN = SamplingOptions(temperature=1.0)
PENALISED = SamplingOptions(
    temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.9, logit_bias={1: 0.8, 4: -0.5}
)
PROMPT = [1]
Emitted = list[tuple[list[int], int]]
"""Per row, the tokens of the accepted path, root first, and the token after it."""


def drafts(kind: str, shape: str, rows: int, seed: int = 0) -> list[Draft]:
    rng = random.Random(seed)

    def pick(_: str, weights: list[float]) -> int:
        return rng.choices(range(len(weights)), weights)[0]

    grower = Grower(KINDS[kind], SHAPES[shape])
    # Logits are the logarithms of the target's distribution, so that a softmax gives it back.
    with patch("tests.decode.tables.logits_table", lambda prefix: p_table(prefix).log()):
        return [grower.grow((), pick) for _ in range(rows)]


def out_of(grown: list[Draft]) -> TargetOutput:
    """The target's logits after the nodes of all rows, shorter ones padded."""
    width = max(draft.tree.size for draft in grown)
    logits = [torch.stack([*draft.logits, *[draft.logits[0]] * (width - len(draft.logits))]) for draft in grown]
    return TargetOutput(torch.stack(logits).float())


def side_by_side(verifier: SamplingVerifier, grown: list[Draft]) -> Emitted:
    committed, roots = verifier.accept(TreeBatch.of([draft.tree for draft in grown]), out_of(grown))
    return list(zip(committed.tokens, roots.root_tokens, strict=True))


def verifier(rows: int, seed: int = 0, sampling: SamplingOptions = PLAIN) -> SamplingVerifier:
    return SamplingVerifier(sampling, [PROMPT] * rows, range(seed, seed + rows), True)


def by_reference(
    draft: Draft, logits_NV: Tensor, seed: int, sampling: SamplingOptions = PLAIN, generated: Sequence[int] = ()
) -> tuple[list[int], int]:
    """Decide one row after `generated`, each token with the next number of each stream."""
    done = len(generated)
    accept, residual, _ = (UniformStream(stream).peek(done + 9)[done:] for stream in row_generators(seed))
    nodes = {path: node for node, path in enumerate(draft.tree.paths, start=1)} | {(): 0}

    def p_target(path: Sequence[int]) -> Tensor:
        return by_hand(sampling, logits_NV[nodes[tuple(path[1:])]], PROMPT, [*generated, *path[1:]]).softmax(-1)

    return reference.accept(draft.root, p_target, map(reference.Chance, accept, residual))


def assert_penalties_as_by_reference(kind: str, rows: int) -> None:
    """Three rounds of a batch: every token counts at the nodes below it, and in later rounds."""
    on_host = verifier(rows, sampling=PENALISED)
    texts: list[list[int]] = [[] for _ in range(rows)]
    for number in range(3):
        grown = drafts(kind, "bushy", rows, seed=number)
        logits_BNV = out_of(grown).logits_BTV
        for row, (path, last) in enumerate(side_by_side(on_host, grown)):
            assert (path, last) == by_reference(grown[row], logits_BNV[row], row, PENALISED, texts[row])
            texts[row] += [*path[1:], last]


@pytest.mark.parametrize("shape", ["root only", "chain of 3", "bushy"])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_side_by_side_do_as_the_reference(kind: str, shape: str) -> None:
    grown = drafts(kind, shape, rows=60)
    logits_BNV = out_of(grown).logits_BTV
    together = side_by_side(verifier(60), grown)
    for seed, (draft, emitted) in enumerate(zip(grown, together, strict=True)):
        assert emitted == by_reference(draft, logits_BNV[seed], seed)


@pytest.mark.parametrize("kind", ["top", "top and sampled", "top and sampled, guesses"])
def test_penalties_at_every_node(kind: str) -> None:
    assert_penalties_as_by_reference(kind, 60)


COUNTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "each token counts once": lambda counts, tokens: counts.scatter_(1, tokens.clamp(min=0), 1),
    "the last token is missed": lambda counts, tokens: _count(counts, tokens[:, :-1]),
    "padding counts as token 0": lambda counts, tokens: _count(counts, tokens.clamp(min=0)),
    "tokens count twice": lambda counts, tokens: _count(counts, torch.cat([tokens, tokens], 1)),
}


@pytest.mark.parametrize("mistake", COUNTS)
def test_wrong_counts_are_noticed(mistake: str) -> None:
    with patch.object(sampling, "_count", COUNTS[mistake]), pytest.raises(AssertionError):
        assert_penalties_as_by_reference("top", 60)


@pytest.mark.parametrize("options", [PLAIN, PENALISED], ids=["plain", "penalised"])
@pytest.mark.parametrize("kind", ["top", "top and sampled", "top and sampled, guesses"])
def test_on_a_device_rows_do_the_same_with_one_wait(kind: str, options: SamplingOptions) -> None:
    """Rows that have ended stay in the batch and are ignored. Penalties cost no further copy."""
    for rows in (1, 16):
        on_host = verifier(rows, sampling=options)
        grown = [drafts(kind, "bushy", rows, seed=number) for number in range(2)]
        expected = [side_by_side(on_host, each) for each in grown]
        with StandIn() as device:
            on_device = verifier(rows, sampling=options)
            for number, each in enumerate(grown):
                batch = TreeBatch.of([moved(draft.tree) for draft in each], CUDA)
                out = TargetOutput(out_of(each).logits_BTV.to(CUDA))
                before = device.counts
                committed, roots = on_device.accept(batch, out)
                assert list(zip(committed.tokens, roots.root_tokens, strict=True)) == expected[number]
                assert (device.counts - before).waits == 1
                if number or options is PLAIN:  # the first use uploads the prompts
                    assert (device.counts - before).uploads == 1


def test_on_a_device_deeper_trees_launch_no_more() -> None:
    launches = []
    for tree in (Tree([1, 2, 3, 4], [-1, 0, 0, 0]), Tree.chain_of([1, 2, 3, 4])):
        with StandIn() as device:
            batch = TreeBatch.of([tree] * 2, CUDA)
            out = TargetOutput(torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(0)).to(CUDA))
            before = device.counts
            verifier(2).accept(batch, out)
            launches.append((device.counts - before).launches)
    assert launches[0] == launches[1]


def moved(tree: Tree) -> Tree:
    sampled = {node: replace(own, q_draft_D=own.q_draft_D.to(CUDA)) for node, own in tree.sampled.items()}
    return replace(tree, sampled=sampled)


# -- the distribution -------------------------------------------------------------------------------------------------

ROWS = 6_000


def first_two(kind: str, shape: str, options: SamplingOptions = PLAIN) -> np.ndarray[Any, Any]:
    """Count the first two tokens after random trees; the target draws the second if a round emits one."""
    rng = random.Random(1)
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for path, last in side_by_side(verifier(ROWS, sampling=options), drafts(kind, shape, ROWS)):
        first, *more = [*path[1:], last]
        second = more[0] if more else rng.choices(range(VOCAB), exact_p((first,), options).tolist())[0]
        counts[first, second] += 1
    return counts


def exact_p(text: tuple[int, ...], options: SamplingOptions) -> Tensor:
    return by_hand(options, p_table(text).log(), PROMPT, list(text)).softmax(-1)


def exact_two(options: SamplingOptions) -> np.ndarray[Any, Any]:
    """Return the exact joint distribution of the first two tokens."""
    first_V = exact_p((), options)
    joint_VV = torch.stack([first_V[token] * exact_p((token,), options) for token in range(VOCAB)])
    return joint_VV.double().numpy()


@pytest.mark.parametrize(
    ("kind", "shape"), [("top", "bushy"), ("top and sampled", "wide"), ("top and sampled", "chain of 3")]
)
def test_lossless_side_by_side(kind: str, shape: str) -> None:
    assert chi_square_p(first_two(kind, shape), exact_joint((), 2)) > 1e-6


def test_lossless_with_penalties() -> None:
    counts = first_two("top and sampled", "chain of 3", PENALISED)
    assert chi_square_p(counts, exact_two(PENALISED)) > 1e-6
    assert chi_square_p(counts, exact_joint((), 2)) < 1e-6, "penalties matter here"
    for setting, value in (("presence_penalty", 0.0), ("frequency_penalty", 0.0), ("logit_bias", {4: -0.5})):
        assert chi_square_p(counts, exact_two(replace(PENALISED, **{setting: value}))) < 1e-6, setting


Wrong = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
MISTAKES: dict[str, Wrong] = {
    "accept and residual share noise": lambda p, accept, residual, x, q: (p, accept, accept, x, q),
    "q is not what the draft was drawn from": lambda p, accept, residual, x, q: (p, accept, residual, x, q.roll(1, 1)),
    "every draft is accepted": lambda p, accept, residual, x, q: (p, torch.zeros_like(accept), residual, x, q),
    "the raw distribution": lambda p, accept, residual, x, q: (p.sqrt(), accept, residual, x, q),
    "drafts count as top-k": lambda p, accept, residual, x, q: (p, torch.ones_like(accept), residual, x, q),
}
"""Falsified inputs of the rule."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_proof_notices(mistake: str) -> None:
    with patch.object(verify, "accept_or_draw", lambda *seen: accept_or_draw(*MISTAKES[mistake](*seen))):
        counts = first_two("top and sampled", "chain of 3")
    assert chi_square_p(counts, exact_joint((), 2)) < 1e-6


def test_a_rejection_by_rounding_stays_within_the_target() -> None:
    """q a little above p everywhere leaves no rest; p then decides."""
    p_target_MV = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 2)
    accept_M, residual_M = torch.full((2,), 1 - 2**-53).double(), torch.tensor([0.2, 0.7]).double()
    sampled_M = torch.tensor([1, 1])
    found = accept_or_draw(p_target_MV.clone(), accept_M, residual_M, sampled_M, p_target_MV * 1.0000002)
    assert found.tolist() == [0, 1]


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


def test_drafts_that_do_not_depend_on_the_batch_leave_a_rows_text_to_itself(target: Target) -> None:
    def options(seed: int) -> DecodeOptions:
        return DecodeOptions(max_new_tokens=16, temperature=0.4, seed=seed, ignore_end=True)

    together = [row.tokens for row in DecodeLoop(target, NgramDrafter()).generate(TEXTS, options(5))]
    alone = [DecodeLoop(target, NgramDrafter()).generate([text], options(5 + row))[0] for row, text in enumerate(TEXTS)]
    assert together == [row.tokens for row in alone]
    assert any(step.nodes > 1 for row in alone for step in row.rounds)


def test_top_k_draws_the_text_that_plain_sampling_draws(target: Target) -> None:
    """Each token takes its own number, whether a draft holds it or not."""
    options = DecodeOptions(max_new_tokens=20, temperature=1.0, seed=3, ignore_end=True, verifier="top_k")
    plain = [row.tokens for row in DecodeLoop(target).generate(TEXTS, options)]
    drafted = DecodeLoop(target, ReplayDrafter(plain, 61, 0.7)).generate(TEXTS, options)
    assert [row.tokens for row in drafted] == plain
    assert sum(len(row.rounds) for row in drafted) < 3 * 19, "some drafts were accepted"


@pytest.mark.parametrize("rule", ["top_k", "greedy_draft"])
def test_processors_see_each_rows_own_text(rule: str, target: Target) -> None:
    def last_but_one(input_ids: Tensor, scores: Tensor) -> Tensor:
        only = torch.full_like(scores, float("-inf"))
        return only.scatter(1, (input_ids[:, -2:-1] + 1) % 61, 0.0)

    options = DecodeOptions(12, temperature=1.0, seed=0, ignore_end=True, verifier=rule, processors=(last_but_one,))
    expected = []
    for text in TEXTS:
        whole = list(text)
        for _ in range(12):
            whole.append((whole[-2] + 1) % 61)
        expected.append(whole[len(text) :])
    drafted = DecodeLoop(target, ReplayDrafter(expected, 61, 0.8)).generate(TEXTS, options)
    assert [row.tokens for row in drafted] == expected
    assert sum(len(row.rounds) for row in drafted) < 3 * 11
