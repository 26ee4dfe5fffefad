"""A whole run on a tiny target that is interrupted in every stage."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from headstart.errors import UserError
from headstart.pipeline.plan import make_plan, show_plan
from headstart.pipeline.run import Run, execute, recipe_text
from headstart.pipeline.stages import STAGES, check_inputs, stages_until
from headstart.train import loop
from headstart.train.config import Recipe, parse_recipe
from tests.test_stages import said

WORDS = "tell me about the sun and moon how to cook rice what is a user system who are you"


def tiny_recipe(folder: Path, target: Path, **changes: Any) -> Recipe:
    """A run of a few seconds."""
    words = WORDS.split()
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"turns": [" ".join(words[(i * k + k) % len(words)] for k in range(1, 7)) + f" {i}"]}) + "\n"
            for i in range(40)
        )
    )
    settings: dict[str, Any] = {
        "name": "tiny",
        "target": {"spec": str(target), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": str(prompts),
            "conversations": 12,
            "heldout": 4,
            "calibration": 4,
            "max_new_tokens": 16,
            "batch_size": 4,
        },
        "heads": {"family": "medusa", "num_heads": 2},
        "train": {"steps": 4, "batch_tokens": 512, "eval_every": 2, "save_every": 2},
        "tune": {"widths": [1, 2, 4], "context": 32, "max_nodes": 4, "max_rank": 2},
        "eval": {"limit": 2, "max_new_tokens": 8},
    }
    for key, value in changes.items():
        settings[key] = {**settings[key], **value}
    return parse_recipe(settings)


def quiet(folder: Path, recipe: Recipe) -> Run:
    return Run(recipe, folder, Console(quiet=True))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> tuple[Recipe, Path]:
    """A run that nothing disturbed."""
    place = tmp_path_factory.mktemp("whole")
    recipe = tiny_recipe(place, tiny_target_folder)
    execute(quiet(place / "run", recipe), STAGES)
    return recipe, place / "run"


def test_a_run_leaves_what_others_script_against(whole: tuple[Recipe, Path]) -> None:
    import headstart

    recipe, folder = whole
    assert {file.name for file in (folder / "report").iterdir()} == {"report.html", "report.md", "results.json"}
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["summary"]["predicted_speedup"] is not None
    assert results["summary"]["divergences"]["count"] == 0
    assert len((folder / "data" / "heldout.jsonl").read_text().splitlines()) == recipe.data.heldout
    answer = headstart.load(folder / "heads").generate("who are you", max_new_tokens=4)
    assert len(answer.tokens) <= 4
    assert "### held-out prompts" in (folder / "heads" / "README.md").read_text()


def test_a_second_run_loads_no_model(whole: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = whole
    monkeypatch.setattr("headstart.target.load_target", lambda *_: pytest.fail("the model was loaded"))
    assert not execute(quiet(folder, recipe), STAGES)


def once(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """`function`, that is interrupted in place of its call number `calls` (from 0)."""
    done = iter(range(1000))

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if next(done) == calls:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    return interrupted


PLACES = (
    ("target", "headstart.pipeline.stages.target_identity", 1),
    ("conversations", "headstart.data.generate.write_conversations", 2),
    ("states", "headstart.data.store._write_shard", 1),
    ("train", "headstart.train.checkpoint.save", 1),
    ("tune", "headstart.decode.tune.measure_verify", 0),
    ("export", "headstart.hub.format.write_card", 0),
    ("eval", "headstart.eval.report.write_text", 1),
)
"""(stage, function that is interrupted in it, at which of its calls)."""


def test_a_run_interrupted_in_every_stage_comes_to_the_same_heads(
    tmp_path: Path, whole: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, undisturbed = whole
    folder = tmp_path / "run"
    names = [stage.name for stage in STAGES]
    assert [place[0] for place in PLACES] == names
    for number, (_, function, calls) in enumerate(PLACES):
        with monkeypatch.context() as patched:
            module, _, name = function.rpartition(".")
            patched.setattr(function, once(getattr(sys.modules[module], name), calls))
            with pytest.raises(KeyboardInterrupt):
                execute(quiet(folder, recipe), STAGES)
        run = quiet(folder, recipe)
        records = [run.record(name) for name in names]
        assert [record is not None and record.whole for record in records] == [i < number for i in range(len(names))]
    execute(quiet(folder, recipe), STAGES)
    for split in ("train", "calibration", "heldout"):
        file = f"data/conversations/{split}.jsonl"
        assert (folder / file).read_text() == (undisturbed / file).read_text()
    theirs, ours = (load_file(place / "heads" / "heads.safetensors") for place in (undisturbed, folder))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_run_killed_while_training_goes_on(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_target_folder, train={"steps": 100_000, "epochs": 100_000})
    folder = tmp_path / "run"
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    command = [sys.executable, "-m", "headstart", "train", str(tmp_path / "recipe.yaml"), "--run-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while len(list((folder / "train" / "checkpoints").glob("step-*"))) < 2 and time.monotonic() < deadline:
            assert process.poll() is None, "the run ended by itself"
            time.sleep(0.05)
        with pytest.raises(UserError, match=f"process {process.pid}"):
            execute(quiet(folder, recipe), STAGES)
    finally:
        process.kill()
        process.wait()
    before = newest_step(folder)
    assert before > 0
    step = loop._Run._step

    def interrupted(self: Any, *arguments: Any) -> float:
        signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    monkeypatch.setattr(loop._Run, "_step", interrupted)
    run = Run(recipe, folder, Console(file=io.StringIO(), width=200))
    with pytest.raises(KeyboardInterrupt):
        execute(run, stages_until("train"))
    assert f"Going on from step {before} " in said(run)
    assert newest_step(folder) == before + 1, "Ctrl-C ends the step and keeps it"
    record = run.record("train")
    assert record is not None
    assert not record.whole


def newest_step(folder: Path) -> int:
    """Of the checkpoints that are whole."""
    return max(int(place.name[5:]) for place in (folder / "train" / "checkpoints").glob("step-????????"))


@pytest.fixture
def copied(tmp_path: Path, whole: tuple[Recipe, Path]) -> tuple[Recipe, Path]:
    """A copy of the finished run, to be changed."""
    recipe, folder = whole
    shutil.copytree(folder, tmp_path / "run")
    return recipe, tmp_path / "run"


def test_heads_trained_by_another_command_are_taken_as_they_are(
    copied: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = copied
    (folder / "stages" / "train.json").unlink()
    monkeypatch.setattr("headstart.train.loop.train", lambda *_: pytest.fail("trained again"))
    execute(quiet(folder, recipe), stages_until("train"))


def test_heads_trained_by_another_command_for_less_are_trained_on(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    (folder / "stages" / "train.json").unlink()
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 6})})
    run = Run(longer, folder, Console(file=io.StringIO(), width=200))
    execute(run, stages_until("train"))
    assert "Going on from step 4 " in said(run)
    assert json.loads((folder / "train" / "result.json").read_text())["steps"] == 6


def test_the_card_counts_the_conversations_that_were_trained_on(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    tight = recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache_gigabytes": 5e-5})})
    execute(quiet(folder, tight), stages_until("export"))
    kept = len(json.loads((folder / "data" / "states" / "train" / "manifest.json").read_text())["lengths"])
    assert 0 < kept < recipe.data.conversations
    assert f"| training conversations | {kept} |" in (folder / "heads" / "README.md").read_text()


def test_a_shard_cut_short_is_computed_again(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    shard = next((folder / "data" / "states" / "train").glob("shard-*.safetensors"))
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-100])
    (folder / "train" / "result.json").unlink()
    (folder / "stages" / "train.json").unlink()
    execute(quiet(folder, recipe), stages_until("train"))
    assert shard.stat().st_size == size


def test_another_model_in_the_targets_place_builds_everything_anew(
    copied: tuple[Recipe, Path], tmp_path: Path, tiny_target_folder: Path
) -> None:
    recipe, folder = copied
    place = tmp_path / "target"
    shutil.copytree(tiny_target_folder, place)
    recipe = tiny_recipe(tmp_path, place)
    execute(quiet(folder, recipe), stages_until("target"))
    before = quiet(folder, recipe).record("target")
    weights = load_file(place / "model.safetensors")
    save_file({name: tensor + 0.125 for name, tensor in weights.items()}, place / "model.safetensors", {"format": "pt"})
    run = quiet(folder, recipe)
    execute(run, stages_until("conversations"))
    after = run.record("target")
    assert before is not None
    assert after is not None
    assert before.identity != after.identity
    assert run.record("states") is not None
    other = quiet(folder, tiny_recipe(tmp_path, tiny_target_folder))
    with pytest.raises(UserError, match="is not the model"):
        _ = other.target


def test_a_plan_names_bytes_time_and_what_would_fail(
    whole: tuple[Recipe, Path], tmp_path: Path, tiny_target_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = whole
    run = Run(recipe, folder, Console(width=120))
    plan = make_plan(run)
    show_plan(run, plan)
    text = capsys.readouterr().out
    assert plan.problems == []
    assert set(plan.seconds) == {stage.name for stage in STAGES}
    assert "Hidden states on disk" in text
    assert "A drafted token" in text
    assert plan.left == {} and plan.disk_bytes == 0
    assert text.count("done before") == len(STAGES) and "Nothing is left to do" in text
    longer = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 6})})
    run = Run(longer, folder, Console(width=120))
    plan = make_plan(run)
    show_plan(run, plan)
    text = capsys.readouterr().out
    assert set(plan.left) == {"train", "tune", "export", "eval"} and plan.disk_bytes > 0
    assert "built anew: train.steps changed from 4 to 6" in text and "again, after train" in text
    assert text.count("done before") == 3 and "Nothing is left" not in text
    assert make_plan(quiet(tmp_path / "none", recipe)).left == dict.fromkeys(plan.seconds, "")
    greedy = tiny_recipe(
        tmp_path, tiny_target_folder, data={"prompts": "self", "conversations": 10**12, "cache_gigabytes": 1e9}
    )
    problems = make_plan(quiet(tmp_path / "none", greedy)).problems
    assert any("free" in problem for problem in problems)
    long = tiny_recipe(tmp_path, tiny_target_folder, data={"max_new_tokens": 5000, "minutes": 1})
    assert any("5384 tokens" in problem for problem in make_plan(quiet(tmp_path / "none", long)).problems)


def test_inputs_are_checked_before_any_work(tmp_path: Path, tiny_target_folder: Path) -> None:
    missing = tiny_recipe(tmp_path, tiny_target_folder, eval={"questions": str(tmp_path / "none.jsonl")})
    with pytest.raises(UserError, match=r"none\.jsonl"):
        check_inputs(missing, STAGES)
    check_inputs(missing, stages_until("train"))
    with pytest.raises(UserError, match="held-out"):
        check_inputs(tiny_recipe(tmp_path, tiny_target_folder, data={"heldout": 0}), STAGES)
    with pytest.raises(UserError, match=r"gone\.jsonl"):
        check_inputs(tiny_recipe(tmp_path, tiny_target_folder, data={"prompts": "gone.jsonl"}), STAGES)


def test_too_little_disk_is_said_before_the_data_is_written(tmp_path: Path, tiny_target_folder: Path) -> None:
    recipe = tiny_recipe(
        tmp_path, tiny_target_folder, data={"prompts": "self", "conversations": 10**12, "cache_gigabytes": 1e9}
    )
    with pytest.raises(UserError, match="are free"):
        execute(quiet(tmp_path / "run", recipe), STAGES)
