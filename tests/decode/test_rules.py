"""Every lossless rule, with every kind of drafter and every shape of tree, gives the target's own distribution."""

from __future__ import annotations

import itertools
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from headstart.decode import rules
from headstart.decode.rules import RULES
from headstart.decode.verify import Accepted, Row, Streams, streams
from headstart.support.rng import draw
from headstart.tree.proposal import Children, SampledChildren
from tests.decode.mutants import MUTANTS
from tests.decode.proofs import (
    chi_square_p,
    enumerate_round,
    exact_error,
    prove_by_sampling,
    prove_exactly,
    sample_texts,
    sample_texts_plainly,
)
from tests.decode.tables import KINDS, SHAPES, VOCAB, Grower, exact_joint

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]


def stands_for_itself(kind: str, shape: str) -> bool:
    """Whether no other case has the same trees: an only child is sampled or top-k, and the root alone is always so."""
    if shape == "root only":
        return kind == "top" or kind == "drawn, guesses"
    if KINDS[kind].adaptive:
        return shape == "bushy"
    return KINDS[kind].children is not Children.TOP_K_AND_SAMPLED or not shape.startswith("chain")


CASES = [
    (rule, kind, shape)
    for rule in LOSSLESS
    for kind, shape in itertools.product(KINDS, SHAPES)
    if stands_for_itself(kind, shape)
    if not RULES[rule].chains_only or (shape not in ("wide", "bushy") and not KINDS[kind].branch)
]


class SingleRow(Row):
    """Distributions in float32, as decoding has them."""

    def p_target(self, node: int) -> torch.Tensor:
        return super().p_target(node).float()

    def q_draft(self, node: int) -> torch.Tensor:
        return super().q_draft(node).float()


def expected_length(rule: str, kind: str, shape: str) -> float:
    """Tokens that one round emits on average."""
    emitted = enumerate_round(RULES[rule].accept_row, Grower(KINDS[kind], SHAPES[shape]))
    return sum(len(tokens) * probability for tokens, probability in emitted.items())


# -- the proofs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "kind", "shape"), CASES)
def test_lossless_by_enumeration(rule: str, kind: str, shape: str) -> None:
    prove_exactly(RULES[rule].accept_row, Grower(KINDS[kind], SHAPES[shape]))


@pytest.mark.parametrize(("rule", "kind", "shape"), CASES)
def test_lossless_by_sampling(rule: str, kind: str, shape: str) -> None:
    prove_by_sampling(sample_texts(RULES[rule].accept_row, Grower(KINDS[kind], SHAPES[shape])))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_lossless_in_float32(rule: str) -> None:
    # Every probability is a product of about ten factors with relative errors of 6e-8.
    shape = "chain of 3" if RULES[rule].chains_only else "bushy"
    prove_exactly(RULES[rule].accept_row, Grower(KINDS["drawn"], SHAPES[shape]), SingleRow, tolerance=1e-6)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_remembered_choices_change_nothing(rule: str) -> None:
    """The sampling proof replays choices that it has met before; the rule run afresh each time gives the same texts."""
    grower = Grower(KINDS["drawn"], SHAPES["chain of 3" if RULES[rule].chains_only else "bushy"])
    accept = RULES[rule].accept_row
    np.testing.assert_array_equal(
        sample_texts(accept, grower, 3, samples=500), sample_texts_plainly(accept, grower, 3, samples=500)
    )


@pytest.mark.parametrize(
    ("mutant", "rule"), [(name, rule) for name, mutant in MUTANTS.items() for rule in mutant.rules]
)
def test_the_proofs_notice(mutant: str, rule: str) -> None:
    wrong, accept = MUTANTS[mutant], RULES[rule].accept_row
    grower = wrong.grower(KINDS[wrong.kind], SHAPES[wrong.shape])
    with patch.dict(vars(rules), wrong.patches):
        counts = sample_texts(accept, grower, same_noise=wrong.same_noise, row_type=wrong.row_type)
        with pytest.raises(AssertionError, match="differs from the target"):
            prove_by_sampling(counts)
        if not wrong.same_noise:
            with pytest.raises(AssertionError, match="differs from the target"):
                prove_exactly(accept, grower, wrong.row_type)


def test_right_samples_give_evenly_spread_p_values() -> None:
    """The chi-square test itself: over many right samples its p-values are as often above as below each quantile."""
    exact, random = exact_joint((), 3), np.random.default_rng(0)
    values = [chi_square_p(random.multinomial(20_000, exact.flatten()).reshape(exact.shape), exact) for _ in range(400)]
    for quantile in (0.1, 0.5, 0.9):  # standard deviation of each share: at most .025
        assert abs(np.mean(np.array(values) < quantile) - quantile) < 0.1


# -- how much the rules accept ---------------------------------------------------------------------------------------


def test_of_top_k_children_all_rules_accept_the_same() -> None:
    for rule in ("greedy_draft", "traversal"):
        assert expected_length(rule, "top", "bushy") == pytest.approx(expected_length("top_k", "top", "bushy"))


def test_rules_that_use_more_of_the_draft_accept_more() -> None:
    """On chains `greedy_draft` decides token by token, and `traversal` by the chain as a whole."""
    assert expected_length("traversal", "drawn", "chain of 3") > expected_length("greedy_draft", "drawn", "chain of 3")
    for kind in ("drawn", "drawn, guesses"):
        lengths = [expected_length(rule, kind, "bushy") for rule in ("top_k", "greedy_draft", "traversal")]
        assert lengths[0] < lengths[1] < lengths[2]


# -- single rounds ---------------------------------------------------------------------------------------------------


def one_round(
    rule: str, p_target: list[list[float]], tokens: list[int], sampled: dict[int, SampledChildren]
) -> Accepted:
    """A chain whose node i is followed by the distribution p_target[i]."""
    parents = list(range(-1, len(tokens) - 1))
    row = Row(tokens, parents, sampled, torch.tensor(p_target), lambda logits_V, _: logits_V)
    return RULES[rule].accept_row(row, streams(0)[0])


@pytest.mark.parametrize("rule", list(RULES))
def test_without_randomness_the_argmax_decides(rule: str) -> None:
    only = torch.eye(4).tolist()
    accepted = one_round(rule, [only[1], only[2], only[3]], [0, 1, 3], {})
    assert (accepted.path, accepted.tokens) == ([0, 1], [1, 2])


@pytest.mark.parametrize("rule", ["greedy_draft", "traversal"])
def test_equal_distributions_accept_everything(rule: str) -> None:
    p_target = [[0.1, 0.2, 0.3, 0.4]] * 4
    sampled = {node: SampledChildren([node + 1], torch.tensor(p_target[0])) for node in range(3)}
    assert one_round(rule, p_target, [0, 1, 0, 3], sampled).path == [0, 1, 2, 3]


@pytest.mark.parametrize("rule", ["greedy_draft", "traversal"])
def test_a_rejection_by_rounding_stays_within_the_target(rule: str) -> None:
    """q a little above p everywhere leaves no residual; p then decides, so impossible tokens stay impossible."""
    p_target_V = torch.tensor([0.5, 0.5, 0.0, 0.0])
    sampled = {0: SampledChildren([1], p_target_V * 1.0000001 + 0.0)}
    with patch.object(rules, "uniform", lambda stream: 1.0 - 2**-53), patch.object(rules, "ratio", lambda *_: 0.5):
        accepted = one_round(rule, [p_target_V.tolist()] * 2, [0, 1], sampled)
    assert accepted.path == [0]
    assert accepted.tokens[0] in (0, 1)


def test_a_draft_from_a_smaller_vocabulary() -> None:
    """The drafter knows the tokens 1 and 3 only."""
    p_target = [[0.0, 0.5, 0.0, 0.5]] * 2
    sampled = {0: SampledChildren([1], torch.tensor([0.5, 0.5]), torch.tensor([1, 3]))}
    assert one_round("greedy_draft", p_target, [0, 3], sampled).path == [0, 1]


def test_draw_follows_the_distribution() -> None:
    probs_V, stream = exact_joint((), 1), streams(4)[0].residual
    counts = np.bincount([draw(torch.tensor(probs_V), stream) for _ in range(100_000)], minlength=VOCAB)
    prove_by_sampling(counts)


# -- typical acceptance ----------------------------------------------------------------------------------------------


def test_typical_is_marked_lossy() -> None:
    assert [name for name, rule in RULES.items() if not rule.lossless] == ["typical"]


@pytest.mark.parametrize("kind", ["top", "top and drawn", "drawn"])
def test_typical_changes_the_distribution(kind: str) -> None:
    grower = Grower(KINDS[kind], SHAPES["bushy"])
    assert exact_error(RULES["typical"].accept_row, grower) > 0.01
    with pytest.raises(AssertionError, match="differs from the target"):
        prove_by_sampling(sample_texts(RULES["typical"].accept_row, grower))


def test_typical_threshold() -> None:
    """p > min(.09, .3 exp(-H)): of a flat distribution over 16 tokens 1/16 > .3/16 is enough, below .09 or not."""
    flat, sharp = [1 / 16] * 16, [0.95] + [0.05 / 15] * 15
    assert one_round("typical", [flat, sharp], [0, 7], {}).path == [0, 1]
    assert one_round("typical", [sharp, sharp], [0, 7], {}).path == [0]
    accept = partial(rules.typical, epsilon=0.5, delta=1.1)  # 1.1 exp(-H) = 1.1 / 16
    row = Row([0, 7], [-1, 0], {}, torch.tensor([flat, sharp]), lambda logits_V, _: logits_V)
    assert accept(row, Streams(*(torch.Generator() for _ in range(2)))).path == [0]
