"""Accuracy, tau and the draft vocabulary on cases counted by hand."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.heads.base import StepPrediction
from headstart.heads.candidates import Candidates
from headstart.model.model import Target
from headstart.support.terminal import progress_bar
from headstart.train import fused_loss
from headstart.train.starting_heads import pick_vocabulary
from headstart.train.training_log import Display, Log
from headstart.train.validation import Tally, Validation, draft_coverage, greedy_tokens
from tests.train.stores import two_texts

DEVICE = torch.device("cpu")


def _says(tokens: list[int], size: int = 12) -> torch.Tensor:
    """Logits that rank each given token first and the following ids after it."""
    logits = torch.zeros(len(tokens), size)
    for row, token in enumerate(tokens):
        for rank in range(size):
            logits[row, (token + rank) % size] = size - rank
    return logits


def _step(logits_MD: torch.Tensor, source: list[int], origin: list[int]) -> StepPrediction:
    flat = (torch.tensor(places).long() for places in (source, origin))
    return StepPrediction(logits_MD, torch.eye(logits_MD.shape[1]), *flat)


@pytest.mark.parametrize("block", [1, 3, 512])
def test_tau_aligns_the_steps_of_one_draft(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_loss, "_BLOCK", {"cpu": 0})
    monkeypatch.setattr(fused_loss, "_BLOCK_ROWS", block)
    greedy_X = torch.tensor([-1, 3, 4, 5, 6, -1])
    steps = [
        # from origins 0, 1, 2, 3: right, wrong (by one rank), right, right
        _step(_says([3, 3, 5, 6]), [1, 2, 3, 4], [0, 1, 2, 3]),
        # from origins 0, 1, 2: right, right (but its first step was wrong), far off
        _step(_says([4, 5, 10]), [2, 3, 4], [0, 1, 2]),
    ]
    tally = Tally(2, DEVICE)
    tally.add(steps, torch.arange(12), greedy_X)
    result = tally.result()
    assert result.predictions == [4, 3]
    assert result.accuracy["top1"] == [pytest.approx(3 / 4), pytest.approx(2 / 3)]
    assert result.accuracy["top4"] == [pytest.approx(1.0), pytest.approx(2 / 3)]
    assert result.accuracy["top8"] == [pytest.approx(1.0), pytest.approx(2 / 3)]
    assert result.tau == pytest.approx(1 + 3 / 4 + 1 / 3)


def test_token_outside_the_draft_vocabulary_is_a_miss() -> None:
    vocabulary_D = torch.tensor([20, 21, 22])
    tally = Tally(1, DEVICE)
    tally.add([_step(_says([1, 1], size=3), [0, 1], [0, 1])], vocabulary_D, torch.tensor([21, 5]))
    assert tally.result().accuracy == {"top1": [0.5], "top4": [0.5], "top8": [0.5]}


def test_excluded_draft_is_a_miss() -> None:
    """Two candidates: the target's token is the third best."""
    step = _step(_says([3, 4]), [0, 1], [0, 1])
    step.candidates = Candidates(torch.zeros(2, 1, 1), torch.zeros(12, 1), 2)
    tally = Tally(1, DEVICE)
    tally.add([step], torch.arange(12), torch.tensor([5, 5]))
    assert tally.result().accuracy == {"top1": [0.0], "top4": [0.5], "top8": [0.5]}


def test_counts_of_ranks_add_up() -> None:
    greedy_X = torch.tensor([3, 4])
    both, other = Tally(1, DEVICE), Tally(1, DEVICE)
    both.add([_step(_says([3, 4]), [0, 1], [0, 1])], torch.arange(12), greedy_X)
    other.add([_step(_says([0, 0]), [0, 1], [0, 1])], torch.arange(12), greedy_X)
    both.counts_KC += other.counts_KC
    assert both.result().accuracy["top1"] == [0.5]
    assert both.result().tau == 1.5


def test_step_beyond_every_answer_counts_nothing() -> None:
    tally = Tally(2, DEVICE)
    tally.add([_step(_says([3]), [0], [0]), _step(_says([]), [], [])], torch.arange(12), torch.tensor([3]))
    assert (tally.result().tau, tally.result().predictions) == (2, [1, 0])


def test_empty_validation_is_plain_decoding() -> None:
    assert Tally(3, DEVICE).result().tau == 1


def test_chosen_tokens_are_the_targets_argmax(tiny_target: Target) -> None:
    tokens, batch = two_texts(tiny_target)
    greedy_X = greedy_tokens(tiny_target, batch)
    own = [tiny_target.model(torch.tensor([row])).logits[0].argmax(-1).tolist() for row in tokens]
    assert greedy_X.tolist() == [-1, -1, own[0][2], own[0][3], -1, own[1][0], own[1][1], -1, -1, -1]


def test_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    counts_V = torch.tensor([1, 4, 0, 4, 9, 1])
    assert pick_vocabulary(counts_V, 3, always=[]).tolist() == [1, 3, 4]
    assert pick_vocabulary(counts_V, 4, always=[]).tolist() == [0, 1, 3, 4]
    assert pick_vocabulary(counts_V, 3, always=[2]).tolist() == [1, 2, 4]


def test_coverage_is_the_draftable_fraction() -> None:
    masks = [torch.ones(10, dtype=torch.bool)]
    store: Any = SimpleNamespace(supervised_counts=lambda _: torch.tensor([6, 0, 3, 1]), supervised=lambda: masks)
    assert draft_coverage(store, 4, torch.tensor([0, 3])) == pytest.approx(0.7)


def test_validation_line_has_leading_zeros() -> None:
    text = io.StringIO()
    shown = Validation({"top1": [0.316, 1.0]}, [0.4, 0.3], [40, 20])
    with progress_bar(None, "training", 100) as bar:
        Display(Log(Console(file=text, width=200), None), bar, 0.0).show_validation(20, 61.0, None, shown)
    assert "top-1 0.32/1.00 · tau 1.70" in text.getvalue()
