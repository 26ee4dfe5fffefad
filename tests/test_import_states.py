"""`headstart data import-states`: from the printed vLLM command to a run with imported states."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from rich.console import Console

from headstart.data.conversations.records import read_conversations
from headstart.data.states.store import StateStore
from headstart.model.loading import load_target
from headstart.pipeline.run import Run
from headstart.pipeline.vllm_states import serve_command
from headstart.recipes.recipe import load_recipe
from tests.data.test_extraction import write
from tests.test_cli import refused, works
from tests.test_pipeline import recipe_text, tiny_recipe


@pytest.fixture
def recipe(tmp_path: Path, tiny_target_folder: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    data = {"conversations": 4, "heldout": 0, "validation": 2, "max_new_tokens": 8}
    file.write_text(recipe_text(tiny_recipe(tmp_path, tiny_target_folder, data=data)))
    return file


def test_the_states_of_a_run_come_from_vllm(recipe: Path, tmp_path: Path, tiny_target_folder: Path) -> None:
    run = tmp_path / "runs" / "run"
    words = shlex.split(works("data", "import-states", recipe, "--run-dir", run).stdout.splitlines()[0])
    assert words[:3] == ["vllm", "serve", str(tiny_target_folder)]
    layers = json.loads(words[words.index("--speculative-config") + 1])["draft_model_config"]["hf_config"]
    assert layers == {"eagle_aux_hidden_state_layer_ids": [3]}
    changed = "description=two words"
    then = shlex.split(works("data", "import-states", recipe, changed, "--run-dir", run).stderr.splitlines()[-1])
    assert then[then.index("import-states") :] == [
        *("import-states", str(recipe), "http://localhost:8000"),
        *(changed, "--run-dir", str(run)),
    ]

    works("data", "build", recipe, "--run-dir", run)
    states = next((run.parent / "artifacts" / "states").iterdir())
    for shard in states.glob("shard-*"):  # of writing in this process, which a server does not leave
        shard.unlink()
    target = load_target(str(tiny_target_folder), "float32", "cpu")
    texts = [item for split in ("train", "validation") for item in read_conversations(texts_of(run, split))]
    for item in texts[1:]:
        write(tmp_path / "files", target, item.tokens, (3,))
    (tmp_path / "files" / "other.safetensors").write_bytes(b"junk")

    said = works("data", "import-states", recipe, tmp_path / "files", "--run-dir", run).stdout
    assert said.splitlines()[-1].endswith(shlex.join(["train", str(recipe), "--run-dir", str(run)]))
    assert "Left out 1 file: it is cut short or no safetensors file (other.safetensors)." in said
    assert f"Imported the states of {len(texts) - 1} conversations.\n1 have no states yet" in said
    taken = set(states.glob("shard-*"))
    works("data", "build", recipe, "--run-dir", run)
    assert len(set(states.glob("shard-*")) - taken) == 1, "only the missing states are computed"
    said = works("data", "import-states", recipe, tmp_path / "files", "--run-dir", run).stdout
    assert f"Imported the states of 0 conversations; {len(texts)} already had states." in said


def test_import_is_refused_where_training_computes_the_states(recipe: Path, tmp_path: Path) -> None:
    said = refused("data", "import-states", recipe, tmp_path, "data.states=online", "--run-dir", tmp_path / "run")
    assert "data.states=stored" in said


def test_a_server_gets_the_rest_of_the_gpu(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(load_recipe(str(recipe)), tmp_path / "run", Console(quiet=True))
    assert "--gpu-memory-utilization" not in serve_command(run)
    size = run.target.parameters * 4
    monkeypatch.setattr(run.target, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 10 * size))
    assert serve_command(run).endswith(" --gpu-memory-utilization 0.75")


def test_an_override_may_stand_where_the_source_would(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = works("data", "import-states", recipe, "heads.num_heads=3", "--run-dir", run).stdout
    assert said.startswith("vllm serve")


def test_int8_states_are_stored_separately(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    works("data", "build", recipe, "--run-dir", run)
    shards = {file.name for file in run.parent.glob("artifacts/states/*/shard-*")}
    works("data", "build", recipe, "--run-dir", run, "data.states_dtype=int8")
    store = StateStore(run / "data" / "states" / "train")
    assert store.states_dtype == "int8"
    assert shards.isdisjoint(file.name for file in store.files)
    assert len(list(run.parent.glob("artifacts/conversations/*"))) == 1, "the same conversations"
    works("data", "build", recipe, "--run-dir", run)
    again = StateStore(run / "data" / "states" / "train")
    assert shards.issuperset(file.name for file in again.files), "none computed again"


def texts_of(run: Path, split: str) -> Path:
    return run / "data" / "conversations" / f"{split}.jsonl"
