"""The benchmark scripts that need no training, each with next to nothing to do."""

from __future__ import annotations

import argparse
import io
import json
import random
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.data.conversations.records import Conversation, write_conversations
from headstart.decode.loop import DecodeLoop
from headstart.decode.options import DecodeOptions, SamplingOptions
from headstart.decode.verify import SamplingVerifier
from headstart.drafters.heads import HeadDrafter
from headstart.heads.io import save_heads
from headstart.model.loading import load_target
from headstart.model.model import TargetOutput
from headstart.support.files import read_json, write_json, write_jsonl
from headstart.tree.tree import Drawn, Tree, TreeBatch, TreeShape
from headstart.tuning.acceptance import Text, measure_drafts
from tests.hub.helpers import export, make_heads
from tests.test_benchmarks import script, written_by
from tests.tiny import tiny_model


def test_device_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a target of one layer: every other one costs the stand-in device seconds."""
    out, benchmark = tmp_path / "waits.json", script("device_waits", monkeypatch)
    monkeypatch.setattr(benchmark, "tiny_model", lambda kind, **sizes: tiny_model(kind, **{**sizes, "layers": 1}))
    benchmark.main(["--families", "medusa", "--rows", "2", "--tokens", "8", "--where", "--out", str(out)])
    rounds = read_json(out)["rows"]
    assert [(row["drafter"], row["temperature"]) for row in rounds] == [
        (drafter, temperature) for drafter in ("none", "ngram", "medusa", "medusa+ngram") for temperature in (0.0, 1.0)
    ]
    assert all(1 <= row["waits"]["mean"] <= row["waits"]["max"] for row in rounds)


def test_sampling_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "step.json"
    arguments = ["--rows", "2", "--vocab", "300", "--repeats", "1", "--rules", "top_k", "greedy_draft"]
    script("sampling_step", monkeypatch).main([*arguments, "--out", str(out)])
    assert len(read_json(out)["rows"]) == 4


def test_forward(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "forward.json"
    arguments = ["--target", str(tiny_target_folder), "--batches", "1", "--widths", "1", "4", "--repeats", "1"]
    script("forward", monkeypatch).main([*arguments, "--context", "16", "--dtype", "float32", "--out", str(out)])
    assert [row["width"] for row in read_json(out)["rows"]] == [1, 4]


def test_an_engines_sources_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setup that ended while it unpacked is no source to build from: the next one fetches it anew."""
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
    assert setup.sources(tmp_path).parent == tmp_path, "what is there is kept"
    assert list(tmp_path.iterdir()) == [tmp_path / name], "nothing else is left"


def test_a_replay_accepts_what_decoding_does(tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the texts that our decoder writes, the ends of texts included."""
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
    assert counted["our_accepted_per_round"] > 0, "else nothing is compared"
    assert engines.replayed(target, heads, texts, 3) == pytest.approx(counted["our_accepted_per_round"])


def test_writing(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing = script("writing", monkeypatch)

    def here(arm: str, source: Path, options: argparse.Namespace) -> Any:
        return json.loads(json.dumps(writing.measured(argparse.Namespace(**{**vars(options), "only": arm}))))

    monkeypatch.setattr(writing, "apart", here)
    out = tmp_path / "writing.json"
    sizes = ["--prompts", "3", "--batch", "2", "--tokens", "8", "--longest", "40", "--dtype", "float32"]
    writing.main(["--target", str(tiny_target_folder), *sizes, "--out", str(out)])
    rows = read_json(out)["rows"]
    assert [(row["writer"], row["same_answers"]) for row in rows] == [("ours", 1.0), ("transformers", 1.0)]


def test_plan_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with what; the commands themselves are not run."""
    module = script("plan_accuracy", monkeypatch)
    stages = [stage for command in module.COMMANDS.values() for stage in command]

    def watched(command: list[str], log: Path) -> dict[str, float]:
        run = Path(command[command.index("--run-dir") + 1])
        if "plan" in command:
            plan = {"seconds": dict.fromkeys(stages, 3.0), "memory": dict.fromkeys(stages, 1500)}
            write_json(Path(command[command.index("--json") + 1]), {**plan, "disk": dict.fromkeys(stages, 600)})
        for stage in stages:
            write_json(run / "stages" / f"{stage}.json", {"seconds": 4.0})
        for kind in ("states", "heads", "exports", "conversations"):
            made = run.parent / "artifacts" / kind / "a" / "file"
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_bytes(b"x" * 500)
            made.with_name("again").unlink(missing_ok=True)
            made.with_name("again").hardlink_to(made)
        write_json(run / "train" / "result.json", {"elapsed_seconds": 12.0})
        return {"bytes": 1000.0, "busy": 0.5}

    monkeypatch.setattr(module, "_watched", watched)
    for only in ("medusa", "eagle3"):
        module.main(["--out", str(tmp_path), "--only", only])
    one, two = read_json(tmp_path / "plan_accuracy.json")["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["of_train"] == 1.5, "three seconds planned; four, of which it had the core for two"
    assert two["of_train"] == 0.5, "torchrun's training has a record of its own"
    assert one["bytes_of_states"] == 1.2, "a file with two names counts once"
    assert one["memory_of_train"] == 1.5


def test_online(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with what; the commands themselves are not run."""
    module, heads = script("online", monkeypatch), make_heads(load_target(str(tiny_target_folder), "float32"))
    commands: list[list[str]] = []

    def run(words: list[str], folder: Path, processes: int = 1) -> None:
        commands.append(words)
        if "build" in words:
            return
        online = folder.name == "online"
        with torch.no_grad():
            next(heads.parameters()).mul_(1.5 if online else 1 / 1.5)
        save_heads(heads, folder / "train" / "last")
        rows = [{"step": step, "elapsed_seconds": step * (2 if online else 1), "loss": 3.0} for step in (0, 5, 10)]
        write_jsonl(folder / "train" / "metrics.jsonl", rows)
        if not online:
            shard = folder / "data" / "states" / "shard-a.safetensors"
            shard.parent.mkdir(parents=True, exist_ok=True)
            shard.write_bytes(bytes(10**6))

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(
        module, "referred", lambda folder, kind: None if folder.name == "online" else folder / "data" / kind
    )
    module.main(["--out", str(tmp_path), "--steps", "10", "--repeats", "2"])
    stored, online = read_json(tmp_path / "online.json")["rows"]
    assert (stored["megabytes_of_states"], online["megabytes_of_states"]) == (1.0, 0.0)
    assert (stored["steps_per_second"], online["steps_per_second"], online["over_stored"]) == (1.0, 0.5, 0.5)
    assert stored["heads_apart"] is None and online["heads_apart"] > 0
    assert [word for words in commands for word in words if word.startswith("data.states")] == [
        f"data.states={way}" for way in ("online", "online", "stored", "stored", "stored", "stored", "online", "online")
    ]


@pytest.mark.parametrize("family", [{"family": "medusa", "num_heads": 2}, {"family": "hydra", "num_heads": 3}])
def test_path_conditioned(
    family: dict[str, Any], tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random heads: all arms decode, with the nodes that they may take."""
    export(tmp_path / "heads", load_target(str(tiny_target_folder), "float32"), **family)
    texts, asked, out = tmp_path / "texts.jsonl", tmp_path / "asked.jsonl", tmp_path / "out"
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (3, 24), generator=random).tolist()
    write_conversations(texts, [Conversation(str(row[0]), row, [False] * 6 + [True] * 18, []) for row in tokens])
    rows = [{"question_id": number, "category": "", "turns": [f"Count to {number}."]} for number in range(2)]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark = script("path_conditioned", monkeypatch)
    arguments = [str(tmp_path / "heads"), str(asked), "--conversations", str(texts), "--out", str(out)]
    arguments += ["--target", str(tiny_target_folder), "--dtype", "float32", "--max-new-tokens", "8"]
    benchmark.main([*arguments, "--nodes", "3", "6"])
    found = read_json(out / "path_conditioned.json")["rows"]
    assert [row["drafts"] for row in found] == list(benchmark.ARMS) * 4
    for row in found:
        most = min(row["nodes"], family["num_heads"] + 1) if row["drafts"] == benchmark.CHAIN else row["nodes"]
        assert row["drafter_error"] is None
        assert 1 <= row["tau"] <= family["num_heads"] + 1
        assert most - 1 < row["nodes_per_round"] <= most, "drafts without a chance are left out"
        base = {benchmark.CHAIN: "over_chain", benchmark.INDEPENDENT: "over_independent"}.get(row["drafts"])
        assert base is None or row[base]["mean"] == 1

    benchmark.main(
        [*arguments[:-2], "--max-new-tokens", "9", "--nodes", "4", "--every-position", "--temperatures", "1"]
    )
    found = read_json(out / "path_conditioned.json")["rows"]
    assert all(1 <= row["tau"] <= family["num_heads"] + 1 and row["drafter_error"] is None for row in found)
    for number in range(2):
        runs = read_json(out / "temperature-1-every-position" / "runs" / f"{number:04d}.json")["runs"].values()
        assert len(runs) == len(benchmark.ARMS)
        assert all(run["tokens"] == next(iter(runs))["tokens"] for run in runs), "all arms read the same text"
        assert all(len(run["rounds"][0]) == len(run["tokens"][0]) - 1 for run in runs), "a round emits one token"


def test_expected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the drawn child is accepted half of the time; else, of what is left, the guess has all."""
    benchmark = script("path_conditioned", monkeypatch)
    p_target_V, q_draft_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.0, 0.6, 0.4])
    tree = Tree([1, 0, 2, 1], [-1, 0, 0, 1], drawn={2: Drawn(q_draft_V, torch.arange(3))})
    assert benchmark.expected_tokens(tree, p_target_V.expand(4, 3)) == pytest.approx(1 + 0.5 + 0.5 + 0.5 * 0.3)
    verifier = SamplingVerifier(SamplingOptions(temperature=1.0), [[1]] * 2000, 0, True)
    out = TargetOutput(p_target_V.log().expand(2000, 4, 3))
    committed, _ = verifier.accept(TreeBatch.of([tree] * 2000), out)
    assert sum(committed.counts) / 2000 == pytest.approx(2.15, abs=0.08), "four standard errors of the rule itself"


def test_drafts_along_the_best_path(tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decoding along the best path drafts is what is measured of it, and the first depth is the heads' own."""
    target = load_target(str(tiny_target_folder), "float32")
    heads = make_heads(target, family="hydra", num_heads=3)
    benchmark = script("path_conditioned", monkeypatch)
    text = Text.of([5, 6, 7], [9, 11, 13, 15, 17, 19, 21])
    along = benchmark.measure_along(target, heads, [text])
    ranks_OK, log_probs_OKR, *_ = measure_drafts(target, heads, [text], benchmark.MAX_RANK)
    assert along[0].shape[0] == len(text.tokens) - 3 - heads.draft_steps
    torch.testing.assert_close(along[1][:, 0], log_probs_OKR[-len(along[1]) :, 0])
    assert torch.equal(along[0][:, 0], ranks_OK[-len(along[0]) :, 0])
    differ = (along[1][:, 1] - log_probs_OKR[-len(along[1]) :, 1]).abs().amax(-1) > 1e-4
    followed = ranks_OK[-len(along[0]) :, 0] == 0
    assert not differ[followed].any() and differ[~followed].all(), "after the best draft, the text is the best path"


def test_drafting(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(tmp_path / "heads", load_target(str(tiny_target_folder), "float32"))
    script("drafting", monkeypatch).main([str(tmp_path / "heads"), "--turns", "1", "--out", str(tmp_path / "out.json")])
    rows = read_json(tmp_path / "out.json")["rows"]
    assert [(row["shape"], row["weights"]) for row in rows] == [
        *(("chain", "full"), ("chain", "8 bits"), ("tree", "full"), ("tree", "8 bits"))
    ]
    assert all(row["over_torch"] == pytest.approx(row["torch_draft_ms"] / row["compiled_draft_ms"]) for row in rows)


def test_forwards(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = script("forwards", monkeypatch)
    monkeypatch.setattr(benchmark, "WIDTHS", (1, 4))
    arguments = ["--target", str(tiny_target_folder), "--dtype", "float32", "--turns", "1"]
    benchmark.main([*arguments, "--out", str(tmp_path / "out.json")])
    rows = read_json(tmp_path / "out.json")["rows"]
    assert [row["tokens"] for row in rows] == [1, 4]
    assert all(row["over_torch"] == pytest.approx(row["torch_ms"] / row["compiled_ms"]) for row in rows)


def test_memory(tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of a tuning that takes any node: what counts is that known answers are followed, and remembered."""
    export(tmp_path / "heads", load_target(str(tiny_target_folder), "float32"))
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out"
    rows = [{"question_id": number, "category": "", "turns": [f"Count to {number}."]} for number in range(2)]
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark = script("memory", monkeypatch)
    monkeypatch.setattr(benchmark, "requests", lambda: benchmark.read_questions(asked) * 3)
    arguments = [str(tmp_path / "heads"), "--questions", str(asked), "--requests", "6", "--out", str(out)]
    benchmark.main([*arguments, "--max-new-tokens", "24"])
    written = written_by("memory", out)
    once, again = written["rows"]
    assert (once["questions"], again["questions"]) == (2, 6)
    assert once["tokens_per_round_with"] == once["tokens_per_round_without"], "nothing is remembered"
    assert again["tokens_per_round_with"] > 1.5 * again["tokens_per_round_without"] >= 1.5, "each is asked three times"
    assert again["over_without"]["low"] > 1
    assert written["details"]["memory"]["tokens"] >= 20_000
    assert "| asked | 2 |" in benchmark.report(written["rows"])


def test_busy_core(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker in this process; one of its own takes longer to import torch."""
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
