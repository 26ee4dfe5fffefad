"""`headstart run --processes 2`: the command starts the ranks itself, and ends them with itself."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from headstart.heads.base import parse_heads
from headstart.pipeline import in_engine, launch
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import STAGES
from headstart.recipes.recipe import load_recipe
from headstart.recipes.values import recipe_text
from headstart.servers.fleet import engine_gpus, gpu_groups
from tests.forks import Forks
from tests.test_pipeline import logged, once, quiet, tiny_recipe
from tests.test_stages import said
from tests.train.conftest import clean_environment

FAKE = Path(__file__).with_name("engines") / "fake_engine.py"
Command = list[str | Path]


@pytest.fixture
def command(tmp_path: Path, tiny_target_folder: Path) -> Command:
    """The words of a run that trains in two processes."""
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe_text(tiny_recipe(tmp_path, tiny_target_folder)))
    return ["-m", "headstart", "run", file, "--run-dir", tmp_path / "run", "--processes", "2"]


def test_one_command_from_nothing_to_the_report_of_an_engine(command: Command, forks: Forks, tmp_path: Path) -> None:
    """It is ended twice while heads train: no process is left, and it resumes."""
    folder, environment = tmp_path / "run", clean_environment()
    engine = f"data.server_command={shlex.join([sys.executable, str(FAKE), 'vllm', 'none'])}"
    heads = "heads={family: eagle3, draft_steps: 2, aux_layers: [1,2,3]}"
    long = "train={steps: 200, epochs: 1000, save_every: 10, eval_every: 100, batch_tokens: 512}"
    words = [*command, "data.server=vllm", "eval.engine=vllm", engine, heads, long]
    for ending, code in ((signal.SIGTERM, 130), (signal.SIGKILL, -9)):
        fork, before = forks.start(*words, env=environment), _last_checkpoint(folder)
        while _last_checkpoint(folder) == before:
            assert fork.poll() is None, fork.err.read_text()
            time.sleep(0.02)
        fork.send_signal(ending)
        assert fork.wait() == code
        _assert_ranks_end(folder)
        assert not (folder / "train" / "result.json").exists()
        assert ("Stopped. Continue with" in fork.err.read_text()) == (code == 130)
    done = forks.run(*words, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Training on 2 processes") == done.stdout.count("4/7 train") == 1
    assert "Continuing from step" in done.stdout and "over plain decoding in vllm, measured" in done.stdout
    assert json.loads((folder / "train" / "result.json").read_text())["steps"] == 200
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["environment"]["engine"] == "vllm 0.0" and results["summary"]["tokens_per_round"] == 2
    assert "training conversations" in results["settings"]["heads"]
    for page in ("report/report.html", "heads/README.md"):
        assert "vllm 0.0" in (folder / page).read_text()
    _assert_ranks_end(folder)


def test_report_of_an_engine_resumes(tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = parse_heads({"family": "eagle3", "draft_steps": 2, "aux_layers": [1, 2, 3]})
    measured = {"engine": "vllm", "engine_command": shlex.join([sys.executable, str(FAKE), "vllm", "none"])}
    recipe = tiny_recipe(tmp_path, tiny_target_folder, eval=measured).model_copy(update={"heads": heads})
    section = recipe.target.model_copy(update={"dtype": "float32", "revision": "main", "trust_remote_code": True})
    recipe = recipe.model_copy(update={"target": section})
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("headstart.pipeline.in_engine.measure_methods", once(in_engine.measure_methods, 0))
        patch.setattr(tempfile, "tempdir", str(tmp_path))
        execute(quiet(tmp_path / "run", recipe), STAGES)
    assert not list(tmp_path.glob("headstart-engine-*")) and not (tmp_path / "run" / "report").exists()
    run = logged(tmp_path / "run", recipe)
    monkeypatch.setattr("headstart.model.loading.load_target", lambda *_, **__: pytest.fail("the model was loaded"))
    execute(run, STAGES)
    assert "7/7 eval  measuring against the baselines (continuing)" in said(run) and "in vllm, measured" in said(run)
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    results = json.loads((tmp_path / "run" / "report" / "results.json").read_text())
    assert "--revision main --dtype float32 --trust-remote-code" in results["environment"]["command"]


def test_error_of_ranks_is_shown_once(command: Command, forks: Forks, tmp_path: Path) -> None:
    done = forks.run(*command, env={**clean_environment(), "ACCELERATE_USE_FSDP": "true"})
    assert done.returncode == 2
    assert done.stderr.count("Heads train whole on every process (DDP)") == 1 == done.stderr.count("Error:")
    assert "Traceback" not in done.stderr
    _assert_ranks_end(tmp_path / "run")


SHARES = {
    "streamed": ([], 6, "0,1,2,3,4,5", "6,7"),
    "from a large engine": (["data.server_arguments=--tensor-parallel-size 4"], 4, "0,1,2,3", "4,5,6,7"),
    "stored": (["data.states=stored"], 8, None, None),
    "in each process": (["data.states_server=null"], 8, None, None),
    "on one GPU": (["target.device=cuda:0", "data.states=stored"], 1, None, None),
}


@pytest.mark.parametrize("states", SHARES)
def test_gpus_are_shared_between_training_and_engine(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, processes, own, engines = SHARES[states]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    recipe = load_recipe("eagle3-8b", ["data.server=vllm", "data.states_server=vllm", *overrides])
    assert launch.training_processes(recipe) == processes
    run = Run(recipe, Path("run"), Console(), processes=processes)
    assert launch.must_launch(run) == (processes > 1)
    around = launch._environment(run, 3, 29500)
    assert (around["RANK"], around["WORLD_SIZE"], around["MASTER_PORT"]) == ("3", str(processes), "29500")
    assert around["CUDA_VISIBLE_DEVICES"] == own or (own is None and "HEADSTART_ENGINE_GPUS" not in around)
    monkeypatch.setattr(os, "environ", around)
    assert not launch.must_launch(run), "a rank starts no ranks"
    if engines is not None:
        assert ",".join(engine_gpus()) == engines
        assert ",".join(gpu_groups(recipe.data.server_arguments)) == engines


def _last_checkpoint(folder: Path) -> str:
    return max((path.name for path in folder.glob("train/checkpoints/*")), default="")


def _assert_ranks_end(folder: Path) -> None:
    """Wait until no process carries the mark of a rank of this run."""
    until = time.monotonic() + 60
    while _ranks(folder):
        assert time.monotonic() < until, _ranks(folder)
        time.sleep(0.1)


def _ranks(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HEADSTART_PART_OF") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found
