"""A teacher stands for its target where heads are made and trained, and says so where it cannot."""

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
from headstart.model.model import Target
from headstart.model.teacher import (
    TeacherModel,
    load_teacher,
    save_teacher,
    teacher_folder,
    teacher_problem,
)
from tests.tiny import KINDS, packed_model, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
STARTS: tuple[Mapping[str, Any], ...] = (
    {"family": "medusa", "num_heads": 2},
    {"family": "eagle", "draft_steps": 2, "draft_vocab_size": 30},
    {"family": "eagle3", "draft_steps": 2, "aux_layers": (1, 2), "num_layers": 2},
)


def kept(target: Target, states: Path, layers: int = 1) -> TeacherModel:
    folder = save_teacher(states, target, layers)
    assert folder is not None
    return load_teacher(folder, CPU)


def started(target: FrozenModel, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    config = make_config(settings, target)
    heads = family(config.family)(config)
    heads.warm_start(target)
    return {**heads.state_dict(), "bias": heads.lm_bias_D if heads.lm_bias_D is not None else torch.zeros(0)}


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_every_architecture_start_from_a_teacher_as_from_its_target(kind: str, tmp_path: Path) -> None:
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
    assert (teacher.finish, teacher.end_tokens, teacher.max_length) == (
        target.finish,
        target.end_tokens,
        target.max_length,
    )
    assert (teacher.identity(), teacher.settings, teacher.dtype) == (
        target.identity(),
        target.settings,
        target.dtype,
    )


def test_short_dtypes_keep_their_bits(tmp_path: Path) -> None:
    target = Target(tiny_model("llama").bfloat16())
    teacher = kept(target, tmp_path)
    assert teacher.dtype == torch.bfloat16
    assert torch.equal(teacher.lm_head_weight, target.lm_head_weight)


def test_what_heads_do_not_read_is_left_out(tmp_path: Path) -> None:
    folder = save_teacher(tmp_path, Target(tiny_model("mixtral")))
    assert folder is not None
    assert sorted(file.name for file in folder.iterdir()) == [
        "base.safetensors",
        "layer-003.safetensors",
        "teacher.json",
    ]
    names = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    assert not [name for name in names if "experts" in name] and any("q_proj" in name for name in names)
    tied = tiny_model("gemma3")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    folder = save_teacher(tmp_path, Target(tied))
    assert folder is not None
    assert "lm_head.weight" not in load_file(folder / "base.safetensors"), "tied weights are kept once"
    teacher = load_teacher(folder, CPU)
    assert teacher.lm_head_weight is teacher.embedding_weight


def test_layers_are_added_and_what_is_there_stays(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    teacher = kept(target, tmp_path)
    assert teacher.starts(1) and not teacher.starts(2)
    folder = save_teacher(tmp_path, target)
    assert folder is not None
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert kept(target, tmp_path, layers=2).starts(2)
    after = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}
    assert after.keys() - before.keys() == {"layer-002.safetensors"}
    assert all(after[name] == before[name] for name in before if name != "teacher.json")
    assert kept(target, tmp_path).starts(2), "heads of fewer layers take nothing away"


def test_stores_of_one_folder_share_it_and_targets_do_not(tmp_path: Path) -> None:
    first, second = Target(tiny_model("llama")), Target(tiny_model("llama", seed=1))
    short = Target(tiny_model("llama").bfloat16())
    folders = {save_teacher(tmp_path, target) for target in (first, second, short, first)}
    assert len(folders) == 3 == len(list(tmp_path.iterdir()))
    assert teacher_folder(tmp_path, first.identity().fingerprint, "float32") in folders


@pytest.mark.parametrize("damage", ["cut short", "a flipped byte", "gone", "no note", "half a note"])
def test_a_damaged_teacher_is_refused_and_mended(damage: str, tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    folder = save_teacher(tmp_path, target)
    assert folder is not None
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
    with pytest.raises(UserError, match=r"(damaged|no whole teacher)") as refused:
        load_teacher(folder, CPU)
    assert "headstart data build" in refused.value.remedy
    assert (teacher_problem(folder) is None) == (damage == "a flipped byte"), "sizes are what is looked at first"
    save_teacher(tmp_path, target)
    assert load_teacher(folder, CPU).starts(1) and file.read_bytes() == content


def test_a_class_that_this_transformers_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_teacher(tmp_path, Target(tiny_model("llama")))
    assert folder is not None
    monkeypatch.setattr("headstart.model.teacher.transformers", SimpleNamespace(__version__="4.0"))
    with pytest.raises(UserError, match=r"transformers \(4\.0\) has no LlamaForCausalLM") as refused:
        load_teacher(folder, CPU)
    assert "pip install transformers==" in refused.value.remedy


def test_a_teacher_knows_the_token_that_no_text_has(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    target = Target(tiny_model("llama", vocab_size=len(tokenizer) + 8), tokenizer)
    folder = save_teacher(tmp_path, target)
    assert folder is not None
    block = {"family": "dflash", "aux_layers": (1, 2)}
    assert load_teacher(folder, CPU).spare_token == len(tokenizer)
    assert make_config(block, load_teacher(folder, CPU)) == make_config(block, target)


class Adapted(torch.nn.Module):
    """A linear layer with something added to it, as adapters leave it."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.added = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.added(x)


def test_a_target_with_packed_weights_or_an_adapter_has_none(tmp_path: Path) -> None:
    assert save_teacher(tmp_path, Target(packed_model(tiny_model("llama"), 8))) is None
    adapted = tiny_model("llama")
    adapted.model.layers[-1].self_attn.q_proj = Adapted(adapted.model.layers[-1].self_attn.q_proj)
    assert save_teacher(tmp_path, Target(adapted)) is None
    assert not list(tmp_path.iterdir())
    assert teacher_problem(tmp_path / "teacher-none") is None
