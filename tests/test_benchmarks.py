"""The benchmark scripts, each with a budget of a few steps on the tiny target."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from headstart.data.conversations.records import Conversation, write_conversations
from headstart.errors import UserError
from headstart.kernels.prepacked import in_panels
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.recipes.recipe import load_recipe
from tests.hub.helpers import export

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TRAIN = "train: {batch_tokens: 256, eval_every: 2, mixed_precision: 'no'}\ntune: {widths: [1, 4]}\n"
RECIPES = {
    "medusa": f"heads: {{family: medusa, num_heads: 2, draft_vocab_size: 40}}\n{TRAIN}",
    "eagle3": f"heads: {{family: eagle3, draft_steps: 2, draft_vocab_size: 40, aux_layers: [1, 2]}}\n{TRAIN}",
}


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark script as `python benchmarks/NAME.py` would find it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for known in ("arms", "record", "tables", name):
        monkeypatch.delitem(sys.modules, known, raising=False)
    return __import__(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder with two recipes, three questions and the conversations of a run."""
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    asked = [{"question_id": number, "category": "", "turns": [f"Count to {number}."]} for number in range(3)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    random = torch.Generator().manual_seed(0)
    for split, count in (("train", 16), ("validation", 6)):
        texts = []
        for number in range(count):
            tokens = torch.randint(3, 60, (30,), generator=random).tolist()
            texts.append(Conversation(f"c{number}", tokens, [index > 8 for index in range(30)], []))
        write_conversations(tmp_path / "run" / "data" / "conversations" / f"{split}.jsonl", texts)
    return tmp_path


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_a_script_finds_what_it_imports_and_says_what_it_does(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "arms", raising=False)
    for name in ("economize", "economize.techniques", "economize.techniques.eagle3", "economize.train"):
        monkeypatch.setitem(sys.modules, name, MagicMock())  # another library, in an environment of its own
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    if 'if __name__ == "__main__"' not in file.read_text():
        runpy.run_path(str(file), run_name=file.stem)
        return
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def written_by(name: str, folder: Path) -> dict[str, Any]:
    """What a benchmark wrote: the figures, and all that says where they come from."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert found["what"] and found["rows"] and found["machine"]["threads"] and found["date"]
    assert found["command"].startswith(f"python benchmarks/{name}.py ")
    assert found["commit"] or found["unknown"]["commit"]
    return found


def common(path: Path, target: Path) -> list[str]:
    return ["--run", str(path / "run"), "--out", str(path / "out"), "--target", str(target), "--dtype", "float32"]


def test_families(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families = script("families", monkeypatch)
    asked = [str(path / "asked.jsonl"), *common(path, tiny_target_folder), "--max-new-tokens", "6", "--limit"]
    recipes = ["--families", *(str(path / f"{name}.yaml") for name in RECIPES)]
    families.main([*asked, "2", *recipes, "--steps", "3"])
    written = written_by("families", path / "out")
    assert [row["family"] for row in written["rows"]] == list(RECIPES)
    assert all(row["asked_t1"]["over_plain"]["mean"] > 0 for row in written["rows"])
    found = written["details"]
    for family, read in found["families"].items():
        assert family in RECIPES and read["steps"] == 3 and read["parameters"] > 0
        for temperature in ("0", "1"):
            rows = found["questions"]["asked"][temperature]
            assert 1 <= rows[f"{family} chain"]["tau"] <= 3
            assert rows[f"{family} chain"]["over_plain"]["mean"] > 0
        assert found["questions"]["asked"]["0"][f"{family} chain"]["same_as_plain"] == 2, "float32: the same tokens"
    assert "| medusa |" in (path / "out" / "families.md").read_text()

    kept = (path / "out" / "asked-0" / "runs" / "0000.json").read_text()
    monkeypatch.setattr(sys.modules["arms"], "train", None)  # whoever trains again fails
    families.main([*asked, "3", *recipes, "--steps", "3"])
    assert (path / "out" / "asked-0" / "runs" / "0000.json").read_text() == kept
    for temperature in ("0", "1"):  # each file of questions at each temperature has a folder of its own
        assert (path / "out" / f"asked-{temperature}" / "runs" / "0002.json").is_file()
    with pytest.raises(UserError, match="made from other settings"):
        families.main([*asked, "3", *recipes, "--steps", "4"])


def test_learning_curve(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--parts", "0.5", "1", "--epochs", "1", "2", "--questions", str(path / "asked.jsonl")]
    arguments += ["--max-new-tokens", "12", "--chain", "2", *common(path, tiny_target_folder)]
    script("learning_curve", monkeypatch).main([str(path / "eagle3.yaml"), *arguments])
    written = written_by("learning_curve", path / "out")
    cells = written["details"]["cells"]
    assert [row["part"] for row in written["rows"]] == [cell["part"] for cell in cells]
    assert [(cell["part"], cell["epochs"]) for cell in cells] == [(0.5, 1), (1.0, 1), (0.5, 2), (1.0, 2)]
    assert [cell["conversations"] for cell in cells] == [8, 16, 8, 16]
    assert [cell["epochs"] for cell in cells] == [1, 1, 2, 2]
    assert cells[1]["supervised_tokens"] == 2 * cells[0]["supervised_tokens"] == 16 * 21
    assert all(1 <= cell["questions"]["tau"] <= 3 for cell in cells)
    assert (path / "out" / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "| 336 |" in (path / "out" / "learning_curve.md").read_text()


def test_published_recipe(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(path / "asked.jsonl"), "--recipe", str(path / "eagle3.yaml"), "--steps", "2", "--lrs", "1e-3"]
    arguments += ["--max-new-tokens", "12", "--chain", "2", *common(path, tiny_target_folder)]
    script("published_recipe", monkeypatch).main(arguments)
    written = written_by("published_recipe", path / "out")
    arms = written["details"]["arms"]
    assert [row["recipe"] for row in written["rows"]] == list(arms)
    assert all(0 <= row["asked"]["accepted_per_round"] <= 2 for row in written["rows"])
    assert list(arms) == ["ours", "published, lr 0.001"]
    (ours,), (published,) = arms.values()
    assert ours["parameters"] == published["parameters"] and ours["steps"] == published["steps"] == 2
    assert set(ours["judged"]) == {"asked", "validation"}
    assert "ours accepts" in (path / "out" / "published_recipe.md").read_text()


def test_arrangements(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(path / "asked.jsonl"), "--recipe", str(path / "eagle3.yaml"), "--steps", "2"]
    arguments += ["--max-new-tokens", "12", "--chain", "2", *common(path, tiny_target_folder)]
    script("arrangements", monkeypatch).main(arguments)
    rows = written_by("arrangements", path / "out")["rows"]
    assert len(rows) == 4 and all(row["steps"] == 2 and row["untrained"]["tau"] >= 1 for row in rows)
    assert len({row["parameters"] for row in rows[1:]}) == 1, "alike but for what they read and add to"
    assert all(1 <= row[where]["tau"] <= 3 for row in rows for where in ("asked", "validation"))
    assert "| layer 2, plain residual |" in (path / "out" / "arrangements.md").read_text()


def test_never_slower(path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    never_slower = script("never_slower", monkeypatch)
    export(path / "heads", Target(tiny_target.model, tiny_target.tokenizer, "tiny"))
    monkeypatch.setattr(never_slower, "options_target", lambda *_: tiny_target)
    never_slower.main([str(path / "heads"), "--quick", "--out", str(path / "never_slower.json")])
    rows = written_by("never_slower", path)["rows"]
    assert len(rows) == 2 * len(never_slower.CONDITIONS)
    assert {row["tokens"] for row in rows} == {8} and not any(row["drafter_errors"] for row in rows)
    over_plain = {"heads": 0.9, "heads+ngram": 1.2, "always": 0.8, "plain again": 1.01}
    known = [dict(row, over_plain=over_plain) for row in rows[:1]]
    assert "1 of 2 cells are at 0.97 or above" in never_slower.report(known)
    assert "Below: as tuned, batch 1, heads: 0.900." in never_slower.report(known)
    assert "Below: as tuned, batch 1, always" not in never_slower.report(known), "it is not asked to know better"


RUN_OF_KILLS = """
import pathlib
import numpy
from safetensors.numpy import save_file
for run in ("tiny", "hydra", "eagle3"):
    (heads := pathlib.Path("runs", run, "heads")).mkdir(parents=True, exist_ok=True)
    save_file({"weight": numpy.ones(2)}, heads / "heads.safetensors")
    (report := pathlib.Path("runs", run, "report")).mkdir(exist_ok=True)
    (report / "report.html").write_text("")
root = pathlib.Path("runs/artifacts")
(parts := root / "conversations" / "a" / "batches").mkdir(parents=True, exist_ok=True)
(part := parts / "00000-train.jsonl").exists() or part.write_text('{}\\n{"id": "0"}\\n')
(states := root / "states" / "a").mkdir(parents=True, exist_ok=True)
shard = states / "shard-0.safetensors"
shard.exists() or save_file({"0": numpy.ones(1)}, shard, metadata={"taps": "[1]", "keys": '["0"]'})
"""
"""What the commands leave behind, in no time."""


def test_kills(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = script("kills", monkeypatch)
    monkeypatch.setattr(kills, "COMMANDS", kills.COMMANDS[:1])

    def start(folder: Path, recipe: Path, command: tuple[str, ...], code: str = RUN_OF_KILLS) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        return subprocess.Popen([sys.executable, "-c", code], cwd=folder)

    monkeypatch.setattr(kills, "start", start)
    kills.main(["--out", str(path / "out"), "--kills", "0"])
    written = written_by("kills", path / "out")
    assert written["rows"] == [{"command": "run RECIPE", "kills": 0, "files_lost": 0}]
    assert written["details"] == {"twice": 0, "different": 0, "reports": 3}
    assert load_recipe(str(path / "out" / "tiny.yaml")).heads.family == "medusa"

    endless = partial(start, code="import threading; threading.Event().wait()")
    monkeypatch.setattr(kills, "start", endless)
    assert kills.disturbed(path / "out" / "killed", path, ("run",), 0.0), "it was running, and is killed"
    before = kills.made(path / "out" / "killed")
    assert len(before) == 2
    (part,) = (path / "out" / "killed").rglob("*.jsonl")
    shutil.copy(part, part.with_name("00000-heldout.jsonl"))
    assert kills.missing(before, kills.made(path / "out" / "killed"))[0] == []
    assert kills.compare(path / "out" / "calm", path / "out" / "killed")["twice"] == 2, "a number and a conversation"
    part.unlink()
    assert kills.missing(before, kills.made(path / "out" / "killed"))[0] == [str(part.relative_to(part.parents[3]))]


ECONOMIZE = """
import json, pathlib, sys
action, folder = sys.argv[2], pathlib.Path(sys.argv[3])
if action == "train":
    out = folder / "theirs" / sys.argv[sys.argv.index("--name") + 1]
    out.mkdir(parents=True, exist_ok=True)
    seconds = {"seconds": 1000.0, "steps": 2, "parameters": 1000, "tokens_a_step": 64.0}
    (out / "result.json").write_text(json.dumps(seconds))
else:
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"tokens": [5, 6, 7], "seconds": 0.5, "rounds": [[2, 1], [2, 0]]}), flush=True)
"""
"""The other half, which needs another library, as far as this one can tell."""


def test_beside_economize(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = script("beside_economize", monkeypatch)
    monkeypatch.setattr(beside, "budget", lambda minutes=None, steps=None: ["train.steps=2", "train.minutes=null"])
    (python := path / "python").write_text(f"#!{sys.executable}\n{ECONOMIZE}")
    python.chmod(0o755)
    arguments = [str(path / "asked.jsonl"), "--their-python", str(python), "--recipe", str(path / "eagle3.yaml")]
    arguments += ["--vocabulary", "40", "--max-new-tokens", "6", "--limit", "2", "--chain", "2", "--theirs", "tuned"]
    beside.main([*arguments, *common(path, tiny_target_folder)])
    rows = {row["name"]: row for row in written_by("beside_economize", path / "out")["rows"]}
    assert rows["economize tuned, 3 drafts"]["accepted_per_round"] == 0.5
    assert rows["ours, same steps, chain"]["over_their_plain"]["mean"] > 0
    assert (path / "out" / "conversations.jsonl").read_text().count("\n") == 16
    assert "their tokens/s" in (path / "out" / "beside_economize.md").read_text()
    monkeypatch.setattr(sys.modules["arms"], "train", None)  # whoever trains again fails
    python.write_text("")
    with pytest.raises(OSError, match="Exec format"):
        beside.main([*arguments, *common(path, tiny_target_folder)])  # its training is kept; it is asked again


def test_beside_economize_theirs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def example(tokens: torch.Tensor, mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(input_ids=tokens, mask=mask)

    def fit(model: Any, data: list[Any], steps: int, **_: Any) -> SimpleNamespace:
        assert [one.mask.tolist() for one in data] == [[0, 1, 1, 0]], "of the token before the one to predict"
        history = [{"time": 2.0 * step, "accuracy": 0.5} for step in range(steps)]
        return SimpleNamespace(history=history, steps=steps, losses=[1.0] * steps)

    model = MagicMock(technique_parameters=lambda: [torch.ones(3)])
    model.decode = lambda *_, **__: SimpleNamespace(tokens=torch.tensor([5, 6]), acceptance=[[2, 1]])
    library = MagicMock(__version__="0", apply=lambda *_: model, load=lambda *_: model)
    modules = {
        "economize": library,
        "economize.techniques": MagicMock(),
        "economize.techniques.eagle3": MagicMock(),
        "economize.train": SimpleNamespace(Example=example, fit=fit),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    theirs = script("beside_economize_theirs", monkeypatch)
    monkeypatch.setattr(theirs, "load", lambda *_: model)
    (path / "vocabulary.json").write_text("[1, 2, 3]")
    (path / "conversations.jsonl").write_text('{"tokens": [1, 2, 3, 4], "supervised": [false, false, true, true]}\n')
    (path / "theirs" / "defaults").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["theirs", "train", str(path), "--minutes", "1", "--warmup", "0.1"])
    theirs.main()
    result = json.loads((path / "theirs" / "defaults" / "result.json").read_text())
    assert result["steps"] == 30, "a minute of steps of two seconds"
    assert result["settings"]["warmup_steps"] == 3 and result["parameters"] == 3 and result["tokens_a_step"] == 32

    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["theirs", "serve", str(path)])
    monkeypatch.setattr(sys, "stdin", ['{"tokens": [1], "max_new_tokens": 2, "cycle_length": 3, "ends": [2]}'])
    theirs.main()
    ready, answer = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert ready == {"ready": True}
    assert answer["tokens"] == [5, 6] and answer["rounds"] == [[2, 1]] and answer["seconds"] >= 0


def test_a_report_becomes_a_results_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, tables = script("record", monkeypatch), script("tables", monkeypatch)
    judged = {"prompts": 3, "count": 1, "unexplained": 0}
    row = dict.fromkeys(record.OF_A_REPORT) | {"tokens_per_second": 20.0, "divergences": judged}
    row |= {"speedup_vs_plain": {"mean": 1.0, "low": 1.0, "high": 1.0}, "round_ms": {"verify": 2.0, "host": 0.5}}
    rows = [row | {"name": name} for name in ("heads", "plain", "ngram")]
    machine = {"cpu": "A", "threads": 1, "date": "2026-01-02T00:00:00+00:00"}
    report = {"compare": rows, "environment": machine, "settings": dict.fromkeys(record.SETTINGS, 1)}
    (path / "results.json").write_text(json.dumps(report))
    record.main([str(path / "results.json"), str(path / "quickstart.json"), "--what", "Three prompts."])
    found = json.loads((path / "quickstart.json").read_text())
    assert found["machine"] == {"cpu": "A", "threads": 1} and found["date"].startswith("2026-01-02")
    assert found["unknown"]["command"] == "not given to record.py"
    columns = ["name", "tokens_per_second", "speedup_vs_plain", "round_total_ms", "outputs_different"]
    text = tables.figures(found["rows"], columns)
    assert text.endswith(
        "| heads | 20.0 | 1.00x (1.00-1.00) | 2.5 | 1 |\n"
        "| ngram | 20.0 | 1.00x (1.00-1.00) | 2.5 | 1 |\n"
        "| plain loop | 20.0 |  | 2.5 |  |"
    )


@pytest.mark.skipif(not in_panels(torch.zeros(32, 32)), reason="C for AVX2 and AVX-512")
def test_same_bits(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits = script("same_bits", monkeypatch)
    export(path / "heads", load_target(str(tiny_target_folder), dtype="float32", device="cpu"))
    same_bits.main([str(path / "heads"), "--quick", "--draft", "on", "--out", str(path / "bits.json")])
    rows = json.loads((path / "bits.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * (1 + len(same_bits.METHODS)) and not any(row["drafter_errors"] for row in rows)
    for row in rows:
        assert row["exact"] == "tokens" or row["outputs_that_differ"] == row["logit_rows"]["differ"] == 0
    broken = [dict(rows[0], outputs_that_differ=1)]
    assert "Not the plain loop's words: plain, batch 1." in same_bits.report(broken)
