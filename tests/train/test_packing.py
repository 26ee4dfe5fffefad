"""Packing several conversations into a row: same losses and gradients as one row each."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from headstart.data.states.store import Sample
from headstart.errors import UserError
from headstart.heads.base import DraftHead, HeadBatch, origins
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.support import regions
from headstart.train.batches import count_predictions, read_batch, sample_anchors, subsample
from tests.heads.test_contract import CASES, build, shake
from tests.tiny import tiny_model
from tests.train.conftest import Train
from tests.train.results import assert_same
from tests.train.test_long_texts import assert_same_step, cut_up, learn

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("llama", vocab_size=61))


def store_of(target: Target, heads: DraftHead, lengths: list[int]) -> Any:
    """Random texts with 90 % of their tokens supervised, always including the first."""
    torch.manual_seed(1)
    layers = sorted({*heads.aux_layers, FINAL})
    samples = []
    for length in lengths:
        states = {layer: torch.randn(length, target.hidden_size) for layer in layers}
        samples.append(Sample(torch.randint(61, (length,)), torch.rand(length) < 0.9, states))
        samples[-1].supervised_T[0] = True
    return SimpleNamespace(samples=lambda indices, layers: [samples[index] for index in indices])


def both(target: Target, heads: DraftHead, lengths: list[int]) -> tuple[HeadBatch, HeadBatch]:
    store, layers = store_of(target, heads, lengths), sorted({*heads.aux_layers, FINAL})
    indices = list(range(len(lengths)))
    padded, packed = (read_batch(store, indices, layers, packed).on(CPU, torch.float32) for packed in (False, True))
    assert packed.tokens_BT.shape == (1, sum(lengths)) and count_predictions(packed) == count_predictions(padded)
    return padded, packed


@pytest.mark.parametrize("short", [True, False], ids=["in one piece", "in parts"])
@pytest.mark.parametrize("name", CASES)
def test_packed_gradients_match(name: str, short: bool, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = shake(build(name, target))
    padded, packed = both(target, heads, [23, 2, 40, 1, 9, 17])
    wanted = learn(target, heads, padded)
    if not short:
        cut_up(monkeypatch)
    assert_same_step(learn(target, heads, packed), wanted)


def test_packed_position_weights_match(target: Target) -> None:
    heads = build("eagle3", target)
    padded, packed = both(target, heads, [23, 40, 9, 17])
    made = [learn(target, heads, batch, position_weight="dpace") for batch in (packed, padded)]
    assert_same_step(*made)


def test_no_draft_crosses_conversations(target: Target) -> None:
    heads = build("medusa", target)
    _, packed = both(target, heads, [4, 3, 5])
    assert packed.starts_BT is not None
    packed.supervised_BT[0, [1, 2, 3, 5, 6, 8, 9, 10, 11]] = True
    assert packed.starts_BT.tolist() == [[0] * 4 + [4] * 3 + [7] * 5]
    # t a b c | u d e | v f g h i: the next two, or three, tokens of an origin must belong to the same answer.
    assert origins(packed, 0).tolist() == [0, 1, 4, 7, 8, 9]
    assert origins(packed, 1).tolist() == [0, 7, 8]


def test_packed_training_resumes(run: Train, tmp_path: Path) -> None:
    settings = {"packing": True, "warmup": 0, "min_lr_ratio": 1}
    for name, steps in (("cut", 4), ("cut", 7), ("once", 7)):
        run(tmp_path / name, steps=steps, **settings)
    assert_same(tmp_path / "cut" / "last", tmp_path / "once" / "last")


def test_packing_changes_the_training_identity(run: Train, tmp_path: Path) -> None:
    run(tmp_path, steps=4)
    run(tmp_path, steps=5)
    with pytest.raises(UserError, match=r"trained with train.packing = False, and now it is True"):
        run(tmp_path, steps=6, packing=True)


FAMILIES = ["medusa", "hydra", "eagle", "eagle3-deep-normed", "mtp", "dflash-sliding", "dspark-deep", "dflash2-deep"]


@pytest.mark.parametrize("drawn", [False, True], ids=["all origins", "anchors of subsampled steps"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("flex_on_cpu")
def test_flex_attention_of_padded_packed_rows_matches(name: str, drawn: bool, target: Target) -> None:
    """Compiled training, in float64 and without the compiler: only the order of sums differs."""
    heads = shake(build(name, target)).double()
    store, layers = store_of(target, heads, [23, 2, 40, 1, 9, 17]), sorted({*heads.aux_layers, FINAL})
    batches = []
    for packed, width in ((True, 100), (True, 0), (False, 0)):
        batch = read_batch(store, range(6), layers, packed, width).on(CPU, torch.float64)
        if drawn and packed:
            batch = sample_anchors(subsample(batch, 0.7, [1]), 9, [1])
        batches.append(batch)
    assert batches[0].tokens_BT.shape == (1, 100)
    wanted = learn(target, heads, batches[1] if drawn else batches[2])
    heads.compiled = True
    found = learn(target, heads, batches[0])
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-10, atol=0)
    for weight, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][weight], gradient, rtol=0, atol=1e-9 * float(gradient.abs().max()))


@pytest.mark.parametrize("name", ["eagle-published", "dflash"])
@pytest.mark.usefixtures("flex_on_cpu")
def test_packed_rows_compile_once(name: str, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once code for any number of origins exists, no step compiles again."""
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(regions, "compile_region", cache(partial(torch.compile, backend=counter)))
    heads = shake(build(name, target))
    heads.compiled, compiled = True, list[int]()
    for lengths in ([23, 2, 40], [30, 5, 44], [60, 20], [70, 22]):
        store, layers = store_of(target, heads, lengths), sorted({*heads.aux_layers, FINAL})
        batch = read_batch(store, range(len(lengths)), layers, True, 100).on(CPU, torch.float32)
        found = learn(target, heads, batch)
        compiled.append(counter.frame_count)
    assert 0 < compiled[0] < compiled[2] == compiled[3], compiled
    heads.compiled = False
    assert_same_step(found, learn(target, heads, batch))
