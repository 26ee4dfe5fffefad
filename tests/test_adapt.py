"""Adapting heads to served traffic: updates that pass the gate, updates that must not, and swaps."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import headstart
from headstart.adapt.engine import check_engine
from headstart.adapt.gate import compare_rounds, refusals
from headstart.adapt.options import AdaptOptions
from headstart.adapt.service import Service
from headstart.adapt.update import Update, Waiting
from headstart.data.conversations.records import read_conversations
from headstart.data.served.log import RequestLog, Served, segments
from headstart.data.states.shards import StateKind
from headstart.decoder import Decoder
from headstart.errors import UserError
from headstart.heads.io import version_of
from headstart.hub.engines.export import export_for
from headstart.hub.engines.importing import untuned
from headstart.hub.format import export_heads
from headstart.pipeline.data_stages import aux_layers
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import STAGES
from headstart.recipes.recipe import load_recipe
from headstart.servers.completions import CompletionRequest
from headstart.servers.engines import ENGINES
from headstart.servers.process import Server
from headstart.support.files import write_json, write_tensors
from headstart.support.lock import Busy, locked
from headstart.train.fused_loss import Teacher
from rehearsal.stand_in import Writer
from tests.engines.test_audit_engine import running
from tests.forks import Forks
from tests.hub.helpers import make_heads
from tests.test_cli import call, works
from tests.test_pipeline import quiet, tiny_recipe

OPTIONS = AdaptOptions(requests=96)
WIDE = replace(OPTIONS, fall=0.3)
"""A wide tolerance: the tiny target has few texts of its own, so small losses cannot be excluded."""
QUICK = ("train.steps=80", "train.lr=1e-2", "train.eval_every=20", "train.lora_rank=0")
THINGS = ["rice", "bread", "fire", "stone", "water", "paper", "glass", "wool", "iron", "milk"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target_folder: Path) -> Path:
    """A briefly trained run and a log of its target's answers to 128 requests."""
    folder = tmp_path_factory.mktemp("adapt")
    sizes = {"conversations": 20, "validation": 12, "heldout": 8, "max_new_tokens": 24}
    engines_know = {"input_map": False}
    execute(quiet(folder / "run", tiny_recipe(folder, tiny_target_folder, data=sizes, heads=engines_know)), STAGES)
    drafting_pays(folder / "run" / "heads")
    decoder = headstart.load(folder / "run", dtype="float32", device="cpu")
    log = RequestLog(folder / "log")
    for start in range(0, 128, 16):
        prompts = [f"{THINGS[n % 10]} for {THINGS[n // 10 % 10]} {n}?" for n in range(start, start + 16)]
        tokens = [decoder.tokens(text) for text in prompts]
        for number, answer in enumerate(decoder.generate_batch(tokens, max_new_tokens=24, draft="off"), start):
            log.add(_served(decoder, tokens[number - start], answer.tokens, number))
    return folder


@pytest.fixture(scope="module", autouse=True)
def costs_stand() -> Iterator[None]:
    """Keep the stored costs: costs measured on a busy machine would stop drafting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.decoder.with_local_costs", lambda tuning, *_: tuning)
        yield


def drafting_pays(heads: Path) -> None:
    """Store costs that make drafts free."""
    tuning = json.loads((heads / "calibration.json").read_text())
    free = {"verify_ms": [1.0] * len(tuning["node_counts"]), "draft_ms": 0.0, "level_ms": 0.0, "read_ms": 0.0}
    write_json(heads / "calibration.json", {**tuning, **free, "curve": []})
    write_json(heads / "tree.json", {"paths": [[0], [0, 0]]})


def _served(decoder: Decoder, prompt: list[int], answer: list[int], number: int) -> Served:
    fingerprint = decoder.target.identity().fingerprint
    return Served(prompt, answer, "end", 1000.0 + number, target=fingerprint, source=f"user {number % 12}")


@pytest.fixture
def place(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run and the log that a test may change."""
    for name in ("run", "log", "artifacts"):
        shutil.copytree(whole / name, tmp_path / name, symlinks=True)
    return tmp_path


def update_of(place: Path, options: AdaptOptions = WIDE, overrides: tuple[str, ...] = QUICK) -> Update:
    recipe = load_recipe(str(place / "run" / "recipe.yaml"))
    return Update(Run(recipe, place / "run", Console(quiet=True)), place / "log", options, overrides)


def of_folder(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


Adapted = tuple[Path, dict[str, Any], Decoder, list[Any]]
"""The folder, the gate's verdict, the decoder, and its answers before and after."""


@pytest.fixture(scope="module")
def adapted(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """An update that was accepted while a decoder served."""
    folder = tmp_path_factory.mktemp("adapted")
    for name in ("run", "log", "artifacts"):
        shutil.copytree(whole / name, folder / name, symlinks=True)
    update = update_of(folder)
    decoder = headstart.load(update.service.link, follow=True, dtype="float32", device="cpu")
    answers = [decoder.generate("milk for wool 7?", max_new_tokens=16, draft="on")]
    update.train()
    answers.append(decoder.generate("milk for wool 7?", max_new_tokens=16, draft="on"))
    judged = update.gate()
    answers.append(decoder.generate("milk for wool 7?", max_new_tokens=16, draft="on"))
    return folder, judged, decoder, answers


def test_a_better_update_serves_from_the_next_request(adapted: Adapted) -> None:
    folder, judged, _, answers = adapted
    assert judged["accepted"], judged["why"]
    assert judged["later"]["change"]["low"] > 0 and judged["later"]["texts"] >= 16
    versions = [answer.heads for answer in answers]
    assert versions[0] == versions[1] != versions[2] == judged["version"]
    assert answers[0].tokens == answers[2].tokens, "heads never change the text"
    assert answers[2].tokens_per_round >= answers[0].tokens_per_round
    service = Service(folder / "run")
    assert service.serving == 1 and not (folder / "log" / "update").exists()
    assert of_folder(folder / "run" / "heads") == of_folder(service.heads(0)), "the run keeps its own"
    assert of_folder(service.heads(1))["answers.bin"] == of_folder(service.heads(0))["answers.bin"]


def test_the_gate_judges_on_later_requests_that_were_not_trained_on(adapted: Adapted) -> None:
    plan = adapted[1]["plan"]
    assert plan["until"] == 1000.0 + 95 and plan["seen"] == 1000.0 + 127
    assert plan["requests"] == 96 and plan["own_conversations"] == 20


def test_one_command_goes_back_and_another_swaps(adapted: Adapted) -> None:
    folder, judged, decoder, answers = adapted
    run, log = str(folder / "run"), str(folder / "log")
    assert "update 0" in works("adapt", "back", run).output
    assert decoder.generate("milk for wool 7?", max_new_tokens=16, draft="on").heads == answers[0].heads
    with pytest.raises(UserError, match="No heads served before"):
        Service(folder / "run").back()
    works("adapt", "swap", run, "1")
    assert decoder.generate("milk for wool 7?", max_new_tokens=16, draft="on").heads == judged["version"]
    updates = folder / "run" / "adapt" / "updates"
    shutil.copytree(updates / "0001", left := updates / "0002.node7.31-0.partial")  # another process writes it
    done = works("adapt", "report", run, "--log", log, "--json", "found.json")
    shutil.rmtree(left)
    assert "Update 1" in done.output and "accepted" in done.output
    assert json.loads(Path("found.json").read_text())["serving"] == 1
    with pytest.raises(UserError, match="no update 7"):
        Service(folder / "run").serve(7, "swap")


def test_a_swap_in_the_middle_of_streams_changes_no_text(adapted: Adapted) -> None:
    folder, _, follower, _ = adapted
    service = Service(folder / "run")
    decoder = headstart.load(service.heads(0), target=follower.target)
    prompts = [f"{thing} for all {thing}s?" for thing in THINGS[:8]]
    options: dict[str, Any] = {"max_new_tokens": 200, "draft": "on", "stop_token_ids": []}
    plain = [decoder.generate(text, max_new_tokens=200, draft="off").tokens for text in prompts]
    swapped, versions = threading.Event(), set()
    other = headstart.load(service.heads(1), target=follower.target)
    streams = [decoder.stream(text, **options) for text in prompts]
    first = [next(stream) for stream in streams]  # all of them have begun
    rest: dict[int, str] = {}

    def read(number: int) -> None:
        pieces = []
        for place, piece in enumerate(streams[number]):
            pieces.append(piece)
            if place == 2:
                swapped.wait()
        rest[number] = "".join(pieces)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for reader in readers:
        reader.start()
    decoder.swap(other.heads, other.shape, other.calibration, other.answers)
    swapped.set()
    later = decoder.generate(prompts[0], **options)
    for reader in readers:
        reader.join()
    for number, stream in enumerate(streams):
        assert stream.answer is not None
        versions.add(stream.answer.heads)
        assert stream.answer.tokens == plain[number]
        assert first[number] + rest[number] == stream.answer.text
    assert versions == {version_of(service.heads(0))}, "they end with the heads they began with"
    assert later.tokens == plain[0] and later.heads == version_of(service.heads(1))


@pytest.mark.parametrize("file", ["heads.safetensors", "answers.bin"])
def test_heads_that_cannot_be_read_leave_the_old_ones_serving(adapted: Adapted, tmp_path: Path, file: str) -> None:
    folder, _, follower, _ = adapted
    good, bad, link = tmp_path / "good", tmp_path / "bad", tmp_path / "link"
    shutil.copytree(Service(folder / "run").heads(1), good)
    shutil.copytree(good, bad)
    (bad / file).write_bytes((bad / file).read_bytes()[:-1])
    link.symlink_to(good)
    decoder = headstart.load(link, target=follower.target, follow=True)
    before = decoder.generate([5, 6, 7], max_new_tokens=8)
    link.unlink()
    link.symlink_to(bad)
    with pytest.warns(RuntimeWarning, match=rf"New heads cannot be used: .*{file} is cut short or damaged.* again"):
        after = decoder.generate([5, 6, 7], max_new_tokens=8)
    assert after.tokens == before.tokens and after.heads == before.heads
    assert decoder.answers == good / "answers.bin"


def test_heads_that_memory_has_no_room_for_leave_the_old_ones_serving(adapted: Adapted) -> None:
    def newer() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    decoder = headstart.load(Service(adapted[0] / "run").heads(1), target=adapted[2].target)
    before, decoder.newer = decoder.generate([5, 6, 7], max_new_tokens=8), newer
    with pytest.warns(RuntimeWarning, match="New heads cannot be used: CUDA out of memory"):
        assert decoder.generate([5, 6, 7], max_new_tokens=8).tokens == before.tokens


def test_an_update_whose_answers_are_damaged_does_not_serve(adapted: Adapted, tmp_path: Path) -> None:
    shutil.copytree(adapted[0], tmp_path / "place", symlinks=True)
    service = Service(tmp_path / "place" / "run")
    service.serve(0, "swap")
    file = service.heads(1) / "answers.bin"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UserError, match=r"answers.bin is cut short or damaged") as caught:
        service.serve(1, "swap")
    assert "delete the file" in caught.value.remedy and service.serving == 0
    with pytest.raises(UserError, match=r"answers.bin is cut short"):
        headstart.load(service.heads(1))
    file.unlink()
    service.serve(1, "swap")
    assert service.serving == 1


def test_chat_logs_and_follows(adapted: Adapted, tmp_path: Path) -> None:
    link = Service(adapted[0] / "run").link
    command = ("chat", link, "--log", tmp_path / "log", "--follow", "--dtype", "float32", "--device", "cpu")
    works(*command, "--max-new-tokens", 8, stdin="milk for wool?\nand rice?\n")
    rows = [json.loads(line) for file in segments(tmp_path / "log") for line in file.read_text().splitlines()]
    assert len(rows) == 2 and len(rows[1]["prompt"]) > len(rows[0]["prompt"]) and rows[0]["target"]


def test_the_steps_are_commands(place: Path) -> None:
    named = [str(place / "run"), "--log", str(place / "log")]
    done = call("adapt", "gate", *named)
    assert done.exit_code == 2 and "no update to judge" in done.output
    works("adapt", "train", *named, "--requests", "96", *QUICK)
    done = works("adapt", "gate", *named, "--fall", "0.3")
    assert "Update 1 (" in done.output and "): accepted; 96 requests" in done.output


# -- in a serving engine -----------------------------------------------------------------------------------------------


def test_acceptance_identifies_served_heads(adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, log, out = str(adapted[0] / "run"), str(adapted[0] / "log"), tmp_path / "served"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr("headstart.adapt.engine._PROMPTS", 6)
    monkeypatch.setattr("headstart.adapt.engine._TOKENS", 24)
    stand_in = f"{sys.executable} -m rehearsal.stand_in vllm serve"

    def adapt(*words: str) -> Any:
        return call("adapt", words[0], run, *words[1:])

    def engine(*words: str) -> Any:
        return adapt("engine", "--log", log, "--out", str(out), *words)

    def restarted(result: Any) -> Server:
        """Start a stand-in for vLLM with the printed command."""
        assert "Start vllm" in result.output, result.output
        (line,) = (line for line in result.output.splitlines() if line.startswith("Start vllm with: "))
        words = shlex.split(line.removeprefix("Start vllm with: "))
        assert words[:2] == ["vllm", "serve"]
        return Server(ENGINES["vllm"], words[2], words[3:], tmp_path / "engine.log", command=stand_in)

    assert adapt("swap", "0").exit_code == 0
    with restarted(engine()) as server:
        address = ("--server", server.url)
        before = engine(*address)
        assert before.exit_code == 0 and "by update 1" in before.output
        assert adapt("swap", "1").exit_code == 0
        old = engine(*address)
        assert old.exit_code == 1 and "Start vllm with" in old.output
    assert sorted(path.name for path in out.iterdir()) == ["0000", "0001"], "the served ones stay"
    with restarted(old) as server:
        address = ("--server", server.url)
        assert (after := engine(*address)).exit_code == 0, after.output

        def tokens_a_round(result: Any) -> float:
            return float(re.search(r"([\d.]+) tokens per round", result.output)[1])

        assert tokens_a_round(after) > tokens_a_round(old) == tokens_a_round(before)
        measured = threading.Event()

        def ask() -> None:
            while not measured.is_set():
                server.answer(CompletionRequest([5, 6, 7], 16))

        asking = threading.Thread(target=ask)
        asking.start()
        busy = engine(*address)
        measured.set()
        asking.join()
        assert busy.exit_code == 2 and "answered other requests meanwhile" in busy.output
    gone = engine(*address)
    assert gone.exit_code == 2 and "Start vllm with" in gone.output, "there is no server"


def test_neither_long_requests_nor_shallow_earlier_heads_spoil_the_check(
    adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run", "log", "artifacts"):
        shutil.copytree(adapted[0] / name, tmp_path / name, symlinks=True)
    monkeypatch.setattr("headstart.adapt.engine._PROMPTS", 6)
    monkeypatch.setattr("headstart.adapt.engine._TOKENS", 24)
    update = update_of(tmp_path)
    service, target = update.service, update.target
    shallow = make_heads(target, num_heads=1)
    export_heads(tmp_path / "shallow", shallow, target, untuned(shallow), {})
    service.add(2, tmp_path / "shallow", adapted[1])
    service.serve(2, "swap")
    service.serve(1, "swap")
    longest = Served([5] * (target.max_length - 24 - 1), [6], "end", 2000.0, target=target.identity().fingerprint)
    RequestLog(tmp_path / "log").add(longest)
    exported = export_for(service.link, tmp_path / "served", "vllm", target).folder
    with running(Writer(target, exported, 2).serving("vllm", "target")) as url:
        figures, serves = check_engine(url, update)
        assert serves and "with 2 drafts" in figures and "by update 2" not in figures
        for file in segments(log := tmp_path / "log"):
            file.unlink()
        RequestLog(log).add(longest)
        with pytest.raises(UserError, match="no request of at most 998 tokens"):
            check_engine(url, update)


# -- updates that must not serve ---------------------------------------------------------------------------------------


def of_another_version(file: Path) -> None:
    tensors = load_file(file)
    file.unlink()  # hard links may share the file
    write_tensors(file, tensors, {"format": "pt", "version": "another"})


def plant(update: Update) -> None:
    """Submit the last step's heads to the gate, whatever validation preferred."""
    shutil.copy(update.folder / "train" / "last" / "heads.safetensors", update.folder / "heads" / "heads.safetensors")


def test_heads_that_learnt_shuffled_labels_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Teacher._compute

    def shuffled(self: Teacher, *states: Any, **tokens: Any) -> torch.Tensor:
        order_D = torch.randperm(len(self._weight_DE), generator=torch.Generator().manual_seed(0))
        return compute(self, *states, **tokens)[:, order_D]

    monkeypatch.setattr(Teacher, "_compute", shuffled)
    update = update_of(place)
    before = of_folder(update.service.heads(0))
    update.train()
    plant(update)
    judged = update.gate()
    assert not judged["accepted"] and judged["later"]["change"]["mean"] < 0
    assert "not clearly better" in judged["why"][0]
    assert update.service.serving == 0 and of_folder(update.service.link) == before
    (kept,) = update.service.updates()
    assert kept["why"] == judged["why"] and update.service.heads(1).is_dir(), "a refused update is kept and explained"


def test_heads_that_forget_the_runs_own_texts_are_refused(place: Path) -> None:
    update = update_of(place, replace(OPTIONS, mix=0.0), ("train.steps=100", "train.lr=3e-2", "train.lora_rank=0"))
    update.train()
    plant(update)
    judged = update.gate()
    assert judged["later"]["change"]["low"] > 0, "better on the traffic"
    assert not judged["accepted"] and "run's own validation texts" in judged["why"][0]
    assert update.service.serving == 0


def test_refuses_updates_that_may_make_other_texts_worse() -> None:
    def figures(low: float | None, mean: float) -> dict[str, Any]:
        one = {"mean": 2.0, "low": 1.9, "high": 2.1}
        return {"texts": 9, "drawn": 9, "before": one, "after": one, "change": {"mean": mean, "low": low, "high": 0.2}}

    good, flat, fell, few = figures(0.01, 0.05), figures(-0.01, 0.0), figures(-0.03, -0.01), figures(None, 0.3)
    assert not refusals(good, {"a": flat}, 0.02)
    assert len(refusals(flat, {"a": flat}, 0.02)) == 1
    assert "compared with a" in refusals(good, {"a": fell, "b": flat}, 0.02)[0]
    assert "not clearly better" in refusals(few, {"a": flat}, 0.02)[0]
    assert "an interval needs 5" in refusals(good, {"a": few}, 0.02)[0]


def test_texts_of_one_source_are_drawn_together(whole: Path) -> None:
    texts = read_conversations(whole / "run" / "data" / "conversations" / "train.jsonl")
    rounds = {text.id: (20, 10) for text in texts}
    of_five = [replace(text, category=f"user {place % 5}") for place, text in enumerate(texts)]
    of_four = [replace(text, category=f"user {place % 4}") for place, text in enumerate(texts)]
    assert compare_rounds(rounds, rounds, of_five, traffic=True)["drawn"] == 5
    assert compare_rounds(rounds, rounds, of_four, traffic=True)["drawn"] == len(texts), "too few for an interval"
    assert compare_rounds(rounds, rounds, of_five)["drawn"] == len(texts), "the run's own kinds are what they are"
    assert compare_rounds({}, {}, texts)["change"]["low"] is None


# -- disturbances ------------------------------------------------------------------------------------------------------


def test_too_few_requests_wait(place: Path) -> None:
    with pytest.raises(Waiting, match="128 requests are new"):
        update_of(place, replace(WIDE, requests=200)).train()
    update = update_of(place)
    update.train()
    for file in segments(place / "log"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["time"] < 1100))
    with pytest.raises(Waiting, match="4 usable requests"):
        update.gate()
    assert update.trained, "it waits to be judged"


def test_two_adapters_at_once(place: Path) -> None:
    update = update_of(place)
    with locked(place / "log"), pytest.raises(Busy):  # of other heads, from this log
        update.train()
    with update.service.lock(), pytest.raises(Busy, match="stop it"):
        update.train()


def test_heads_are_rolled_back_while_an_update_trains(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = update_of(place)
    update.service.add(1, update.service.heads(0), {"plan": {"seen": 0.0}})
    update.service.serve(1, "swap")
    update.service.serve(1, "swap")  # serves already: nothing to go back to but 0

    def meanwhile(*_: Any) -> None:
        works("adapt", "back", place / "run")
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.adapt.update.train", meanwhile)
    with pytest.raises(KeyboardInterrupt):
        update.train()
    assert update.service.serving == 0


def test_an_update_cannot_be_judged_for_another_run(place: Path) -> None:
    shutil.copytree(place / "run", place / "other", symlinks=True)
    update_of(place).train()
    file = place / "other" / "heads" / "heads.safetensors"
    of_another_version(file)
    other = Run(load_recipe(str(place / "other" / "recipe.yaml")), place / "other", Console(quiet=True))
    with pytest.raises(UserError, match=r"The update under way in .* is of the heads of another run"):
        Update(other, place / "log", WIDE, QUICK).gate()


def test_a_run_that_was_trained_again_begins_anew(place: Path) -> None:
    update = update_of(place)
    file = place / "run" / "heads" / "heads.safetensors"
    of_another_version(file)
    with pytest.raises(UserError, match="have changed since adapting began") as caught:
        update.train()
    assert caught.value.remedy.endswith(f"rm -r {update.service.folder}")


def test_the_states_budget_drops_requests_and_own_texts_alike(place: Path) -> None:
    kind = StateKind(update_of(place).target, aux_layers(update_of(place).run))
    room = f"data.cache_gigabytes={0.6e-9 * kind.bytes(116 * 30)}"
    recipe = load_recipe(str(place / "run" / "recipe.yaml"), [room])
    update = Update(Run(recipe, place / "run", Console(quiet=True)), place / "log", WIDE, QUICK)
    update.train()
    plan = json.loads((update.folder / "plan.json").read_text())
    assert 0 < plan["requests"] < 96 and 0 < plan["own_conversations"] < 20
    assert plan["left_out"] == {"beyond data.cache_gigabytes": 96 - plan["requests"]}


def test_a_full_disk_leaves_the_heads_in_service(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = update_of(place)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))

    for where in ("data.states.shards.write_tensors", "heads.io.write_tensors", "adapt.service.link_into_run"):
        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
            patched.setattr(f"headstart.{where}", full)
            update.train()
            update.gate()
        assert update.service.serving == 0
    assert update.gate()["number"] == 1


def test_a_log_of_another_target_teaches_nothing(place: Path) -> None:
    for file in segments(place / "log"):
        rows = [{**json.loads(line), "target": "another"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(Waiting, match=r"0 requests are new .* 128 of another target"):
        update_of(place).train()


def test_one_source_does_not_own_an_update(place: Path) -> None:
    update = update_of(place, replace(WIDE, per_source=2))
    update.train()
    plan = json.loads((update.folder / "plan.json").read_text())
    assert plan["requests"] == 24 and plan["left_out"] == {"beyond 2 of one source": 72}


def test_watch_goes_on_after_sigkill(place: Path, forks: Forks) -> None:
    command = ["-m", "headstart", "adapt", "watch", str(place / "run"), "--log", str(place / "log")]
    command += ["--once", "--requests", "96", "--fall", "0.3", *QUICK, "train.save_every=5"]
    for mark in ("plan.json", "train/checkpoints"):
        process = forks.start(*command)
        for _ in range(1200):
            if (place / "log" / "update" / mark).exists() or process.poll() is not None:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = forks.run(*command)
    assert done.returncode == 0, done.stderr
    assert "): accepted; 96 requests" in done.stdout and "0 requests are new" in done.stdout
    assert Service(place / "run").serving == 1 and not (place / "log" / "update").exists()


def test_a_log_is_described_and_deleted(place: Path) -> None:
    run, log = str(place / "run"), str(place / "log")
    (place / "log" / "engine.jsonl").write_text("{half")
    update_of(place).train()
    done = works("adapt", "log", run, "--log", log)
    assert "Requests: 128" in done.output and "lines that are half-written" in done.output
    assert "not written by headstart: engine.jsonl" in works("adapt", "log", run, "--log", log, "--delete").output
    assert {file.name for file in (place / "log").iterdir()} == {"engine.jsonl", "lock", "log.json"}
    done = call("adapt", "log", run, "--log", f"{log}s", "--delete")
    assert done.exit_code == 2 and "nothing was deleted" in done.output and not Path(f"{log}s").exists()


def test_watch_waits_for_the_first_request(place: Path) -> None:
    shutil.rmtree(place / "log")
    RequestLog(place / "log")
    done = works("adapt", "watch", place / "run", "--log", place / "log", "--once")
    assert "is empty" in done.output


def test_only_runs_adapt(tmp_path: Path) -> None:
    done = call("adapt", "train", tmp_path, "--log", tmp_path)
    assert done.exit_code == 2 and "not the folder of a run" in done.output
