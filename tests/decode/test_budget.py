"""Nodes are chosen by cost and gain, and drafting pauses where it does not pay."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import log2

import numpy as np
import pytest
import torch

from headstart.decode.budget import Budget, Costs
from headstart.decode.experience import Experience, RoundTimes, size_of
from headstart.tree.tree import DraftDistribution, Tree

FLAT = Costs((1, 64), (10.0, 10.0))
STEEP = Costs((1, 64), (10.0, 640.0))
REAL = Costs((1, 2, 4, 8, 16, 32, 64), (23.7, 24.2, 24.8, 27.1, 32.0, 43.0, 65.0))


def trees(accept_probs: list[list[float]], parents: list[list[int]]) -> list[Tree]:
    tokens = [[row * 100 + node for node in range(len(probs))] for row, probs in enumerate(accept_probs)]
    rows = zip(tokens, parents, accept_probs, strict=True)
    return [Tree(list(own), list(above), list(probs)) for own, above, probs in rows]


def roots(rows: int) -> list[Tree]:
    return [Tree([0]) for _ in range(rows)]


def sizes(drafted: list[Tree]) -> list[int]:
    return [tree.size for tree in drafted]


def play(budget: Budget, emitted: Iterable[int]) -> list[bool]:
    """Play rounds with chains of 4 drafts; return which of them drafted."""
    history = []
    for tokens in emitted:
        history.append(budget.drafts)
        budget.record([Tree.chain_of([0] * 5)] if budget.drafts else roots(1), [tokens if budget.drafts else 1])
    return history


def test_free_nodes_are_all_kept_and_expensive_ones_all_dropped() -> None:
    drafted = trees([[1.0, 0.5, 0.4, 0.3]], [[-1, 0, 0, 1]])
    assert sizes(Budget(FLAT, "on", 1).prune(drafted)) == [4]
    assert sizes(Budget(STEEP, "on", 1).prune(drafted)) == [1]


def test_pruning_keeps_the_best_nodes_with_their_parents() -> None:
    drafted = trees([[1.0, 0.01, 0.9, 0.8, 0.005]], [[-1, 0, 0, 2, 1]])
    (kept,) = Budget(REAL, "on", 1).prune(drafted)
    assert kept == Tree([0, 2, 3], [-1, 0, 1], [1.0, 0.9, 0.8])


def test_rows_share_one_width_by_acceptance() -> None:
    drafted = trees([[1.0, 0.9, 0.8, 0.7], [1.0, 0.1]], [[-1, 0, 1, 2], [-1, 0]])
    kept = Budget(REAL, "on", 2).prune(drafted)
    assert sizes(kept) == [4, 2], "one row pays for the width; the other brings what it has"


def test_the_best_width_equals_exhaustive_search() -> None:
    rng = random.Random(0)
    for _ in range(20):
        budget = Budget(REAL, "on", 1)
        accept_probs = [1.0, *sorted((rng.random() ** 2 for _ in range(20)), reverse=True)]
        drafted = trees([accept_probs], [[-1, *[0] * 20]])
        assert budget._corrected is not None
        rate = budget._rate(budget._corrected, 21)
        net = [sum(accept_probs[:nodes]) - rate * REAL.verify(nodes) for nodes in range(1, 22)]
        assert sizes(budget.prune(drafted)) == [net.index(max(net)) + 1]


def test_trees_with_drawn_nodes_are_never_pruned() -> None:
    drafted = trees([[1.0, 0.01]], [[-1, 0]])
    drafted[0].sampled[1] = DraftDistribution(torch.tensor([1.0]))
    assert sizes(Budget(STEEP, "on", 1).prune(drafted)) == [2]


@pytest.mark.parametrize("accepted", [0, 1])
def test_drafting_pauses_only_where_it_does_not_pay(accepted: int) -> None:
    """A round costs .14 tokens; rounds without accepted drafts take less than 3 % of all time."""
    drafted = sum(play(Budget(REAL, "auto", 1, limit=1000, draft_ms=1.6), [1 + accepted] * 300))
    assert drafted == 300 if accepted else 0.14 * drafted < 0.03 * 300


def test_a_few_rounds_without_luck_are_forgiven() -> None:
    """A round brings 1.5 tokens and costs 1.3 plain ones: of 12 tokens won, at most 8 are lost again."""
    budget = Budget(Costs((1, 64), (10.0, 10.0), 3.0), "auto", 1, draft_ms=3.0)
    assert all(play(budget, [1, 2] * 30))
    assert play(budget, [1] * 40).index(False) == 27


def test_expensive_drafts_that_fail_are_given_up_early() -> None:
    history = play(Budget(REAL, "auto", 1, draft_ms=20.0), [1] * 9)
    assert history.index(False) == 3, "three such rounds cost its stake of two tokens"


def test_drafting_returns_when_it_pays_again() -> None:
    history = play(Budget(REAL, "auto", 1, limit=2000, draft_ms=1.6), [1] * 100 + [3] * 300)
    assert not all(history[20:100])
    assert all(history[200:])


@pytest.mark.parametrize(("levels", "charged"), [(1, 3.0), (4, 6.0), (None, 5.0)])
def test_a_draft_costs_the_levels_that_the_heads_drafted(levels: int | None, charged: float) -> None:
    """The tree is 3 deep. Another drafter's deeper branch costs no level; without `levels`, the depth counts."""
    budget = Budget(Costs((1, 64), (10.0, 10.0), 6.0, 1.0, 4), "on", 1)
    drafted = trees([[1.0, 0.9, 0.8, 0.7]], [[-1, 0, 1, 2]])
    drafted[0].levels = levels
    for _ in range(200):
        budget.record(budget.prune(drafted), [1])
    assert budget._draft_ms == pytest.approx(charged, abs=1e-6), "the mean of a constant"


@pytest.mark.parametrize("limit", [32, 64])
@pytest.mark.parametrize(("draft_ms", "plain_tokens"), [(2.0, 8), (7.0, 200)])
def test_short_answers_are_drafted_once_they_earned_a_trial(limit: int, draft_ms: float, plain_tokens: int) -> None:
    """Answers too short to win back a trial of expensive drafts stay plain until together they have earned its price,
    and draft from then on; cheap drafts are tried in the first answer."""
    costs = Costs((1, 2, 4, 8, 16, 32, 64), (4.3, 4.4, 4.8, 5.5, 7.0, 10.0, 16.0), draft_ms)
    experience, plain_rounds, later = Experience(), 0, []
    for _ in range(20):
        budget = Budget(costs, "auto", 1, limit, prompt=30, experience=experience)
        left, rounds, drafted = limit - 1, 0, 0
        while left > 0:
            nodes = min(6, budget.node_limit(64)) if budget.drafts else 1
            emitted = min(left, nodes if nodes < 6 else 5)
            chain = Tree([0] * nodes, list(range(-1, nodes - 1)), [0.9**depth for depth in range(nodes)])
            spent_ms = (draft_ms if nodes > 1 else 0.0, costs.verify(nodes))
            budget.record([chain], [emitted], spent_ms)
            left, rounds, drafted = left - emitted, rounds + 1, drafted + (nodes > 1)
        plain_rounds += rounds if not later and not drafted else 0
        later += [drafted / rounds] if drafted or later else []
    assert plain_rounds <= plain_tokens
    assert min(later) > 0.5 and sum(later) > 0.8 * len(later), "all but rounds that measured pairs begin with"


def test_rounds_that_could_not_draft_are_no_loss_of_drafting() -> None:
    """After a prompt that leaves no room, the next request drafts as usual."""
    experience = Experience()
    full = Budget(REAL, "auto", 1, 200, prompt=8000, experience=experience)
    for _ in range(100):
        full.record(roots(1), [1], (0.0, 20.0), could_draft=False)
    assert full.drafts and experience.account == Experience().account and not experience.lost_trials
    assert Budget(REAL, "auto", 1, 200, prompt=30, experience=experience).drafts


def test_modes() -> None:
    assert Budget(None, "auto", 1).drafts
    assert not Budget(REAL, "off", 1).drafts
    assert Budget(None, "auto", 1).threshold == 0.0
    assert Budget(None, "auto", 1, experience=Experience()).node_limit(64) == 64, "without costs nothing is small"
    assert 0 < Budget(REAL, "auto", 1).threshold < Budget(REAL, "auto", 16).threshold < 1


def test_noisy_rounds_do_not_make_nodes_free() -> None:
    """Where small trees met slow moments and large ones did not, a node still has to be likely enough to be drafted."""
    noisy = Experience(rounds=RoundTimes({0: (1.0, 1.0), size_of(4): (1.3, 1.3), size_of(16): (0.9, 0.9)}))
    usual, now = (Budget(REAL, "auto", 1, experience=of).threshold for of in (None, noisy))
    assert now == pytest.approx(usual), "nodes take longer, and so do the rounds that they are weighed against"


def test_a_token_counts_for_the_time_that_it_saves() -> None:
    """A forward costs 10 ms and 1 more per row: the shared part is charged to the row that will end last."""
    budget = Budget(Costs((1, 64), (11.0, 74.0)), "on", 2, limit=100)
    assert budget.weights == pytest.approx([1.0, 1.0]), "nothing is known yet"
    for _ in range(20):
        budget.record(roots(2), [3, 1])
    first, second = budget.weights
    assert first == pytest.approx(2 * 1 / 12, abs=0.01), "its own share of the forward"
    assert second == pytest.approx(2 * 11 / 12, abs=0.01)
    budget.reorder([1])
    assert budget.weights == [1.0]


def test_a_batch_whose_slowest_row_gains_nothing_is_decoded_plainly() -> None:
    """Fast rows would pay for drafting on average, yet the batch would end later."""
    drafted = trees([[1.0, 0.9]] * 3 + [[1.0, 0.02]], [[-1, 0]] * 4)
    costs = Costs((1, 4, 8), (20.0, 24.0, 32.0))
    alike = Budget(costs, "on", 4)
    assert sizes(alike.prune(drafted)) == [2] * 4
    uneven = Budget(costs, "on", 4, limit=200)
    for _ in range(30):
        uneven.record(roots(4), [2, 2, 2, 1])
    assert sizes(uneven.prune(drafted)) == [1] * 4


def verifying(pairs: dict[int, tuple[float, ...]], nodes: int) -> float:
    return float(np.interp(log2(nodes), *RoundTimes(ratios=pairs).verify_slowdown))


def test_sizes_of_trees_differ_by_what_chance_leaves() -> None:
    assert verifying({}, 8) == verifying({0: (3.0, 3.0), 3: (2.0,)}, 8) == 1, "nothing is known of trees"
    assert verifying({2: (1.5, 1.5, 1.5)}, 1) == 1 and verifying({2: (1.5, 1.5, 1.5)}, 32) == pytest.approx(1.5)
    scattered = {2: (1.0, 1.3), 3: (0.9, 1.25)}
    assert verifying(scattered, 4) == pytest.approx(verifying(scattered, 8), abs=0.02)
    clear = {2: (1.0, 1.01, 1.02), 3: (1.49, 1.5, 1.51), 4: (1.0, 1.01)}
    assert verifying(clear, 5) > 1.2 and verifying(clear, 7) > 1.4 and verifying(clear, 13) < 1.05


def test_sizes_that_are_seldom_seen_are_compared_later_than_others() -> None:
    rounds = RoundTimes()
    for _ in range(2):
        rounds.add(1, 1.0, None)
    for number in range(40):
        rounds.add(16 if number in (10, 20, 30) else 4, 1.1, 1.0)
    assert {kind: len(pairs) for kind, pairs in rounds.ratios.items()} == {0: 4, 2: 4, 4: 2}
    rounds.ratios, rounds.fresh = {}, False  # the next call: its rounds may be an hour later
    rounds.add(1, 1.0, None)
    rounds.fresh = False
    for nodes in (4, 4, 4, 4, 8, 8, 8):
        rounds.add(nodes, 1.1, 1.0)
    assert {kind: len(pairs) for kind, pairs in rounds.ratios.items()} == {0: 4, 2: 4}
    assert not rounds.plain_rounds_due
    for _ in range(17):
        rounds.add(4, 1.1, 1.0)
    assert rounds.plain_rounds_due, "a size is not known that one of 24 rounds verified"


def test_a_size_that_is_not_verified_any_more_is_forgotten() -> None:
    rounds = RoundTimes()
    for session in range(3):
        for _ in range(2):
            rounds.add(1, 1.0, None)
        for number in range(10):
            rounds.add(16 if not session and number < 2 else 4, 3.0 if number < 2 else 1.0, 1.0)
    assert len(rounds.ratios[4]) < 2 <= len(rounds.ratios[2]), "both when a neighbour was busy"
    assert len(rounds.ratios[0]) == 12
