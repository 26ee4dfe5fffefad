"""Smoke tests of the benchmark scripts on the tiny target."""

from __future__ import annotations

import argparse
import io
import json
import random
import runpy
import socket
import sys
import tarfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from headstart.data.conversations.records import Conversation, write_conversations
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions
from headstart.drafters.heads import HeadDrafter
from headstart.errors import UserError
from headstart.model.loading import load_target
from headstart.model.model import Target
from headstart.tree.tree import TreeShape
from headstart.tuning.acceptance import Text
from tests.hub.helpers import export, make_heads

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
TRAIN = "train: {batch_tokens: 256, eval_every: 2, mixed_precision: 'no'}\ntune: {widths: [1, 4]}\n"
RECIPES = {
    "medusa": f"heads: {{family: medusa, num_heads: 2, draft_vocab_size: 40}}\n{TRAIN}",
    "eagle3": f"heads: {{family: eagle3, draft_steps: 2, draft_vocab_size: 40, aux_layers: [1, 2]}}\n{TRAIN}",
}


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a benchmark script as `python benchmarks/NAME.py` does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for known in ("record", "tables", name):
        monkeypatch.delitem(sys.modules, known, raising=False)
    return __import__(name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Folder with two recipes, three questions and the conversations of a run."""
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    asked = [{"question_id": number, "category": "", "turns": [f"Count to {number}."]} for number in range(3)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 16), ("validation", 6)):
        texts = []
        for number in range(count):
            tokens = torch.randint(3, 60, (30,), generator=generator).tolist()
            texts.append(Conversation(f"c{number}", tokens, [index > 8 for index in range(30)], []))
        write_conversations(tmp_path / "run" / "data" / "conversations" / f"{split}.jsonl", texts)
    return tmp_path


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_scripts_import_and_print_their_usage(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(sys, "argv", [str(file), "--help"])
    if 'if __name__ == "__main__"' not in file.read_text():
        runpy.run_path(str(file), run_name=file.stem)
        return
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def written_by(name: str, folder: Path) -> dict[str, Any]:
    """Read a results file and check its provenance."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert found["what"] and found["rows"] and found["machine"]["threads"] and found["date"]
    assert found["command"].startswith(f"python benchmarks/{name}.py ")
    assert found["commit"] or found["unknown"]["commit"]
    return found


def test_families(path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families = script("families", monkeypatch)
    asked = [str(path / "asked.jsonl"), "--run", str(path / "run"), "--out", str(path / "out")]
    asked += ["--target", str(tiny_target_folder), "--dtype", "float32", "--max-new-tokens", "6", "--limit"]
    recipes = ["--families", *(str(path / f"{name}.yaml") for name in RECIPES)]
    families.main([*asked, "2", *recipes, "--steps", "3"])
    rows = written_by("families", path / "out")["rows"]
    assert [row["family"] for row in rows] == list(RECIPES)
    for row in rows:
        assert row["steps"] == 3 and row["parameters"] > 0 and row["draft_ms"] > 0
        for asked_of in (row["asked_greedy"], row["asked_t1"]):
            assert 1 <= asked_of["chain_tau"] <= 3 and asked_of["drafter_error"] is None
            assert asked_of["over_plain"]["mean"] > 0 and asked_of["over_transformers"]["mean"] > 0
        assert row["asked_greedy"]["same_as_plain"] == 2, "float32: the same tokens"

    kept = (path / "out" / "asked-0" / "runs" / "0000.json").read_text()
    monkeypatch.setattr(families, "train", None)  # training again fails
    families.main([*asked, "3", *recipes, "--steps", "3"])
    assert (path / "out" / "asked-0" / "runs" / "0000.json").read_text() == kept
    for temperature in ("0", "1"):  # each file of questions at each temperature has its own folder
        assert (path / "out" / f"asked-{temperature}" / "runs" / "0002.json").is_file()
    with pytest.raises(UserError, match="made from other settings"):
        families.main([*asked, "3", *recipes, "--steps", "4"])


def test_never_slower(path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    never_slower = script("never_slower", monkeypatch)
    export(path / "heads", Target(tiny_target.model, tiny_target.tokenizer, "tiny"))
    monkeypatch.setattr(never_slower, "load", lambda *_: tiny_target)
    never_slower.main([str(path / "heads"), "--quick", "--out", str(path / "never_slower.json")])
    rows = written_by("never_slower", path)["rows"]
    assert [row["condition"] for row in rows] == [condition.name for condition in never_slower.CONDITIONS]
    for row in rows:
        assert row["tokens"] == 8 and row["drafter_errors"] == {"1": [], "2": []}
        assert all(row["over_plain"][batch]["heads"] > 0 for batch in ("1", "2"))
    over_plain = {"1": {"heads": 0.9, "heads+ngram": 1.2, "always": 0.8, "plain again": 1.01}}
    known = [dict(rows[0], over_plain=over_plain, drafter_errors={"1": ["no drafts"]})]
    assert "1 of 2 cells are at 0.97 or above" in never_slower.report(known)
    assert "Below: as tuned, batch 1, heads: 0.900." in never_slower.report(known)
    assert "Below: as tuned, batch 1, always" not in never_slower.report(known), "no bar for drafting every round"
    assert "Failed: as tuned: no drafts" in never_slower.report(known)


ENGINE = """
import os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})
    HTTPServer(("127.0.0.1", int(sys.argv[2])), BaseHTTPRequestHandler).serve_forever()
words = [sys.executable, "-c", os.environ["ENGINE"], "--port", os.environ["PORT"]]
subprocess.Popen(words, start_new_session=True)
time.sleep(600)
"""
"""A command with an engine in a session of its own, and the engine's worker, which has another environment."""


def test_one_command(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_command = script("one_command", monkeypatch)
    monkeypatch.setattr(one_command, "GONE_SECONDS", 0.5)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PORT", str(port := free.getsockname()[1]))
    monkeypatch.setenv("ENGINE", ENGINE)
    with closing(one_command.Command([sys.executable, "-c", ENGINE], path / "folder" / "run", 20)) as command:
        assert command.kill_engine() == port
        with one_command.occupied(port), socket.create_connection(("127.0.0.1", port)):
            command.process.kill()
            with pytest.raises(one_command.Failed, match=r"left running: .*python"):
                command.check_gone()
        with pytest.raises(one_command.Failed, match=r"run-00\.log ends \(-9\) without this: more batches than 0"):
            command.until(lambda: one_command.batches(command.run), "more batches than 0")
    assert command.check_gone() < 0.5


def test_record_converts_a_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_engine_setup_downloads_again_after_an_interrupted_unpacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = script("engine_setup", monkeypatch)
    packed, name = io.BytesIO(), setup.LLAMA_CPP.replace("-", "_").replace("==", "-")
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file in ("CMakeLists.txt", "src/last.cpp"):
            entry = tarfile.TarInfo(f"{name}/vendor/llama.cpp/{file}")
            entry.size = 100_000
            archive.addfile(entry, io.BytesIO(random.Random(0).randbytes(entry.size)))
    whole = packed.getvalue()
    arriving = iter((whole[: len(whole) * 2 // 3], whole))

    def fetched(*words: str | Path) -> None:
        (Path(words[words.index("--dest") + 1]) / f"{name}.tar.gz").write_bytes(next(arriving))

    monkeypatch.setattr(setup, "run", fetched)
    with pytest.raises((EOFError, tarfile.ReadError)):
        setup.sources(tmp_path)
    assert (setup.sources(tmp_path) / "vendor/llama.cpp/src/last.cpp").stat().st_size == 100_000
    assert setup.sources(tmp_path).parent == tmp_path, "existing sources are kept"
    assert list(tmp_path.iterdir()) == [tmp_path / name], "no leftovers"


def test_engine_replay_and_decoding_accept_equally(tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay the decoder's own texts, including their ends."""
    engines, target = script("engines", monkeypatch), load_target(str(tiny_target_folder), "float32")
    prompts = [[5, 6, 7], [9, 11], [4, 8, 15, 16]]
    plain = DecodeLoop(target).generate(prompts, DecodeOptions(25))
    often = Counter(token for answer in plain for token in answer.tokens).most_common(2)
    heads = make_heads(target, num_heads=3, draft_vocab_size=2)
    heads.set_draft_vocabulary(torch.tensor([token for token, _ in sorted(often)]))
    chain = HeadDrafter(heads, TreeShape.chain(3))
    counted = engines.ours(target, chain, prompts, 25)
    written = DecodeLoop(target, chain).generate(prompts, DecodeOptions(25, draft="on"))
    texts = [Text.of(prompt, list(answer.tokens)) for prompt, answer in zip(prompts, written, strict=True)]
    assert counted["our_accepted_per_round"] > 0, "otherwise the comparison is empty"
    assert engines.replayed(target, heads, texts, 3) == pytest.approx(counted["our_accepted_per_round"])


def test_busy_core(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker runs in this process, since a second one would import torch again."""
    benchmark = script("busy_core", monkeypatch)
    export(tmp_path / "heads", load_target(str(tiny_target_folder)))
    methods, settings = benchmark.METHODS, benchmark.SETTINGS
    asked = [{"setting": setting, "method": method, "prompt": 0} for setting in settings for method in methods]
    requests = "".join(json.dumps(row) + "\n" for row in ({}, *asked))
    monkeypatch.setattr("sys.stdin", io.StringIO(requests))
    threads = torch.get_num_threads()
    benchmark.main([str(tmp_path / "heads"), "--quick", "--worker"])
    torch.set_num_threads(threads)
    said, *texts = map(json.loads, capsys.readouterr().out.splitlines()[-1 - len(asked) :])
    assert said["device"] == "cpu" and all(text["tokens"] == 8 and text["seconds"] > 0 for text in texts)

    def answer(worker: str, request: dict[str, Any]) -> dict[str, float]:
        return {"seconds": {"free cores": 1.1, "one thread": 1.0}.get(request["setting"], 2.0), "tokens": 8}

    monkeypatch.setattr(benchmark, "ask", answer)
    workers = {name: name for name in benchmark.SETTINGS}
    rows = list(benchmark.measure("quiet", workers, argparse.Namespace(prompts=1, repeats=4)))
    assert [row["method"] for row in rows] == list(methods)
    assert all(row["over_best_fixed"] == pytest.approx(1 / 1.1) for row in rows)
