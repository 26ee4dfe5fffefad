"""`headstart run --processes 2`: the command starts the ranks itself, and ends them with itself."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from headstart.cli.app import app
from headstart.errors import UserError
from headstart.heads.base import parse_heads
from headstart.pipeline import in_engine, launch
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import STAGES
from headstart.recipes.recipe import load_recipe
from headstart.recipes.values import recipe_text
from headstart.servers.fleet import engine_gpus, gpu_groups
from headstart.support.files import write_json
from headstart.train import checkpoint
from headstart.train.interrupt import Interrupt
from tests.forks import Forks
from tests.test_pipeline import logged, once, quiet, tiny_recipe
from tests.test_stages import said
from tests.train.conftest import clean_environment

PLANS = Path(__file__).parents[1] / "docs" / "plans"
FAKE = Path(__file__).with_name("engines") / "fake_engine.py"
Command = list[str | Path]


@pytest.fixture
def command(tmp_path: Path, tiny_target_folder: Path) -> Command:
    """The words of a run that trains in two processes."""
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe_text(tiny_recipe(tmp_path, tiny_target_folder)))
    return ["-m", "headstart", "run", file, "--run-dir", tmp_path / "run", "--processes", "2"]


def test_a_command_that_ends_leaves_no_rank_and_resumes(command: Command, forks: Forks, tmp_path: Path) -> None:
    """The rehearsal's part `one_command` goes on to a report of an engine."""
    folder, environment = tmp_path / "run", clean_environment()
    words = [*command, "train={steps: 10000, epochs: 10000, save_every: 5, eval_every: 10000, batch_tokens: 512}"]
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
        said = fork.out.read_text()
        assert said.count("Training on 2 processes") == said.count("4/7 train") == 1
        assert ("Continuing from step" in said) == (code == -9)


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
    assert results["environment"]["engine"] == "vllm 0.0" and results["summary"]["tokens_per_round"] == 2
    assert "training conversations" in results["settings"]["heads"]
    for page in ("report/report.html", "heads/README.md"):
        assert "vllm 0.0" in (tmp_path / "run" / page).read_text()


SHARES = {
    "streamed": ([], 6, "0,1,2,3,4,5", "6,7"),
    "from a large engine": (["data.server_arguments=--tensor-parallel-size 4"], 4, "0,1,2,3", "4,5,6,7"),
    "stored": (["data.states=stored"], 8, None, None),
    "in each process": (["data.states_server=null"], 8, None, None),
    "from pairs": (["data.server_arguments=--tensor_parallel_size=2"], 6, "0,1,2,3,4,5", "6,7"),
    "from threes": (["data.server_arguments=-tp 3"], 5, "0,1,2,3,4", "5,6,7"),
    "spread": (["target.device=all", "data.states_server=null"], 1, None, None),
    "sharded": (["target.device=all", "data.states_server=null", "train.shard_target=true"], 8, None, None),
    "on one GPU": (["target.device=cuda:0", "data.states=stored"], 1, None, None),
}


@pytest.mark.parametrize("states", SHARES)
def test_gpus_are_shared_between_training_and_engine(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides, processes, own, engines = SHARES[states]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    recipe = load_recipe("eagle3-8b", ["data.server=vllm", "data.states_server=vllm", *overrides])
    assert launch.training_processes(recipe, Path("run")) == processes
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


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)


def streaming(folder: Path, *overrides: str, processes: int | None = None) -> Run:
    recipe = load_recipe("eagle3-8b", ["data.server=vllm", "data.states_server=vllm", *overrides])
    return Run(recipe, folder, Console(), processes=processes or launch.training_processes(recipe, folder))


@pytest.mark.usefixtures("eight_gpus")
def test_launched_ranks_launch_no_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = streaming(tmp_path, processes=1)
    assert launch.must_launch(run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not launch.must_launch(run)


@pytest.mark.usefixtures("eight_gpus")
def test_engines_get_the_gpus_that_the_user_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_ENGINE_GPUS", "0,1,2")
    run = streaming(tmp_path)
    around = launch._environment(run, 0, 29500)
    assert (run.processes, around["CUDA_VISIBLE_DEVICES"], around["HEADSTART_ENGINE_GPUS"]) == (5, "3,4,5,6,7", "0,1,2")


@pytest.mark.usefixtures("eight_gpus")
def test_a_plan_is_for_the_processes_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9))
    monkeypatch.chdir(tmp_path)
    words = ["plan", "eagle3-8b", f"target={PLANS / 'llama-3.1-8b'}", "data.server=null", "data.states_server=null"]
    words += ["--prompt-tokens", "200", "--json", "plan.json"]
    estimates = []
    for more in ([], ["--processes", "8"], ["--processes", "2"]):
        done = CliRunner().invoke(app, [*words, *more])
        assert done.exit_code == 0, done.output
        estimates.append(json.loads(Path("plan.json").read_text())["network"])
    default, eight, two = estimates
    assert default == eight > two > 0


REFUSED = {
    "an engine on all GPUs": (["data.server_arguments=-tp 8"], None, "needs 8 GPUs"),
    "too many ranks beside it": (["data.server_arguments=-tp 4"], 6, "leaves it 2"),
    "a numbered GPU": (["target.device=cuda:3"], None, "target.device=cuda:3 is one GPU"),
}


@pytest.mark.usefixtures("eight_gpus")
@pytest.mark.parametrize("case", REFUSED)
def test_gpus_that_do_not_suffice_are_refused(case: str, tmp_path: Path) -> None:
    overrides, processes, problem = REFUSED[case]
    with pytest.raises(UserError, match=problem):
        launch.check_gpus(streaming(tmp_path, *overrides, processes=processes))
    launch.check_gpus(streaming(tmp_path, *overrides, "data.states=stored", processes=processes))
    launch.check_gpus(streaming(tmp_path))


@pytest.mark.usefixtures("eight_gpus")
def test_an_interrupted_training_keeps_its_number_of_processes(tmp_path: Path) -> None:
    trained = tmp_path / "heads"
    (last := trained / "checkpoints" / "step-00000003").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "references.json", {"train": "../heads"})
    for count, taken in ((3, 3), (16, 6)):
        manifest = {"trainer_state": {"step": 3}, "settings": {checkpoint.PROCESSES: count}, "files": {}}
        write_json(last / checkpoint.MANIFEST, manifest)
        assert streaming(tmp_path / "run").processes == taken
    write_json(last / checkpoint.MANIFEST, {**manifest, "settings": {checkpoint.PROCESSES: 3}})
    (trained / "result.json").touch()
    assert streaming(tmp_path / "run").processes == 6, "finished"


ENDS: dict[str, tuple[tuple[str, ...], type[BaseException] | None, str | None]] = {
    "done": (("exit(0)", "exit(0)", "exit(0)"), None, None),
    "killed": (("exit(2)", "os.kill(os.getpid(), signal.SIGKILL)", "exit(2)"), UserError, "process 1 of 3 .* 137"),
    "reported": (("exit(1)", "exit(2)", "exit(2)"), SystemExit, "2"),
    "hanging": (("exit(2)", "time.sleep(60)", "exit(2)"), SystemExit, "2"),
    "interrupted": (("exit(130)", "exit(130)", "exit(130)"), KeyboardInterrupt, None),
}


@pytest.mark.parametrize("ends", ENDS)
def test_the_rank_that_failed_is_reported(ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, error, problem = ENDS[ends]
    start = launch.guard.start

    def started(_: list[str], seconds: float, env: dict[str, str]) -> Popen[bytes]:
        line = f"import os, signal, time; {lines[int(env['RANK'])]}"
        return start([sys.executable, "-c", line], seconds, env=env)

    monkeypatch.setattr(launch.guard, "start", started)
    monkeypatch.setattr(launch, "_REPORT_SECONDS", 1.0)
    with pytest.raises(error, match=problem) if error else nullcontext():
        launch.launch_training(Run(load_recipe("quickstart"), tmp_path, Console(), processes=3))


def test_error_of_ranks_is_shown_once(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank prints it (`tests.train.test_ranks`), and the command nothing more."""
    start = launch.guard.start
    failing = [sys.executable, "-c", "exit(2)"]
    monkeypatch.setattr(launch.guard, "start", lambda _, seconds, env: start(failing, seconds, env=env))
    (tmp_path / "tiny.yaml").write_text(recipe_text(tiny_recipe(tmp_path, tiny_target_folder)))
    done = CliRunner().invoke(app, ["run", "tiny.yaml", "--run-dir", "run", "--processes", "2"])
    assert done.exit_code == 2 and "4/7 train" in done.stdout and not done.stderr


def test_an_interruption_lets_every_rank_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_REPORT_SECONDS", 0.0)
    monkeypatch.setattr(launch, "_KILL_SECONDS", 0.0)
    tidy = "import signal, time; signal.signal(15, lambda *_: (time.sleep(1), exit(7)))"
    tidy += "; print(flush=True); time.sleep(60)"
    ranks = [
        launch.guard.start([sys.executable, "-c", line], 30.0, stdout=PIPE)
        for line in (tidy, "print(flush=True); exit(3)")
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline()
    ranks[1].wait()
    with Interrupt() as interrupt:
        interrupt.requested = True
        assert launch._wait(ranks, interrupt) == {1: 3, 0: 130}
    assert ranks[0].returncode == 7, "not killed"


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
