"""The job queue of cooperating processes: no job is lost or done twice, also when a process dies."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from headstart.data.conversations.answers import Answers
from headstart.data.conversations.building import Splits, build_conversations
from headstart.data.conversations.jobs import JOB, JOBS, Board, Job, Taker, Workers, help_others, share
from headstart.data.conversations.part_writer import PART, PartWriter, help_writing
from headstart.data.states import shards
from headstart.data.states.shards import Capture, Work, build_store, compute_shard
from headstart.model.model import Target
from headstart.recipes.sections import DataSection
from headstart.replay.patch import FINAL
from headstart.support.files import write_jsonl
from tests.data.loading import everything
from tests.spies import raising

CPU = torch.device("cpu")
LONG = 60
"""A timeout in seconds that only a failing test reaches."""


class Numbers:
    """A plan of `count` jobs.

    Attributes:
        time: predicate: may this job still begin?
    """

    def __init__(self, count: int) -> None:
        self._left = iter(range(count))
        self.time: Callable[[Job], bool] = lambda _: True

    def next(self, waiting: Sequence[Job], writers: int) -> Job | None:
        number = next(self._left, None)
        return None if number is None else Job(f"{number:03d}", {"number": number})

    def still(self, job: Job, writers: int) -> bool:
        return self.time(job)


def squares(plan: Numbers, board: Board, do: Callable[[dict[str, Any]], dict[str, Any]]) -> list[int]:
    with Workers(CPU, 1) as workers:
        return [result["square"] for _, result in share(plan.next, do, workers, board, still=plan.still)]


def square(what: dict[str, Any]) -> dict[str, Any]:
    return {"square": what["number"] ** 2}


@contextmanager
def helping(
    board: Board,
    do: Callable[[dict[str, Any]], dict[str, Any]],
    mine: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> Iterator[None]:
    """Run a helper in a thread. Locks belong to open files, so they treat it as another process."""
    stop = threading.Event()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with Workers(CPU, 1) as workers:
                taker = Taker(do, workers, mine)
                while not stop.wait(0.01):
                    help_others([board], taker)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LONG)
    if raised:
        raise raised[0]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.data.conversations.jobs.LOOK", 0.01)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board(tmp_path / "jobs")


def test_job_has_one_owner_until_it_is_done(board: Board) -> None:
    board.post("a", {"number": 1})
    claim = board.claim("a")
    assert claim is not None and board.claim("a") is None and not board.is_free("a") and not board.withdraw("a")
    claim.close()
    again = board.claim("a")
    assert again is not None and not (board.folder / "a" / JOB).with_name("result.json").exists()
    board.finish("a", {"square": 1})
    again.close()
    assert not board.is_free("a") and board.result("a") == {"square": 1}
    board.post("b", {})
    assert board.names() == ["a", "b"] and board.withdraw("b") and board.names() == ["a"]
    assert board.claim("b") is None and not (board.folder / "b").exists()
    board.clear()
    assert not board.folder.exists()


def test_job_of_a_killed_process_is_free(board: Board) -> None:
    board.post("a", {"number": 1})
    code = (
        "import sys, pathlib, threading\nfrom headstart.support.lock import locked\n"
        f"with locked(pathlib.Path({str(board.folder / 'a')!r})):\n"
        "    print('held', flush=True)\n    threading.Event().wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert not board.is_free("a")
        process.kill()
        process.wait()
    claim = board.claim("a")
    assert claim is not None
    claim.close()


def test_clear_keeps_claimed_jobs(board: Board) -> None:
    for name in ("done", "free", "held"):
        board.post(name, {})
    board.finish("done", {})
    claim = board.claim("held")
    board.clear()
    assert board.names() == ["held"]
    assert claim is not None
    claim.close()


def test_refused_job_is_examined_once(board: Board) -> None:
    board.post("0-other", {"number": 1})
    seen: list[dict[str, Any]] = []

    def mine(what: dict[str, Any]) -> bool:
        seen.append(what)
        return False

    refused: set[str] = set()
    for _ in range(3):
        with Workers(CPU, 1) as workers:
            assert help_others([board], Taker(square, workers, mine, refused)) == 0
    assert len(seen) == 1 and refused == {"0-other"} and board.is_free("0-other")


def test_helpers_do_jobs_of_a_busy_planner(board: Board) -> None:
    """The planner's first job waits until a helper has done three others."""
    theirs, ours = list[int](), list[int]()
    three = threading.Semaphore(0)

    def slow(what: dict[str, Any]) -> dict[str, Any]:
        if not ours:
            assert all(three.acquire(timeout=LONG) for _ in range(3))
        ours.append(what["number"])
        return square(what)

    def quick(what: dict[str, Any]) -> dict[str, Any]:
        theirs.append(what["number"])
        three.release()
        return square(what)

    with helping(board, quick):
        assert squares(Numbers(12), board, slow) == [number**2 for number in range(12)]
    assert sorted(theirs + ours) == list(range(12)) and len(theirs) >= 3
    assert board.names() == []


def test_planner_does_jobs_that_fail_on_a_helper(board: Board) -> None:
    refused = threading.Event()

    def fails(what: dict[str, Any]) -> dict[str, Any]:
        refused.set()
        raise MemoryError

    def wait_for_it(what: dict[str, Any]) -> dict[str, Any]:
        assert refused.wait(LONG)
        return square(what)

    with pytest.raises(MemoryError), helping(board, fails):
        assert squares(Numbers(4), board, wait_for_it) == [0, 1, 4, 9]
    assert refused.is_set()


def test_jobs_of_another_target_are_left_alone(board: Board) -> None:
    board.post("a", {"number": 1})
    with Workers(CPU, 1) as workers:
        taker = Taker(square, workers, lambda what: what["number"] > 1)
        assert help_others([board], taker) == 0
        board.post("b", {"number": 2})
        assert help_others([board], taker) == 1
    assert board.result("a") is None and board.result("b") == {"square": 4}


def test_results_outlive_the_planner(board: Board) -> None:
    """A planner dies after a helper has done one job of its plan. The next planner does only the rest."""
    (job,) = [Numbers(3).next((), 1)]
    assert job is not None
    board.post(job.name, job.what)
    board.finish(job.name, {"square": 100})
    done: list[int] = []

    def noted(what: dict[str, Any]) -> dict[str, Any]:
        done.append(what["number"])
        return square(what)

    assert squares(Numbers(3), board, noted) == [100, 1, 4]
    assert done == [1, 2]


def test_jobs_past_the_deadline_are_withdrawn(board: Board) -> None:
    """A job posted for helpers does not start when its turn comes after the deadline."""
    plan, done = Numbers(9), list[int]()

    def noted(what: dict[str, Any]) -> dict[str, Any]:
        done.append(what["number"])
        if what["number"] == 2:
            plan.time = lambda _: False
        return square(what)

    assert squares(plan, board, noted) == [0, 1, 4]
    assert done == [0, 1, 2] and board.names() == []


def test_planner_error_withdraws_unclaimed_jobs(board: Board) -> None:
    with pytest.raises(ValueError, match="no"):
        squares(Numbers(9), board, raising(ValueError("no")))
    assert [name for name in board.names() if not name.startswith("000")] == []


# -- conversations and states ----------------------------------------------------------------------------------------

AUX_LAYERS = (1, FINAL)
PLENTY = 10**9
SMALL = Work(batch_tokens=64, shard_bytes=20_000)


def section(tmp_path: Path, **more: object) -> DataSection:
    """Settings over 40 prompts. `some_unfit` drops every fourth, so the count is known only after writing."""
    rows = [{"turns": [f"{'so ' * (i % 5)}why {i}?", "And?"][: 1 + i % 2], "id": str(i)} for i in range(40)]
    write_jsonl(tmp_path / "prompts.jsonl", rows)
    values = {"conversations": 10, "heldout": 2, "validation": 3, "batch_size": 4, "max_new_tokens": 8}
    return DataSection.model_validate(
        {"prompts": str(tmp_path / "prompts.jsonl"), "sampled_fraction": 0.5, **values, **more}
    )


def some_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop every fourth prompt at the time of writing."""
    answered = Answers.answered

    def fewer(self: Answers, prompts: Any, *arguments: Any) -> Any:
        return answered(self, [prompt for prompt in prompts if int(prompt.id.rpartition("-")[2]) % 4], *arguments)

    monkeypatch.setattr(Answers, "answered", fewer)


def parts_of(folder: Path) -> dict[str, list[str]]:
    """Read each part without its header, which holds the time taken."""
    return {file.name: file.read_text().splitlines()[1:] for file in (folder / "parts").glob("*.jsonl")}


def written(target: Target, folder: Path, data: DataSection, shared: Path | None, shards: Path) -> Splits:
    shards.mkdir(exist_ok=True)
    capture = Capture(shards, target, AUX_LAYERS)
    return build_conversations(target, data, folder, capture=capture, shared=shared)


class Turns:
    """A gate at which the planner waits until a helper has finished a job."""

    def __init__(self) -> None:
        self._helps = threading.local()
        self._done = threading.Event()

    def helper(self, do: Callable[[dict[str, Any]], dict[str, Any]], what: dict[str, Any]) -> dict[str, Any]:
        self._helps.now = True
        result = do(what)
        self._done.set()
        return result

    def planner(self) -> None:
        assert getattr(self._helps, "now", False) or self._done.wait(LONG)

    @property
    def helped(self) -> bool:
        return self._done.is_set()


def test_helpers_write_the_same_parts(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_unfit(monkeypatch)
    data, turns, owner = section(tmp_path), Turns(), tiny_target.whole_identity
    alone = written(tiny_target, tmp_path / "alone", data, None, tmp_path / "a")
    own = PartWriter.write

    def do(what: dict[str, Any]) -> dict[str, Any]:
        assert what["kind"] == PART
        return help_writing(tiny_target, what, partial(Capture, tmp_path / "b", tiny_target), lambda: None)

    def write(self: PartWriter, what: dict[str, Any], check: Any) -> dict[str, Any]:
        if what["split"] == "train":
            turns.planner()
        return own(self, what, check)

    monkeypatch.setattr(PartWriter, "write", write)
    folder = tmp_path / "together"
    with helping(
        Board(folder / JOBS),
        partial(turns.helper, do),
        lambda what: what["target"] == owner and what["split"] == "train",
    ):
        together = written(tiny_target, folder, data, folder, tmp_path / "b")
    assert turns.helped
    assert everything(together) == everything(alone) and len(alone.train) == 10
    assert parts_of(tmp_path / "together") == parts_of(tmp_path / "alone")
    assert {file.name for file in (tmp_path / "a").iterdir()} == {file.name for file in (tmp_path / "b").iterdir()}


def test_helpers_compute_the_same_states(tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = build_conversations(tiny_target, section(tmp_path, conversations=20), tmp_path / "data").train
    alone = build_store(tmp_path / "alone", items, tiny_target, AUX_LAYERS, budget_bytes=PLENTY, work=SMALL)
    own, turns = tiny_target.hidden_states, Turns()

    def hidden_states(rows: Any, layers: Any) -> Any:
        turns.planner()
        return own(rows, layers)

    monkeypatch.setattr(tiny_target, "hidden_states", hidden_states)
    compute = partial(compute_shard, tiny_target, shards=tmp_path / "together")
    with helping(Board(tmp_path / "together" / JOBS), partial(turns.helper, compute)):
        together = build_store(tmp_path / "together", items, tiny_target, AUX_LAYERS, budget_bytes=PLENTY, work=SMALL)
    assert turns.helped
    assert sorted(file.name for file in together.files) == sorted(file.name for file in alone.files)
    for index in range(len(items)):
        for layer in AUX_LAYERS:
            assert torch.equal(alone.get(index).states[layer], together.get(index).states[layer])


def test_shards_of_a_dead_planner_are_finished_first(tiny_target: Target, tmp_path: Path, board: Board) -> None:
    """Otherwise the next planner would store some conversations twice."""
    items = build_conversations(tiny_target, section(tmp_path, conversations=20), tmp_path / "data").train
    posted: list[Job] = []

    def dies(target: Target, shards: Path, jobs: Any, *_: Any, **__: Any) -> Iterator[Any]:
        posted.extend(jobs)
        if posted:
            raise KeyboardInterrupt
        yield from ()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "_computed", dies)
        with pytest.raises(KeyboardInterrupt):
            build_store(tmp_path, items, tiny_target, AUX_LAYERS, budget_bytes=PLENTY, work=SMALL)
    assert len(posted) > 3
    for job in posted[1:3]:
        board.post(job.name, job.what)
    board.finish(posted[1].name, compute_shard(tiny_target, posted[1].what, tmp_path))
    build_store(tmp_path, items, tiny_target, AUX_LAYERS, budget_bytes=PLENTY, work=SMALL)
    held = [key for file in tmp_path.glob("shard-*") for key in keys_of(file)]
    assert len(held) == len(set(held)) == len(items)


def keys_of(shard: Path) -> list[str]:
    with safe_open(shard, framework="pt") as handle:
        return list(json.loads(handle.metadata()["keys"]))
