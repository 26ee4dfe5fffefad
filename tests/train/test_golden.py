"""The recorded first losses of every family: a change that moves them must be intended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headstart.heads.base import families
from headstart.support.files import read_jsonl
from tests.train.conftest import Train

GOLDEN = Path(__file__).parent / "golden_losses.json"

_SETTINGS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2},
    "eagle": {"draft_steps": 3},
    "eagle3": {"draft_steps": 3, "aux_layers": (1, 2, 3)},
    "peagle": {"draft_steps": 3, "aux_layers": (1, 2, 3), "mask_token_id": 0},
    "dspark": {"block_size": 3, "aux_layers": (1, 2), "markov_rank": 4, "confidence": True},
    "dflash": {"block_size": 4, "aux_layers": (1, 2)},
    "dflash2": {"block_size": 4, "aux_layers": (1, 2), "selector_rank": 4, "selector_top_k": 8},
    "mtp": {"draft_steps": 3},
}
HEADS = {name: {"family": name, **settings} for name, settings in _SETTINGS.items()}


def test_every_family_has_a_golden_run() -> None:
    assert set(HEADS) == set(families())


@pytest.mark.parametrize("name", HEADS)
def test_first_losses_match_the_golden_ones(name: str, run: Train, tmp_path: Path) -> None:
    """float32 sums in another order differ by about 1e-6, and Adam may flip the step of a weight with a near-zero
    gradient: 1e-3 of the loss covers both. A shift by one position or a wrong normaliser moves the loss by far more."""
    run(tmp_path, heads=HEADS[name], steps=6, eval_every=1, lr=1e-3)
    losses = [row["loss"] for _, row in read_jsonl(tmp_path / "metrics.jsonl")][1:]
    assert losses == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=1e-3)
