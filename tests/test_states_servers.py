"""Runs with hidden states from servers: engines that the run starts, restarts and stops, and addresses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.data.conversations.records import read_conversations
from headstart.data.states.served import ServedStates
from headstart.data.states.store import StateStore
from headstart.errors import UserError
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.pipeline import states_servers
from headstart.pipeline.data_stages import conversations
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.recipes.sections import DataSection
from headstart.recipes.values import recipe_text
from headstart.servers import client, fleet
from tests.states_server import StatesServer, engine_command, serving
from tests.test_cli import works
from tests.test_pipeline import tiny_recipe
from tests.train.results import metrics, weights

DATA = {"conversations": 6, "heldout": 0, "validation": 2, "max_new_tokens": 8}


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm, which other processes use too; retries come at once."""
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(states_servers, "_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(states_servers, "_WATCH_SECONDS", 0.02)
    return tmp_path / "memory"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> tuple[Recipe, Path]:
    """A recipe with data.states=online, and a folder of runs with its finished data."""
    folder = tmp_path_factory.mktemp("written")
    train = {"steps": 4, "eval_every": 2, "lr": 1e-3, "batch_tokens": 128}
    values = tiny_recipe(folder, tiny_target_folder, data={**DATA, "states": "online"}, train=train)
    heads = {"family": "eagle3", "aux_layers": [1, 2], "draft_steps": 2}
    recipe = parse_recipe({**values.model_dump(mode="json"), "heads": heads})
    execute(Run(recipe, folder / "run", Console(quiet=True)), stages_until("states"))
    return recipe, folder


@pytest.fixture
def server(tiny_target_folder: Path, tmp_path: Path) -> Iterator[StatesServer]:
    server = StatesServer(load_target(str(tiny_target_folder), "float32", "cpu"), tmp_path / "files")
    with serving(server):
        yield server


def changed(recipe: Recipe, **data: Any) -> Recipe:
    values = recipe.model_dump(mode="json")
    return parse_recipe({**values, "data": {**values["data"], **data}})


def run_of(recipe: Recipe, folder: Path) -> Run:
    return Run(recipe, folder, Console(file=StringIO(), width=500))


def lives(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "lives").read_text().split()]


@pytest.fixture
def runs(written: tuple[Recipe, Path], tmp_path: Path) -> Path:
    """A copy of the folder of runs, since a streamed training is the same artifact as one with forwards here."""
    return Path(shutil.copytree(written[1], tmp_path / "runs", symlinks=True))


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "target", property(lambda run: pytest.fail("the target was loaded")))


@pytest.fixture(scope="module")
def trained_here(written: tuple[Recipe, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here") / "runs"
    shutil.copytree(written[1], folder, symlinks=True)
    execute(run_of(written[0], folder / "run"), stages_until("train"))
    return folder / "run" / "train"


def test_streamed_heads_match_those_of_forwards_here_though_the_engine_dies(
    written: tuple[Recipe, Path],
    runs: Path,
    trained_here: Path,
    tmp_path: Path,
    server: StatesServer,
    memory: Path,
    not_loaded: None,
) -> None:
    """Losses within the rounding of float32 sums, as of every online training."""
    streaming = changed(written[0], states_server="vllm", server_command=engine_command(tmp_path, server, 2, 9))
    execute(run := run_of(streaming, runs / "run"), stages_until("train"))
    assert len(lives(tmp_path)) == 3, "it died twice"
    assert not [pid for pid in lives(tmp_path) if Path(f"/proc/{pid}").exists()]
    assert not list(memory.iterdir()) and not list(run.folder.glob(f"{states_servers._FILES}*"))
    assert not list((run.folder / "data" / "states").iterdir()), "nothing is stored"
    ours, theirs = metrics(trained_here), metrics(run.folder / "train")
    assert [row["loss"] for row in theirs][1:] == pytest.approx([row["loss"] for row in ours][1:], rel=1e-5)
    for name, weight in weights(trained_here / "last").items():
        torch.testing.assert_close(weights(run.folder / "train" / "last")[name], weight, rtol=1e-3, atol=1e-4)


def test_stored_states_come_from_an_engine(
    written: tuple[Recipe, Path],
    runs: Path,
    tmp_path: Path,
    server: StatesServer,
    request: pytest.FixtureRequest,
) -> None:
    """It starts if states are missing; the target is not loaded, and training reads its teacher from the files."""
    command = engine_command(tmp_path, server, 1, 4)
    storing = changed(written[0], states="stored", states_server="vllm", server_command=command)
    execute(run_of(storing, runs / "run"), stages_until("conversations"))
    request.getfixturevalue("not_loaded")
    execute(run := run_of(storing, runs / "run"), stages_until("train"))
    store = StateStore(run.folder / "data" / "states" / "train")
    texts = read_conversations(run.folder / "data" / "conversations" / "train.jsonl")
    assert len(store) == len(texts) > 0 and len(lives(tmp_path)) == 2
    for index in (0, len(texts) - 1):
        (expected,) = server.target.hidden_states([texts[index].tokens], store.aux_layers)
        for layer, state_TE in store.get(index).states.items():
            torch.testing.assert_close(state_TE, expected[layer], rtol=1e-5, atol=1e-6)
    assert (run.folder / "train" / "best").is_dir()
    (run.folder / "data" / "states" / "train" / "manifest.json").unlink()
    execute(run_of(storing, runs / "run"), stages_until("states"))
    assert len(lives(tmp_path)) == 2, "no state is missing, so no engine starts"


def test_engine_that_keeps_dying_ends_the_training(
    written: tuple[Recipe, Path],
    runs: Path,
    tmp_path: Path,
    server: StatesServer,
    memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "_RESTARTS", 1)
    command = engine_command(tmp_path, server, 1000, 3)
    run = run_of(changed(written[0], states_server="vllm", server_command=command), runs / "run")
    with pytest.raises(UserError, match="vllm died 2 times") as refusal:
        execute(run, stages_until("train"))
    assert str(run.folder / "logs" / "vllm-states-0.log") in refusal.value.remedy
    assert not [pid for pid in lives(tmp_path) if Path(f"/proc/{pid}").exists()] and not list(memory.iterdir())


def test_ranks_stop_when_the_engines_are_gone(tiny_target: Target, memory: Path) -> None:
    """Also while a silent program at the engine's port accepts a request."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        check = partial(states_servers._refuse_ended, memory / "1", "Run it again.")
        client = ServedStates([url], tiny_target, [1], 1, "Start it.", lambda _: False, check)
        (memory / "1").mkdir()
        threading.Timer(0.2, (memory / "1").rmdir).start()
        with pytest.raises(UserError, match=r"engines that compute hidden states have ended.*Run it again"):
            client.states([[1, 2, 3]], [1])
    with pytest.raises(UserError, match=r"engines that compute hidden states have ended.*Run it again"):
        states_servers._wait_for_restart(memory / "1", "Run it again.", url)


def test_wait_for_an_engine_ends(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_servers, "_RESTART_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 was not restarted within 0 minutes.*Run it again"):
        states_servers._wait_for_restart(memory, "Run it again.", "http://127.0.0.1:9")


def test_targets_that_vllm_extracts_nothing_from_are_refused(
    written: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(changed(written[0], states_server="vllm"), tmp_path / "run")
    monkeypatch.setattr(run.described.config, "model_type", "gemma2")
    with pytest.raises(UserError, match=r"no hooks for models of type 'gemma2'.*data\.states_server=null"):
        execute(run, stages_until("train"))
    assert not (run.folder / "data" / "conversations").exists()


def test_engines_start_without_the_target_in_memory(
    written: tuple[Recipe, Path], runs: Path, tmp_path: Path, server: StatesServer
) -> None:
    command = engine_command(tmp_path, server)
    run = run_of(changed(written[0], states="stored", states_server="vllm", server_command=command), runs / "run")
    assert run.target is run.described
    execute(run, stages_until("states"))
    assert len(lives(tmp_path)) == 1 and "target" not in vars(run)


def test_wrong_address_is_answered_with_the_command_that_starts_a_server(
    written: tuple[Recipe, Path], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TRIES", 1)
    values = changed(written[0], states_server="http://127.0.0.1:9").model_dump(mode="json")
    more = {"revision": "main", "trust_remote_code": True, "dtype": "float32"}
    run = run_of(parse_recipe({**values, "target": {**values["target"], **more}}), runs / "run")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 did not answer") as refusal:
        execute(run, stages_until("train"))
    words = shlex.split(refusal.value.remedy.partition(": ")[2])
    assert words[:3] == ["vllm", "serve", written[0].target.spec]
    expected = ["--revision", "main", "--trust-remote-code", "--max-model-len", "auto", "--dtype", "float32"]
    assert words[3:10] == expected
    layers = json.loads(words[words.index("--speculative-config") + 1])["draft_model_config"]["hf_config"]
    assert layers == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def test_files_go_to_memory_if_they_fit(
    written: tuple[Recipe, Path], tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(written[0], tmp_path / "run")
    run.folder.mkdir()
    left = run.folder / f"{states_servers._FILES}left"  # by a killed process
    for folder, name in ((left, "0"), (left.with_name(left.name + "-new"), "0")):
        (folder / name).mkdir(parents=True)
    os.utime(left, (time.time() - 1000,) * 2)
    with states_servers._private_folder(run, (1,), run.described) as folder:
        assert folder.parent == memory and folder.stat().st_mode & 0o77 == 0
    assert not folder.exists()
    monkeypatch.setattr(states_servers, "free_disk", lambda place: 10 if place == memory else 10**12)
    with states_servers._private_folder(run, (1,), run.described) as folder:
        assert folder.parent == run.folder
        os.utime(folder, (time.time() - 1000,) * 2)
        with states_servers._private_folder(run, (1,), run.described):
            assert folder.is_dir(), "in use"
    assert [path.name for path in run.folder.glob(f"{states_servers._FILES}*")] == [f"{states_servers._FILES}left-new"]


def test_files_have_room_for_the_longest_conversations(
    written: tuple[Recipe, Path], tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr(states_servers, "need_disk", lambda place, needed, *_: asked.append(needed))
    run, later = run_of(written[0], written[1] / "run"), run_of(written[0], tmp_path / "later")
    for each in (run, later):
        with states_servers._private_folder(each, (1,), run.described):
            pass
    token = 64 * run.described.hidden_size * 4
    texts = [text for split in ("train", "validation") for text in conversations(run, split)]
    assert asked == [max(len(text.tokens) for text in texts) * token, run.described.max_length * token]


@pytest.mark.parametrize(
    ("data", "source"),
    [
        ({"states_server": "auto", "server": "vllm"}, ("vllm",)),
        ({"states_server": "auto", "server": "llama.cpp"}, None),
        ({"states_server": "auto"}, None),
        ({"states_server": "vllm", "server_arguments": "--max-model-len 99"}, ("vllm",)),
        ({"states_server": "http://a:1, http://b:1/v1"}, ("http://a:1", "http://b:1/v1")),
        ({}, None),
    ],
)
def test_source_of_states(data: dict[str, Any], source: tuple[str, ...] | None) -> None:
    assert DataSection.model_validate(data).states_source == source


def test_options_for_two_kinds_of_engine_are_refused() -> None:
    given = {"server": "llama.cpp", "states_server": "vllm"}
    assert DataSection.model_validate(given).states_source == ("vllm",)
    with pytest.raises(UserError, match=r"data\.server_command='llama' would apply to both llama\.cpp and vllm"):
        parse_recipe({"name": "two", "data": {**given, "server_command": "llama"}})


def test_engine_without_extraction_is_refused(written: tuple[Recipe, Path]) -> None:
    with pytest.raises(UserError, match=r"'data.states_server' has 'llama.cpp'.*Write vllm or auto, an address"):
        changed(written[0], states_server="llama.cpp")


def test_int8_states_are_stored_separately(tmp_path: Path, tiny_target_folder: Path) -> None:
    recipe, run = tmp_path / "tiny.yaml", tmp_path / "runs" / "run"
    recipe.write_text(recipe_text(tiny_recipe(tmp_path, tiny_target_folder, data={**DATA, "conversations": 4})))
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
