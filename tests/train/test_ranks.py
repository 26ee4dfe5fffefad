"""Training on two gloo processes: matches one process, ends together, and prints each message once."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.data.conversations.records import read_conversations
from headstart.data.states.store import StateStore
from headstart.heads.base import HeadBatch, make_config
from headstart.heads.io import load_heads
from headstart.model.loading import load_target
from headstart.pipeline.run import execute
from headstart.pipeline.stages import stages_until
from headstart.recipes.recipe import load_recipe
from headstart.support.artifacts import references
from headstart.support.lock import locked
from headstart.train import batches, trainer
from headstart.train.batches import count_predictions, epoch_batches, epoch_steps, read_batch
from headstart.train.training_artifact import training_artifact
from tests.forks import Forks
from tests.states_server import StatesServer, engine_command, serving
from tests.test_pipeline import quiet
from tests.train import ranks
from tests.train.conftest import Workplace, clean_environment
from tests.train.results import assert_same, weights
from tests.train.test_golden import HEADS
from tests.train.test_main import here

COUNT = 2


@dataclass
class Ended:
    """Exit code and output of a process."""

    code: int
    text: str


Ranks = Callable[..., list[Ended]]


@pytest.fixture(scope="module")
def together(forks: Forks) -> Ranks:
    """Run a function of `tests.train.ranks` on two processes."""

    def run(do: Callable[..., None], *arguments: str | Path) -> list[Ended]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        everyone = {**clean_environment(), **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(COUNT))}
        everyone |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code = f"import sys; from tests.train import ranks; ranks.{do.__name__}(*sys.argv[1:])"
        begun = [
            forks.start("-c", code, *arguments, env={**everyone, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))})
            for rank in range(COUNT)
        ]
        return [Ended(fork.wait(), fork.out.read_text() + fork.err.read_text()) for fork in begun]

    return run


@pytest.fixture
def running() -> Iterator[ExitStack]:
    """Contexts that end with the test."""
    with ExitStack() as stack:
        yield stack


def assert_codes(ended: list[Ended], *codes: int) -> None:
    assert [one.code for one in ended] == list(codes), [one.text for one in ended]


def assert_one_voice(ended: list[Ended], *parts: str) -> None:
    """Assert that the processes together print each part once, without a traceback."""
    said = "".join(one.text for one in ended)
    for part in parts:
        assert said.count(part) == 1, said
    assert "Traceback" not in said, said


def read(store: Any, batch: list[int]) -> HeadBatch:
    return read_batch(store, batch, []).on(torch.device("cpu"), torch.float32)


def last_row(folder: Path) -> Any:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def assert_moved_alike(
    start: dict[str, torch.Tensor], one: dict[str, torch.Tensor], other: Any, within: float = 1e-5
) -> None:
    """Assert equal movement from the start, up to the order of sums: a small fraction of the distance."""
    moved = sum(float((one[name] - tensor).double().square().sum()) for name, tensor in start.items()) ** 0.5
    apart = sum(float((one[name] - other[name]).double().square().sum()) for name in start) ** 0.5
    assert moved > 0 and apart <= within * moved, (apart, moved)


def train_alone(
    target_folder: Path,
    states: Path,
    folder: Path,
    accumulation: int,
    how: str = "stored",
    do: Callable[..., None] = ranks.train_families,
    **settings: Any,
) -> None:
    """Run the same training in this process."""
    replaced: list[tuple[Any, str]] = [(trainer, "epoch_batches"), (batches, "epoch_batches")]
    replaced += [(trainer, "make_optimizers"), (trainer._Trainer, "train")]
    with pytest.MonkeyPatch.context() as patch:
        for where, name in replaced:  # `do` replaces them for good; the patch restores them
            patch.setattr(where, name, getattr(where, name))
        do(str(target_folder), str(states), str(folder), accumulation, how, **settings)


@dataclass
class Trained:
    """Folders of the same trainings of every family, by two processes and by one."""

    both: Path
    alone: Path


MakeTrained = Callable[[str], Trained]


@pytest.fixture(scope="module")
def trained(
    together: Ranks, states: Path, tiny_target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trained]:
    """Train from the store or online, once per module."""
    made: dict[str, Trained] = {}

    def make(how: str) -> Trained:
        if how not in made:
            folder = tmp_path_factory.mktemp(how)
            words = [tiny_target_folder, states, folder / "both", "1", how]
            assert_codes(together(ranks.train_families, *words), 0, 0)
            train_alone(tiny_target_folder, states, folder / "alone", COUNT, how)
            made[how] = Trained(folder / "both", folder / "alone")
        return made[how]

    return make


@pytest.mark.parametrize("how", ["stored", "online"])
def test_two_processes_match_one(trained: MakeTrained, states: Path, how: str) -> None:
    """From the store, and online with a forward in each process."""
    store = StateStore(states / "train")
    steps = epoch_steps(epoch_batches(store.lengths, 64, seed=0, epoch=0), COUNT, 1)[:3]
    silent = ranks.silent(store)
    learnt = [[count_predictions(read(silent, batch)) > 0 for batch in step] for step in steps]
    assert [False, True] in learnt or [True, False] in learnt, "in some step one rank has no predictions"
    made = trained(how)
    for name in ranks.families_of(how):
        first, second = (weights(made.both / name / f"of-{rank}") for rank in range(COUNT))
        alone, start = (weights(made.alone / name / what) for what in ("of-0", "start-0"))
        for key in alone:
            assert torch.equal(first[key], second[key]), f"{key} of {name} differs between the processes"
        assert_moved_alike(start, alone, first)
        rows = [last_row(folder / name) for folder in (made.both, made.alone)]
        assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)
        assert rows[0]["predictions"] == rows[1]["predictions"], "validation counts over both ranks"


@pytest.mark.parametrize("how", ["stored", "online"])
def test_one_process_continues_where_two_were_killed(
    trained: MakeTrained, states: Path, tiny_target_folder: Path, tmp_path: Path, how: str
) -> None:
    made = trained(how)
    for name in ranks.families_of(how):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        shutil.copyfile(made.both / name / "metrics.jsonl", tmp_path / name / "metrics.jsonl")
        kept = Path("checkpoints", "step-00000002")
        shutil.copytree(made.both / name / kept, tmp_path / name / kept)
    train_alone(tiny_target_folder, states, tmp_path, COUNT, how)
    for name in ranks.families_of(how):
        log = (tmp_path / name / "log.txt").read_text()
        assert "Training on 1 process " in log and "Continuing from step 2 " in log
        alone, start = (weights(made.alone / name / what) for what in ("of-0", "start-0"))
        assert_moved_alike(start, alone, weights(tmp_path / name / "of-0"))
        rows = [last_row(folder / name) for folder in (tmp_path, made.alone)]
        assert rows[0]["tokens"] == rows[1]["tokens"] and rows[0]["step"] == rows[1]["step"] == 3


@pytest.mark.parametrize("how", ["stored", "online"])
def test_packed_on_two_processes_matches_unpacked_on_one(
    together: Ranks, states: Path, tiny_target_folder: Path, tmp_path: Path, how: str
) -> None:
    ended = together(ranks.train_families_packed, tiny_target_folder, states, tmp_path / "both", "1", how)
    assert_codes(ended, 0, 0)
    alone = tmp_path / "alone"
    do = ranks.train_families_packed
    train_alone(tiny_target_folder, states, alone, COUNT, how, do, packing=False)
    for name in ranks.KINDS:
        one, both = (weights(folder / name / "last") for folder in (alone, tmp_path / "both"))
        assert_moved_alike(weights(alone / name / "start-0"), one, both)
        rows = [last_row(folder / name) for folder in (alone, tmp_path / "both")]
        assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], rel=1e-5)


def test_online_on_two_processes_matches_the_store(
    together: Ranks, workplace: Workplace, tiny_target_folder: Path, tmp_path: Path, running: ExitStack
) -> None:
    """With a sharded target, and with states streamed from an engine that dies twice.

    `test_two_processes_match_one` trains online with a whole target on each process. The states differ by the order of
    sums, and so do initial weights solved for from them in directions that barely depend on the states: compare the
    movement from the start. A sharded target adds a part of each sum on each process.
    """
    file, run = workplace(heads=HEADS["eagle3"], steps=3, batch_tokens=64, lr=0.1, min_lr_ratio=1, eval_every=2)
    online = "data.states=online"
    settings = {"stored": ["data.states=stored"], "parts": [online, "train.shard_target=true"]}
    server = StatesServer(load_target(str(tiny_target_folder), "float32", "cpu"), tmp_path / "files")
    running.enter_context(serving(server))
    command = engine_command(tmp_path / "engine", server, deaths=2, answers=20)
    settings["streamed"] = [online, "data.states_server=vllm", f"data.server_command={command}"]
    # Separate folders of runs, else the last two would share one training.
    folders = {how: run.parent.with_name(how) / "run" for how in settings}
    for how, folder in folders.items():
        execute(quiet(folder, load_recipe(str(file), settings[how])), stages_until("states"))
        ended = together(ranks.train_plainly, file, "--run-dir", folder, *settings[how])
        assert_codes(ended, 0, 0)
        assert "Training on 2 processes" in ended[0].text
        assert ("Each process holds a part of the weights" in ended[0].text) == (how == "parts")
        assert ("is not loaded: training only reads" in ended[0].text) == (how in ("stored", "streamed"))
    lives = [int(line) for line in (tmp_path / "engine" / "lives").read_text().split()]
    assert len(lives) == 3 and not [pid for pid in lives if Path(f"/proc/{pid}").exists()]
    lengths = [len(text.tokens) for text in read_conversations(run / "data/conversations/validation.jsonl")]
    assert len(epoch_batches(lengths, 64, seed=0, epoch=0)) % COUNT == 1, "one process validates less than the other"
    assert StateStore(folders["stored"] / "data" / "states" / "train").bytes > 0
    for how in ("parts", "streamed"):
        assert not list((folders[how] / "data" / "states").iterdir()) and "states" not in references(folders[how])

    start = {how: weights(folder / "train" / "start-0") for how, folder in folders.items()}
    last = {how: weights(folder / "train" / "last") for how, folder in folders.items()}
    ways = {how: {name: last[how][name] - start[how][name] for name in last[how]} for how in folders}
    nowhere = {name: torch.zeros_like(tensor) for name, tensor in ways["stored"].items()}
    for how in ("parts", "streamed"):
        assert load_heads(folders[how] / "train" / "last").config == load_heads(folders["stored"] / "train/last").config
        assert_moved_alike(nowhere, ways["stored"], ways[how], within=1e-3)
    rows = {how: last_row(folder / "train") for how, folder in folders.items()}
    for how in ("parts", "streamed"):
        assert rows[how]["loss"] == pytest.approx(rows["stored"]["loss"], rel=1e-5)
        assert rows[how]["predictions"] == rows["stored"]["predictions"]


def test_not_finite_loss_on_one_stops_both(together: Ranks, workplace: Workplace) -> None:
    file, run = workplace(steps=40, eval_every=100, save_every=100)
    ended = together(ranks.train_poisoned, file, "--run-dir", run)
    assert_codes(ended, 2, 2)
    assert_one_voice(ended, "not finite at step")


def test_killed_process_ends_both(together: Ranks, workplace: Workplace, tmp_path: Path) -> None:
    file, run = workplace(steps=8, save_every=3, eval_every=4, lr=1e-3)
    ended = together(ranks.train_until_one_is_killed, file, "--run-dir", run)
    assert_codes(ended, 1, -9)
    assert_one_voice(ended, "Another process of this training has ended", "goes on from the last checkpoint")
    resumed = together(ranks.train_with_an_old_view, file, "--run-dir", run)
    assert_codes(resumed, 0, 0)
    assert "Continuing from step 3" in resumed[0].text and "Training on 2 processes" in resumed[0].text
    assert not resumed[1].text, "only the main process speaks"
    assert json.loads((run / "stages" / "train.json").read_text())["is_complete"]
    _, complete = workplace(tmp_path / "whole", steps=8)
    assert_codes(together(ranks.train, file, "--run-dir", complete), 0, 0)
    assert_same(run / "train" / "last", complete / "train" / "last")


@pytest.mark.parametrize("what", ["whole heads", "low-rank updates"])
def test_two_processes_continue_where_one_was_stopped(
    together: Ranks, trained: MakeTrained, states: Path, tiny_target_folder: Path, tmp_path: Path, what: str
) -> None:
    start_from = str(trained("stored").alone / "medusa" / "last") if what == "low-rank updates" else ""

    def on_one(folder: Path, *stop: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "make_optimizers", trainer.make_optimizers)
            patch.setattr(trainer._Trainer, "_step", trainer._Trainer._step)
            ranks.train_some_steps(str(tiny_target_folder), str(states), str(folder), COUNT, start_from, *stop)

    on_one(tmp_path / "whole")
    on_one(tmp_path / "cut", 4)
    middle = load_file(tmp_path / "cut" / "checkpoints" / "step-00000004" / "model.safetensors")
    start = {name.split("heads.", 1)[1]: tensor for name, tensor in middle.items() if "heads." in name}
    ended = together(ranks.train_some_steps, tiny_target_folder, states, tmp_path / "cut", "1", start_from)
    assert_codes(ended, 0, 0)
    assert "Continuing from step 4 " in (tmp_path / "cut" / "log.txt").read_text()
    one, other = (weights(tmp_path / name / "last") for name in ("whole", "cut"))
    assert one.keys() == start.keys()
    assert_moved_alike(start, one, other)
    assert last_row(tmp_path / "whole")["tokens"] == last_row(tmp_path / "cut")["tokens"]


def test_main_process_clock_ends_both(together: Ranks, workplace: Workplace) -> None:
    """Also when time runs out during the last step, while its checkpoint is written."""
    file, run = workplace(steps=None, minutes=1, save_every=1, eval_every=100)
    assert_codes(together(ranks.train_by_two_clocks, file, "--run-dir", run), 0, 0)
    assert last_row(run / "train")["step"] == 4
    (run / "stages" / "train.json").unlink()  # as if the run had been killed just then
    assert_codes(together(ranks.train_with_an_old_view, file, "--run-dir", run), 0, 0)
    assert last_row(run / "train")["step"] == 4, "finished, also with a stale view"


def test_ctrl_c_keeps_the_step(together: Ranks, forks: Forks, workplace: Workplace) -> None:
    file, run = workplace(steps=8, save_every=100, eval_every=100)
    ended = together(ranks.train_until_ctrl_c, file, "--run-dir", run)
    assert_codes(ended, 130, 130)
    assert_one_voice(ended, "Stopped after step 4")
    assert [path.name for path in (run / "train" / "checkpoints").iterdir()] == ["step-00000004"]
    words = [file, "--run-dir", run, "train.gradient_accumulation_steps=2", "--processes", "1"]
    alone = forks.run("-m", "headstart.train", *words, env=clean_environment())
    assert alone.returncode == 0, alone.stderr
    assert "Continuing from a training on another number of processes of these heads" in alone.stdout
    assert "Continuing from step 4" in alone.stdout and last_row(run / "train")["step"] == 8


def test_refusal_of_one_process_is_printed_once(together: Ranks, workplace: Workplace) -> None:
    file, run = workplace(steps=8)
    ended = together(ranks.train_with_one_refusing, file, "--run-dir", run)
    assert_codes(ended, 2, 2)
    assert "The disk of this machine is full" in ended[1].text
    assert "Error" not in ended[0].text and "Traceback" not in ended[0].text + ended[1].text


def test_refusals_are_printed_once(together: Ranks, workplace: Workplace) -> None:
    file, run = workplace(steps=2)
    recipe = load_recipe(str(file))
    target = load_target(recipe.target.spec, recipe.target.dtype, recipe.target.device)
    stores = [StateStore(run / "data" / "states" / split) for split in ("train", "validation")]
    begun = training_artifact(run, recipe, make_config(recipe.heads, target), *stores).folder
    here(file, begun)
    (begun / "result.json").unlink()  # as if it had been interrupted
    for overrides, parts in (
        ([], ["was trained with number of processes = 1, and now it is 2.", "begin anew in another folder of runs"]),
        (["train.loss=foo"], ["Recipe key 'train.loss' is 'foo'"]),
        (
            ["data.conversations=30"],
            ["(conversations: data.conversations changed from 24 to 30)", "headstart data build"],
        ),
    ):
        ended = together(ranks.train, file, "--run-dir", run, *overrides)
        assert_codes(ended, 2, 2)
        assert_one_voice(ended, *parts)
    with locked(run):
        ended = together(ranks.train, file, "--run-dir", run)
    assert_codes(ended, 2, 2)
    assert_one_voice(ended, f"Another run (process {os.getpid()}) is working in {run}", "choose another --run-dir")
