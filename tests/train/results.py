"""What trainings leave, and how tests stop them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headstart.heads.io import load_heads


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_heads(folder).state_dict()


def assert_same(one: Path, other: Path) -> None:
    """Bitwise the same heads."""
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """Raised in the middle of a run that is to stop dead."""
