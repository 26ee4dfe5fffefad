"""Work that several processes share: nothing is lost or done twice when one of them dies."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from headstart.data.conversations.answers import AnswerGenerator
from headstart.data.conversations.batch_generator import BatchGenerator
from headstart.data.conversations.batches import CLOCKS
from headstart.data.conversations.building import ConversationBuild, Splits, build_conversations
from headstart.data.conversations.records import Conversation
from headstart.data.states import shards
from headstart.data.states.shards import Capture, StateKind, build_store, compute_states
from headstart.data.workers import claim, prune_claims
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.recipes.sections import DataSection
from headstart.replay.patch import FINAL
from headstart.support.files import write_jsonl
from headstart.support.lock import locked
from tests.data.loading import everything

LONG = 60
"""Seconds after which something has gone wrong."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("conversations.building", "states.shards"):
        monkeypatch.setattr(f"headstart.data.{module}.POLL_SECONDS", 0.01)
    monkeypatch.setattr(shards, "SHARD_BYTES", (20_000, 20_000))
    monkeypatch.setattr(shards, "BATCH_TOKENS", 64)


def never() -> bool:
    return False


@pytest.mark.parametrize("has_locks", [True, False])
def test_an_output_belongs_to_one_process_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
        monkeypatch.setattr(fcntl, "lockf", refuse)
    held = claim(tmp_path, "a", never)
    assert held is not None and claim(tmp_path, "a", never) is None
    other = claim(tmp_path, "b", never)
    assert other is not None and len(prune_claims(tmp_path)) == 2
    for one in (held, other):
        one.close()
    assert not list(tmp_path.iterdir())
    with claim(tmp_path, "a", never) or pytest.fail("still claimed"):
        pass
    assert claim(tmp_path, "a", lambda: True) is None and not prune_claims(tmp_path)


def test_the_claim_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, threading\nfrom headstart.support.lock import locked\n"
        f"with locked(pathlib.Path({str(tmp_path)!r}), name='a.claim'):\n"
        "    print('held', flush=True)\n    threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert claim(tmp_path, "a", never) is None
        process.kill()
        process.wait()
    with claim(tmp_path, "a", never) or pytest.fail("still claimed"):
        (tmp_path / "b.claim").touch()
        assert [lock.name for lock in prune_claims(tmp_path)] == ["a.claim"], "b is nobody's, and deleted"
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_deleted_file_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last holder deleted the file after we opened it, and a third process created another."""

    @contextmanager
    def replaced(folder: Path, name: str) -> Iterator[Any]:
        with locked(folder, name=name) as handle:
            (folder / name).rename(folder / "old")
            (folder / name).touch()
            yield handle

    monkeypatch.setattr("headstart.data.workers.locked", replaced)
    assert claim(tmp_path, "a", never) is None


# -- conversations and states ----------------------------------------------------------------------------------------

AUX_LAYERS = (1, FINAL)
PLENTY = 10**9


def section(tmp_path: Path, **more: object) -> DataSection:
    rows = [{"turns": [f"{'so ' * (i % 5)}why {i}?", "And?"][: 1 + i % 2], "id": str(i)} for i in range(40)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    values = {"conversations": 10, "heldout": 2, "validation": 3, "batch_size": 4, "max_new_tokens": 8}
    return DataSection.model_validate(
        {"prompts": str(tmp_path / "prompts.jsonl"), "sampled_fraction": 0.5, **values, **more}
    )


@pytest.fixture
def some_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth prompt yields no conversation, so that their number is known only once they are written."""
    answer = AnswerGenerator.answer

    def fewer(self: AnswerGenerator, prompts: Any, *arguments: Any) -> Any:
        return answer(self, [prompt for prompt in prompts if int(prompt.id.rpartition("-")[2]) % 4], *arguments)

    monkeypatch.setattr(AnswerGenerator, "answer", fewer)


def parts_of(folder: Path) -> dict[str, list[str]]:
    """Each batch without the line that holds its time."""
    return {file.name: file.read_text().splitlines()[1:] for file in (folder / "batches").glob("*.jsonl")}


def generated(target: Target, folder: Path, data: DataSection, states: Path) -> Splits:
    states.mkdir(exist_ok=True)
    return build_conversations(target, data, folder, capture=Capture(states, StateKind(target, AUX_LAYERS)))


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run work in another thread, which holds locks as another process does; yield the errors it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="beside")
    thread.start()
    try:
        yield raised
    finally:
        thread.join(LONG)
        assert not thread.is_alive()


class Turns:
    """Makes one process wait at its work until the other one has done some.

    `BatchGenerator` objects tell the processes apart: their work runs in threads of a pool.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.helped = threading.Event()
        self.helper: ConversationBuild | None = None
        self.error: BaseException | None = None
        self.numbers: dict[str, list[int]] = {"helper": [], "main": []}
        own = BatchGenerator.generate

        def generate(generator: BatchGenerator, split: str, number: int, *arguments: Any) -> Any:
            helps = self.helper is not None and generator is self.helper.generator
            self.numbers["helper" if helps else "main"].append(number)
            if helps and split == "train" and self.error is not None:
                self.helped.set()
                raise self.error
            if not helps and split == "train":
                assert self.helped.wait(LONG)
            result = own(generator, split, number, *arguments)
            if helps and split == "train":
                self.helped.set()
            return result

        monkeypatch.setattr(BatchGenerator, "generate", generate)


@pytest.mark.usefixtures("some_unfit")
def test_batches_of_two_processes_are_those_of_one(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder = section(tmp_path), tmp_path / "together"
    alone = generated(tiny_target, tmp_path / "alone", data, tmp_path / "a")
    turns = Turns(monkeypatch)
    (tmp_path / "b").mkdir()
    capture = Capture(tmp_path / "b", StateKind(tiny_target, AUX_LAYERS))
    turns.helper = ConversationBuild(tiny_target, data, folder, capture=capture)
    with beside(turns.helper.run) as raised:
        together = generated(tiny_target, folder, data, tmp_path / "b")
    assert not raised and turns.helped.is_set()
    assert everything(together) == everything(alone) and len(alone.train) == 10
    assert parts_of(folder) == parts_of(tmp_path / "alone")
    assert {file.name for file in (tmp_path / "a").iterdir()} == {file.name for file in (tmp_path / "b").iterdir()}
    both = turns.numbers["helper"] + turns.numbers["main"]
    assert len(both) == len(set(both)) == len(parts_of(folder)), "no batch is written twice"
    assert not prune_claims(folder / "batches")


def test_the_batch_of_a_process_that_fails_is_written_by_another(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, folder = section(tmp_path), tmp_path / "together"
    alone = build_conversations(tiny_target, data, tmp_path / "alone")
    turns = Turns(monkeypatch)
    turns.helper, turns.error = ConversationBuild(tiny_target, data, folder), MemoryError()
    with beside(turns.helper.run) as raised:
        together = build_conversations(tiny_target, data, folder)
    assert raised == [turns.error]
    assert everything(together) == everything(alone)


@pytest.mark.usefixtures("some_unfit")
@pytest.mark.parametrize("kept", [{1, 3}, {0, 2, 4}, {4}])
def test_batches_that_were_finished_early_survive_a_kill(tiny_target: Target, tmp_path: Path, kept: set[int]) -> None:
    """Several are written at once, so a kill may leave a gap before a finished batch."""
    data = section(tmp_path)
    alone = build_conversations(tiny_target, data, tmp_path / "alone")
    folder = tmp_path / "killed"
    build_conversations(tiny_target, data, folder)
    before = {}
    for file in (folder / "batches").glob("*.jsonl"):
        if int(file.name[:5]) in kept:
            before[file] = file.stat().st_mtime_ns
        else:
            file.unlink()
    assert len(before) == len(kept)
    assert everything(build_conversations(tiny_target, data, folder)) == everything(alone)
    assert parts_of(folder) == parts_of(tmp_path / "alone")
    assert {file: file.stat().st_mtime_ns for file in before} == before


@pytest.mark.parametrize("more", [{}, {"conversations": 6}])
def test_a_gap_filled_with_smaller_batches_skips_no_prompt(
    tiny_target: Target, tmp_path: Path, more: dict[str, int]
) -> None:
    """Batches 2 and 3 are lost; the last one of the gap takes all prompts up to those of batch 4."""
    folder = tmp_path / "killed"
    before = build_conversations(tiny_target, section(tmp_path, conversations=18), folder)
    ids = {item.id for part in everything(before) for item in part}
    for number in (2, 3):
        (folder / "batches" / f"{number:05d}-train.jsonl").unlink()
    data = section(tmp_path, conversations=18, batch_size=2)
    build_conversations(tiny_target, data.model_copy(update=more), folder)
    again = build_conversations(tiny_target, data, folder)
    assert {item.id for part in everything(again) for item in part} == ids


def test_a_time_budget_ends_all_processes(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first batch the time is up for both, so neither begins another one."""
    data, folder = section(tmp_path, minutes=1e-6), tmp_path / "together"
    turns = Turns(monkeypatch)
    turns.helped.set()
    turns.helper = ConversationBuild(tiny_target, data, folder)
    with beside(turns.helper.run) as raised:
        together = build_conversations(tiny_target, data, folder)
    assert not raised and len(together.train) == 4
    assert len(list((folder / "batches").glob("*-train.jsonl"))) == 1


def test_a_batch_that_another_process_gives_back_is_not_begun_after_the_time(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every claim fails once, as if another process held it while it looked at its clock."""
    failed = set[str]()

    def busy_once(folder: Path, name: str, is_done: Callable[[], bool]) -> Any:
        if name not in failed:
            failed.add(name)
            return None
        return claim(folder, name, is_done)

    monkeypatch.setattr("headstart.data.conversations.building.claim", busy_once)
    assert len(build_conversations(tiny_target, section(tmp_path, minutes=1e-6), tmp_path / "data").train) == 4


def test_only_the_holder_of_a_run_records_where_its_time_ended(tiny_target: Target, tmp_path: Path) -> None:
    data = section(tmp_path, minutes=1e-6)
    for records, recorded in ((False, False), (True, True)):
        ConversationBuild(tiny_target, data, tmp_path / "data").run(records_time=records)
        assert (tmp_path / "data" / "batches" / CLOCKS).is_file() == recorded


def test_a_process_with_other_splits_is_named(tiny_target: Target, tmp_path: Path) -> None:
    build = ConversationBuild(tiny_target, section(tmp_path), tmp_path / "data")
    build.folder.mkdir(parents=True)
    (build.folder / "00000-train.jsonl").touch()
    with pytest.raises(UserError, match=r"with other settings: .*00000-train\.jsonl is not of heldout"):
        build.run()


def items(target: Target, tmp_path: Path) -> list[Conversation]:
    return build_conversations(target, section(tmp_path, conversations=20), tmp_path / "data").train


def test_states_of_two_processes_are_those_of_one(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = items(tiny_target, tmp_path)
    alone = build_store(tmp_path / "alone", given, tiny_target, AUX_LAYERS, budget_bytes=PLENTY)
    own, helped, rows = tiny_target.hidden_states, threading.Event(), list[Sequence[int]]()

    def hidden_states(some: Any, layers: Any) -> Any:
        rows.extend(some)
        if threading.current_thread().name == "beside":
            helped.set()
        assert helped.wait(LONG)
        return own(some, layers)

    monkeypatch.setattr(tiny_target, "hidden_states", hidden_states)
    folder = tmp_path / "together"
    folder.mkdir()
    with beside(lambda: compute_states(StateKind(tiny_target, AUX_LAYERS), given, folder)) as raised:
        together = build_store(folder, given, tiny_target, AUX_LAYERS, budget_bytes=PLENTY)
    assert not raised and helped.is_set() and len(rows) == len(given), "no text is read twice"
    assert sorted(file.name for file in together.files) == sorted(file.name for file in alone.files)
    for index in range(len(given)):
        for layer in AUX_LAYERS:
            assert torch.equal(alone.get(index).states[layer], together.get(index).states[layer])
    assert not prune_claims(folder)


def test_shards_of_a_killed_process_are_not_computed_again(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = items(tiny_target, tmp_path)
    build_store(tmp_path, given, tiny_target, AUX_LAYERS, budget_bytes=PLENTY)
    files = sorted(tmp_path.glob("shard-*"))
    assert len(files) > 3
    for file in files[::2]:
        file.unlink()
    (tmp_path / "0123456789abcdef.claim").touch()
    rows, own = list[Sequence[int]](), tiny_target.hidden_states
    monkeypatch.setattr(tiny_target, "hidden_states", lambda some, layers: rows.extend(some) or own(some, layers))
    build_store(tmp_path, given, tiny_target, AUX_LAYERS, budget_bytes=PLENTY)
    keys = [key for file in tmp_path.glob("shard-*") for key in keys_of(file)]
    assert len(keys) == len(set(keys)) == len(given)
    assert 0 < len(rows) < len(given) and not prune_claims(tmp_path)


def keys_of(shard: Path) -> list[str]:
    with safe_open(shard, framework="pt") as handle:
        return list(json.loads(handle.metadata()["keys"]))
