"""The stage framework on made-up stages: skipped when done, repeated when a setting changed, never cleared."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from headstart.errors import UserError
from headstart.model.model import Target
from headstart.pipeline.run import Outcome, Run, Stage, execute, left_to_do
from headstart.pipeline.stages import STAGES
from headstart.recipes.recipe import Recipe, load_recipe, parse_recipe
from headstart.support import provenance as provenance_module
from headstart.support.artifacts import add_reference, artifact, lock_artifact
from headstart.support.lock import locked
from headstart.support.provenance import git_state
from tests.hub.helpers import export


class Factory:
    """Two stages that add a file and log their name each time they work; `fail` interrupts one half way."""

    def __init__(self) -> None:
        self.worked: list[str] = []
        self.fail: str | None = None
        self.version = 1
        self.identity = ""

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage(
                "first", "first things", self.version, ("a",), (), lambda run: {"seed": run.recipe.data.seed}, self.a
            ),
            Stage("second", "second things", 1, ("b/c",), ("first",), lambda run: {"lr": run.recipe.train.lr}, self.b),
        )

    def a(self, run: Run) -> Outcome:
        return self._write(run.folder / "a", "first")

    def b(self, run: Run) -> Outcome:
        return self._write(run.folder / "b" / "c", "second")

    def _write(self, path: Path, name: str) -> Outcome:
        self.worked.append(name)
        path.mkdir(parents=True, exist_ok=True)
        (path / f"part-{len(list(path.iterdir()))}").touch()
        if self.fail == name:
            raise KeyboardInterrupt
        return Outcome(f"{name} is there", self.identity)


@pytest.fixture
def factory() -> Factory:
    return Factory()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def make_run(folder: Path, **settings: Any) -> Run:
    return Run(
        parse_recipe({"name": "made-up", "heads": {"family": "medusa"}, **settings}),
        folder,
        Console(file=io.StringIO(), width=200),
    )


def said(run: Run) -> str:
    assert isinstance(run.console.file, io.StringIO)
    return run.console.file.getvalue()


def parts(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_done_stages_are_skipped(folder: Path, factory: Factory) -> None:
    assert execute(make_run(folder), factory.stages())
    assert not execute(make_run(folder), factory.stages())
    assert factory.worked == ["first", "second"]


@pytest.mark.parametrize(
    ("settings", "worked"),
    [
        ({"data": {"seed": 1}}, ["first", "second"]),
        ({"train": {"lr": 0.5}}, ["second"]),
        ({"train": {"max_grad_norm": 0.5}}, []),
    ],
)
def test_changed_settings_repeat(folder: Path, factory: Factory, settings: dict[str, Any], worked: list[str]) -> None:
    execute(make_run(folder), factory.stages())
    factory.worked.clear()
    execute(make_run(folder, **settings), factory.stages())
    assert factory.worked == worked
    assert parts(folder / "a") == 1 + worked.count("first"), "earlier files stay"
    assert parts(folder / "b" / "c") == 1 + worked.count("second")


def test_a_change_that_comes_to_the_same_leaves_later_stages_done(folder: Path, factory: Factory) -> None:
    factory.identity = "the same"
    execute(make_run(folder), factory.stages())
    factory.worked.clear()
    execute(make_run(folder, data={"seed": 1}), factory.stages())
    assert factory.worked == ["first"]


def test_names_the_changed_setting(folder: Path, factory: Factory) -> None:
    execute(make_run(folder), factory.stages())
    run = make_run(folder, data={"seed": 7})
    execute(run, factory.stages())
    assert "seed changed from 0 to 7" in said(run)
    assert "first changed" in said(run)


def test_another_family_is_named_before_settings_that_follow_from_it(folder: Path) -> None:
    def settings(run: Run) -> dict[str, Any]:
        return {f"heads.{key}": value for key, value in run.recipe.heads.to_recipe().items()}

    stage = Stage("train", "training", 1, (), (), settings, lambda _: Outcome("trained"))
    execute(make_run(folder), (stage,))
    later = make_run(folder, heads={"family": "eagle3", "aux_norms": True})
    assert left_to_do(later, (stage,)) == {"train": 'heads.family changed from "medusa" to "eagle3"'}


def test_a_new_version_of_a_stage_works_again(folder: Path, factory: Factory) -> None:
    execute(make_run(folder), factory.stages())
    factory.version = 2
    execute(make_run(folder), factory.stages())
    assert factory.worked == ["first", "second"] * 2


@pytest.mark.parametrize("name", ["first", "second"])
def test_an_interrupted_stage_goes_on_with_what_it_has(folder: Path, factory: Factory, name: str) -> None:
    factory.fail = name
    with pytest.raises(KeyboardInterrupt):
        execute(make_run(folder), factory.stages())
    record = make_run(folder).record(name)
    assert record is not None
    assert not record.is_complete
    factory.fail = None
    execute(make_run(folder), factory.stages())
    assert parts(folder / {"first": "a", "second": "b/c"}[name]) == 2, "the first part was kept"
    assert factory.worked.count("first") == (2 if name == "first" else 1)


@pytest.mark.parametrize("loss", ["a", "b", "stages/first.json"])
def test_deleted_outputs_are_made_again(folder: Path, factory: Factory, loss: str) -> None:
    execute(make_run(folder), factory.stages())
    path = folder / loss
    if path.is_dir():
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        path.rmdir()
    else:
        path.unlink()
    factory.worked.clear()
    execute(make_run(folder), factory.stages())
    assert factory.worked == (["second"] if loss == "b" else ["first", "second"])


def test_a_damaged_record_counts_as_none(folder: Path, factory: Factory) -> None:
    execute(make_run(folder), factory.stages())
    (folder / "stages" / "second.json").write_text('{"fingerprint": ')
    execute(make_run(folder), factory.stages())
    assert factory.worked == ["first", "second", "second"]


def test_a_stage_can_be_asked_for_again(folder: Path, factory: Factory) -> None:
    execute(make_run(folder), factory.stages())
    execute(make_run(folder), factory.stages(), again={"second"})
    assert factory.worked == ["first", "second", "second"]


def test_a_stage_whose_artifact_is_gone_or_another_works_again(folder: Path, factory: Factory) -> None:
    made, other = (artifact(folder, "things", "second", {"what": what}) for what in (1, 2))

    def work(run: Run) -> Outcome:
        with lock_artifact(made):
            add_reference(run.folder, "second", made)
        return factory.b(run)

    stages = [factory.stages()[0], replace(factory.stages()[1], work=work)]
    execute(make_run(folder), stages)
    assert not execute(make_run(folder), stages)
    factory.worked.clear()
    add_reference(folder, "second", other)  # a launcher has trained for it, say
    execute(make_run(folder), stages)
    (folder / "references.json").unlink()
    execute(make_run(folder), stages)
    shutil.rmtree(made.folder)
    execute(make_run(folder), stages)
    assert factory.worked == ["second"] * 3


def test_artifacts_are_content_addressed(tmp_path: Path) -> None:
    made = artifact(tmp_path / "run", "things", "a word", {"what": 1})
    with lock_artifact(made):
        pass
    assert artifact(tmp_path / "other", "things", "another", {"what": 1}).folder == made.folder


def test_a_folder_takes_one_run_at_a_time(folder: Path, factory: Factory) -> None:
    with locked(folder), pytest.raises(UserError, match=f"process {os.getpid()}"):
        execute(make_run(folder), factory.stages())
    execute(make_run(folder), factory.stages())


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    code = "from headstart.support.lock import locked; from pathlib import Path; import os, signal\n"
    code += f"with locked(Path({str(tmp_path)!r})): os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert re.fullmatch(r"\d+ on \S+", (tmp_path / "lock").read_text().strip())
    with locked(tmp_path):
        pass


def test_left_to_do_names_the_reasons(folder: Path, factory: Factory) -> None:
    stages = factory.stages()
    assert left_to_do(make_run(folder), stages) == {"first": "", "second": ""}
    assert not folder.exists(), "asking leaves no trace"
    factory.fail = "second"
    with pytest.raises(KeyboardInterrupt):
        execute(make_run(folder), stages)
    assert left_to_do(make_run(folder), stages) == {"second": "begun, 0.0 s so far"}
    factory.fail = None
    execute(make_run(folder), stages)
    assert left_to_do(make_run(folder), stages) == {}
    assert left_to_do(make_run(folder, train={"lr": 0.5}), stages) == {"second": "lr changed from 0.001 to 0.5"}
    assert left_to_do(make_run(folder, data={"seed": 1}), stages) == {
        "first": "seed changed from 0 to 1",
        "second": "again, after first",
    }


def test_a_run_can_be_repeated_from_its_own_files(folder: Path, factory: Factory) -> None:
    run = make_run(folder, train={"lr": 0.25})
    execute(run, factory.stages())
    assert load_recipe(str(folder / "recipe.yaml")) == run.recipe
    commands = json.loads((folder / "provenance.json").read_text())["commands"]
    assert len(commands) == 1
    assert commands[0]["argv"] == sys.argv
    assert "torch" in commands[0]["versions"]
    execute(make_run(folder), factory.stages())
    assert len(json.loads((folder / "provenance.json").read_text())["commands"]) == 2, "the changed run is noted too"


def test_provenance_names_only_its_own_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sha, _ = git_state()
    assert sha is None or len(sha) == 40
    monkeypatch.setattr(provenance_module, "__file__", str(tmp_path / "run.py"))
    assert provenance_module.git_state() == (None, None)


NO_MEMORY = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")


def test_out_of_memory_names_the_setting_to_change(factory: Factory, tmp_path: Path) -> None:
    def work(run: Run) -> Outcome:
        raise NO_MEMORY

    first, _ = factory.stages()
    with pytest.raises(UserError, match="Memory ran out while first things: CUDA out of memory") as refused:
        execute(make_run(tmp_path), [replace(first, work=work, takes_memory="train.batch_tokens")])
    assert refused.value.remedy == "Change train.batch_tokens."


def test_every_stage_names_settings_that_there_are() -> None:
    for stage in STAGES:
        for section, name in re.findall(r"\b(target|data|train|tune|eval)\.(\w+)", stage.takes_memory):
            assert name in Recipe.model_fields[section].annotation.model_fields, stage.name  # type: ignore[union-attr]


@pytest.mark.parametrize("where", ["from_pretrained", "generate"])
def test_out_of_memory_elsewhere_is_one_sentence(
    where: str, tiny_target: Target, tiny_target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_much(*_: Any, **__: Any) -> None:
        raise NO_MEMORY

    export(tmp_path / "heads", tiny_target)
    if where == "from_pretrained":
        monkeypatch.setattr("headstart.model.loading.AutoModelForCausalLM.from_pretrained", too_much)
    else:
        monkeypatch.setattr("headstart.cli.heads._print_stream", too_much)
    asked = ("generate", tmp_path / "heads", "--target", tiny_target_folder, "--prompt", "hi")
    from tests.test_cli import refused  # which imports this module

    sentence = refused(*asked)
    assert "CUDA out of memory" in sentence
    assert ("int8 or int4" if where == "from_pretrained" else "--max-new-tokens") in sentence
