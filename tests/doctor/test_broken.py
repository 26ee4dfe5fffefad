"""Broken input, missing input, and the command line."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from headstart.data.states.store import StateStore
from headstart.doctor.examination import CHECKS, examine
from headstart.doctor.findings import Finding, good, show
from headstart.doctor.subject import Subject, find_subject
from headstart.errors import UserError
from headstart.model.model import Target
from headstart.recipes.recipe import parse_recipe
from headstart.recipes.values import recipe_text
from tests.hub.helpers import export
from tests.test_cli import call, refused, works

NAMES = [check.__name__ for _, check in CHECKS]
MEDUSA = {"name": "tiny", "heads": {"family": "medusa", "num_heads": 2}}


def quickly(path: Path) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(find_subject(str(path), quick=True))}


# -- what cannot be read ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("data/conversations/train.jsonl", "not valid JSON"),
        ("a shard", "cut short"),
        ("data/states/validation/manifest.json", "not valid JSON"),
        ("train/best/heads.safetensors", "cut short or damaged"),
        ("train/best/config.json", "not valid JSON"),
    ],
)
def test_a_file_cut_short_is_named_once_and_the_rest_is_examined(run: Path, file: str, words: str) -> None:
    path = StateStore(run / "data" / "states" / "train").files[0] if file == "a shard" else run / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = quickly(run)
    assert list(found) == NAMES
    (wrong,) = [finding for finding in found.values() if finding.ok is False]
    assert words in wrong.sentence
    assert path.name in wrong.sentence
    assert any(finding.ok for finding in found.values()), "checks that do not need the file still run"


def test_missing_files_are_no_problem(run: Path) -> None:
    for path in sorted((run / "data").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    found = quickly(run)
    assert [finding.check for finding in found.values() if finding.ok is False] == []
    assert found["mask"].sentence == "Not checked: there are no conversations of a run here."
    assert found["equality"].ok is True, "the target writes the texts"


def test_a_run_copied_without_its_artifacts_is_named(run: Path) -> None:
    shutil.rmtree(run.parent / "artifacts")
    console = Console(file=io.StringIO(), width=200)
    show(found := list(examine(find_subject(str(run), quick=True))), console)
    (wrong,) = [finding for finding in found if finding.check == "states"]
    assert f"refers to artifacts in {run.parent / 'artifacts'}, and all of them are missing" in wrong.sentence
    assert "Copy the whole folder of runs" in wrong.remedy
    assert isinstance(console.file, io.StringIO) and "\nstates\n" in console.file.getvalue()


def test_a_check_that_breaks_off_is_a_finding(healthy: Path) -> None:
    def fragile(subject: Subject) -> Finding:
        raise ZeroDivisionError("nothing to divide by")

    first, second = examine(find_subject(str(healthy), quick=True), checks=[("run", fragile), CHECKS[0]])
    assert (first.check, first.stage, first.ok) == ("fragile", "run", False)
    assert "ZeroDivisionError: nothing to divide by (test_broken.py, line" in first.sentence
    assert "fragile" in first.figures["traceback"]
    assert second.ok is True


def test_a_check_of_ones_own_is_one_function(healthy: Path) -> None:
    def greetings(subject: Subject) -> Finding:
        assert begun == [("data", "greetings")], "told before it runs"
        return good("All is polite.", count=3)

    begun: list[tuple[str, str]] = []
    (finding,) = examine(Subject(None), lambda *names: begun.append(names), [("data", greetings)])
    assert finding == Finding(True, "All is polite.", "", {"count": 3}, "greetings", "data")


# -- without a run ---------------------------------------------------------------------------------------------------


def test_a_recipe_without_a_run(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = parse_recipe({**MEDUSA, "target": str(tiny_target_folder)})
    (tmp_path / "mine.yaml").write_text(recipe_text(recipe))
    found = {finding.check: finding for finding in examine(find_subject("mine.yaml"))}
    assert {name for name, finding in found.items() if finding.ok} == {"equality"}
    assert all(finding.ok is not False for finding in found.values())


def test_heads_without_their_run(tmp_path: Path, tiny_target: Target, tiny_target_folder: Path) -> None:
    export(tmp_path / "heads", Target(tiny_target.model, tiny_target.tokenizer, str(tiny_target_folder)))
    found = quickly(tmp_path / "heads")
    assert found["equality"].ok is True
    assert found["template"].ok is None
    assert found["vocabulary"].ok is True


def test_heads_in_a_run_are_examined_with_it(run: Path) -> None:
    subject = find_subject(str(run / "train" / "last"), quick=True)
    assert subject.heads_folder == run / "train" / "last"
    assert subject.run == run
    assert subject.recipe is not None


def test_unknown_recipes_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'quickstart'"):
        find_subject("quickstrt")
    with pytest.raises(UserError, match="No folder at"):
        find_subject("quickstart", run_dir=tmp_path / "none")


def test_settings_that_the_family_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: medusa\nheads: {num_head: 2}\n")
    with pytest.raises(UserError, match=r"no setting 'num_head'\. Did you mean 'num_heads'"):
        find_subject(str(tmp_path / "mine.yaml"))


# -- the command line ------------------------------------------------------------------------------------------------


def test_the_command_logs_each_step_and_finds_nothing_wrong(healthy: Path) -> None:
    shown = works("doctor", healthy, "--quick").stdout
    assert "Nothing wrong in 9 checks." in shown and "✓" in shown and "Fix:" not in shown
    steps = ["loading the target", *(f"examining {stage}: {check.__name__}" for stage, check in CHECKS)]
    assert shown.splitlines()[: len(steps)] == steps


def test_the_command_names_the_problem_and_fails(run: Path, tmp_path: Path) -> None:
    path = run / "data" / "conversations" / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["supervised"] = [[start + 1, stop] for start, stop in row["supervised"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = call("doctor", run, "--quick", "--json", tmp_path / "found.json")
    assert result.exit_code == 1
    printed = " ".join(result.stdout.split())
    assert "data: mask The mask is one token late" in printed
    assert "Fix: Build the data again" in printed
    assert "Start with mask (data)" in printed
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["ok"] is False
    (wrong,) = [finding for finding in written["findings"] if finding["ok"] is False]
    assert (wrong["check"], wrong["stage"], wrong["figures"]["shift"]) == ("mask", "data", 1)


def test_the_command_refuses_unknown_inputs(tmp_path: Path) -> None:
    assert "Did you mean 'quickstart'" in refused("doctor", "quickstrt")
    assert "missing.jsonl" in refused("doctor", "quickstart", "--questions", tmp_path / "missing.jsonl")
    text = works("doctor", "--help").stdout
    assert "Example: headstart doctor" in text


def test_the_page_describes_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert all(f"| `{check.__name__}` | {stage} |" in page for stage, check in CHECKS)
