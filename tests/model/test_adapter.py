"""Targets with an adapter: logits of the adapted model, and an identity of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from transformers import LlamaForCausalLM

from headstart.errors import UserError
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.replay.patch import FINAL
from tests.tiny import save_tiny_adapter, tiny_model, tiny_tokenizer

TEXT = [5, 9, 2, 7, 7, 30, 12]


def load(folder: Path, adapter: Path | None = None, **how: Any) -> Target:
    return load_target(str(folder), device="cpu", adapter=adapter and str(adapter), **{"dtype": "float32", **how})


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    return save_tiny_adapter(tmp_path_factory.mktemp("adapters") / "one", tiny_target_folder)


@pytest.fixture(scope="module")
def base(tiny_target_folder: Path) -> Target:
    return load(tiny_target_folder)


@pytest.fixture(scope="module")
def adapted(tiny_target_folder: Path, adapter: Path) -> Target:
    return load(tiny_target_folder, adapter)


def test_logits_match_peft(adapted: Target, adapter: Path, tiny_target_folder: Path) -> None:
    plain = LlamaForCausalLM.from_pretrained(tiny_target_folder, dtype=torch.float32)
    with torch.no_grad():
        before = plain(torch.tensor([TEXT])).logits[0, -1]
        after = PeftModel.from_pretrained(plain, str(adapter)).eval()(torch.tensor([TEXT])).logits[0, -1]
    ours = adapted.prefill(adapted.new_cache(1, 16), [TEXT]).logits_BTV[0, 0]
    torch.testing.assert_close(ours, after, atol=1e-4, rtol=1e-4)
    assert (before - after).norm() > 0.1 * after.norm(), "the adapter matters"


def test_adapter_changes_name_and_identity(base: Target, adapted: Target) -> None:
    assert base.adapter is None and adapted.adapter is not None
    assert base.identity().fingerprint != adapted.identity().fingerprint
    assert adapted.name == f"{base.name} with the adapter one"


def test_fingerprint_of_an_adapter(adapted: Target, adapter: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "moved")
    settings = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = "elsewhere"
    settings["target_modules"] = settings["target_modules"][::-1]
    (tmp_path / "moved" / "adapter_config.json").write_text(json.dumps(settings))
    short = load(tiny_target_folder, tmp_path / "moved", dtype="bfloat16")
    assert short.identity().fingerprint == adapted.identity().fingerprint


def test_sketch_identifies_the_adapter(
    base: Target, adapted: Target, adapter: Path, tiny_target_folder: Path, tmp_path: Path
) -> None:
    other = load(tiny_target_folder, save_tiny_adapter(tmp_path / "other", tiny_target_folder, seed=1))
    short = load(tiny_target_folder, adapter, dtype="bfloat16")
    adapted.save(tmp_path / "merged")
    merged, twice = load(tmp_path / "merged"), load(tmp_path / "merged", adapter)
    drawn = json.loads(json.dumps(adapted.sketch()))
    assert adapted.differs_from(drawn) is None
    assert short.differs_from(drawn) is None
    assert merged.differs_from(drawn) is None, "merged by hand"
    assert base.differs_from(drawn) == "it lacks the adapter"
    assert other.differs_from(drawn) == "its adapter other is another one"
    assert "twice" in str(twice.differs_from(drawn))
    assert adapted.differs_from(base.sketch()) == "it has the adapter one"


def test_small_changes_differ_from_rounding(tiny_target_folder: Path, tmp_path: Path) -> None:
    """An adapter that moves every number by less than bfloat16 rounding."""
    from safetensors.torch import load_file, save_file

    folder = save_tiny_adapter(tmp_path / "small", tiny_target_folder)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file({name: 0.01 * weight for name, weight in weights.items()}, folder / "adapter_model.safetensors")
    drawn = load(tiny_target_folder, folder).sketch()
    plain = {**drawn, "adapter": None}
    assert load(tiny_target_folder).differs_from(plain) is None, "rounding would explain it"
    assert load(tiny_target_folder).differs_from(drawn) == "it lacks the adapter"


def test_adapted_states_differ(adapted: Target, base: Target) -> None:
    ours, theirs = (target.hidden_states([TEXT], [FINAL])[0][FINAL] for target in (adapted, base))
    assert ours.shape == theirs.shape and not torch.allclose(ours, theirs)


def test_adapter_of_another_model_is_refused(tmp_path: Path, adapter: Path) -> None:
    for part in (tiny_model("gpt_neox", vocab_size=len(tiny_tokenizer())), tiny_tokenizer()):
        part.save_pretrained(tmp_path / "neox")
    with pytest.raises(UserError, match="does not fit the target"):
        load(tmp_path / "neox", adapter)


def test_prompt_tuning_is_refused(tiny_target_folder: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_target_folder)
    get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no change of weights"):
        load(tiny_target_folder, tmp_path)


def test_adapter_of_tied_embeddings_is_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer()))
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path / "tied")
    tiny_tokenizer().save_pretrained(tmp_path / "tied")
    folder = save_tiny_adapter(tmp_path / "adapter", tmp_path / "tied", target_modules=["lm_head"])
    with pytest.raises(UserError, match="one matrix"):
        load(tmp_path / "tied", folder)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_incomplete_folder_is_refused(missing: str, adapter: Path, tiny_target_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "part")
    (tmp_path / "part" / missing).unlink()
    with pytest.raises(UserError, match=f"has no {missing}"):
        load(tiny_target_folder, tmp_path / "part")
    with pytest.raises(UserError, match="No adapter at"):
        load(tiny_target_folder, tmp_path / "nothing")
