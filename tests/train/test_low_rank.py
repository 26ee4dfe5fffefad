"""Low-rank updates of earlier heads: trained weights, gradients, merged heads and exact resumption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import DraftHead, families
from headstart.heads.io import load_heads, save_heads
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from headstart.train import trainer
from headstart.train.batches import read_batch
from headstart.train.checks import check_training
from headstart.train.starting_heads import build_heads
from headstart.train.wrapped import LowRank, Unrolled, count_trained_parameters, matrices
from tests.spies import spy
from tests.train.conftest import MakeRecipe, Train
from tests.train.results import assert_same, metrics, weights
from tests.train.test_golden import HEADS

RANK = 2
Earlier = Callable[[str], Path]


@pytest.fixture
def earlier(recipe: MakeRecipe, tiny_target: Target, train_store: StateStore, tmp_path: Path) -> Earlier:
    """Make a folder with heads of a family, perturbed from their usual start."""

    def make(name: str) -> Path:
        heads = build_heads(recipe(heads=HEADS[name]), tiny_target, train_store)
        random = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in heads.parameters():
                weight += 0.02 * torch.randn(weight.shape, generator=random)
        save_heads(heads, tmp_path / f"earlier-{name}")
        return tmp_path / f"earlier-{name}"

    return make


def adapted(name: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """Settings for a low-rank update of the heads in a folder."""
    return {"heads": HEADS[name], "start_from": str(folder), "lora_rank": RANK, **settings}


@pytest.mark.parametrize("name", HEADS)
def test_every_family_learns_updates_of_this_rank_alone(
    name: str, earlier: Earlier, run: Train, tmp_path: Path, tiny_target: Target
) -> None:
    folder = earlier(name)
    made = run(tmp_path / "run", **adapted(name, folder, steps=3, eval_every=3, lr=0.01))
    before, after = weights(folder), weights(made.last_folder)
    assert before.keys() == after.keys(), "ordinary heads"
    learnt = matrices(load_heads(folder, tiny_target))
    assert learnt
    for key, tensor in after.items():
        if key not in learnt:
            assert torch.equal(tensor, before[key]), f"{key} does not learn"
            continue
        moved = (tensor - before[key]).double()
        sizes = torch.linalg.svdvals(moved.reshape(-1, *moved.shape[-2:]))
        assert (sizes[:, 0] > 0).all(), f"{key} learns"
        assert (sizes[:, RANK:] < 1e-4 * sizes[:, :1]).all(), f"{key} moved by more than this rank"


def test_gradients(recipe: MakeRecipe, earlier: Earlier, tiny_target: Target, train_store: StateStore) -> None:
    """Against plain heads with the merged weights."""
    batch = read_batch(train_store, [0, 3, 5], [1, 2, 3, FINAL]).on(torch.device("cpu"), torch.float32)

    def loss(predictions: Any) -> torch.Tensor:
        return torch.stack([one.logits_MD.log_softmax(-1)[:, 5].sum() for one in predictions]).sum()

    for name in families():
        plain, updated = (load_heads(earlier(name), tiny_target).train() for _ in range(2))
        low = LowRank(Unrolled(updated), RANK)
        assert low.trainable_parameters == count_trained_parameters(plain, RANK) < plain.trainable_parameters
        random = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for up in low.up.values():
                up += 0.05 * torch.randn(up.shape, generator=random)
        with low.merged():
            plain.load_state_dict(updated.state_dict())
            inside = low(batch, loss)
        value = low(batch, loss)
        expected = Unrolled(plain)(batch, loss)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(inside, expected, rtol=1e-5, atol=1e-5)
        value.backward()
        expected.backward()
        assert any(weight.grad is not None for weight in matrices(plain).values())
        for key, weight in matrices(plain).items():
            if weight.grad is not None:  # this loss does not use confidence heads
                up, down = (part[key.replace(".", "-")] for part in (low.up, low.down))
                for got, wanted in ((up.grad, weight.grad @ down.mT), (down.grad, up.mT @ weight.grad)):
                    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4 * wanted.abs().max().item())


def test_resumed_run_is_bit_exact(earlier: Earlier, run: Train, tmp_path: Path) -> None:
    """With Muon matrices that take turns, and with validations of the merged heads in between."""
    how = {"optimizer": "muon", "warmup": 0, "min_lr_ratio": 1, "lr": 0.01}
    given = adapted("eagle3", earlier("eagle3"), **how)
    for name, steps in (("cut", 4), ("cut", 8), ("whole", 8)):
        run(tmp_path / name, **{**given, "steps": steps, "eval_every": 4 if name == "cut" else 2})
    assert_same(tmp_path / "cut" / "last", tmp_path / "whole" / "last")


def test_judges_the_merged_heads(earlier: Earlier, run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = adapted("medusa", earlier("medusa"), lr=0.05)
    run(tmp_path / "low", **given, steps=6, eval_every=6)
    taken = spy(
        monkeypatch, trainer._Trainer, "_validate",
        lambda one, *_: {key: tensor.clone() for key, tensor in one.heads.state_dict().items()},
    )  # fmt: skip
    last = str(tmp_path / "low" / "last")
    run(tmp_path / "full", heads=given["heads"], start_from=last, steps=1, eval_every=1, lr=1e-9)
    kept = weights(tmp_path / "low" / "last")
    assert all(torch.equal(kept[key], tensor) for key, tensor in taken[0].items())
    ours, theirs = metrics(tmp_path / "low")[-1], metrics(tmp_path / "full")[0]
    assert ours["tau"] == theirs["tau"] and metrics(tmp_path / "low")[0]["tau"] != ours["tau"]


def test_weights_are_restored_after_an_error(earlier: Earlier, tiny_target: Target) -> None:
    heads: DraftHead = load_heads(earlier("hydra"), tiny_target)
    before = {key: tensor.clone() for key, tensor in heads.state_dict().items()}
    low = LowRank(Unrolled(heads), RANK)
    with torch.no_grad():
        for up in low.up.values():
            up += 1
    with pytest.raises(UserError), low.merged():
        assert any(not torch.equal(tensor, before[key]) for key, tensor in heads.state_dict().items())
        raise UserError("The disk is full.", "Make room.")
    assert all(torch.equal(tensor, before[key]) for key, tensor in heads.state_dict().items())


def test_bad_settings(recipe: MakeRecipe, earlier: Earlier, tiny_target: Target, train_store: StateStore) -> None:
    folder = earlier("medusa")
    with pytest.raises(UserError, match=r"train\.start_from names none"):
        check_training(recipe(lora_rank=2))
    with pytest.raises(UserError, match=r"train\.gradient_checkpointing"):
        check_training(recipe(**adapted("medusa", folder, gradient_checkpointing=True)))
    other = {**adapted("medusa", folder), "heads": {"num_heads": 3}}
    with pytest.raises(UserError, match=r"heads\.num_heads is 3 \(theirs: 2\)"):
        build_heads(recipe(**other), tiny_target, train_store)
