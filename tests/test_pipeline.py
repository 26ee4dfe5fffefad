"""A whole run on a tiny target, interrupted in every stage."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import headstart
import headstart.model
from headstart.data.states.store import StateStore, estimate_bytes
from headstart.drafters.memory import CONTEXT
from headstart.errors import UserError
from headstart.heads.base import parse_heads
from headstart.model.teacher import teacher_problem
from headstart.pipeline.data_stages import conversations, states_artifact
from headstart.pipeline.inventory import delete, run_states, unreferenced
from headstart.pipeline.plan import make_plan, show_plan
from headstart.pipeline.report_stages import headline
from headstart.pipeline.run import NAMES, Run, execute
from headstart.pipeline.stages import STAGES, check_inputs, stages_until
from headstart.recipes.recipe import Recipe, parse_recipe
from headstart.recipes.values import recipe_text
from headstart.replay.patch import FINAL
from headstart.support.answer_file import read_answers
from headstart.support.artifacts import read_note, referred
from headstart.support.lock import locked
from headstart.train import trainer
from tests.data.test_prompts import NEW, OLD, FakeHub
from tests.forks import Forks
from tests.test_stages import said

WORDS = "tell me about the sun and moon how to cook rice what is a user system who are you"
SIZES = {"conversations": 12, "heldout": 4, "validation": 4, "max_new_tokens": 16, "batch_size": 4}
TOO_MUCH = {"prompts": "self", "conversations": 10**12, "cache_gigabytes": 1e9}


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
        "data": {"prompts": str(prompts), **SIZES},
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


def logged(folder: Path, recipe: Recipe) -> Run:
    return Run(recipe, folder, Console(file=io.StringIO(), width=200))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> tuple[Recipe, Path]:
    """An uninterrupted run."""
    path = tmp_path_factory.mktemp("whole")
    recipe = tiny_recipe(path, tiny_target_folder, train={"tracker": "tensorboard"})
    execute(quiet(path / "run", recipe), STAGES)
    return recipe, path / "run"


def test_a_finished_run_has_its_report_heads_and_data(whole: tuple[Recipe, Path]) -> None:
    recipe, folder = whole
    assert {file.name for file in (folder / "report").iterdir()} == {"report.html", "report.md", "results.json"}
    results = json.loads((folder / "report" / "results.json").read_text())
    assert results["summary"]["predicted_speedup"] is not None
    assert results["summary"]["divergences"]["count"] == 0
    assert len((folder / "data" / "heldout.jsonl").read_text().splitlines()) == recipe.data.heldout
    assert headline({**results, "summary": {**results["summary"], "undrafted_prompts": 1}}, quiet(folder, recipe)) == (
        f"{results['summary']['speedup_vs_plain']['mean']:.2f}x over plain decoding, measured; "
        f"τ {results['summary']['tokens_per_round']:.2f} on 2 prompts"
    )
    undrafted = {**results, "summary": {**results["summary"], "undrafted_prompts": 2}}
    assert re.match(
        r"nothing was drafted on 2 prompts, .* train longer .* doctor", headline(undrafted, logged(folder, recipe))
    )
    answer = headstart.load(folder / "heads").generate("who are you", max_new_tokens=4)
    assert len(answer.tokens) <= 4
    assert "### held-out prompts" in (folder / "heads" / "README.md").read_text()
    spans = [(each, span) for each in conversations(quiet(folder, recipe), "train") for span in each.supervised_spans]
    trained = [list(each.tokens[max(0, begin - CONTEXT) : end]) for each, (begin, end) in spans]
    assert read_answers(folder / "heads" / "answers.bin") == trained and len(trained) == 12


def test_the_report_of_a_run_names_its_heads(whole: tuple[Recipe, Path]) -> None:
    text = (whole[1] / "report" / "report.md").read_text()
    assert text.startswith("# tiny on ")
    for row in ("family | medusa", "drafts in a row | 2", "recipe | tiny", "training conversations | 12"):
        assert f"| {row} |" in text


def test_a_plan_knows_the_bytes_that_a_run_leaves(whole: tuple[Recipe, Path], tmp_path: Path) -> None:
    recipe, folder = whole
    # Answers of the tiny target are as long as they may be.
    plan = make_plan(quiet(tmp_path / "none", recipe))
    for stage, kind, within in (("states", "states", 0.2), ("train", "heads", 0.2), ("export", "exports", 0.3)):
        files = [file for file in (folder.parent / "artifacts" / kind).rglob("*.*") if file.suffix != ".pkl"]
        files = [file for file in files if file.is_file() and ".tfevents" not in file.name]
        left = sum({info.st_ino: info.st_size for file in files if (info := file.stat())}.values())
        assert plan.disk[stage] == pytest.approx(left, rel=within), stage


def test_a_second_run_loads_no_model(whole: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = whole
    monkeypatch.setattr("headstart.model.loading.load_target", lambda *_, **__: pytest.fail("the model was loaded"))
    assert not execute(quiet(folder, recipe), STAGES)


def once(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Return `function` with its call number `calls` (from 0) interrupted."""
    done = iter(range(1000))

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if next(done) == calls:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    return interrupted


PLACES = (
    ("target", "headstart.pipeline.data_stages.Outcome", 0),
    ("conversations", "headstart.data.conversations.building.write_split", 2),
    ("states", "headstart.data.states.shards._manifest", 1),
    ("train", "headstart.train.checkpoint.save", 1),
    ("tune", "headstart.tuning.tune.measure_costs", 0),
    ("export", "headstart.hub.format.write_card", 0),
    ("eval", "headstart.eval.report.write_text", 1),
)
"""Stage, a function to interrupt in it, and at which call."""


def test_interrupts_in_every_stage(tmp_path: Path, whole: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, undisturbed = whole
    folder = tmp_path / "runs" / "run"
    names = [stage.name for stage in STAGES]
    assert [path[0] for path in PLACES] == names == list(NAMES)
    for number, (_, function, calls) in enumerate(PLACES):
        with monkeypatch.context() as patched:
            module, _, name = function.rpartition(".")
            patched.setattr(function, once(getattr(sys.modules[module], name), calls))
            with pytest.raises(KeyboardInterrupt):
                execute(quiet(folder, recipe), STAGES)
        run = quiet(folder, recipe)
        records = [run.record(name) for name in names]
        assert [record is not None and record.is_complete for record in records] == [
            i < number for i in range(len(names))
        ]
    execute(quiet(folder, recipe), STAGES)
    for split in ("train", "validation", "heldout"):
        file = f"data/conversations/{split}.jsonl"
        assert (folder / file).read_text() == (undisturbed / file).read_text()
    theirs, ours = (load_file(path / "heads" / "heads.safetensors") for path in (undisturbed, folder))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_run_killed_while_training_goes_on(
    tmp_path: Path, tiny_target_folder: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_target_folder, train={"steps": 100_000, "epochs": 100_000})
    folder = tmp_path / "run"
    (tmp_path / "recipe.yaml").write_text(recipe_text(recipe))
    process = forks.start("-m", "headstart", "train", tmp_path / "recipe.yaml", "--run-dir", folder)
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
    step = trainer._Trainer._step

    def interrupted(self: Any, *arguments: Any) -> float:
        signal.raise_signal(signal.SIGINT)
        return step(self, *arguments)

    monkeypatch.setattr(trainer._Trainer, "_step", interrupted)
    run = logged(folder, recipe)
    with pytest.raises(KeyboardInterrupt):
        execute(run, stages_until("train"))
    assert f"Continuing from step {before} " in said(run)
    assert newest_step(folder) == before + 1, "Ctrl-C ends the step and keeps it"
    assert (record := run.record("train")) is not None and not record.is_complete


def newest_step(folder: Path) -> int:
    """Return the step of the newest complete checkpoint."""
    return max(int(path.name[5:]) for path in (folder / "train" / "checkpoints").glob("step-????????"))


@pytest.fixture
def copied(tmp_path: Path, whole: tuple[Recipe, Path]) -> tuple[Recipe, Path]:
    """A copy of the finished run and its artifacts that a test may change."""
    recipe, folder = whole
    shutil.copytree(folder.parent, tmp_path / "runs", symlinks=True)
    return recipe, tmp_path / "runs" / "run"


def changed(recipe: Recipe, **sections: dict[str, Any]) -> Recipe:
    """The recipe with other settings."""
    updates = {name: getattr(recipe, name).model_copy(update=values) for name, values in sections.items()}
    return recipe.model_copy(update=updates)


def files_under(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of every file, without locks and links."""
    return {
        file: (file.stat().st_size, file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink() and file.name != "lock"
    }


def kept(before: dict[Path, tuple[int, int]]) -> bool:
    """Return whether every artifact file is unchanged; model cards may cite the newest report."""
    return all(
        file.is_file() and (file.stat().st_size, file.stat().st_mtime_ns) == stamp
        for file, stamp in before.items()
        if file.name not in ("README.md", "clocks.json")
    )


DONE = {
    "write": "headstart.data.conversations.batch_generator.AnswerGenerator.answer",
    "states": "headstart.data.states.shards._write_shard",
    "train": "headstart.pipeline.head_stages.train",
    "tune": "headstart.pipeline.head_stages.tune",
    "eval": "headstart.pipeline.actions.evaluate",
}


def forbid(monkeypatch: pytest.MonkeyPatch, *stages: str) -> None:
    """Fail if a finished stage works again."""
    for stage in stages:
        monkeypatch.setattr(DONE[stage], lambda *_, stage=stage: pytest.fail(f"{stage} works again"))


def test_artifacts_are_found_without_records(copied: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = copied
    shutil.rmtree(folder / "stages")
    forbid(monkeypatch, "train", "write", "states", "tune")
    execute(quiet(folder, recipe), STAGES)


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"batch_size": 3}},
        {"data": {"cache_gigabytes": 3.0}},
        {"train": {"eval_every": 1}},
        {"train": {"save_every": 1, "log_every": 3}},
    ],
    ids=str,
)
def test_settings_without_effect_on_artifacts_cost_nothing(
    copied: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch, change: dict[str, dict[str, Any]]
) -> None:
    recipe, folder = copied
    before = files_under(folder.parent / "artifacts")
    forbid(monkeypatch, "train", "write", "states")
    execute(quiet(folder, changed(recipe, **change)), STAGES)
    assert files_under(folder.parent / "artifacts").keys() == before.keys() and kept(before)


def test_longer_training_continues_and_keeps_the_shorter(
    copied: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, folder = copied
    before = files_under(folder.parent / "artifacts")
    first = (folder / "train").resolve()
    run = logged(folder, changed(recipe, train={"steps": 6}))
    execute(run, STAGES)
    assert "Continuing from step 4 " in said(run)
    assert json.loads((folder / "train" / "result.json").read_text())["steps"] == 6
    assert json.loads((first / "result.json").read_text())["steps"] == 4
    assert kept(before)
    # Back to the shorter one: everything is still there, its report and its heads too.
    forbid(monkeypatch, "train", "eval")
    execute(quiet(folder, recipe), STAGES)
    assert (folder / "train").resolve() == first
    rows = [json.loads(row)["step"] for row in (folder / "train" / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 2, 4]


def test_more_conversations_are_appended(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    before = files_under(folder.parent / "artifacts")
    text = (folder / "data" / "conversations" / "train.jsonl").read_text()
    execute(quiet(folder, changed(recipe, data={"conversations": 20})), STAGES)
    longer = (folder / "data" / "conversations" / "train.jsonl").read_text()
    assert longer.startswith(text) and len(longer.splitlines()) == 20
    assert kept(before)
    made = [file for file in files_under(folder.parent / "artifacts") if file not in before]
    assert sorted(file.name.partition("-")[0] for file in made if file.parent.name == "batches") == ["00005", "00006"]
    # Asking for fewer again takes the first part, as trained on before.
    execute(quiet(folder, recipe), STAGES)
    assert (folder / "data" / "conversations" / "train.jsonl").read_text() == text


def test_a_dropped_revision_is_left(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch is pinned to one commit while the recipe names it; a run stays on it when the data set moves on."""
    hub, folder = FakeHub(monkeypatch), tmp_path / "run"

    def commit(revision: str | None) -> str:
        data = {"prompts": "someone/chats", "split": "train", "revision": revision}
        execute(quiet(folder, tiny_recipe(tmp_path, tiny_target_folder, data=data)), stages_until("conversations"))
        known = referred(folder, "conversations")
        assert known is not None
        return str(read_note(known)["prompts"][0]["commit"])

    assert [commit("v1"), commit("v1"), commit(None)] == [OLD, OLD, NEW]
    honest = hub.info
    monkeypatch.setattr(hub, "info", lambda *args, **named: honest(*args, **named | {"revision": "v1"}))
    assert commit(None) == NEW, "the newest is now another"


def test_another_family_shares_the_data(copied: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = copied
    before = files_under(folder.parent / "artifacts")
    forbid(monkeypatch, "write", "states")
    heads = parse_heads({"family": "hydra", "num_heads": 2})
    other = recipe.model_copy(update={"name": "other", "heads": heads})
    execute(quiet(folder.parent / "other", other), STAGES)
    assert kept(before)
    assert (folder.parent / "other" / "report" / "report.html").is_file()
    assert (folder / "report" / "report.html").is_file()
    states = {run.folder.name: run for run in run_states(folder.parent)}
    assert {name: (run.state, run.family) for name, run in states.items()} == {
        "run": ("done", "medusa"),
        "other": ("done", "hydra"),
    }
    assert all(run.tau is not None and run.speedup is not None and run.bytes > 10_000 for run in states.values())


def test_gc_frees_only_unreferenced_artifacts(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    assert unreferenced(folder.parent) == []
    first = (folder / "train").resolve()
    execute(quiet(folder, changed(recipe, train={"steps": 6})), STAGES)
    found = unreferenced(folder.parent)
    assert {one.path.parent.name for one in found} == {"heads", "tuning", "exports", "reports"}
    assert first in {one.path.resolve() for one in found}
    used = {path for path in files_under(folder.parent) if not any(one.path in path.parents for one in found)}
    with locked(found[0].path):  # another process uses it
        assert found[0].path not in {one.path for one in unreferenced(folder.parent)}
        assert delete(folder.parent, found) > 0
        assert found[0].path.is_dir()
    assert delete(folder.parent, unreferenced(folder.parent)) > 0
    assert not any(one.path.exists() for one in found)
    assert all(path.is_file() for path in used), "nothing else is deleted"
    assert not execute(quiet(folder, changed(recipe, train={"steps": 6})), STAGES), "the run is still whole"


def test_interrupted_gc_leaves_nothing_complete(copied: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = copied
    execute(quiet(folder, changed(recipe, train={"steps": 6})), stages_until("train"))
    heads = [one for one in unreferenced(folder.parent) if one.path.parent.name == "heads"]

    def killed(_place: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("headstart.support.files.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            delete(folder.parent, heads)
    assert "half deleted" in {one.what for one in unreferenced(folder.parent)}
    execute(quiet(folder, recipe), stages_until("train"))
    assert (folder / "train" / "best" / "heads.safetensors").is_file(), "trained again, not taken from the rest"
    execute(quiet(folder, changed(recipe, train={"steps": 6})), stages_until("train"))  # unused again, beside the rest
    found = unreferenced(folder.parent)
    assert delete(folder.parent, found) > 0 and unreferenced(folder.parent) == []


def test_gc_spares_artifacts_reused_before_the_answer(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    execute(quiet(folder, changed(recipe, train={"steps": 6})), STAGES)
    found = unreferenced(folder.parent)
    execute(quiet(folder, recipe), STAGES)  # while gc waits for a yes
    delete(folder.parent, found)
    assert not execute(quiet(folder, recipe), STAGES), "all of it is still there"


def test_heads_trained_by_a_launcher_meanwhile_are_not_reused(copied: tuple[Recipe, Path], forks: Forks) -> None:
    recipe, folder = copied
    (tmp := folder.parent.parent / "longer.yaml").write_text(recipe_text(changed(recipe, train={"steps": 6})))
    done = forks.run("-m", "headstart.train", tmp, "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "train" / "result.json").read_text())["steps"] == 6
    run = logged(folder, changed(recipe, tune={"max_rank": 1}))
    execute(run, stages_until("tune"))
    assert "train.steps changed from 6 to 4" in said(run)
    assert json.loads((folder / "train" / "result.json").read_text())["steps"] == 4, "the recipe's own heads"


def test_states_that_no_run_reads_are_freed_alone(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    more = changed(recipe, data={"conversations": 20})
    execute(quiet(folder, more), stages_until("states"))
    execute(quiet(folder, recipe), stages_until("states"))
    found = [one for one in unreferenced(folder.parent) if one.path.suffix == ".safetensors"]
    assert found
    delete(folder.parent, found)
    assert not execute(quiet(folder, recipe), stages_until("states"))
    execute(quiet(folder, more), stages_until("states"))
    assert len(StateStore(folder / "data" / "states" / "train")) == 20, "they can be had again"


def test_the_card_counts_the_conversations_that_were_trained_on(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    execute(quiet(folder, changed(recipe, data={"cache_gigabytes": 1.2e-4})), stages_until("export"))
    used = len(json.loads((folder / "data" / "states" / "train" / "manifest.json").read_text())["lengths"])
    assert 0 < used < recipe.data.conversations
    assert f"| training conversations | {used} |" in (folder / "heads" / "README.md").read_text()


def test_the_byte_budget_covers_both_splits_and_stops_the_writing(tmp_path: Path, tiny_target_folder: Path) -> None:
    recipe = tiny_recipe(tmp_path, tiny_target_folder, data={"conversations": 28, "cache_gigabytes": 2e-4})
    run = quiet(tmp_path / "runs" / "run", recipe)
    execute(run, stages_until("states"))
    stores = [StateStore(run.folder / "data" / "states" / split) for split in ("train", "validation")]
    own = sum(estimate_bytes(store.tokens, 1, store.hidden_size, torch.float32) for store in stores)
    assert own <= 2e5
    written = len((run.folder / "data" / "conversations" / "train.jsonl").read_text().splitlines())
    assert len(stores[0]) <= written <= len(stores[0]) + 2 * recipe.data.batch_size < 28, "two may be under way"


def test_a_shard_cut_short_is_computed_again(copied: tuple[Recipe, Path]) -> None:
    recipe, folder = copied
    store = StateStore(folder / "data" / "states" / "train")
    before = [store.get(i).states[FINAL].clone() for i in range(len(store))]
    shard = store.files[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    (folder / "train" / "result.json").unlink()
    (folder / "stages" / "train.json").unlink()
    execute(quiet(folder, recipe), stages_until("train"))
    again = StateStore(folder / "data" / "states" / "train")
    assert shard not in again.files
    for i, states_TE in enumerate(before):  # float32, read token by token and then in one forward
        torch.testing.assert_close(again.get(i).states[FINAL], states_TE, atol=1e-4, rtol=1e-4)


def test_training_alone_loads_no_target(copied: tuple[Recipe, Path], spy: Any) -> None:
    """The stored teacher is enough; a damaged one is rewritten, which loads the target."""
    recipe, folder = copied
    before = load_file(folder / "train" / "last" / "heads.safetensors")
    (teacher,) = (folder.parent / "artifacts").glob("states/*/teacher-*")
    loaded = spy(headstart.model.loading, "load_target")
    for damaged in (False, True):
        shutil.rmtree((folder / "train").resolve())
        (folder / "stages" / "train.json").unlink()
        if damaged:
            (teacher / "base.safetensors").write_bytes(b"cut")
        execute(quiet(folder, recipe), stages_until("train"))
        assert len(loaded) == damaged
        after = load_file(folder / "train" / "last" / "heads.safetensors")
        assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert teacher_problem(teacher) is None


def test_an_online_run_stores_no_states(copied: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = copied
    stored = (folder / "train").resolve()
    forbid(monkeypatch, "write")
    online = changed(recipe, data={"states": "online", "cache_gigabytes": 1e-9})
    run = logged(folder, online)
    execute(run, stages_until("export"))
    assert "nothing to store: training computes them" in said(run)
    found = [one for one in unreferenced(folder.parent) if one.path.parent.name == "states"]
    assert len(found) == 1, "the stored states are unreferenced now"
    delete(folder.parent, found)
    assert not list(folder.parent.rglob("shard-*")) and not list(folder.parent.rglob("teacher-*"))
    assert (folder / "train").resolve() != stored, "an artifact of its own"
    assert "| training conversations | 12 |" in (folder / "heads" / "README.md").read_text()
    assert not execute(quiet(folder, online), stages_until("export")), "it is done"
    execute(quiet(folder, recipe), stages_until("train"))
    assert (folder / "train").resolve() == stored, "stored states find the heads that they have taught"


def test_a_changed_model_rebuilds_all(copied: tuple[Recipe, Path], tmp_path: Path, tiny_target_folder: Path) -> None:
    recipe, folder = copied
    path = tmp_path / "target"
    shutil.copytree(tiny_target_folder, path)
    recipe = tiny_recipe(tmp_path, path)
    execute(quiet(folder, recipe), stages_until("target"))
    before = quiet(folder, recipe).record("target")
    weights = load_file(path / "model.safetensors")
    save_file({name: tensor + 0.125 for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"})
    run = quiet(folder, recipe)
    execute(run, stages_until("conversations"))
    after = run.record("target")
    assert before is not None and after is not None and before.identity != after.identity
    assert run.record("states") is not None
    other = quiet(folder, tiny_recipe(tmp_path, tiny_target_folder))
    with pytest.raises(UserError, match="is not the model"):
        _ = other.target


def test_a_plan_names_bytes_time_and_what_would_fail(
    whole: tuple[Recipe, Path],
    tmp_path: Path,
    tiny_target_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, folder = whole
    run = Run(recipe, folder, Console(width=120))
    with monkeypatch.context() as patched:
        patched.setattr("headstart.model.loading.load_target", lambda *_, **__: pytest.fail("the model was loaded"))
        plan = make_plan(run)
    show_plan(run, plan)
    text = capsys.readouterr().out
    assert plan.problems == []
    assert set(plan.seconds) == {stage.name for stage in STAGES}
    assert plan.left == {} and plan.peak_bytes == 0
    assert text.count("done: ") == len(STAGES) and "Nothing is left to do" in text
    ignored = make_plan(run, 2, prompt_tokens=5, tokens_per_second=9)
    show_plan(run, ignored)
    told = capsys.readouterr().out
    for option in ("--processes", "--prompt-tokens", "--tokens-per-second"):
        assert f"{option} has no effect" in told
    run = Run(changed(recipe, train={"steps": 6}), folder, Console(width=120))
    plan = make_plan(run)
    show_plan(run, plan)
    text = capsys.readouterr().out
    assert set(plan.left) == {"train", "tune", "export", "eval"} and 0 < plan.left_bytes < plan.peak_bytes
    assert "train.steps changed from 4 to 6" in text and "again, after train" in text
    assert text.count("done: ") == 3 and "Nothing is left" not in text
    assert "Compute per draft" in text and "Conversations" not in dict(plan.facts)
    before = make_plan(quiet(tmp_path / "none", recipe))
    assert before.left == dict.fromkeys(before.seconds, "") and "Hidden states on disk" in dict(before.facts)
    greedy = tiny_recipe(tmp_path, tiny_target_folder, data=TOO_MUCH)
    problems = make_plan(quiet(tmp_path / "none", greedy)).problems
    assert any("free" in problem for problem in problems)
    long = tiny_recipe(tmp_path, tiny_target_folder, data={"max_new_tokens": 5000, "minutes": 1})
    assert any("5384 tokens" in problem for problem in make_plan(quiet(tmp_path / "none", long)).problems)


def test_a_plan_knows_a_target_that_is_the_same_in_other_files(
    copied: tuple[Recipe, Path], tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after reinstalling a package with the target. `run` notices too, and does no further work."""
    folder = copied[1]
    recipe = tiny_recipe(tmp_path, tiny_target_folder)
    execute(quiet(folder, recipe), STAGES)
    again = tmp_path / "again"
    shutil.copytree(tiny_target_folder, again, copy_function=shutil.copyfile)
    moved = changed(recipe, target={"spec": str(again)})
    with monkeypatch.context() as patched:
        patched.setattr("headstart.pipeline.plan.dry_run", lambda *_: pytest.fail("forwards were timed"))
        plan = make_plan(run := logged(folder, moved))
    assert list(plan.left) == ["target"] and plan.facts == []
    show_plan(run, plan)
    assert "Nothing is left to do: the target has new files, and is the same model." in said(run)
    assert "train" in make_plan(quiet(folder, changed(moved, train={"steps": 6}))).left
    other = quiet(folder, changed(moved, target={"dtype": "bfloat16"}))
    assert set(make_plan(other).left) == {stage.name for stage in STAGES}, "it is planned, not refused"


def test_writing_awaits_no_other_run(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = quiet(tmp_path / "runs" / "run", tiny_recipe(tmp_path, tiny_target_folder))
    execute(run, stages_until("target"))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr("headstart.support.artifacts.time", clock)  # other modules may sleep
    states = states_artifact(run).folder
    with locked(states):
        execute(run, stages_until("conversations"))
    assert list(states.glob("shard-*.safetensors")) and referred(run.folder, "states") == states


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
    recipe = tiny_recipe(tmp_path, tiny_target_folder, data=TOO_MUCH)
    with pytest.raises(UserError, match="are free"):
        execute(quiet(tmp_path / "run", recipe), STAGES)
