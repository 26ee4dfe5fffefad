"""The command line: what each command prints and leaves, and that bad input is one clear line without a traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.main import get_command
from typer.testing import CliRunner

from headstart.cli.app import app
from headstart.heads.io import write_weights
from headstart.model.model import Target
from headstart.pipeline.inventory import run_states
from tests.forks import Forks
from tests.hub.helpers import make_heads
from tests.test_pipeline import recipe_text, tiny_recipe
from tests.tiny import tiny_model, tiny_tokenizer

COMMANDS = (
    "run", "plan", "data", "data build", "data show", "train", "tune", "eval", "audit",
    "generate", "chat", "race", "serve", "export", "import", "push", "runs", "gc", "recipes", "recipes show", "doctor",
    "report", "report diff",
)  # fmt: skip


def call(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def works(*arguments: object, stdin: str | None = None) -> Any:
    result = call(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object) -> str:
    """Return a command's one-line error about bad input."""
    result = call(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), "an unexpected error has a traceback"
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    return str(lines[0])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    path = tmp_path_factory.mktemp("recipe")
    file = path / "tiny.yaml"
    file.write_text(recipe_text(tiny_recipe(path, tiny_target_folder)))
    return file


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    """The folder of a finished run."""
    folder = recipe.parent / "runs" / "run"
    works("run", recipe, "--run-dir", folder)
    return folder


@pytest.fixture
def heads(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run's heads that a test may change."""
    shutil.copytree(finished / "heads", tmp_path / "heads")
    return tmp_path / "heads"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"turns": ["who are you", "and now"]}\n{"turns": ["tell me"], "category": "talk"}\n')
    return file


# -- help and speed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help_with_an_example_and_nothing_cut_short(command: str) -> None:
    words = command.split()
    text = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).stdout
    assert "Example: headstart " in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert not re.search(r"…|\w\.\.\.$|<[^>]*\|[^>]*$", text, re.MULTILINE), "no name, no type and no sentence"
    asked: Any = get_command(app)
    for word in words:
        asked = asked.commands[word]
    assert all(option in text for parameter in asked.params for option in parameter.opts if option.startswith("-"))
    first = [other.help.partition("\n")[0].partition(". ")[0] for other in getattr(asked, "commands", {}).values()]
    assert all(sentence in " ".join(text.split()) for sentence in first)


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom headstart.cli.app import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'pydantic', 'numpy') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("asked", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_do_not_spin_for_long_by_default(asked: str | None) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    if asked:
        environment[asked] = "passive"
    code = f"import headstart, os; print(*(os.environ.get(name) for name in {names}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    expected = {None: "6000 active", "OMP_WAIT_POLICY": "None passive", "GOMP_SPINCOUNT": "passive None"}
    assert done.stdout.split("\n")[0] == expected[asked]


def test_another_system_is_named_and_not_a_missing_module() -> None:
    code = "import sys; sys.modules['fcntl'] = None; from headstart.cli.app import main"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith("ImportError: headstart needs Linux (macOS is untested); on Windows, run it in WSL.\n")
    assert "fcntl" not in done.stderr.replace(code, "")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "headstart", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip()[0].isdigit()


# -- the commands ----------------------------------------------------------------------------------------------------


def test_run_ends_with_the_table_and_the_paths(finished: Path, recipe: Path) -> None:
    again = works("run", recipe, "--run-dir", finished).stdout
    assert again.count("done, ") == 7
    assert "Nothing was left to do. The finished stages took " in again and "This took" not in again
    for text in ("tokens/s", "plain loop", "transformers generate", "prompt lookup", "τ ", "predicted"):
        assert text in again
    assert str(finished / "report" / "report.html") in again
    assert f"headstart chat {finished / 'heads'}" in again


def test_generate_writes_the_same_words_with_and_without_heads(finished: Path) -> None:
    heads = finished / "heads"
    texts = {
        works(
            "generate", heads, "--prompt", "who are you", "--dtype", "float32", "--max-new-tokens", 12, "--drafter", how
        ).stdout
        for how in ("heads", "none")
    }
    assert len(texts) == 1
    sampled = works("generate", heads, "--prompt", "hello", "--temperature", 1, "--seed", 3, "--max-new-tokens", 8)
    assert "tokens/s" in sampled.stderr
    assert "tokens/s" not in sampled.stdout


def test_generate_answers_a_file_of_prompts(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In file order, two per batch, with the text each prompt gets alone; one bad line refuses the whole file."""
    monkeypatch.setattr("headstart.cli.heads._BATCH", 2)
    file, how = tmp_path / "prompts.jsonl", ("--dtype", "float32", "--max-new-tokens", 8)
    asked = ["who are you", "and again", "hello"]
    rows = [{"prompt": asked[0], "id": "first"}, {"turns": asked[1:2]}]
    rows.append({"messages": [{"role": "user", "content": asked[2]}]})
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    result = works("generate", finished, "--prompts", file, *how)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["id"] for answer in answers] == ["first", "line 2", "line 3"]
    alone = [works("generate", finished, "--prompt", text, *how).stdout for text in asked]
    assert [answer["text"] + "\n" for answer in answers] == alone
    assert "3 answers, 24 tokens" in result.stderr
    single = tmp_path / "single.jsonl"
    single.write_text(json.dumps(rows[0]), encoding="utf-8")
    cut = works("generate", finished, "--prompts", single, *how)
    assert f"τ {json.loads(cut.stdout)['tokens_per_round']:.2f}" in cut.stderr
    sampled = works("generate", finished, "--prompts", file, *how, "--temperature", 1, "--seed", 5).stdout
    assert [json.loads(line)["seed"] for line in sampled.splitlines()] == [5, 6, 7]
    raw = works("generate", finished, "--prompts", file, "--raw", *how).stdout
    alone = [works("generate", finished, "--prompt", text, "--raw", *how).stdout for text in asked]
    assert [json.loads(line)["text"] + "\n" for line in raw.splitlines()] == alone
    rows[2]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert "the prompt line 3 has 2 messages" in refused("generate", finished, "--prompts", file, "--raw")
    file.write_text('{"prompt": "hello"}\n{"prompt": 5}\n', encoding="utf-8")
    assert "line 2" in refused("generate", finished, "--prompts", file)
    for row, reason in (
        ('{"question": "q"}', "line 2: unknown shape with the keys question. Write"),
        ('{"messages": "hello"}', "line 2: 'messages' is a str, not a list of messages. Write"),
        ('{"prompt": "nice \\ud83d"}', "line 2: a prompt with text that is not UTF-8. Write"),
    ):
        file.write_text(f'{{"prompt": "hello"}}\n{row}\n', encoding="utf-8")
        assert reason in " ".join(refused("generate", finished, "--prompts", file).split())
    assert "one of the two" in refused("generate", finished)


def test_generate_ends_at_a_stop_text(finished: Path) -> None:
    heads = finished / "heads"
    asked = ("generate", heads, "--prompt", "who are you", "--dtype", "float32", "--max-new-tokens", 12)
    text = works(*asked).stdout.rstrip("\n")
    stop = next(letter for letter in text if letter.isascii() and letter.isprintable())
    assert works(*asked, "--stop", stop).stdout.rstrip("\n") == text[: text.index(stop) + 1]


def test_chat_keeps_the_conversation_and_shows_its_speed(finished: Path) -> None:
    lines = "hello\n/new\nand again\n\n"
    result = works("chat", finished / "heads", "--max-new-tokens", 6, "--system", "be brief", stdin=lines)
    assert result.stderr.count("tokens/s, τ") == 2


def test_chat_survives_a_conversation_that_has_grown_too_long(finished: Path) -> None:
    result = works("chat", finished / "heads", "--max-new-tokens", 6, stdin="word " * 2000 + "\nhello\n\n")
    assert "/new starts over" in result.stderr
    assert result.stderr.count("tokens/s, τ") == 1


def test_eval_writes_the_three_files(finished: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    asked = ("eval", finished / "heads", "--questions", questions, "--out", out, "--max-new-tokens", 6)
    works(*asked, "--limit", 1, "--dtype", "float32", "--multi-turn")
    assert {file.name for file in out.iterdir()} == {"report.html", "report.md", "results.json"}
    results = json.loads((out / "results.json").read_text())
    assert [row["id"] for row in results["per_prompt"]] == ["1", "1/2"]
    assert results["environment"]["dtype"] == "float32"
    works(*asked, "--batch-size", 2, "--temperature", 0.5, "--overwrite")


def test_a_report_names_the_heads_and_their_training(finished: Path, questions: Path, tmp_path: Path) -> None:
    asked = "--questions", questions, "--out", tmp_path / "out", "--max-new-tokens", 4, "--no-baselines"
    works("eval", finished, *asked)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results["settings"]["methods"]) == {"heads", "plain", "heads+ngram"}
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| family | medusa |" in text and "| training conversations | 12 |" in text


def test_data_show_marks_supervised_text(finished: Path, tmp_path: Path, tiny_target_folder: Path) -> None:
    assert "supervised" in works("data", "show", finished, "--index", 1).stdout
    file = finished / "data" / "conversations" / "validation.jsonl"
    assert "⟦" in works("data", "show", file).stdout
    shutil.copy(file, tmp_path / "alone.jsonl")
    assert "--target" in refused("data", "show", tmp_path / "alone.jsonl")
    assert "⟦" in works("data", "show", tmp_path / "alone.jsonl", "--target", tiny_target_folder).stdout


def test_data_and_train_are_the_first_stages_of_a_run(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    works("data", recipe, "--run-dir", folder)
    assert (folder / "data" / "states" / "train" / "manifest.json").is_file()
    assert "no heads yet" in refused("export", folder, "--out", tmp_path / "out")
    out = works("train", recipe, "--run-dir", folder).stdout
    assert out.count("done, ") == 3
    assert (folder / "train" / "best" / "heads.safetensors").is_file()


def test_plan_does_no_work(recipe: Path, tmp_path: Path) -> None:
    out = works("plan", recipe, "--run-dir", tmp_path / "run").stdout
    assert "Hidden states on disk" in out
    assert "Measured here: loading, " in out and "about" in out and "tokens of prompts in" in " ".join(out.split())
    assert not (tmp_path / "run" / "stages").exists()
    assert call("plan", recipe, "data.max_new_tokens=5000", "--run-dir", tmp_path / "run").exit_code == 2


def test_tuning_again_writes_the_heads_anew(finished: Path, heads: Path, tmp_path: Path) -> None:
    calibration = finished / "data" / "conversations" / "validation.jsonl"
    assert "--conversations" in refused("tune", heads)
    (heads / "notes.txt").touch()
    assert "would be lost: notes.txt" in refused("tune", heads, "--conversations", calibration)
    (heads / "notes.txt").unlink()
    works("tune", heads, "--conversations", calibration)
    works("generate", heads, "--prompt", "hello", "--max-new-tokens", 4)
    shutil.copytree(finished.parent, tmp_path / "runs", symlinks=True)
    run = tmp_path / "runs" / "run"
    assert "requested" in works("tune", run).stdout
    for option, value in (("--dtype", "float32"), ("--target", "elsewhere"), ("--conversations", calibration)):
        assert f"{option} is not for a run, which is tuned as its recipe says. " in refused("tune", run, option, value)
    assert f"headstart tune {run / 'heads'} --dtype" in refused("tune", run, "--dtype", "float32")


def test_export_copies_heads_that_load_alone(finished: Path, tmp_path: Path, tiny_target_folder: Path) -> None:
    works("export", finished, "--out", tmp_path / "out")
    works("generate", tmp_path / "out", "--prompt", "hello", "--max-new-tokens", 4)
    works("export", finished, "--out", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    assert "would be lost: notes.txt" in refused("export", finished, "--out", tmp_path / "mine")
    shutil.copytree(tiny_target_folder, tmp_path / "model")
    assert "would be lost" in refused("export", finished, "--out", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.json").write_text("{}")
    assert "headstart export did not write" in refused("export", finished, "--out", tmp_path / "foreign")


def test_push_can_be_tried_without_sending(finished: Path) -> None:
    out = works("push", finished / "heads", "user/name", "--private", "--dry-run").stdout
    assert "heads.safetensors" in out
    assert "Would upload 7 files" in out
    assert "user/name" in refused("push", finished / "heads", "name", "--dry-run")


def test_recipes_are_listed_and_shown(tmp_path: Path) -> None:
    assert "quickstart" in works("recipes").stdout
    (tmp_path / "mine.yaml").write_text(works("recipes", "show", "quickstart", "train.lr=0.5").stdout)
    assert "lr: 0.5" in works("recipes", "show", tmp_path / "mine.yaml").stdout
    explained = works("recipes", "show", tmp_path / "mine.yaml", "--all").stdout
    assert "train.lr\t0.5\t0.001\tPeak learning rate.\n" in explained
    assert works("recipes", "docs").stdout.startswith("# Settings of recipes\n")


# -- bad input -------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_the_nearest(recipe: Path, tmp_path: Path) -> None:
    assert "'train.lrr'. Did you mean 'lr'?" in refused("run", recipe, "train.lrr=1")
    assert "Did you mean 'num_heads'?" in refused("run", recipe, "heads.num_headz=1", "--run-dir", tmp_path / "run")
    assert "Did you mean 'medusa'?" in refused("run", recipe, "heads.family=medsua", "--run-dir", tmp_path / "run")
    assert "Did you mean 'quickstart'?" in refused("run", "quikstart")
    assert "key=value" in refused("run", recipe, "train.lr")
    assert "train.lr" in refused("run", recipe, "train.lr=-1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.loss=foo", "foo"),
        ("train.tracker=wand", "wandb"),
        ("heads.family=hydraa", "Did you mean 'hydra'?"),
        ("heads.stepss=3", "stepss"),
        ("eval.compare=[foo]", "foo"),
        ("eval.questions=gone.jsonl", "gone.jsonl"),
        ("train.start_from=gone", "gone"),
    ],
)
@pytest.mark.parametrize("begun", [True, False])
def test_refuses_mistakes(recipe: Path, finished: Path, tmp_path: Path, change: str, words: str, begun: bool) -> None:
    """A finished run stays unchanged, and a new one writes nothing."""
    folder = tmp_path / "runs" / "run"
    if begun:
        shutil.copytree(finished.parent, tmp_path / "runs", symlinks=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert words in refused("run", recipe, change, "--run-dir", folder)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_runs_are_listed_and_only_the_unused_is_freed(recipe: Path, finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished.parent, tmp_path / "runs", symlinks=True)
    listed = works("runs", "--runs", tmp_path / "runs").stdout
    assert "done" in listed and "medusa" in listed
    assert "Nothing to delete" in works("gc", "--runs", tmp_path / "runs").stdout
    (before,) = run_states(tmp_path / "runs")
    assert before.state == "done" and None not in (before.tau, before.predicted_tau, before.speedup)
    works("train", recipe, "train.steps=5", "--run-dir", tmp_path / "runs" / finished.name)
    (after,) = run_states(tmp_path / "runs")
    assert (after.state, after.tau, after.speedup) == ("train done", None, None), "the report is of the heads before"
    assert after.predicted_tau is not None
    dry = works("gc", "--runs", tmp_path / "runs", "--dry-run").stdout
    assert "heads that no run refers to" in dry
    assert dry == works("gc", "--runs", tmp_path / "runs", "--dry-run").stdout, "nothing was deleted"
    declined = call("gc", "--runs", tmp_path / "runs", stdin="n\n").stdout
    assert "Nothing was deleted" in declined
    assert "Freed" in works("gc", "--runs", tmp_path / "runs", "--yes").stdout
    assert "Nothing to delete" in works("gc", "--runs", tmp_path / "runs").stdout
    assert "No folder at" in refused("runs", "--runs", tmp_path / "none")


def test_a_whole_run_in_one_of_several_processes_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refused("run", recipe)
    assert "headstart run works in one process, and a launcher started 2." in said
    assert "--processes" in said
    assert "Leave out --processes, or the launcher" in refused("train", recipe, "--processes", 2)


def test_an_unknown_target_is_refused(recipe: Path, tmp_path: Path) -> None:
    assert "smollm2-135m" in refused("run", recipe, "target.spec=nosuch", "--run-dir", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    asked = ("run", recipe, f"target.spec={tmp_path / 'empty'}", "--run-dir", tmp_path / "run")
    assert "config.json" in refused(*asked)
    assert not (tmp_path / "run" / "data" / "conversations").exists()


def test_a_target_without_a_chat_template_is_refused(recipe: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    tiny_model("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    asked = (recipe, f"target.spec={tmp_path / 'target'}", "--run-dir", tmp_path / "run")
    assert "chat template" in refused("run", *asked)
    planned = call("plan", *asked)
    assert planned.exit_code == 2 and "Problem: " in planned.stdout and "chat template" in planned.stdout


@pytest.mark.parametrize("command", ["run", "plan", "data", "train"])
def test_a_missing_prompt_file_is_refused(recipe: Path, command: str) -> None:
    assert "gone.jsonl" in refused(command, recipe, "data.prompts=gone.jsonl")


def test_malformed_lines_are_named_by_file_and_number(recipe: Path, finished: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"turns": ["fine"]}\n{"turns": [\n')
    for asked in (
        ("run", recipe, f"eval.questions={bad}"),
        ("run", recipe, f"data.prompts={bad}", "--run-dir", tmp_path / "run"),
        ("eval", finished / "heads", "--questions", bad, "--out", tmp_path / "out"),
        ("data", "show", bad, "--target", "smollm2-135m"),
    ):
        line = refused(*asked)
        assert "bad.jsonl, line 2" in line or "bad.jsonl, line 1: not a tokenised" in line


def test_missing_files_and_folders_are_refused(finished: Path, questions: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert str(gone) in refused("eval", finished / "heads", "--questions", gone, "--out", tmp_path / "out")
    assert str(gone) in refused("eval", gone, "--questions", questions, "--out", tmp_path / "out")
    assert str(gone) in refused("generate", gone, "--prompt", "hello")
    assert str(gone) in refused("chat", gone)
    assert str(gone) in refused("data", "show", gone)
    assert str(gone) in refused("export", gone, "--out", tmp_path / "out")
    assert str(gone) in refused("push", gone, "user/name", "--dry-run")
    assert str(gone) in refused("tune", gone)
    assert "0 to 11" in refused("data", "show", finished, "--index", 12)


@pytest.mark.parametrize("name", ["heads.safetensors", "config.json", "tree.json", "calibration.json"])
def test_heads_cut_short_are_refused(heads: Path, name: str) -> None:
    file = heads / name
    file.write_bytes(file.read_bytes()[:-40])
    assert name in refused("generate", heads, "--prompt", "hello")
    file.unlink()
    assert name in refused("generate", heads, "--prompt", "hello")


def test_heads_for_another_model_are_refused(heads: Path, tmp_path: Path, tiny_target_folder: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_target_folder, other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor + 0.125 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    arguments = ("generate", heads, "--prompt", "hello", "--max-new-tokens", 4, "--target", other)
    assert "another model" in refused(*arguments)
    assert call(*arguments, "--any-target").exit_code == 0


def test_a_tree_deeper_than_the_heads_is_refused(heads: Path) -> None:
    (heads / "tree.json").write_text(json.dumps({"paths": [[0], [0, 0], [0, 0, 0]]}))
    assert "3 deep" in refused("generate", heads, "--prompt", "hello")


def test_prompts_longer_than_the_context_are_refused(finished: Path, tmp_path: Path, tiny_target: Target) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"turns": ["word " * tiny_target.max_length]}) + "\n")
    assert "context of 1024" in refused("generate", finished / "heads", "--prompt", "word " * 1024)
    assert "context of 1024" in refused("eval", finished / "heads", "--questions", long, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_too_little_disk_is_refused(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("run", recipe, "data.conversations=1000000000000", "data.cache_gigabytes=1e9", "--run-dir", tmp_path / "r")
    assert "are free" in refused(*asked)

    monkeypatch.setattr("headstart.data.conversations.building.write_split", full)
    line = refused("data", recipe, "--run-dir", tmp_path / "run")
    assert "disk is full" in line
    monkeypatch.undo()
    works("data", recipe, "--run-dir", tmp_path / "run")


def test_a_disk_that_fills_up_during_export(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)  # copytree gathers what fails into an error without a number
        line = refused("export", finished, "--out", tmp_path / "out" / "heads")
    assert "The disk is full" in line and "Free some space" in line
    monkeypatch.setattr("headstart.support.files.os.fsync", full)
    assert "The disk is full" in refused("export", finished, "--out", tmp_path / "out" / "heads")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left behind"


def test_weights_that_the_disk_cannot_hold_are_an_error_of_the_disk(tmp_path: Path, tiny_target: Target) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="Not a directory"):
        write_weights(make_heads(tiny_target), tmp_path / "file" / "heads.safetensors")


def test_unwritable_places_are_refused(finished: Path, recipe: Path, questions: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for nowhere in (Path("/proc/x"), tmp_path / "file" / "below"):
        for asked in (
            ("run", recipe, "--run-dir", nowhere),
            ("export", finished, "--out", nowhere),
            ("eval", finished / "heads", "--questions", questions, "--out", nowhere),
            ("audit", finished / "heads", "--out", nowhere),
            ("doctor", finished, "--json", nowhere / "findings.json"),
        ):
            line = refused(*asked)
            assert str(nowhere) in line or f"{nowhere.parent} (" in line, line
    assert {path.name for path in tmp_path.iterdir()} == {"file", questions.name}


@pytest.mark.parametrize("command", ["eval", "audit", "doctor"])
def test_output_folders_are_checked_before_the_work(
    finished: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("headstart.cli.heads.load_decoder", work)
    monkeypatch.setattr("headstart.doctor.subject.find_subject", work)
    heads, nowhere = finished / "heads", Path("/proc/x")
    asked = {
        "eval": ("eval", heads, "--questions", questions, "--out", nowhere),
        "audit": ("audit", heads, "--out", nowhere),
        "doctor": ("doctor", finished, "--json", nowhere / "findings.json"),
    }
    assert "Cannot write to /proc/x" in refused(*asked[command])


def test_an_earlier_report_is_not_lost(finished: Path, questions: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    measure = ("eval", finished / "heads", "--questions", questions, "--out", out, "--max-new-tokens", 4, "--limit", 1)
    works(*measure)
    before = {path: path.read_bytes() for path in out.iterdir()}
    line = refused(*measure)
    assert "already holds a report (results.json, report.md, report.html)" in line and "--overwrite" in line
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    works(*measure, "--overwrite", "--seed", 7)
    assert json.loads((out / "results.json").read_text())["settings"]["seed"] == 7
    prove = ("audit", finished / "heads", "--out", out, "--limit", 1, "--drafters", "static", "--temperature", 0)
    works(*prove)
    assert "already holds a report (audit.json, audit.md)" in refused(*prove)
    works(*prove, "--overwrite")
    (out / "numbers.json").write_text("[1, 2]")
    assert "would be lost" in refused("doctor", finished, "--json", out / "numbers.json")
    assert (out / "notes.txt").read_text() == "mine"


def test_options_out_of_range_are_refused(finished: Path, questions: Path, tmp_path: Path) -> None:
    heads = finished / "heads"
    for asked in (
        ("generate", heads, "--prompt", "hello", "--max-new-tokens", 0),
        ("generate", heads, "--prompt", "hello", "--temperature", -1),
        ("generate", heads, "--prompt", "hello", "--drafter", "medusa"),
        ("eval", heads, "--questions", questions, "--out", tmp_path, "--dtype", "int3"),
        ("nonsense",),
    ):
        result = call(*asked)
        assert result.exit_code == 2
        assert "Traceback" not in result.output
    assert "empty" in refused("generate", heads, "--prompt", "hello", "--stop", "")


def test_a_terminal_sees_one_line_and_no_traceback(recipe: Path, forks: Forks) -> None:
    """In a separate process, as a script would call it."""
    done = forks.run("-m", "headstart", "run", recipe, "train.lrr=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Error: Unknown recipe key 'train.lrr'. Did you mean 'lr'?\n"


def test_ctrl_c_says_how_to_continue(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.data.conversations.building.write_split", interrupted)
    monkeypatch.setattr(sys, "argv", ["headstart", "run", "tiny.yaml"])
    result = call("run", recipe, "--run-dir", tmp_path / "run")
    assert result.exit_code == 130
    assert "Continue with: headstart run tiny.yaml" in result.stderr
