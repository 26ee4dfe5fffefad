"""Calibrated probabilities match the observed acceptance."""

from __future__ import annotations

import numpy as np
import pytest

from headstart.tree.calibration import Calibration
from headstart.tuning.calibrate import Tables, fit_calibration


def overconfident(origins: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Simulate heads that claim probability c for their best draft, right with probability c / 2."""
    rng = np.random.default_rng(0)
    claimed = rng.uniform(0.05, 0.9, (origins, 2))
    right = rng.uniform(size=(origins, 2)) < claimed / 2
    ranks = np.where(right, 0, 4)
    log_probs = np.log(np.stack([claimed, np.full_like(claimed, 0.01)], axis=-1)).astype(np.float32)
    return ranks, log_probs


def test_sampling_accepts_at_the_targets_rate() -> None:
    claimed, own = np.array([0.5, 0.2, 0.1, 0.05]), np.array([0.4, 0.15, 0.1, 0.05])
    log_probs, likely = (np.tile(part.astype(np.float32), (40, 1, 1)) for part in (np.log(claimed), own))
    found = fit_calibration(np.zeros((40, 1), dtype=np.int64), log_probs, likely)
    assert found.any_child_accepted == (pytest.approx(0.65),), "the sum of the best three"
    assert found.probs(0, np.log(claimed).astype(np.float32)).tolist() == pytest.approx(own.tolist(), abs=0.01)


def test_sampled_child_has_its_own_probability() -> None:
    claimed, own, sampled = np.array([0.5, 0.2, 0.1, 0.05]), np.array([0.4, 0.15, 0.1, 0.05]), np.array([0.6, 0.3, 0.2])
    log_probs, likely, sampled_OKR = (
        np.tile(part.astype(np.float32), (40, 1, 1)) for part in (np.log(claimed), own, sampled)
    )
    found = fit_calibration(np.zeros((40, 1), dtype=np.int64), log_probs, likely, sampled_OKR)
    assert found.any_child_accepted == (pytest.approx(0.4 + 0.15 + 0.2),), "two top-k children and a sampled one"
    asked = np.log(claimed[:3]).astype(np.float32)
    assert found.sampled_probs(0, asked).tolist() == pytest.approx(sampled.tolist(), abs=0.01)
    unlikely = found.sampled_probs(0, np.log(np.array([0.5, 0.01, 0.01], dtype=np.float32))).tolist()
    assert unlikely == pytest.approx([0.6, 0.3, 0.295], abs=0.01), "it depends on the mass left by earlier drafts"
    again = Calibration.from_knots(found.knots("sampled_"), "sampled_")
    assert again == found
    halfway = fit_calibration(np.zeros((40, 1), dtype=np.int64), log_probs, likely).towards(found, 0.5)
    expected = (own[:3] + sampled) / 2
    assert halfway.sampled_probs(0, asked).tolist() == pytest.approx(expected.tolist(), abs=0.01)


def test_calibration_corrects_overconfidence() -> None:
    ranks, log_probs = overconfident()
    found = fit_calibration(ranks, log_probs)
    asked = np.log(np.array([0.2, 0.5, 0.8], dtype=np.float32))
    # 40 bins of 1000 drafts: three standard errors are .05.
    np.testing.assert_allclose(found.probs(0, asked), [0.1, 0.25, 0.4], atol=0.05)
    for shares in found.accepted:
        assert list(shares) == sorted(shares)


def test_off_best_paths_have_their_own_curve() -> None:
    """The second draft is right as often as claimed, and half as often if the first token was not the best draft."""
    rng = np.random.default_rng(1)
    origins = 40_000
    first = rng.choice(3, origins, p=(0.5, 0.3, 0.2))  # rank of the true token; the last one was not drafted
    claimed = rng.uniform(0.1, 0.9, origins)
    second = np.where(rng.uniform(size=origins) < np.where(first == 0, claimed, claimed / 2), 0, 2)
    log_probs = np.log(np.stack([np.full((origins, 2), (0.5, 0.3)), np.stack([claimed, 1e-4 * claimed], 1)], 1))
    found = fit_calibration(np.stack([first, second], 1), log_probs.astype(np.float32))
    asked = np.log(np.array([0.2, 0.5, 0.8], dtype=np.float32))
    # Bins of 500 drafts or more: three standard errors are .07.
    np.testing.assert_allclose(found.after(False).probs(1, asked), [0.2, 0.5, 0.8], atol=0.07)
    np.testing.assert_allclose(found.after(True).probs(1, asked), [0.1, 0.25, 0.4], atol=0.07)
    assert found.child_acceptance(1) == pytest.approx(0.5, abs=0.02)
    assert found.child_acceptance(1, 1.0) == pytest.approx(0.25, abs=0.02)
    assert found.child_acceptance(1, 0.5) == pytest.approx(
        (found.child_acceptance(1) + found.child_acceptance(1, 1.0)) / 2
    )
    one_curve = Tables(np.stack([first, second], 1), log_probs.astype(np.float32)).fit(by_path=False)
    assert one_curve.off_best is None
    assert found.after(True).probs(0, asked).tolist() == pytest.approx(one_curve.probs(0, asked).tolist())
    again = Calibration.from_knots(found.knots("sampled_"), "sampled_")
    assert again == found
    halfway = one_curve.towards(found, 0.5)
    assert halfway.off_best is not None
    expected = (one_curve.probs(1, asked) + found.off_best.probs(1, asked)) / 2 if found.off_best else None
    np.testing.assert_allclose(halfway.off_best.probs(1, asked), expected)


def test_path_curves_need_evidence() -> None:
    """Heads that follow the path may be equally good after any path; noise alone makes no curves."""
    ranks, log_probs = overconfident()
    assert fit_calibration(ranks, log_probs).off_best is None
    assert Tables(ranks, log_probs).fit(by_path=True).off_best is None, "no drafted path leaves the best one"
    rng = np.random.default_rng(2)
    ranks = rng.choice(3, (4_000, 3), p=(0.5, 0.3, 0.2))
    log_probs = np.log(rng.uniform(0.1, 0.9, (4_000, 3, 2))).astype(np.float32)
    assert fit_calibration(ranks, log_probs).off_best is None
    assert Tables(ranks, log_probs).fit(by_path=True).off_best is not None


def test_few_paths_fall_back_to_all_paths() -> None:
    """Two paths off the best one, both right, are too little evidence."""
    ranks = np.array([[0, 1]] * 400 + [[1, 0]] * 2)
    log_probs = np.full((402, 2, 2), -1.0, dtype=np.float32)
    found = Tables(ranks, log_probs).fit(by_path=True)
    assert found.after(True).probs(1, log_probs[0, 0, :1])[0] == pytest.approx(0.5, abs=0.01)


def test_without_measurements_the_heads_are_trusted() -> None:
    assert Calibration().probs(2, np.log(np.array([0.25], dtype=np.float32)))[0] == pytest.approx(0.25)
    empty = fit_calibration(np.zeros((0, 2), dtype=np.int64), np.zeros((0, 2, 3), dtype=np.float32))
    assert empty.probs(0, np.zeros(1, dtype=np.float32))[0] == 1.0
