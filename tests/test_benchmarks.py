"""The benchmark scripts, each with a budget of a few steps on the tiny target."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch

from headstart.data.conversations import Conversation, write_conversations
from headstart.errors import UserError
from headstart.pipeline.layout import CONVERSATIONS
from headstart.target import Target, load_target
from tests.hub.helpers import export

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TRAIN = "train: {batch_tokens: 256, eval_every: 2, mixed_precision: 'no'}\ntune: {widths: [1, 4]}\n"
RECIPES = {
    "medusa": f"heads: {{family: medusa, num_heads: 2, draft_vocab_size: 40}}\n{TRAIN}",
    "eagle3": f"heads: {{family: eagle3, steps: 2, draft_vocab_size: 40, tap_layers: [1, 2]}}\n{TRAIN}",
}


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark script as `python benchmarks/NAME.py` would find it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for known in ("arms", name):
        monkeypatch.delitem(sys.modules, known, raising=False)
    return __import__(name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two recipes, three questions and the conversations of a run."""
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    asked = [{"question_id": number, "category": "", "turns": [f"Count to {number}."]} for number in range(3)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    random = torch.Generator().manual_seed(0)
    for split, count in (("train", 16), ("calibration", 6)):
        texts = []
        for number in range(count):
            tokens = torch.randint(3, 60, (30,), generator=random).tolist()
            texts.append(Conversation(f"c{number}", tokens, [place > 8 for place in range(30)], []))
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


def common(place: Path, target: Path) -> list[str]:
    return ["--run", str(place / "run"), "--out", str(place / "out"), "--target", str(target), "--dtype", "float32"]


def test_families(place: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families = script("families", monkeypatch)
    asked = [str(place / "asked.jsonl"), *common(place, tiny_target_folder), "--max-new-tokens", "6", "--limit"]
    recipes = ["--families", *(str(place / f"{name}.yaml") for name in RECIPES)]
    families.main([*asked, "2", *recipes, "--steps", "3"])
    found = json.loads((place / "out" / "families.json").read_text())
    for family, read in found["families"].items():
        assert family in RECIPES and read["steps"] == 3 and read["parameters"] > 0
        for temperature in ("0", "1"):
            rows = found["questions"]["asked"][temperature]
            assert 1 <= rows[f"{family} chain"]["tau"] <= 3
            assert rows[f"{family} chain"]["over_plain"]["mean"] > 0
        assert found["questions"]["asked"]["0"][f"{family} chain"]["same_as_plain"] == 2, "float32: the same tokens"
    assert "| medusa |" in (place / "out" / "families.md").read_text()

    kept = (place / "out" / "asked-0" / "runs" / "0000.json").read_text()
    monkeypatch.setattr(sys.modules["arms"], "train", None)  # whoever trains again fails
    families.main([*asked, "3", *recipes, "--steps", "3"])
    assert (place / "out" / "asked-0" / "runs" / "0000.json").read_text() == kept
    assert (place / "out" / "asked-0" / "runs" / "0002.json").is_file()
    with pytest.raises(UserError, match="made from other settings"):
        families.main([*asked, "3", *recipes, "--steps", "4"])


def test_learning_curve(place: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--parts", "0.5", "1", "--epochs", "1", "2", "--questions", str(place / "asked.jsonl")]
    arguments += ["--max-new-tokens", "12", "--chain", "2", *common(place, tiny_target_folder)]
    script("learning_curve", monkeypatch).main([str(place / "eagle3.yaml"), *arguments])
    cells = json.loads((place / "out" / "curve.json").read_text())["cells"]
    assert [(cell["part"], cell["epochs"]) for cell in cells] == [(0.5, 1), (1.0, 1), (0.5, 2), (1.0, 2)]
    assert [cell["conversations"] for cell in cells] == [8, 16, 8, 16]
    assert [cell["epochs"] for cell in cells] == [1, 1, 2, 2]
    assert cells[1]["supervised_tokens"] == 2 * cells[0]["supervised_tokens"] == 16 * 21
    assert all(1 <= cell["questions"]["tau"] <= 3 for cell in cells)
    assert (place / "out" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "| 336 |" in (place / "out" / "curve.md").read_text()


def test_published_recipe(place: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [str(place / "asked.jsonl"), "--recipe", str(place / "eagle3.yaml"), "--steps", "2", "--lrs", "1e-3"]
    arguments += ["--max-new-tokens", "12", "--chain", "2", *common(place, tiny_target_folder)]
    script("published_recipe", monkeypatch).main(arguments)
    arms = json.loads((place / "out" / "published.json").read_text())["arms"]
    assert list(arms) == ["ours", "published, lr 0.001"]
    (ours,), (published,) = arms.values()
    assert ours["parameters"] == published["parameters"] and ours["steps"] == published["steps"] == 2
    assert set(ours["judged"]) == {"asked", "held-out conversations"}
    assert "ours accepts" in (place / "out" / "published.md").read_text()


def test_prompt_breadth(place: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.data.selfprompt.acceptable", lambda text, special: True)
    # A random model seldom writes the token that ends a turn.
    monkeypatch.setattr(Target, "end_tokens", frozenset(range(0, 300, 9)))
    arguments = [str(place / "asked.jsonl"), "--recipe", str(place / "eagle3.yaml"), "--steps", "2", "--limit", "2"]
    arguments += ["--max-new-tokens", "12", "--chain", "2", "--out", str(place / "out"), "--dtype", "float32"]
    arguments += ["--target", str(tiny_target_folder), "--data-minutes", "5", "--set"]
    arguments += ["data.conversations=6", "data.calibration=4", "data.batch_size=8", "data.max_new_tokens=16"]
    script("prompt_breadth", monkeypatch).main(arguments)
    arms = json.loads((place / "out" / "breadth.json").read_text())
    assert list(arms) == ["none", "broad"]
    for found in arms.values():
        assert found["conversations"] == 6 and 6 <= found["answer_tokens"] <= 6 * 16 and found["steps"] == 2
        assert 1 <= found["questions_chain"]["tau"] <= 3
        assert 1 <= found["questions_tree_tau"] <= 3
    asked = {
        arm: (place / "out" / arm / CONVERSATIONS / "train.jsonl").read_text().splitlines() for arm in ("none", "broad")
    }
    assert asked["none"] != asked["broad"]
    monkeypatch.setattr(sys.modules["arms"], "train", None)  # whoever trains again fails
    sys.modules["prompt_breadth"].main(arguments)
    assert json.loads((place / "out" / "breadth.json").read_text()) == arms


def test_never_slower(place: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    never_slower = script("never_slower", monkeypatch)
    export(place / "heads", Target(tiny_target.model, tiny_target.tokenizer, "tiny"))
    monkeypatch.setattr(never_slower, "options_target", lambda *_: tiny_target)
    never_slower.main([str(place / "heads"), "--quick", "--out", str(place / "slower.json")])
    rows = json.loads((place / "slower.json").read_text())["rows"]
    assert len(rows) == 2 * len(never_slower.CONDITIONS)
    assert {row["tokens"] for row in rows} == {8} and not any(row["drafter_errors"] for row in rows)
    known = [dict(row, over_plain={"heads": 0.9, "heads+ngram": 1.2, "plain again": 1.01}) for row in rows[:1]]
    assert "1 of 2 cells are at 0.97 or above" in never_slower.report(known)
    assert "Below: as tuned, batch 1, heads: 0.900." in never_slower.report(known)


def test_same_bits(place: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits = script("same_bits", monkeypatch)
    export(place / "heads", load_target(str(tiny_target_folder), dtype="float32", device="cpu"))
    same_bits.main([str(place / "heads"), "--quick", "--draft", "on", "--out", str(place / "bits.json")])
    rows = json.loads((place / "bits.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * (1 + len(same_bits.METHODS)) and not any(row["drafter_errors"] for row in rows)
    for row in rows:
        assert row["exact"] == "tokens" or row["outputs_that_differ"] == row["logit_rows"]["differ"] == 0
    assert any(row["logit_rows"]["differ"] for row in rows), "without the bits rounding differs"
    broken = [dict(rows[0], outputs_that_differ=1)]
    assert "Not the plain loop's words: plain, batch 1." in same_bits.report(broken)
