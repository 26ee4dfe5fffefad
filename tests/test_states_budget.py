"""`headstart gc --states-gigabytes`: deletes states of finished trainings, the least recently read first."""

from __future__ import annotations

import json
import os
from pathlib import Path

from headstart.data.states.shards import build_store
from headstart.data.states.store import StateStore
from headstart.model.model import Target
from headstart.pipeline.inventory import delete, over_budget, unreferenced
from headstart.replay.patch import FINAL
from headstart.support.lock import locked
from tests.data.loading import some_conversations
from tests.test_cli import works

SIZE = 1000
LONG_AGO = 10**9


def states(folder: Path) -> Path:
    """Write an artifact with shards a, b, c and d, from the most to the least recently read."""
    path = folder / "artifacts" / "states" / "tiny-0123456789ab"
    path.mkdir(parents=True)
    (path / "artifact.json").write_text('{"identity": {}}')
    for age, name in enumerate("abcd"):
        file = path / f"shard-{name}.safetensors"
        file.write_bytes(bytes(SIZE))
        os.utime(file, (LONG_AGO - age, LONG_AGO - age))
    return path


def run(folder: Path, name: str, shards: str, trained: bool = True, whole: bool = True) -> None:
    """A run that reads some of the shards."""
    path = folder / name
    (path / "stages").mkdir(parents=True)
    (path / "recipe.yaml").write_text("heads: {family: medusa}\n")
    (path / "references.json").write_text('{"states": "../artifacts/states/tiny-0123456789ab"}')
    for stage, done in (("states", whole), ("train", trained)):
        (path / "stages" / f"{stage}.json").write_text(json.dumps({"is_complete": done}))
    (path / "data" / "states" / "train").mkdir(parents=True)
    files = [{"file": f"shard-{one}.safetensors", "bytes": SIZE} for one in shards]
    (path / "data" / "states" / "train" / "manifest.json").write_text(json.dumps({"files": files}))


def names(folder: Path, maximum: int) -> str:
    return "".join(one.path.name[6] for one in over_budget(folder, maximum))


def test_the_longest_unread_go_first_and_no_more_than_need_be(tmp_path: Path) -> None:
    path = states(tmp_path)
    run(tmp_path, "one", "abcd")
    assert [names(tmp_path, maximum) for maximum in (4000, 3999, 2000, 0)] == ["", "d", "dc", "dcba"]
    os.utime(path / "shard-d.safetensors", (LONG_AGO + 1, LONG_AGO - 9))
    assert names(tmp_path, 0) == "cbad", "reading counts"


def test_states_that_a_training_still_needs_stay(tmp_path: Path) -> None:
    states(tmp_path)
    run(tmp_path, "one", "abcd")
    run(tmp_path, "two", "bd", trained=False)
    assert names(tmp_path, 0) == "ca"
    assert names(tmp_path, 3999) == "c", "what stays counts too"


def test_states_of_a_working_run_stay(tmp_path: Path) -> None:
    """Until it reaches that stage, its training counts as finished by an earlier record."""
    states(tmp_path)
    run(tmp_path, "one", "abcd")
    with locked(tmp_path / "one"):
        assert names(tmp_path, 0) == ""
    assert names(tmp_path, 0) == "dcba"


def test_states_newer_than_the_training_stay(tmp_path: Path) -> None:
    """The records of an extended run: its training is complete, but read other states."""
    path = states(tmp_path)
    run(tmp_path, "one", "abcd")
    stages = tmp_path / "one" / "stages"
    (stages / "states.json").write_text(json.dumps({"is_complete": True, "identity": "new"}))
    (stages / "train.json").write_text(json.dumps({"is_complete": True, "before": {"states": "old"}}))
    assert names(tmp_path, 0) == ""
    (stages / "conversations.json").write_text(json.dumps({"is_complete": False}))
    (stages / "states.json").write_text(json.dumps({"is_complete": True, "before": {"conversations": "old"}}))
    (path / "shard-e.safetensors").write_bytes(bytes(SIZE))
    (path / "shard-f.safetensors.partial").write_bytes(bytes(SIZE))
    assert unreferenced(tmp_path) == [], "writing goes on, and keeps what it computes"


def test_nothing_goes_while_a_run_adds_to_them(tmp_path: Path) -> None:
    states(tmp_path)
    run(tmp_path, "one", "abcd")
    run(tmp_path, "two", "", whole=False)
    assert names(tmp_path, 0) == ""


def test_unreferenced_states_do_not_count(tmp_path: Path) -> None:
    path = states(tmp_path)
    (path / "shard-e.safetensors.damaged").write_bytes(bytes(SIZE))
    run(tmp_path, "one", "bc")
    assert [one.path.name[6] for one in unreferenced(tmp_path)] == ["e", "a", "d"]
    assert names(tmp_path, 2000) == ""
    assert names(tmp_path, 1999) == "c"


def test_the_budget_is_checked_again_before_deleting(tmp_path: Path) -> None:
    path = states(tmp_path)
    run(tmp_path, "one", "abcd")
    found = over_budget(tmp_path, 2500)
    assert delete(tmp_path, found) == 0, "without the budget all of them are in use"
    run(tmp_path, "two", "d", trained=False)
    assert delete(tmp_path, found, 2500) == SIZE
    assert sorted(file.name[6] for file in path.glob("shard-*")) == ["a", "b", "d"]


def test_the_command(tmp_path: Path) -> None:
    path = states(tmp_path)
    run(tmp_path, "one", "abcd")
    listed = works("gc", "--runs", tmp_path, "--states-gigabytes", "0.000002", "--dry-run").stdout
    assert "shard-d.safetensors  (hidden states of finished trainings, last read" in listed
    assert "2 items to delete, up to 2.0 kB." in listed
    assert len(list(path.glob("shard-*"))) == 4
    works("gc", "--runs", tmp_path, "--states-gigabytes", "0.000002", "--yes")
    assert sorted(file.name[6] for file in path.glob("shard-*")) == ["a", "b"]


def test_reading_states_is_noted(tmp_path: Path, tiny_target: Target) -> None:
    build_store(tmp_path, some_conversations(tiny_target, 2), tiny_target, [FINAL], budget_bytes=10**9)
    store = StateStore(tmp_path)
    (file,) = store.files
    os.utime(file, (LONG_AGO, LONG_AGO))
    store.get(0)
    assert (file.stat().st_mtime, file.stat().st_atime > LONG_AGO) == (LONG_AGO, True)
