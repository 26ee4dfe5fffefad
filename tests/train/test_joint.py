"""Joint training (Medusa-2): an adapter of the target trains with the heads, which then fit the adapted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.heads.base import HeadBatch
from headstart.heads.io import load_heads
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.replay.patch import FINAL
from headstart.train.batches import read_batch
from headstart.train.checks import check_training
from headstart.train.joint import Drift, Joint
from headstart.train.training_artifact import training
from tests.tiny import tiny_model
from tests.train.conftest import KillAfter, MakeRecipe, Train
from tests.train.results import Killed, assert_same, metrics
from tests.train.test_golden import HEADS

JOINT = {"rank": 4, "warmup": 0.5, "dropout": 0.1, "lr_ratio": 1.0}
LAYERS = [1, 2, 3, FINAL]


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def in_numbers(target: Target, layer: int = FINAL) -> torch.Tensor:
    return target.hidden_states([[5, 9, 2, 7, 7, 30]], [layer])[0][layer]


@pytest.fixture
def batch(train_store: StateStore) -> HeadBatch:
    return read_batch(train_store, [0, 3, 5], LAYERS).on(torch.device("cpu"), torch.float32)


@pytest.fixture
def joint(recipe: MakeRecipe, tiny_target: Target) -> Any:
    """An adapter in the target with random weights that change its outputs."""
    joint = Joint(tiny_target, recipe(joint={**JOINT, "dropout": 0.0}).train)
    joint.begin()
    with torch.no_grad():
        for weight in joint.weights:
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    yield joint
    joint.release()


def test_leaves_heads_and_an_adapter(run: Train, tmp_path: Path, tiny_target: Target, tiny_target_folder: Path) -> None:
    before, identity = in_numbers(tiny_target), tiny_target.identity()
    result = run(tmp_path, steps=12, eval_every=3, joint=JOINT)
    assert torch.equal(in_numbers(tiny_target), before) and tiny_target.identity() == identity
    assert not any("lora" in name for name, _ in tiny_target.model.named_modules())
    drifts = [row["drift"] for row in metrics(tmp_path)]
    assert [drift["tokens"] > 0 for drift in drifts] == [False, False, False, True, True], "after the warm-up"
    assert drifts[-1]["kl"] > drifts[0]["kl"] == 0
    assert result.metrics["step"] > 6, "the best heads come from after the warm-up"
    last = result.last_folder
    assert any(weight.any() for name, weight in adapter(last).items() if "lora_B" in name)
    assert json.loads((last / "adapter" / "headstart.json").read_text())["kl"] == drifts[-1]["kl"]
    adapted = load_target(str(tiny_target_folder), "float32", "cpu", adapter=str(last / "adapter"))
    assert load_heads(last, adapted).draft_steps == 2
    assert adapted.adapter is not None and adapted.adapter.note["tokens"] == drifts[-1]["tokens"]


def test_heads_learn_alone_during_warmup(run: Train, tmp_path: Path) -> None:
    run(tmp_path / "alone")
    run(tmp_path / "joint", joint=JOINT)
    alone, joint = metrics(tmp_path / "alone"), metrics(tmp_path / "joint")
    assert joint[1]["loss"] == alone[1]["loss"] and joint[1]["tau"] == alone[1]["tau"], "step 6 of 12"
    assert joint[2]["loss"] != alone[2]["loss"]


def test_adapted_states_match_the_merged_model(
    joint: Joint, batch: HeadBatch, tmp_path: Path, tiny_target_folder: Path, train_store: StateStore
) -> None:
    adapted = joint.read(batch)
    joint.save(tmp_path, Drift(torch.device("cpu")))
    merged = load_target(str(tiny_target_folder), "float32", "cpu", adapter=str(tmp_path / "adapter"))
    for row, index in enumerate([0, 3, 5]):
        tokens = train_store.get(index).tokens_T.tolist()
        for layer, state_TE in merged.hidden_states([tokens], LAYERS)[0].items():
            torch.testing.assert_close(adapted.states[layer][row, : len(tokens)], state_TE, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(adapted.states[FINAL], batch.states[FINAL], atol=1e-2), "the adapter matters"


def test_distillation_is_the_kl_to_the_plain_target(joint: Joint, batch: HeadBatch, tiny_target: Target) -> None:
    """Against the definition, with the adapter switched off instead of stored states."""
    adapted = joint.read(batch)
    loss = joint.distillation(batch, adapted)
    loss.backward()
    total, count, nll = 0.0, 0, 0.0
    with torch.no_grad(), joint._adapted.disable_adapter():
        for row in range(3):
            base = joint._adapted(batch.tokens_BT[row : row + 1]).logits[0].log_softmax(-1)
            ours = tiny_target.lm_head(adapted.states[FINAL][row]).log_softmax(-1)
            for t in range(batch.tokens_BT.shape[1] - 1):
                if batch.supervised_BT[row, t + 1]:
                    total += float((base[t].exp() * (base[t] - ours[t])).sum())
                    nll -= float(ours[t, batch.tokens_BT[row, t + 1]])
                    count += 1
    assert float(loss.detach()) == pytest.approx(total, rel=1e-3)
    assert all(weight.grad is not None and weight.grad.any() for weight in joint.weights)
    joint.judge(batch, drift := Drift(torch.device("cpu")))
    assert drift.to_json()["kl"] == pytest.approx(total / count, rel=1e-2)
    assert drift.to_json()["perplexity_after"] == pytest.approx(torch.tensor(nll / count).exp().item(), rel=1e-3)


def test_unchanged_adapter_costs_nothing(recipe: MakeRecipe, tiny_target: Target, batch: HeadBatch) -> None:
    joint = Joint(tiny_target, recipe(joint=JOINT).train)
    joint.begin()
    try:
        assert not joint.moved
        assert float(joint.distillation(batch, joint.read(batch)).detach()) == pytest.approx(0, abs=1e-4)
        assert float(joint.untouched()) == 0
    finally:
        joint.release()


def test_heads_loss_trains_the_adapter(run: Train, tmp_path: Path) -> None:
    """A larger weight of the heads' loss moves the adapted target further."""
    weak = run(tmp_path / "weak", joint={**JOINT, "heads_weight": 1e-6}, max_grad_norm=1e6)
    strong = run(tmp_path / "strong", joint={**JOINT, "heads_weight": 10}, max_grad_norm=1e6)
    kl = [metrics(folder.parent)[-1]["drift"]["kl"] for folder in (weak.last_folder, strong.last_folder)]
    assert kl[1] > kl[0]


@pytest.mark.parametrize("name", HEADS)
def test_every_family_trains_with_an_adapter(name: str, run: Train, tmp_path: Path) -> None:
    run(tmp_path, heads={"family": name, **HEADS[name]}, steps=2, eval_every=2, joint={**JOINT, "warmup": 0})
    assert metrics(tmp_path)[-1]["drift"]["kl"] > 0


def test_killed_run_resumes_to_the_same_adapter(run: Train, tmp_path: Path, kill_after: KillAfter) -> None:
    whole = run(tmp_path / "whole", joint=JOINT)
    kill_after(10)
    with pytest.raises(Killed):
        run(tmp_path / "killed", joint=JOINT)
    kill_after(10**9)
    again = run(tmp_path / "killed", joint=JOINT)
    for one, other in ((whole.last_folder, again.last_folder), (whole.heads_folder, again.heads_folder)):
        assert_same(one, other)
        assert adapter(one).keys() == adapter(other).keys()
        assert all(torch.equal(weight, adapter(other)[name]) for name, weight in adapter(one).items())


def test_no_joint_in_identity(recipe: MakeRecipe, train_store: StateStore, tiny_target: Target, tmp_path: Path) -> None:
    from headstart.heads.base import make_config

    def of(chosen: Recipe) -> Any:
        config = make_config(chosen.heads, tiny_target)
        return training(tmp_path / "run", chosen, config, train_store, train_store)

    assert "joint" not in of(recipe()).identity["train"]
    assert of(recipe(joint={"alpha": 3})).name == of(recipe()).name, "no adapter, whatever its settings"
    assert of(recipe(joint=JOINT)).name != of(recipe()).name


def test_conflicting_settings_are_refused(recipe: MakeRecipe) -> None:
    both = parse_recipe(
        {**recipe(joint=JOINT).model_dump(mode="json"), "target": {"spec": "tiny", "adapter": "some/adapter"}}
    )
    with pytest.raises(UserError, match="names another"):
        check_training(both)
    for section, key, value in (("data", "states", "online"), ("train", "packing", True)):
        values = recipe(joint=JOINT).model_dump(mode="json")
        values[section][key] = value
        with pytest.raises(UserError, match=rf"train\.joint .*{key}") as refused:
            check_training(parse_recipe(values))
        assert key in refused.value.remedy


def test_other_layer_types_are_adapted(recipe: MakeRecipe) -> None:
    target = Target(tiny_model("gpt2"))
    joint = Joint(target, recipe(joint=JOINT).train)
    joint.begin()
    assert len(joint.weights) == 2 * 4 * 3, "A and B of four linear maps in each of three layers"
    joint.release()
