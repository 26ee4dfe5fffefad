"""A teacher replaces its target for making and training heads, or names the reason it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.errors import UserError
from headstart.heads.base import family, make_config
from headstart.model.frozen import FrozenModel
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.model.outline import unloaded
from headstart.model.teacher import TeacherModel, load_teacher, save_teacher, teach, teacher_folder, teacher_problem
from tests.tiny import KINDS, packed_model, save_tiny_target, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
STARTS: tuple[Mapping[str, Any], ...] = (
    {"family": "medusa", "num_heads": 2},
    {"family": "eagle", "draft_steps": 2, "draft_vocab_size": 30},
    {"family": "eagle3", "draft_steps": 2, "aux_layers": (1, 2), "num_layers": 2},
)


def saved(target: Target, states: Path, layers: int = 1) -> Path:
    folder = save_teacher(states, target, layers)
    assert folder is not None
    return folder


def kept(target: Target, states: Path, layers: int = 1) -> TeacherModel:
    return load_teacher(saved(target, states, layers), CPU)


def started(target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = make_config(settings, target)
    heads = family(config.family)(config)
    heads.warm_start(target)
    return {**heads.state_dict(), "bias": heads.lm_bias_D if heads.lm_bias_D is not None else torch.zeros(0)}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_every_architecture_start_alike_from_teacher_and_target(kind: str, tmp_path: Path) -> None:
    target = Target(tiny_model(kind), spec=kind)
    teacher = kept(target, tmp_path, layers=2)
    for settings in STARTS:
        assert make_config(settings, teacher) == make_config(settings, target)
        one, other = started(target, settings), started(teacher, settings)
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name]), f"{name} of {settings['family']}"
    state_ME = torch.randn(5, target.hidden_size)
    assert torch.equal(teacher.lm_head(state_ME), target.lm_head(state_ME))
    assert teacher.identity() == target.identity()
    for name in ("logit_transform", "end_tokens", "max_length", "settings", "dtype"):
        assert getattr(teacher, name) == getattr(target, name), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt_neox", "mixtral", "gpt2", "phi3"])
def test_teacher_from_the_files_equals_that_of_the_loaded_target(kind: str, dtype: str, tmp_path: Path) -> None:
    """With tied weights, biases, fused projections, other names in the files, experts, and a spare token that is chosen
    by its embedding."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(kind, vocab_size=len(tokenizer) + 8)
    model.get_input_embeddings().weight.data[len(tokenizer)] = 0  # blank, so it spares none
    model.save_pretrained(tmp_path / "target", max_shard_size="100KB")
    tokenizer.save_pretrained(tmp_path / "target")
    source = str(tmp_path / "target"), dtype, "cpu"
    loaded, known = load_target(*source), unloaded(*source)
    assert known is not None
    expected = save_teacher(tmp_path / "loaded", loaded, 2, "main")
    found = save_teacher(tmp_path / "files", known, 2, "main")
    assert expected is not None and found is not None
    for file in expected.iterdir():
        assert (found / file.name).read_bytes() == file.read_bytes(), file.name
    assert len(list(found.iterdir())) == 4
    taught, kept = teach(known, 2, CPU), load_teacher(expected, CPU)
    assert taught is not None and taught.spare_token == loaded.spare_token != len(tokenizer)
    assert taught.whole_identity == loaded.whole_identity and taught.sketch() == loaded.sketch()
    for name, weight in kept.model.named_parameters(remove_duplicate=False):
        other = taught.model.get_parameter(name)
        assert other.is_meta == weight.is_meta and (weight.is_meta or torch.equal(other, weight)), name


def test_weights_that_loading_changes_are_not_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_target(tmp_path / "target")
    known = unloaded(str(tmp_path / "target"), "bfloat16", "cpu")
    assert known is not None
    monkeypatch.setattr(known.model, "_keep_in_fp32_modules", ["lm_head"])
    assert teach(known) is None and save_teacher(tmp_path, known) is None


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    target = Target(tiny_model("llama").bfloat16())
    teacher = kept(target, tmp_path)
    assert teacher.dtype == torch.bfloat16
    assert torch.equal(teacher.lm_head_weight, target.lm_head_weight)


def test_unread_weights_are_left_out(tmp_path: Path) -> None:
    folder = saved(Target(tiny_model("mixtral")), tmp_path)
    files = sorted(file.name for file in folder.iterdir())
    assert files == ["base.safetensors", "layer-003.safetensors", "teacher.json"]
    names = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    assert not [name for name in names if "experts" in name] and any("q_proj" in name for name in names)
    tied = tiny_model("gemma3")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    folder = saved(Target(tied), tmp_path)
    assert "lm_head.weight" not in load_file(folder / "base.safetensors"), "tied weights are kept once"
    teacher = load_teacher(folder, CPU)
    assert teacher.lm_head_weight is teacher.embedding_weight


def test_layers_are_added_and_none_removed(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    teacher = kept(target, tmp_path)
    assert teacher.starts(1) and not teacher.starts(2)
    folder = saved(target, tmp_path)
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert kept(target, tmp_path, layers=2).starts(2)
    after = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert after.keys() - before.keys() == {"layer-002.safetensors"}
    assert all(after[name] == before[name] for name in before if name != "teacher.json")
    assert kept(target, tmp_path).starts(2), "saving fewer layers removes none"


def test_stores_share_a_teacher_and_targets_do_not(tmp_path: Path) -> None:
    first, second = Target(tiny_model("llama")), Target(tiny_model("llama", seed=1))
    short = Target(tiny_model("llama").bfloat16())
    folders = {save_teacher(tmp_path, target) for target in (first, second, short, first)}
    assert len(folders) == 3 == len(list(tmp_path.iterdir()))
    assert teacher_folder(tmp_path, first.identity().fingerprint, "float32") in folders


@pytest.mark.parametrize("damage", ["cut short", "a flipped byte", "gone", "no note", "half a note"])
def test_damaged_teacher_is_refused_and_repaired(damage: str, tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    folder = saved(target, tmp_path)
    file, note = folder / "layer-003.safetensors", folder / "teacher.json"
    content = file.read_bytes()
    match damage:
        case "cut short":
            file.write_bytes(content[:-1])
        case "a flipped byte":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "gone":
            file.unlink()
        case "no note":
            note.unlink()
        case _:
            note.write_text(note.read_text()[:50])
    with pytest.raises(UserError, match=r"(damaged|no complete teacher)") as refused:
        load_teacher(folder, CPU)
    assert "headstart data build" in refused.value.remedy
    assert (teacher_problem(folder) is None) == (damage == "a flipped byte"), "it checks sizes only"
    save_teacher(tmp_path, target)
    assert load_teacher(folder, CPU).starts(1) and file.read_bytes() == content


def test_missing_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(Target(tiny_model("llama")), tmp_path)
    monkeypatch.setattr("headstart.model.teacher.transformers", SimpleNamespace(__version__="4.0"))
    with pytest.raises(UserError, match=r"transformers \(4\.0\) has no LlamaForCausalLM") as refused:
        load_teacher(folder, CPU)
    assert "pip install transformers==" in refused.value.remedy


def test_spare_token_is_known(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model("llama", vocab_size=len(tokenizer) + 8), tokenizer)
    teacher, block = kept(target, tmp_path), {"family": "dflash", "aux_layers": (1, 2)}
    assert teacher.spare_token == len(tokenizer)
    assert make_config(block, teacher) == make_config(block, target)


class Adapted(torch.nn.Module):
    """A linear layer wrapped by an adapter."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.added = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.added(x)


def test_packed_or_adapted_targets_have_no_teacher(tmp_path: Path) -> None:
    assert save_teacher(tmp_path, Target(packed_model(tiny_model("llama"), 8))) is None
    adapted = tiny_model("llama")
    adapted.model.layers[-1].self_attn.q_proj = Adapted(adapted.model.layers[-1].self_attn.q_proj)
    assert save_teacher(tmp_path, Target(adapted)) is None
    assert not list(tmp_path.iterdir())
    assert teacher_problem(tmp_path / "teacher-none") is None
