"""Reading the results of trainings, and an exception that stops one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headstart.heads.io import load_heads


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_heads(folder).state_dict()


def assert_same(one: Path, other: Path) -> None:
    """Assert bitwise equal heads."""
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """Raised inside a run to end it like a kill."""
