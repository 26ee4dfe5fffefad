"""Trackers: complete logs in the run's folder, resumption, and failures that leave a training untouched."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import wandb
import yaml
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils import tensorboard
from wandb.proto.wandb_internal_pb2 import Record

from headstart.errors import UserError
from headstart.train import trainer
from headstart.train.checks import check_training
from headstart.train.tracking import check_tracker, link_report, start_tracker
from tests.spies import raising
from tests.train.conftest import MakeRecipe, Train
from tests.train.results import Killed

Logged = dict[str, list[tuple[int, float]]]
"""(step, value) of every logged name."""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """wandb without an account and without a network, in a folder of its own."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # drop settings of earlier tests
    yield
    wandb.teardown()


def _records(file: Path) -> Iterator[Any]:
    """Parse wandb's file, a LevelDB log: blocks of 32 KiB, chunks with a header of 7 bytes."""
    data, block, header, index, parts = file.read_bytes(), 32768, 7, 7, b""  # the file's own header takes the first 7
    while index + header <= len(data):
        if block - index % block < header:
            index += block - index % block
            continue
        length, kind = struct.unpack_from("<HB", data, index + 4)
        parts += data[index + header : index + header + length]
        index += header + length
        if kind in (1, 4):  # full, or the last chunk
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def in_wandb(folder: Path) -> tuple[Logged, dict[str, Any]]:
    """Read values and configuration of the last offline session."""
    wandb.teardown()  # flushes the file
    *_, file = sorted(folder.glob("wandb/offline-run-*/*.wandb"))  # the folder's name begins with the time
    logged: Logged = {}
    config: dict[str, Any] = {}
    for record in _records(file):
        items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for name, value in items.items():
            if name.startswith("_"):
                continue
            if isinstance(json.loads(value), int | float):
                logged.setdefault(name, []).append((int(items["_step"]), float(value)))
            else:
                config[name] = json.loads(value)
        for item in [*record.config.update, *record.run.config.update]:
            config["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return logged, config


def in_tensorboard(folder: Path) -> tuple[Logged, dict[str, Any]]:
    events = EventAccumulator(str(folder / "tries")).Reload()
    logged = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    (file,) = folder.glob("tries/*/hparams.yml")
    config = yaml.safe_load(file.read_text())
    for tag in events.Tags()["tensors"]:
        (*_, last) = events.Tensors(tag)
        config[tag.removesuffix("/text_summary")] = last.tensor_proto.string_val[0].decode()
    return logged, config


def in_trackio(folder: Path) -> tuple[Logged, dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("tries")
    logged: Logged = {}
    config = dict(SQLiteStorage.get_run_config("tries", run) or {})
    for row in SQLiteStorage.get_logs("tries", run):
        for name, value in row.items():
            if isinstance(value, str) and name != "timestamp":
                config[name] = value
            elif name not in ("step", "timestamp"):
                logged.setdefault(name, []).append((int(row["step"]), float(value)))
    return logged, config


READERS: dict[str, Callable[[Path], tuple[Logged, dict[str, Any]]]] = {
    "wandb": in_wandb,
    "tensorboard": in_tensorboard,
    **({"trackio": in_trackio} if importlib.util.find_spec("trackio") else {}),
}
"""Readers of logged values and configuration; trackio is optional."""


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redirect trackio's global folder of runs, which it resolves on import."""
    if "trackio" in READERS:
        for name in ("trackio.utils", "trackio.sqlite_storage"):
            monkeypatch.setattr(importlib.import_module(name), "TRACKIO_DIR", tmp_path / "home")


@pytest.mark.parametrize("tracker", READERS)
def test_report_joins_the_run_of_its_training(
    run: Train, recipe: MakeRecipe, tmp_path: Path, offline: None, at_home: None, tracker: str
) -> None:
    folder, report = tmp_path / "run" / "train", tmp_path / "report"
    run(folder, steps=1, log_every=1, tracker=tracker, project="tries")
    report.mkdir()
    (report / "report.md").write_text("# What came of it")
    said: list[str] = []
    section = recipe(tracker=tracker, project="tries").train
    summary = {"tokens_per_round": 2.5, "speedup_vs_plain": {"mean": 1.5}, "drafter": "heads"}
    wandb.teardown()  # as in another process
    link_report(section, folder, "tiny", report, summary, said.append)
    assert said == []
    logged, config = READERS[tracker](folder)
    if tracker == "wandb":
        run_id = json.loads((folder / "tracker.json").read_text())["wandb"]
        assert {known for known, _ in runs_in_wandb(folder)} == {run_id}, "the same run"
    assert [value for _, value in logged["report/speedup_vs_plain.mean"]] == [1.5]
    assert config["report"] == "# What came of it"


class Refusing:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("no room for events")


def test_failing_tracker_is_reported(recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.md").write_text("x")
    monkeypatch.setattr(tensorboard, "SummaryWriter", Refusing)
    said: list[str] = []
    link_report(recipe(tracker="tensorboard").train, tmp_path, "tiny", tmp_path, {}, said.append)
    link_report(recipe(tracker="wandb").train, tmp_path, "tiny", tmp_path, {}, said.append)  # it has no run
    link_report(recipe().train, tmp_path, "tiny", tmp_path, {}, said.append)
    assert said == ["The tracker tensorboard did not take the report: no room for events"]


@pytest.mark.parametrize("tracker", READERS)
def test_logged_values_are_complete(run: Train, tmp_path: Path, offline: None, at_home: None, tracker: str) -> None:
    folder = tmp_path / "run" / "train"
    before = dict(os.environ)
    run(folder, steps=3, log_every=1, eval_every=2, tracker=tracker, project="tries")
    changed = {name for name in os.environ.keys() | before.keys() if os.environ.get(name) != before.get(name)}
    assert {name for name in changed if name.startswith("WANDB_")} <= {"WANDB_SERVICE"}, "wandb sets that one itself"
    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["run"], "nothing beside the run"
    logged, config = READERS[tracker](folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for name, of_row in (("valid/tau", lambda row: row["tau"]), ("valid/top1_step1", lambda row: row["top1"][1])):
        assert [step for step, _ in logged[name]] == [0, 2, 3]
        assert [value for _, value in logged[name]] == pytest.approx([of_row(row) for row in rows], abs=1e-4)
    assert [step for step, _ in logged["loss"]] == [1, 2, 3]
    losses = [value for _, value in logged["loss"]]
    assert [sum(losses[:2]) / 2, losses[2]] == pytest.approx([row["loss"] for row in rows[1:]])
    assert all(0 < value <= 3e-3 for _, value in logged["lr"])
    assert [step for step, _ in logged["grad_norm"]] == [1, 2, 3] and all(value > 0 for _, value in logged["grad_norm"])
    assert [value for _, value in logged["valid/coverage"]] == pytest.approx(
        [row["coverage"] for row in rows], abs=1e-4
    )
    place = dict(logged["data/step_in_epoch"])
    assert [place[step] for step in range(4)] == [0, 1, 2, 3]
    assert {value for _, value in logged["data/epoch"]} == {0}
    assert all(0.05 < value < 100 for _, value in logged["memory/rss_gigabytes"])
    assert ("memory/cuda_peak_gigabytes" in logged) is torch.cuda.is_available()
    assert (config["heads.family"], config["train.lr"], config["train.max_grad_norm"]) == ("medusa", 3e-3, 1.0)


def test_wandb_dir_is_respected(run: Train, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "mine"))
    run(tmp_path / "run", steps=1, log_every=1, tracker="wandb")
    assert "loss" in in_wandb(tmp_path / "mine")[0]
    assert not (tmp_path / "run" / "wandb").exists()


def runs_in_wandb(folder: Path) -> list[tuple[str, str]]:
    """Return (id, name) of the run of every offline session."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    runs = [next(record.run for record in _records(file) if record.run.run_id) for file in files]
    return [(run.run_id, run.display_name) for run in runs]


def test_resuming_keeps_the_wandb(run: Train, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, steps=2, log_every=1, tracker="wandb")
    run(tmp_path, steps=3, log_every=1, tracker="wandb")
    first, second = runs_in_wandb(tmp_path)
    assert first == second and first[1] == "tiny", "the recipe's name"
    assert json.loads((tmp_path / "tracker.json").read_text()) == {"wandb": first[0]}
    assert [step for step, _ in in_wandb(tmp_path)[0]["loss"]] == [3]
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    monkeypatch.setenv("WANDB_NAME", "my name")
    wandb.teardown()  # as in another process: variables are read once
    run(tmp_path, steps=4, log_every=1, tracker="wandb")
    assert runs_in_wandb(tmp_path)[-1] == ("mine", "my name"), "the user's variables win"


def test_disabled_wandb_is_silent(run: Train, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert run(tmp_path / "run", steps=1, log_every=1, tracker="wandb").steps == 1
    assert not list(tmp_path.rglob("*.wandb"))


def test_tensorboard_drops_lost_steps(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"log_every": 1, "save_every": 2, "tracker": "tensorboard", "project": "tries"}
    with monkeypatch.context() as patch:
        patch.setattr(trainer._Trainer, "_finish", raising(Killed))
        with pytest.raises(Killed):
            run(tmp_path, steps=3, **settings)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
    run(tmp_path, steps=4, **settings)
    losses = EventAccumulator(str(tmp_path / "tries")).Reload().Scalars("loss")
    assert [loss.step for loss in losses] == [1, 2, 3, 4], "step 3 once"


class Started:
    """A fake accelerator that records the arguments of `init_trackers`."""

    is_main_process = True

    def __init__(self, folder: Path) -> None:
        self.project_dir, self.trackers = str(folder), list[Any]()

    def init_trackers(self, project: str, config: Any, init_kwargs: dict[str, Any]) -> None:
        self.project, self.options = project, init_kwargs


def test_trackio_runs_have_unique_names(recipe: MakeRecipe, tmp_path: Path) -> None:
    names = []
    for step, again in ((None, {}), (4, {"resume": "allow"}), (None, {})):
        accelerator = Started(tmp_path)
        start_tracker(cast(Accelerator, accelerator), recipe(tracker="trackio").train, {}, "tiny", step)
        name = accelerator.options["trackio"].pop("name")
        assert accelerator.options == {"trackio": again} and name.startswith("tiny-")
        names.append(name)
    assert names[0] == names[1] != names[2], "another one when a training begins anew"


def test_no_tracker_imports_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: pytest.fail(f"imports {name}"))
    check_tracker("none")


@pytest.mark.parametrize("tracker", ["wandb", "trackio", "tensorboard"])
def test_missing_tracker_is_refused(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, tracker: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"tracker {tracker} is not installed") as refused:
        check_training(recipe(tracker=tracker))
    assert refused.value.remedy == f"Run: pip install {tracker}"


def test_either_tensorboard_package_works(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "tensorboardX" else None)
    monkeypatch.setattr(importlib, "import_module", imported.append)
    check_tracker("tensorboard")
    assert imported == ["tensorboardX"]


def test_tracker_that_does_not_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", raising(ImportError("no libprotobuf")))
    with pytest.raises(UserError, match="tensorboard cannot be imported: no libprotobuf") as refused:
        check_tracker("tensorboard")
    assert "wandb" not in refused.value.remedy


def test_wandb_without_login(recipe: MakeRecipe, offline: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_training(recipe(tracker="wandb"))
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(UserError, match="no account to log in with") as refused:
        check_training(recipe(tracker="wandb"))
    assert "wandb login" in refused.value.remedy and "WANDB_MODE=offline" in refused.value.remedy


def test_tracker_that_fails_later_is_dropped_with_one_warning(
    run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(TensorBoardTracker, "log", raising(OSError("no room for events")))
        assert run(tmp_path / "log", steps=3, log_every=1, tracker="tensorboard").steps == 3
    text = (tmp_path / "log" / "log.txt").read_text()
    assert text.count("The tracker tensorboard failed and gets no more values: no room for events") == 1
    monkeypatch.setattr(TensorBoardTracker, "finish", raising(OSError("no room for events")))
    monkeypatch.setattr(trainer._Trainer, "_finish", raising(Killed))
    with pytest.raises(Killed):
        run(tmp_path / "finish", steps=1, tracker="tensorboard")
    assert "The tracker tensorboard failed" in (tmp_path / "finish" / "log.txt").read_text()


def test_failing_start_reaches_all_ranks(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[str] = []

    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            shared.append(error.problem)
            raise

    monkeypatch.setattr(trainer, "raise_on_all_ranks", noted)
    monkeypatch.setattr(tensorboard, "SummaryWriter", Refusing)
    with pytest.raises(UserError):
        run(tmp_path, steps=1, tracker="tensorboard")
    assert shared == ["The tracker tensorboard did not start: no room for events"]


def test_failing_start_keeps_the_training(run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def files() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))}

    run(tmp_path, steps=10, eval_every=3)
    earlier = files()
    monkeypatch.setattr(tensorboard, "SummaryWriter", Refusing)
    with pytest.raises(UserError, match="tensorboard did not start: no room for events") as refused:
        run(tmp_path, steps=20, eval_every=3, tracker="tensorboard")
    assert "wandb" not in refused.value.remedy and "train.tracker=none" in refused.value.remedy
    assert files() == earlier
