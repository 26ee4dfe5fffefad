"""A healthy run of a tiny target, and copies of it to break."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headstart.data.conversations.records import Conversation, read_conversations, write_conversations
from headstart.data.states.shard_format import KEY, checksums
from headstart.data.states.shards import build_store
from headstart.data.states.store import MANIFEST, StateStore
from headstart.doctor.examination import examine
from headstart.doctor.findings import Finding
from headstart.doctor.subject import Subject, find_subject
from headstart.model.model import Target
from headstart.pipeline.run import CONVERSATIONS, STATES, Run, execute
from headstart.pipeline.stages import stages_until
from headstart.replay.patch import FINAL
from tests.test_pipeline import tiny_recipe

SPLITS = ("train", "validation")


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    """A run up to trained heads."""
    path = tmp_path_factory.mktemp("doctor")
    recipe = tiny_recipe(
        path,
        tiny_target_folder,
        data={"conversations": 24, "max_new_tokens": 48, "batch_size": 16},
        heads={"draft_vocab_size": 200},
        train={"steps": 100, "eval_every": 25, "save_every": 100, "lr": 3e-3},
    )
    execute(Run(recipe, path / "runs" / "run", Console(quiet=True)), stages_until("train"))
    return path / "runs" / "run"


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be broken."""
    shutil.copytree(healthy.parent, tmp_path / "runs", symlinks=True)
    return tmp_path / "runs" / "run"


def problems(subject: Subject | Path) -> list[Finding]:
    """Return the problems that a quick examination finds; no check may crash."""
    subject = find_subject(str(subject), quick=True) if isinstance(subject, Path) else subject
    wrong = [finding for finding in examine(subject) if finding.ok is False]
    assert all("traceback" not in finding.figures for finding in wrong), wrong
    return wrong


def planted(subject: Subject | Path, check: str, *words: str) -> Finding:
    """Return the first finding, which must be this check's and contain these words."""
    first = problems(subject)[0]
    assert (first.check, [word for word in words if word not in first.sentence]) == (check, []), first
    return first


def rewrite(run: Path, target: Target, change: Callable[[Conversation], Conversation], *aux_layers: int) -> None:
    """Change every conversation of a run, and rebuild the stores."""
    for split in SPLITS:
        file = run / CONVERSATIONS / f"{split}.jsonl"
        items = [change(item) for item in read_conversations(file)]
        write_conversations(file, items)
        build_store(run / STATES / split, items, target, [*aux_layers, FINAL], budget_bytes=10**8)


def rewrite_states(run: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change the tensors of every shard, with matching checksums, as a faulty writer would."""
    stores = [StateStore(run / STATES / split) for split in SPLITS]
    for file in sorted({file for store in stores for file in store.files}):
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata()
        tensors = {name: part.contiguous() for name, part in change(load_file(file)).items()}
        metadata[KEY] = checksums(tensors, json.loads(metadata["lengths"]))
        save_file(tensors, file, metadata)
    for store in stores:
        manifest = json.loads((store.folder / MANIFEST).read_text())
        for named, file in zip(manifest["files"], store.files, strict=True):
            named["bytes"] = file.stat().st_size
        (store.folder / MANIFEST).write_text(json.dumps(manifest))


def read_again(target: Target, tensors: dict[str, torch.Tensor], run: Path, layer: int) -> torch.Tensor:
    """Return the states at `layer` of a shard's tokens; its conversations are concatenated."""
    every = [item for split in SPLITS for item in read_conversations(run / CONVERSATIONS / f"{split}.jsonl")]
    tokens, rows = tensors["tokens"].tolist(), []
    while tokens:
        item = next(item for item in every if tokens[: len(item.tokens)] == list(item.tokens))
        rows.append(target.hidden_states([item.tokens], [layer])[0][layer])
        tokens = tokens[len(item.tokens) :]
    return torch.cat(rows)
