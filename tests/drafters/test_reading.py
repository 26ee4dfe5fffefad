"""Drafters read a long prompt in pieces: the drafts stay the same, and reading can be cancelled between pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.decode.drafting import Drafter
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.early_exit import EarlyExitDrafter
from headstart.drafters.heads import ShippedDrafter
from headstart.heads.parts.recurrent import RecurrentHead
from headstart.model.model import Target
from tests.drafters.helpers import drafted, heads_drafter, tiny
from tests.shipped import ship

CHUNK = 16
OPTIONS = DecodeOptions(max_new_tokens=8, ignore_end=True)


@pytest.fixture
def target() -> Target:
    return tiny()


def text(length: int, first: int = 3) -> list[int]:
    return [(7 * index + first) % 60 for index in range(length)]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("lengths", [(50,), (50, 33), (50, 1, 17)])
def test_drafts_in_pieces(name: str, lengths: tuple[int, ...], target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, prompts = heads_drafter(target, name), [text(length, length) for length in lengths]
    _, at_once = drafted(target, drafter, prompts, OPTIONS)
    for module in ("block", "recurrent"):
        monkeypatch.setattr(f"headstart.heads.parts.{module}.CHUNK", CHUNK)
    _, in_pieces = drafted(target, drafter, prompts, OPTIONS)
    assert len(at_once) == len(in_pieces)
    for tree, other in zip(at_once, in_pieces, strict=True):
        assert (tree.tokens, tree.parents) == (other.tokens, other.parents)
        # Attention adds in another order, in float32.
        assert tree.accept_probs == pytest.approx(other.accept_probs, rel=1e-4)


class Cancelled(BaseException):
    """Raised by a check to cancel reading."""


def heads(target: Target, folder: Path) -> tuple[Target, Drafter, Any, str]:
    return target, heads_drafter(target, "eagle3"), RecurrentHead, "_run"


def early_exit(target: Target, folder: Path) -> tuple[Target, Drafter, Any, str]:
    drafter = EarlyExitDrafter(target, 2)
    return target, drafter, drafter.first_layers, "_read_causal"


def mtp(target: Target, folder: Path) -> tuple[Target, Drafter, Any, str]:
    shipped = ship("mimo", folder / "shipped").target
    return shipped, ShippedDrafter(shipped), RecurrentHead, "_run"


@pytest.mark.parametrize("make", [heads, early_exit, mtp])
def test_reading_is_cancelled_between_two_pieces(
    make: Callable[[Target, Path], tuple[Target, Drafter, Any, str]],
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spy: Any,
) -> None:
    decoded, drafter, owner, name = make(target, tmp_path)
    loop, prompt = DecodeLoop(decoded, drafter), [text(100)]
    for module in ("model.model", "heads.parts.recurrent"):
        monkeypatch.setattr(f"headstart.{module}.CHUNK", CHUNK)
    pieces = spy(owner, name)

    def check() -> None:
        if len(pieces) == 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        loop.generate(prompt, OPTIONS, check_on=check)
    assert len(pieces) == 2, "of seven"
    with torch.inference_mode():
        (row,) = loop.generate(prompt, OPTIONS)
    assert row.drafter_error is None and len(pieces) > 7
