"""Trained modules written into a copy of the target's checkpoint: only their bytes change, and the copy drafts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter, ShippedDrafter
from headstart.errors import UserError
from headstart.heads.base import DraftHead, parse_heads
from headstart.heads.io import WEIGHTS as HEADS
from headstart.heads.io import build_heads
from headstart.hub.engines import into_checkpoint
from headstart.hub.engines.importing import untuned
from headstart.hub.engines.into_checkpoint import check_checkpoint, export_checkpoint
from headstart.hub.format import export_heads, read_config
from headstart.model.model import Target
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from headstart.support.files import file_hash
from headstart.tree.tree import TreeShape
from tests.heads import test_contract as contract
from tests.shipped import ONE_MODULE, WEIGHTS, reload, ship
from tests.spies import raising
from tests.test_cli import refused, works
from tests.test_pipeline import tiny_recipe
from tests.tiny import tiny_tokenizer

PROMPTS = [[3, 9, 14], [8, 40, 12]]
OPTIONS = DecodeOptions(max_new_tokens=12, ignore_end=True, draft="on")
SETTINGS = {"family": "mtp", "init": "native", "draft_steps": 3}


@pytest.fixture(autouse=True)
def case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract.CASES, "native", SETTINGS)


@torch.no_grad()
def louder(model: Any) -> None:
    """Scale the LM head, which heads do not train, to separate tokens."""
    model.lm_head.weight.mul_(50)


def published(kind: str, folder: Path) -> Target:
    """Write a target as published: bfloat16 in three shards with an index, and other files."""
    ship(kind, folder, louder)
    tensors = {
        name: tensor if "correction_bias" in name else tensor.to(torch.bfloat16)
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    (folder / WEIGHTS).unlink()
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        file = f"model-{number + 1:05d}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[number * len(names) // 3 : (number + 1) * len(names) // 3]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "tokenizer.model").write_text("words")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "lock").write_text("foreign")
    return reload(folder)


def kept(heads: DraftHead, target: Target, folder: Path) -> Path:
    export_heads(folder, heads, target, tuning=untuned(heads), facts={})
    return folder


def bytes_of(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """Read the dtype and bytes of every tensor of a checkpoint."""
    stored: dict[str, tuple[str, Tensor]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            names = held.keys()
            for name in names:
                tensor = held.get_tensor(name)
                stored[name] = (str(tensor.dtype), tensor.contiguous().flatten().view(torch.uint8))
    return stored


def train(heads: DraftHead, target: Target) -> tuple[float, float]:
    """Train briefly on the target's own answers; return the first and last loss."""
    rows = DecodeLoop(target).generate(PROMPTS, OPTIONS)
    texts = [prompt + row.tokens for prompt, row in zip(PROMPTS, rows, strict=True)]
    batch = contract.batch_of(target, heads, texts, prompt=3)
    optimizer, losses = torch.optim.Adam(heads.parameters(), lr=1e-2), []
    for _ in range(20):
        steps = list(heads.unroll(batch))
        loss = sum(F.cross_entropy(step.logits_MD, batch.tokens_BT.flatten()[step.teacher_M + 1]) for step in steps)
        assert isinstance(loss, Tensor)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def tokens_per_round(target: Target, drafter: Any) -> float:
    rows = DecodeLoop(target, drafter).generate(PROMPTS, OPTIONS)
    assert [row.drafter_error for row in rows] == [None] * len(rows)
    return sum(row.tokens_per_round for row in rows) / len(rows)


@pytest.mark.parametrize("kind", ONE_MODULE)
def test_trained_module_returns_to_its_checkpoint(kind: str, tmp_path: Path) -> None:
    source, out = tmp_path / "target", tmp_path / "out"
    target = published(kind, source)
    heads = contract.build("native", target)

    modes = {file: file.stat().st_mode for file in source.iterdir()}
    untrained = export_checkpoint(kept(heads, target, tmp_path / "untrained"), tmp_path / "same")
    assert untrained.changed == ()
    for file in source.iterdir():
        if file.is_file():
            assert file_hash(tmp_path / "same" / file.name) == file_hash(file), "bit for bit"
            assert file.stat().st_mode == modes[file], "linked files keep their mode"
    assert not (tmp_path / "same" / ".cache").exists()

    before = tokens_per_round(target, HeadDrafter(heads, TreeShape.chain(3)))
    first, last = train(heads.train(), target)
    assert last < 0.5 * first
    done = export_checkpoint(kept(heads, target, tmp_path / "trained"), out)
    ours, theirs = bytes_of(source), bytes_of(out)
    assert {name: dtype for name, (dtype, _) in ours.items()} == {name: dtype for name, (dtype, _) in theirs.items()}
    changed = {name for name, (_, stored) in ours.items() if not torch.equal(stored, theirs[name][1])}
    assert changed == set(done.changed) <= set(heads.in_checkpoint())
    assert len(changed) > 0.9 * len(heads.in_checkpoint())
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    for file in source.glob("*.*"):
        untouched = file.name not in {index[name] for name in changed}
        if file.is_file():
            assert (file_hash(out / file.name) == file_hash(file)) is untouched
            assert os.path.samefile(out / file.name, file) is (untouched and file.suffix == ".safetensors")

    again = reload(out)
    after = tokens_per_round(again, ShippedDrafter(again))
    assert after > before + 1.5, "in bfloat16, from the files alone"
    assert done.commands["vllm"] == (
        f"vllm serve {out} --speculative-config '" + '{"method": "mtp", "num_speculative_tokens": 3}' + "'"
    )


def test_failed_copy_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = published("mimo", tmp_path / "target")
    heads = kept(contract.shake(contract.build("native", target)), target, tmp_path / "heads")
    hashes = {file: file_hash(file) for file in (tmp_path / "target").glob("*.*") if file.is_file()}

    monkeypatch.setattr(into_checkpoint, "write_tensors", raising(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(heads, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads", "target"]
    assert hashes == {file: file_hash(file) for file in hashes}


def test_unfit_heads_are_refused(tmp_path: Path) -> None:
    target = published("mimo", tmp_path / "target")
    heads = kept(contract.shake(contract.build("native", target)), target, tmp_path / "heads")
    with pytest.raises(UserError, match=r"holds other files.*config\.json"):
        export_checkpoint(heads, tmp_path / "target")
    plain = kept(contract.build("mtp", target), target, tmp_path / "plain")
    with pytest.raises(UserError, match=r"cannot hold these mtp heads.*heads\.init=native"):
        export_checkpoint(plain, tmp_path / "out")

    other = published("glm", tmp_path / "glm")
    with pytest.raises(UserError, match=r"has no model\.mtp_layers\.0\..*--target"):
        export_checkpoint(heads, tmp_path / "out", other.spec)

    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.mtp_layers.0.input_proj.weight"
    file = tmp_path / "target" / index[name]
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name][:, :64].contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"shape \[64, 64\] in the checkpoint .*, and \[64, 128\] in the heads"):
        export_checkpoint(heads, tmp_path / "out")
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"input_proj\.weight in low precision \(F8_E4M3\).*in bfloat16"):
        export_checkpoint(heads, tmp_path / "out")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UserError, match="cut short or damaged"):
        export_checkpoint(heads, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ONE_MODULE)
def test_check_finds_faults_of_a_copy(kind: str, tmp_path: Path) -> None:
    target = published(kind, tmp_path / "target")
    heads = kept(contract.shake(contract.build("native", target)), target, tmp_path / "heads")
    out = export_checkpoint(heads, tmp_path / "out").folder
    assert check_checkpoint(out, against=heads) == []
    (finding,) = check_checkpoint(tmp_path / "target", ["vllm"], against=heads)
    assert "differ from" in finding.problem
    assert [one.engine for one in check_checkpoint(out, ["sglang", "llama.cpp"])] == ["llama.cpp"]

    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    names = build_heads(read_config(heads)["heads"], heads / HEADS).in_checkpoint()
    name = next(name for name in names if "norm" in name)
    file = out / index[name]
    whole, tensors = file.read_bytes(), load_file(file)
    for said, change in (
        ("not finite", {**tensors, name: tensors[name] * float("nan")}),
        ("", {**tensors, name: torch.cat([tensors[name], tensors[name]])}),
        ("cannot be read", {other: tensor for other, tensor in tensors.items() if other != name}),
    ):
        file.unlink()
        save_file(change, file, metadata={"format": "pt"})
        found = check_checkpoint(out)
        assert [one.engine for one in found] == ["vllm", "sglang"] and said in found[0].problem, said
    file.write_bytes(whole[:-10])
    assert "cut short" in check_checkpoint(out)[0].problem


def test_command_prints_how_to_serve_the_copy(tmp_path: Path) -> None:
    """From a recipe to the copy: a run trains the target's module, and the copy drafts here too."""
    tokenizer, folder, runs, served = tiny_tokenizer(), tmp_path / "target", tmp_path / "runs", tmp_path / "served"
    ship("deepseek", folder, louder, vocabulary=len(tokenizer))
    tokenizer.save_pretrained(folder)
    runs.mkdir()
    recipe = tiny_recipe(runs, folder, train={"steps": 12, "eval_every": 6, "lr": 1e-2})
    recipe = recipe.model_copy(update={"heads": parse_heads(SETTINGS)})
    execute(Run(recipe, runs, Console(quiet=True)), stages_until("train"))
    printed = " ".join(works("export", runs, "--format", "checkpoint", "--out", served).output.split())
    assert f"vllm serve {served} --speculative-config" in printed and '"method": "mtp"' in printed
    assert f"--model-path {served} --speculative-algorithm EAGLE --speculative-num-steps 3" in printed
    assert " tensors of the heads." in printed
    checked = works("export", "--check", served, "--against", runs).stdout
    assert "is complete; vllm and sglang read its own module" in " ".join(checked.split())
    asked = ("--prompt", "one two", "--max-new-tokens", 6, "--dtype", "float32")
    plain = works("generate", folder, "--drafter", "mtp", *asked).stdout
    assert works("generate", served, "--drafter", "mtp", *asked).stdout == plain
    assert works("generate", runs, *asked).stdout == plain
    for format, problem in (("vllm", "--format checkpoint"), ("checkpoint,gguf", "goes with no other format")):
        assert problem in refused("export", runs, "--format", format, "--out", tmp_path / "other")
    asked = ("--format", "checkpoint", "--dtype", "float16", "--out", tmp_path / "other")
    assert "keeps the dtype" in refused("export", runs, *asked)
