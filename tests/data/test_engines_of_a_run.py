"""A run that starts, restarts and stops an engine to generate its conversations."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headstart.errors import UserError
from headstart.pipeline.generation_servers import check_commands
from headstart.pipeline.run import Run, execute
from headstart.pipeline.stages import stages_until
from tests.test_pipeline import tiny_recipe

ENGINE = """
import os, signal, sys, time
from pathlib import Path
repository, lives, deaths, answers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
holder = lives.with_name("holder")
sys.path.append(repository)  # last: its links are called train, data, eval ...
from rehearsal.engine_http import StandIn, serve
lives.open("a").write(f"{os.getpid()}\\n")
if len(lives.read_text().split()) > deaths:
    answers = 10**9
def answer(prompt, count, body):
    global answers
    answers -= 1
    if answers < 0:
        if holder.is_file() and os.fork() == 0:
            os.setsid()
            holder.write_text(str(os.getpid()))
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    return [*[10 + (sum(prompt) + step) % 50 for step in range(count // 2)], *body["stop_token_ids"][:1]], {}
serve(StandIn("vllm", answer), "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
"""
"""An engine that kills itself after a number of answers, the first few times that it runs. If there is a file `holder`,
it leaves a program that holds its port and never answers."""


def engine_run(tmp_path: Path, target: Path, deaths: int, answers: int = 7) -> Run:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "engine.py").write_text(ENGINE)
    words = [sys.executable, str(tmp_path / "engine.py"), str(Path(__file__).parents[2]), str(tmp_path / "lives")]
    command = shlex.join([*words, str(deaths), str(answers)])
    recipe = tiny_recipe(tmp_path, target, data={"server": "vllm", "server_command": command, "states": "online"})
    return Run(recipe, tmp_path / "run", Console(file=StringIO()))


def lives(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "lives").read_text().split()]


def test_engine_is_started_again_and_stopped_at_the_end(tiny_target_folder: Path, tmp_path: Path) -> None:
    run = engine_run(tmp_path, tiny_target_folder, deaths=2)
    execute(run, stages_until("conversations"))
    assert len((run.folder / "data" / "conversations" / "train.jsonl").read_text().splitlines()) > 0
    assert len(lives(tmp_path)) == 3
    assert not [pid for pid in lives(tmp_path) if Path(f"/proc/{pid}").exists()]
    whole = engine_run(tmp_path / "whole", tiny_target_folder, deaths=0)
    execute(whole, stages_until("conversations"))
    written = [each.folder / "data" / "conversations" / "train.jsonl" for each in (run, whole)]
    assert written[0].read_text() == written[1].read_text()


def test_engine_that_keeps_dying_ends_the_run(tiny_target_folder: Path, tmp_path: Path) -> None:
    run = engine_run(tmp_path, tiny_target_folder, deaths=1000, answers=1)
    with pytest.raises(UserError, match="vllm died 6 times") as refusal:
        execute(run, stages_until("conversations"))
    assert str(run.folder / "logs" / "vllm-0.log") in refusal.value.remedy
    assert not [pid for pid in lives(tmp_path) if Path(f"/proc/{pid}").exists()]


def test_missing_engine_is_named(tiny_target_folder: Path, tmp_path: Path) -> None:
    changes = {"server": "vllm", "server_command": "no-such-engine serve", "states": "online"}
    run = Run(tiny_recipe(tmp_path, tiny_target_folder, data=changes), tmp_path / "run", Console(file=StringIO()))
    with pytest.raises(UserError, match=r"no-such-engine is no command here.*data\.server_command"):
        execute(run, stages_until("conversations"))


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        ("train", {"data": {"states": "online", "states_server": "vllm", "server_command": "no-such-engine serve"}}),
        ("eval", {"eval": {"engine": "vllm", "engine_command": "no-such-engine serve"}}),
    ],
)
def test_missing_engine_of_a_late_stage_is_named_at_once(
    stage: str, changes: dict[str, Any], tiny_target_folder: Path, tmp_path: Path
) -> None:
    run = Run(tiny_recipe(tmp_path, tiny_target_folder, **changes), tmp_path / "run", Console(file=StringIO()))
    with pytest.raises(UserError, match="no-such-engine is no command here"):
        check_commands(run, [stage])
    check_commands(run, ["conversations", "states"])  # they may exist already


def test_lost_port_is_reported_while_requests_hang(tiny_target_folder: Path, tmp_path: Path) -> None:
    run, holder = engine_run(tmp_path, tiny_target_folder, deaths=1), tmp_path / "holder"
    holder.touch()
    try:
        with pytest.raises(UserError, match="another program uses its port"):
            execute(run, stages_until("conversations"))
    finally:
        os.kill(int(holder.read_text()), signal.SIGKILL)
    assert not [pid for pid in lives(tmp_path) if Path(f"/proc/{pid}").exists()]
    execute(run, stages_until("conversations"))
    assert len(lives(tmp_path)) == 2


def test_no_engine_starts_for_conversations_that_exist(tiny_target_folder: Path, tmp_path: Path) -> None:
    run = engine_run(tmp_path, tiny_target_folder, deaths=0)
    execute(run, stages_until("conversations"))
    execute(run, stages_until("conversations"), again={"conversations"})
    assert len(lives(tmp_path)) == 1
    longer = tiny_recipe(tmp_path, tiny_target_folder, data={**run.recipe.data.model_dump(), "conversations": 14})
    execute(Run(longer, run.folder, run.console), stages_until("conversations"))
    assert len(lives(tmp_path)) == 2
    assert len((run.folder / "data" / "conversations" / "train.jsonl").read_text().splitlines()) == 14
