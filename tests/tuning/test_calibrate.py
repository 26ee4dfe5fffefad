"""Calibrated probabilities match what is accepted, and the replay of dynamic trees counts right."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.calibration import Calibration
from headstart.decode.budget import Costs
from headstart.tuning.calibrate import fit_calibration, replay_dynamic


def overconfident(origins: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Heads that claim probability c for their best draft, which is right with probability c / 2."""
    rng = np.random.default_rng(0)
    claimed = rng.uniform(0.05, 0.9, (origins, 2))
    right = rng.uniform(size=(origins, 2)) < claimed / 2
    ranks = np.where(right, 0, 4)
    log_probs = np.log(np.stack([claimed, np.full_like(claimed, 0.01)], axis=-1)).astype(np.float32)
    return ranks, log_probs


def test_sampling_accepts_as_often_as_the_target_says() -> None:
    claimed, own = np.array([0.5, 0.2, 0.1, 0.05]), np.array([0.4, 0.15, 0.1, 0.05])
    log_probs, likely = (np.tile(part.astype(np.float32), (40, 1, 1)) for part in (np.log(claimed), own))
    found = fit_calibration(np.zeros((40, 1), dtype=np.int64), log_probs, likely)
    assert found.reached == (pytest.approx(0.65),), "the best three of them together"
    assert found.probs(0, np.log(claimed).astype(np.float32)).tolist() == pytest.approx(own.tolist(), abs=0.01)


def test_a_sampled_child_has_a_probability_of_its_own() -> None:
    claimed, own, sampled = np.array([0.5, 0.2, 0.1, 0.05]), np.array([0.4, 0.15, 0.1, 0.05]), np.array([0.6, 0.3, 0.2])
    log_probs, likely, sampled_OKR = (
        np.tile(part.astype(np.float32), (40, 1, 1)) for part in (np.log(claimed), own, sampled)
    )
    found = fit_calibration(np.zeros((40, 1), dtype=np.int64), log_probs, likely, sampled_OKR)
    assert found.reached == (pytest.approx(0.4 + 0.15 + 0.2),), "two top-k children and a sampled one"
    assert found.sampled is not None
    asked = np.log(claimed[:3]).astype(np.float32)
    assert found.sampled.probs(0, asked).tolist() == pytest.approx(sampled.tolist(), abs=0.01)
    halfway = fit_calibration(np.zeros((40, 1), dtype=np.int64), log_probs, likely).towards(found, 0.5)
    assert halfway.sampled is not None
    expected = (own[:3] + sampled) / 2
    assert halfway.sampled.probs(0, asked).tolist() == pytest.approx(expected.tolist(), abs=0.01)


def test_calibration_corrects_overconfidence() -> None:
    ranks, log_probs = overconfident()
    found = fit_calibration(ranks, log_probs)
    asked = np.log(np.array([0.2, 0.5, 0.8], dtype=np.float32))
    # 40 bins of 1000 drafts: three standard errors of a share are .05.
    np.testing.assert_allclose(found.probs(0, asked), [0.1, 0.25, 0.4], atol=0.05)
    for shares in found.accepted:
        assert list(shares) == sorted(shares)


def test_without_measurements_the_heads_are_believed() -> None:
    assert Calibration().probs(2, np.log(np.array([0.25], dtype=np.float32)))[0] == pytest.approx(0.25)
    empty = fit_calibration(np.zeros((0, 2), dtype=np.int64), np.zeros((0, 2, 3), dtype=np.float32))
    assert empty.probs(0, np.zeros(1, dtype=np.float32))[0] == 1.0


def test_replay_of_certain_drafts_accepts_all_of_them() -> None:
    ranks = np.zeros((30, 2), dtype=np.int64)
    log_probs = np.full((30, 2, 1), -1e-6, dtype=np.float32)
    tokens, ms = replay_dynamic(ranks, log_probs, Calibration(), Costs((1, 4), (10.0, 11.0), 1.0))
    assert tokens == 3.0
    assert ms == pytest.approx(10.0 + 2 / 3 + 1.0)


@pytest.mark.parametrize(
    ("best_child", "level_ms", "tokens"), [(1.0, 4.0, 3.0), (0.1, 4.0, 2.0), (0.56, 4.0, 2.0), (1.0, 9.0, 2.0)]
)
def test_the_replay_drafts_a_level_where_growing_would(best_child: float, level_ms: float, tokens: float) -> None:
    """Certain drafts, at 10 ms a round and 1 ms a node: the second level promises `best_child` less the worth of a
    node."""
    ranks = np.zeros((60, 2), dtype=np.int64)
    log_probs = np.full((60, 2, 1), -1e-6, dtype=np.float32)
    costs = Costs((1, 64), (10.0, 73.0), 10.0, level_ms, 2)
    calibration = Calibration(reached=(1.0, best_child))
    assert replay_dynamic(ranks, log_probs, calibration, costs)[0] == tokens


def test_replay_of_hopeless_drafts_verifies_nothing() -> None:
    ranks = np.full((30, 2), 3)
    log_probs = np.full((30, 2, 1), -8.0, dtype=np.float32)
    tokens, ms = replay_dynamic(ranks, log_probs, Calibration(), Costs((1, 4), (10.0, 20.0), 1.0))
    assert (tokens, ms) == (1.0, 11.0)
