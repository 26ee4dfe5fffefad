"""MTP heads that hold the module that a target ships: they keep the contract, and can be trained.

tests/drafters/test_mtp.py holds what they draft untrained to the published computation.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headstart.errors import UserError
from headstart.heads.base import make_config
from headstart.heads.io import load_heads, save_heads
from headstart.heads.mtp import MtpHead
from headstart.model.model import Target
from tests.heads import test_contract as contract
from tests.shipped import ONE_MODULE, WEIGHTS, ShippedTarget, reload, ship
from tests.tiny import tiny_model

TEXT = [3, 9, 14, 27, 33, 8, 40, 12, 55, 6, 21, 44, 17]
SETTINGS = {"family": "mtp", "init": "native", "draft_steps": 3}
PROMISES = (contract.test_unroll_shapes_and_gradients, contract.test_drafting_equals_the_unrolled_training_forward)
"""Contract tests that depend on the kind of layer."""
OTHERS = (
    contract.test_a_teacher_replaces_the_target_in_training,
    contract.test_texts_with_too_few_supervised_tokens_predict_nothing,
    contract.test_subsampling_leaves_the_other_predictions_unchanged,
    contract.test_commits_in_rounds_equal_one_prefill,
    contract.test_rows_of_a_batch_are_independent,
    contract.test_operations_of_a_draft_are_counted,
)


@pytest.fixture(scope="module", params=ONE_MODULE)
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ShippedTarget:
    return ship(request.param, tmp_path_factory.mktemp("shipped") / request.param)


@pytest.fixture(autouse=True)
def case(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(contract.CASES, "native", SETTINGS)
    return "native"


def test_every_kind_of_layer_keeps_the_contract_of_families(one: ShippedTarget, case: str) -> None:
    for promise in PROMISES:
        promise(case, one.target)


@pytest.mark.parametrize("one", ["deepseek"], indirect=True)
def test_the_contract_of_families_is_kept(one: ShippedTarget, case: str, tmp_path: Path) -> None:
    given = {"name": case, "target": one.target, "tmp_path": tmp_path}
    for promise in OTHERS:
        promise(**{name: given[name] for name in inspect.signature(promise).parameters})


@pytest.mark.parametrize("one", ["deepseek"], indirect=True)
def test_saved_heads_bind_to_the_modules_own_lm_head(one: ShippedTarget, case: str, tmp_path: Path) -> None:
    """DeepSeek-V3's module has a copy of the target's LM head in the file; here the copy differs."""
    ship("deepseek", tmp_path / "target")
    tensors = load_file(tmp_path / "target" / WEIGHTS)
    other_VE = tensors["model.layers.2.shared_head.head.weight"].roll(1, 0).contiguous()
    tensors["model.layers.2.shared_head.head.weight"] = other_VE
    save_file(tensors, tmp_path / "target" / WEIGHTS, metadata={"format": "pt"})
    target = reload(tmp_path / "target")
    heads = contract.shake(contract.build(case, target))
    save_heads(heads, tmp_path / "heads")
    loaded = load_heads(tmp_path / "heads", target)
    assert isinstance(loaded, MtpHead)
    assert torch.equal(loaded.lm_head_DE, other_VE)
    assert torch.equal(loaded.target_embeddings, target.embedding_weight)
    batch = contract.batch_of(target, heads, [TEXT], prompt=3)
    for ours, theirs in zip(loaded.unroll(batch), heads.unroll(batch), strict=True):
        assert torch.equal(ours.logits_MD, theirs.logits_MD)


@pytest.mark.parametrize("one", ["mimo"], indirect=True)
def test_settings_and_targets_without_such_a_module_are_refused(one: ShippedTarget, tmp_path: Path) -> None:
    for target, settings, said in (
        (one.target, {"draft_vocab_size": 30}, r"drafts from the whole vocabulary.*heads\.draft_vocab_size=0"),
        (Target(tiny_model("llama")), {}, r"has no multi-token-prediction modules.*as it was published"),
        (ship("deepseek-two", tmp_path / "two").target, {}, r"ships 2 multi-token-prediction modules.*--drafter mtp"),
    ):
        with pytest.raises(UserError, match=said):
            MtpHead(MtpHead.Config.model_validate(make_config({**SETTINGS, **settings}, target)))
