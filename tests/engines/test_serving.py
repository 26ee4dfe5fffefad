"""Measuring drafts in serving engines, with a stand-in server."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headstart.data.conversations.records import Conversation, write_conversations
from headstart.decode.options import EngineOptions
from headstart.errors import UserError
from headstart.eval.report import write_report
from headstart.hub.engine_tuning import (
    FILE,
    EngineTuning,
    EngineWorkload,
    measure_drafts,
    read_engine_tunings,
    write_engine_tuning,
)
from headstart.hub.engines.export import export_for
from headstart.model.model import Target
from headstart.pipeline.actions import keeping_engine_tunings
from headstart.pipeline.in_engine import served_with, tune_in_engine
from headstart.servers import process as serving
from headstart.servers.completions import CompletionRequest
from headstart.servers.engines import ENGINES
from headstart.servers.fleet import Fleet, gpu_groups
from headstart.servers.process import EngineAnswer, Server, read_counters
from headstart.support.files import read_json
from tests.engines.conftest import Made
from tests.eval.test_report import measured as measured_report
from tests.forks import Forks
from tests.test_benchmarks import script
from tests.test_cli import refused, works

FAKE = Path(__file__).with_name("fake_engine.py")


def command(kind: str, fault: str = "none") -> str:
    return shlex.join([sys.executable, str(FAKE), kind, fault])


def tune(heads: Path, texts: Path, *more: object, name: str = "vllm", fault: str = "none") -> tuple[object, ...]:
    """Return the words of a command that tunes heads in the fake engine."""
    return "tune", heads, "--conversations", texts, "--engine", name, "--engine-command", command(name, fault), *more


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "validation.jsonl"
    made = [Conversation(str(n), [5, 6, 7, 8 + n], [False, False, True, True], []) for n in range(3)]
    write_conversations(file, made)
    return file


@pytest.fixture
def heads(made: Made, tmp_path: Path) -> Path:
    """A private folder, because tuning writes into it."""
    folder = tmp_path / "heads"
    works("export", made("eagle3-reduced")[1], "--out", folder)
    calibration = read_json(folder / "calibration.json")
    calibration["settings"] = {}
    calibration["acceptance"] = [[0.5, 0.1], [0.4, 0.1], [0.2, 0.1]]
    (folder / "calibration.json").write_text(json.dumps(calibration))
    return folder


@pytest.mark.parametrize("name", ENGINES)
def test_each_number_of_drafts_is_measured_and_kept(name: str, heads: Path, texts: Path, tmp_path: Path) -> None:
    write_report(measured_report(), tmp_path / "report")  # the report of the heads' run
    options = ("--engine-target", "target.gguf", "--engine-drafts", "3,1", "--engine-tokens", 9)
    said = works(*tune(heads, texts, *options, name=name)).stdout
    assert "tokens/s" in said and name in said
    measured = read_engine_tunings(heads)[name]
    assert [row.drafts for row in measured.rows] == [1, 3] and measured.prompts == 3
    assert measured.version == {"vllm": "0.0", "llama.cpp": "b0"}[name] and measured.target == "target.gguf"
    assert measured.same_texts == (6, 6)
    for row in measured.rows:
        assert row.accepted == row.by_position[0] == 1 and sum(row.by_position[1:]) == 0
        taken = (1.5 if row.drafts == 1 else 1.5 + 0.2 + 0.04) * row.plain_ms / row.round_ms
        assert row.expected == pytest.approx(taken)
    card = (heads / "README.md").read_text()
    assert card.count("## In serving engines") == 1 and f"| {name} " in card
    shown = f"{name} {measured.version}, 3 drafts"
    assert shown in (tmp_path / "report" / "report.html").read_text()
    # Exports use the number of drafts, and their card has the figures.
    write_engine_tuning(heads, paying(measured, 1))
    done = works("export", heads, "--format", ENGINES[name].format, "--out", tmp_path / "served")
    served = " ".join(done.stdout.split())
    assert {"vllm": '"num_speculative_tokens": 1', "llama.cpp": "--spec-draft-n-max 1"}[name] in served
    assert f"| {name} " in (tmp_path / "served" / "README.md").read_text()
    write_engine_tuning(heads, paying(measured, 0))
    served = works("export", heads, "--format", ENGINES[name].format, "--out", tmp_path / "served").stdout
    assert "No number of drafts pays" in " ".join(served.split())


def test_one_server_at_a_time_where_two_do_not_fit(
    heads: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.pipeline.in_engine.visible_gpus", lambda: ["0"])
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10**9, 10**9))
    running, most, start, stop = set[Server](), list[int](), Server.start, Server.stop

    def started(server: Server) -> None:
        running.add(server)
        most.append(len(running))
        start(server)

    def stopped(server: Server) -> None:
        stop(server)
        running.discard(server)

    monkeypatch.setattr(Server, "start", started)
    monkeypatch.setattr(Server, "stop", stopped)
    works(*tune(heads, texts, "--engine-drafts", "1,3", "--engine-tokens", 9, "--engine-requests", "1,2"))
    measured = read_engine_tunings(heads)["vllm"]
    assert [(row.requests, row.drafts) for row in measured.rows] == [(1, 1), (2, 1), (1, 3), (2, 3)]
    assert measured.same_texts == (14, 14) and all(row.accepted == 1 for row in measured.rows)
    asked, started_by = tmp_path / "asked.jsonl", ("--engine", "vllm", "--engine-command", command("vllm"))
    asked.write_text('{"turns": ["one two", "more"]}\n{"turns": ["three"]}\n')
    sizes = ("--max-new-tokens", 9, "--sweep-batch", 2, "--multi-turn")
    works("eval", heads, "--questions", asked, "--out", tmp_path / "out", *started_by, *sizes)
    results = read_json(tmp_path / "out" / "results.json")
    drafted, plain = results["compare"]
    assert (drafted["tokens_per_round"], plain["tokens_per_round"]) == (2, None)
    assert drafted["ttft_ms"]["count"] == 3 and results["batches"][0]["tokens_per_round"] == 2
    assert results["settings"]["servers"] == "one after the other, without heads first"
    assert most == [1] * 5


def test_terminated_command_leaves_no_files(heads: Path, texts: Path, tmp_path: Path, forks: Forks) -> None:
    waits = shlex.join([sys.executable, "-c", "import time; time.sleep(60)"])
    place = tmp_path / "tmp"
    place.mkdir()
    code = f"import tempfile; tempfile.tempdir = {str(place)!r}; from headstart.cli.app import main; main()"
    fork = forks.start("-c", code, *map(str, tune(heads, texts)[:-1]), waits)
    while not list(place.glob("headstart-engine-*/logs/plain.log")):
        assert fork.poll() is None, fork.err.read_text()
        time.sleep(0.02)
    fork.send_signal(signal.SIGTERM)
    assert fork.wait() == 130
    assert not list(place.iterdir())


def paying(measured: EngineTuning, drafts: int) -> EngineTuning:
    """Pretend that only this number of drafts pays."""
    rows = tuple(replace(row, expected=1.5 if row.drafts == drafts else 0.5) for row in measured.rows)
    return replace(measured, rows=rows)


def test_report_includes_engine_measurements(heads: Path, texts: Path, tmp_path: Path) -> None:
    works(*tune(heads, texts, "--engine-drafts", "2", "--engine-tokens", 9))
    questions = tmp_path / "asked.jsonl"
    questions.write_text('{"turns": ["one two"]}\n')
    asked = ("--questions", questions, "--out", tmp_path / "out", "--max-new-tokens", 6, "--dtype", "float32")
    works("eval", heads, *asked)
    (engine,) = read_json(tmp_path / "out" / "results.json")["engines"]
    assert (engine["engine"], [row["drafts"] for row in engine["rows"]]) == ("vllm", [2])
    assert "1 prompt (asked.jsonl)" in (tmp_path / "out" / "report.html").read_text()


def test_vllm_gets_a_number_of_drafts_per_load(heads: Path, texts: Path, tmp_path: Path) -> None:
    """Chains of 3 pay at one request, of 1 at two and three, none at four; 8 is like 4."""
    options = ("--engine-drafts", "1,3", "--engine-requests", "1,2,4,8", "--engine-tokens", 9)
    said = works(*tune(heads, texts, *options)).stdout
    assert "with 4 requests at a time" in " ".join(said.split())
    measured = read_engine_tunings(heads)["vllm"]
    assert [(row.drafts, row.requests) for row in measured.rows] == [(d, r) for d in (1, 3) for r in (1, 2, 4, 8)]
    assert measured.same_texts == (2 * (3 + 4 + 4 + 8),) * 2, "three prompts, repeated to fill the requests"
    assert all(row.accepted == row.by_position[0] == 1 for row in measured.rows)
    pays = {1: 3, 2: 1, 4: 0, 8: 0}
    rows = [replace(row, expected=1.5 if row.drafts == pays[row.requests] else 0.5) for row in measured.rows]
    write_engine_tuning(heads, replace(measured, rows=tuple(rows)))
    words = shlex.split(export_for(heads, tmp_path / "served", "vllm").commands["vllm"])
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["num_speculative_tokens"] == 3
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 3, 1], [4, 4096, 0]]


@pytest.mark.parametrize(
    ("gpus", "arguments", "seen"),
    [
        (0, "", [""]),
        (1, "", [""]),
        (2, "", ["0", "1"]),
        (8, "--tensor-parallel-size 4", ["0,1,2,3", "4,5,6,7"]),
        (8, "-tp 3", ["0,1,2", "3,4,5"]),
        (4, "--tensor-parallel-size=4", [""]),
        (8, "-tp 2 -dp 4 --max-model-len 8", [""]),
    ],
)
def test_servers_get_their_own_gpus(
    gpus: int, arguments: str, seen: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert gpu_groups(arguments) == seen
    if gpus == 2:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
        plain, drafted = gpu_groups("")
        assert (plain, drafted) == ("5", "7")
        with Server(ENGINES["vllm"], "target", (), tmp_path / "log", command=command("vllm"), gpus=drafted) as server:
            around = Path(f"/proc/{_engine_of(server)}/environ").read_text().split("\0")
        assert "CUDA_VISIBLE_DEVICES=7" in around


@pytest.mark.parametrize("many", [False, True])
def test_context_fits_into_memory_unless_it_is_given(many: bool, tmp_path: Path) -> None:
    for given, value in (("", "auto"), ("--max-model-len 99", "99")):
        words = Server(ENGINES["vllm"], "target", (), tmp_path / "log", options=given, many=many).words
        last = len(words) - 1 - words[::-1].index("--max-model-len")  # vLLM takes the last one
        assert words[last + 1] == value
    assert "--max-model-len" not in Server(ENGINES["llama.cpp"], "t.gguf", (), tmp_path / "log", many=many).words


def test_prompts_are_sent_concurrently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, all_are_there = Server(ENGINES["vllm"], "target", (), tmp_path / "log"), threading.Barrier(4)

    def answer(ask: CompletionRequest) -> EngineAnswer:
        all_are_there.wait(30)
        return EngineAnswer((*ask.prompt, 9), (1.0, 1.0), 1.0)

    monkeypatch.setattr(server, "answer", answer)
    assert [each.tokens for each in server.answers([CompletionRequest([n], 9) for n in (1, 2, 3, 4)])] == [
        (1, 9),
        (2, 9),
        (3, 9),
        (4, 9),
    ]


def test_figures_survive_tuning_and_copies(heads: Path, texts: Path, tmp_path: Path) -> None:
    works(*tune(heads, texts, "--engine-drafts", "1", "--engine-tokens", 5))
    works("export", heads, "--out", tmp_path / "copy")
    assert (tmp_path / "copy" / FILE).read_bytes() == (heads / FILE).read_bytes()
    assert str(tmp_path) not in (heads / FILE).read_text()
    kept = (heads / FILE).read_bytes()
    with keeping_engine_tunings(heads):
        works("export", tmp_path / "copy", "--out", heads)  # the same heads
        (heads / FILE).unlink()
    assert (heads / FILE).read_bytes() == kept
    with keeping_engine_tunings(heads):
        (heads / FILE).unlink()
        (heads / "heads.safetensors").write_bytes(b"other heads")
    assert not (heads / FILE).exists()


def test_first_error_of_a_llama_server_is_quoted(tmp_path: Path) -> None:
    log = tmp_path / "llama.cpp.log"
    server = Server(ENGINES["llama.cpp"], "TARGET.gguf", (), log)
    log.write_text(
        "0.00.002.280 W srv  llama_server: security: no API key is set\n"
        "0.00.006.339 E llama_model_load: error loading model: no such file\n"
        "0.00.006.387 I srv    operator(): operator(): cleaning up before exit...\n"
        "0.00.006.808 E srv  llama_server: exiting due to model loading error\n"
    )
    assert server.log_excerpt() == "0.00.006.339 E llama_model_load: error loading model: no such file"
    log.write_text("0.00.000.766 I srv  llama_server: initializing ...\nerror: invalid argument: --no-such-option\n")
    assert server.log_excerpt() == "error: invalid argument: --no-such-option"


def test_reason_of_a_validation_error_is_quoted(tmp_path: Path) -> None:
    server = Server(ENGINES["vllm"], "TARGET", (), log := tmp_path / "vllm.log")
    log.write_text(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (9) is greater than the derived max_model_len [type=value_error]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error\n"
    )
    assert "User-specified max_model_len (9)" in server.log_excerpt() and "visit" not in server.log_excerpt()


def test_killed_engine_may_lack_memory(tmp_path: Path) -> None:
    words = shlex.join([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    with (
        pytest.raises(UserError, match=r"vllm ended with 137: it printed nothing.*--gpu-memory-utilization"),
        Server(ENGINES["vllm"], "TARGET", (), tmp_path / "vllm.log", command=words, many=True),
    ):
        pass


def test_failing_engine_is_explained(heads: Path, texts: Path, tmp_path: Path) -> None:
    before = {path.name for path in heads.iterdir()}
    said = refused(*tune(heads, texts, fault="start"))
    assert "ended with 3" in said and "no such layer: midlayer.surprise" in said and "INFO" not in said
    assert (log := Path(said.split("Its log is ")[1].split()[0].rstrip("."))).is_file(), log
    assert "the prompt is too long" in refused(*tune(heads, texts, fault="answer"))
    assert "drafted nothing" in refused(*tune(heads, texts, fault="silent"))
    assert "--engine-command" in refused(*tune(heads, texts)[:-1], str(tmp_path / "nowhere"))
    assert {path.name for path in heads.iterdir()} == before


def test_failure_leaves_only_its_log(heads: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    refused(*tune(heads, texts)[:-1], str(tmp_path / "nowhere"))
    assert not list(place.iterdir())
    said = "".join(refused(*tune(heads, texts, fault="start")).split())
    (kept,) = place.iterdir()
    assert str(kept) in said and [file.name for file in kept.iterdir()] == ["logs"]


def test_bad_input_is_refused(heads: Path, made: Made, texts: Path) -> None:
    asked = ("tune", heads, "--conversations", texts, "--engine")
    assert "vllm" in refused(*asked, "vlm")
    assert "--engine-drafts" in refused(*asked, "vllm", "--engine-drafts", "none")
    assert "--engine-requests" in refused(*asked, "vllm", "--engine-requests", "0")
    assert "drafts the same number" in refused(*asked, "llama.cpp", "--engine-requests", "1,2")
    assert "--engine-target" in refused(*asked, "llama.cpp", "--engine-command", command("llama.cpp"))
    assert "--conversations" in refused("tune", heads, "--engine", "vllm")
    medusa = made("medusa")[1]
    assert "up to 3" in refused(*asked, "vllm", "--engine-drafts", "1,4")
    assert "--engine-arguments=" in refused(*asked, "vllm", "--dtype", "float32")
    assert "without an engine" in refused("tune", heads, "--engine-drafts", "1")
    for option in ("--engine-command", "--engine-arguments"):
        assert f"{option} cannot be split into words" in refused(*asked, "vllm", option, "serve 'target")
    assert "EAGLE-3" in refused("tune", medusa, "--conversations", texts, "--engine", "llama.cpp")


def test_server_is_stopped_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; held = b\"1\" * 2**28; time.sleep(600)'])\n"
        f"os.execv(sys.executable, [sys.executable, {str(FAKE)!r}, 'vllm', 'none', *sys.argv[1:]])\n"
    )
    words = shlex.join([sys.executable, str(script)])
    with Server(ENGINES["vllm"], "target", (), tmp_path / "log", command=words) as server:
        assert server.answer(CompletionRequest([1, 2], 3)).tokens == (7, 8, 9)
        assert not server.counters()
        group = _engine_of(server)
    assert not _processes(group)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ended_command_stops_its_engines(ending: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "tuning.py"
    script.write_text(
        "import signal, time\n"
        "from pathlib import Path\n"
        "from headstart.servers.engines import ENGINES\n"
        "from headstart.servers.process import Server\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup has it ignored
        f"log, command = Path({str(tmp_path / 'log')!r}), {command('vllm')!r}\n"
        "with Server(ENGINES['vllm'], 'target', (), log, command=command) as one:\n"
        "    print(one._process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        group = _child_of(int(process.stdout.readline()))
        process.send_signal(ending)
        assert process.wait(30) == -ending
    assert _ends(group)


def started(log: Path, *, fault: str = "none", many: bool = False) -> Server:
    """Return a stand-in engine, not started yet."""
    return Server(ENGINES["vllm"], "target", (), log, command=command("vllm", fault), many=many)


def test_engine_ends_with_its_guard(tmp_path: Path) -> None:
    endings = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL]
    servers = [started(tmp_path / ending.name) for ending in endings]
    with Fleet(servers):
        groups = [_engine_of(server) for server in servers]
        for server, ending in zip(servers, endings, strict=True):
            _guard_of(server).send_signal(ending)
        assert [_ends(group) for group in groups] == [True] * 4


def test_stopping_needs_neither_the_pipe_nor_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [started(tmp_path / "held"), started(tmp_path / "hung")]
    with Fleet(servers):
        groups = [_engine_of(server) for server in servers]
        held, hung = map(_guard_of, servers)
        assert held.stdin is not None
        forked = os.dup(held.stdin.fileno())  # as in a forked child
        servers[0].stop()
        os.close(forked)
        hung.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(serving, "_STOP_SECONDS", 0.1)
        servers[1].stop()
        assert [_ends(group) for group in groups] == [True] * 2


def test_engine_is_no_rank_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_NAME", "MASTER_PORT", "OMP_NUM_THREADS"]
    for name in names:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_SCRATCH", "/local")
    with started(tmp_path / "log") as server:
        around = Path(f"/proc/{_engine_of(server)}/environ").read_text().split("\0")
    assert "LOCAL_SCRATCH=/local" in around
    assert not {f"{name}=1" for name in names} & set(around)


def test_another_program_at_the_port_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started(tmp_path / "other") as other:
        monkeypatch.setattr(serving, "_free_port", lambda *_: other._port)  # taken after the check
        server = started(tmp_path / "log")
        server.start()
        _guard_of(server).wait(30)
        with pytest.raises(UserError, match="Address already in use"):
            server.wait()
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", server._port)), pytest.raises(UserError, match="another program uses"):
        server.start()
    server.stop()


def test_another_program_that_answers_is_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine itself is still loading."""
    loads = shlex.join([sys.executable, "-c", "import time; time.sleep(60)"])
    with started(tmp_path / "other") as other:
        monkeypatch.setattr(serving, "_free_port", lambda *_: other._port)
        server = Server(ENGINES["vllm"], "target", (), tmp_path / "log", command=loads, start_seconds=1.0)
        with pytest.raises(UserError, match="did not answer within 1 seconds"), server:
            pass


def test_restart_ends_with_the_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, start = started(tmp_path / "log"), Server.start
    with Fleet([server]) as fleet:
        os.killpg(_engine_of(server), signal.SIGKILL)
        _guard_of(server).wait(30)
        closing = threading.Thread(target=fleet.__exit__)

        def start_late() -> None:
            closing.start()
            while not fleet._is_closing:
                time.sleep(0.02)
            start(server)

        monkeypatch.setattr(server, "start", start_late)
        assert not fleet.recover(server.url)
        closing.join(5)
        assert not closing.is_alive() and server._process is None


def test_engines_are_stopped_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_are_there = threading.Barrier(2)
    monkeypatch.setattr(Server, "stop", lambda _: both_are_there.wait(10))
    Fleet([started(tmp_path / "a"), started(tmp_path / "b")]).__exit__()


def test_aborted_answer_is_an_error(tmp_path: Path) -> None:
    with started(tmp_path / "log", fault="abort") as server, pytest.raises(UserError, match="gave up"):
        server.answer(CompletionRequest([1, 2], 3))


@pytest.mark.parametrize(("many", "option"), [(False, "--engine-arguments"), (True, "data.server_arguments=")])
def test_remedy_for_little_memory(many: bool, option: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal, started(tmp_path / "log", fault="memory", many=many):
        pass
    assert option in refusal.value.remedy and ("Two servers" in refusal.value.remedy) != many


def _engine_of(server: Server) -> int:
    """Return the process id of an engine, which is its group's: the guard's only child."""
    return _child_of(_guard_of(server).pid)


def _child_of(process: int) -> int:
    (child,) = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return child


def _guard_of(server: Server) -> subprocess.Popen[bytes]:
    assert server._process is not None
    return server._process


def _ends(group: int) -> bool:
    """Wait up to 5 s for all processes of a group to end."""
    for _ in range(100):
        if not _processes(group):
            return True
        time.sleep(0.05)
    return False


def _processes(group: int) -> list[Path]:
    return [stat for stat in Path("/proc").glob("[0-9]*/stat") if _in_group(stat, group)]


def _in_group(stat: Path, group: int) -> bool:
    try:
        state, _, found = stat.read_text().rsplit(")", 1)[1].split()[:3]
    except (OSError, ValueError):
        return False
    return int(found) == group and state != "Z"


def test_silent_server_times_out(tmp_path: Path) -> None:
    words = shlex.join([sys.executable, "-c", "import time; print('waiting for a device'); time.sleep(60)"])
    with (
        pytest.raises(UserError, match="did not answer within"),
        Server(ENGINES["vllm"], "target", (), tmp_path / "log", command=words, start_seconds=0.5),
    ):
        pass


def test_missing_command_leaves_signals_unchanged(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    with (
        pytest.raises(UserError, match="cannot be started"),
        Server(ENGINES["vllm"], "target", (), tmp_path / "log", command="no-such-engine-here"),
    ):
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before


def test_run_and_printed_commands_match(made: Made, target: Target, tmp_path: Path) -> None:
    done = export_for(made("eagle3")[1], tmp_path / "served", "vllm")
    engine = ENGINES["vllm"]
    with_heads = [*shlex.split(engine.command), target.spec, *served_with(engine, done, {1: 3})]
    assert with_heads == shlex.split(done.commands["vllm"])


def test_imported_heads_must_be_tuned_first(heads: Path, target: Target, texts: Path, tmp_path: Path) -> None:
    works("export", heads, "--format", "vllm", "--out", tmp_path / "there")
    works("import", tmp_path / "there", "--target", target.spec, "--out", tmp_path / "back")
    assert "Tune them first" in refused(*tune(tmp_path / "back", texts))


def test_paths_with_spaces_are_quoted(made: Made, tmp_path: Path) -> None:
    done = export_for(made("eagle3")[1], tmp_path / "my heads", "vllm")
    words = shlex.split(done.commands["vllm"])
    assert json.loads(words[words.index("--speculative-config") + 1])["model"] == str(tmp_path / "my heads")


def test_drafts_beyond_the_end_do_not_lengthen_rounds(tmp_path: Path) -> None:
    """An answer of 4 tokens takes the prompt's pass and two rounds; the last draft is cut off."""
    heads = tmp_path / "heads"
    heads.mkdir()
    (heads / "model.safetensors").touch()
    drafting = ("--speculative-config", json.dumps({"model": str(heads), "num_speculative_tokens": 1}))
    engine = ENGINES["vllm"]
    with (
        Server(engine, "target", (), tmp_path / "plain.log", command=command("vllm")) as plain,
        Server(engine, "target", drafting, tmp_path / "drafts.log", command=command("vllm")) as drafted,
    ):
        measured = measure_drafts(plain, drafted, 1, EngineWorkload([[1, 2]], 4, [[0.5]]))
    assert measured.row.accepted == 1 and measured.same == 1
    seconds = 4 / measured.row.tokens_per_second
    assert measured.row.round_ms <= 1e3 * seconds / 2, "two rounds"


def test_counters_are_summed_over_engines() -> None:
    page = 'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\nvllm:spec_decode_num_drafts_total{engine="1"} 2.0\n'
    page += 'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
    assert read_counters(page) == {"drafts": 5}


def test_damaged_tunings_are_refused(heads: Path, texts: Path) -> None:
    (heads / FILE).write_text('{"vllm": {"rows": 3}}')
    with pytest.raises(UserError, match="Delete it"):
        read_engine_tunings(heads)
    from rich.console import Console

    with pytest.raises(UserError, match="Delete it"):
        tune_in_engine(heads, texts, Console(), None, EngineOptions(engine="vllm", engine_command=command("vllm")))


def test_benchmark_of_engines(heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--engine", "vllm", "--engine-command", command("vllm"), "--limit", "2", "--max-new-tokens", "7"]
    more = ["--dtype", "float32", "--drafts", "1", "3", "--out", str(tmp_path / "out")]
    script("engines", monkeypatch).main([str(heads), *asked, *more])
    rows = read_json(tmp_path / "out" / "vllm.json")["rows"]
    assert [row["drafts"] for row in rows] == [1, 3] and all(row["accepted_per_round"] == 1 for row in rows)
    for row in rows:
        assert row["our_accepted_per_round"] == pytest.approx(sum(row["our_acceptance_by_place"]))
        assert len(row["our_acceptance_by_place"]) == row["drafts"] and row["our_rounds"] >= 2


@pytest.mark.parametrize("name", ENGINES)
def test_a_report_of_an_engine(name: str, heads: Path, tmp_path: Path) -> None:
    questions = tmp_path / "asked.jsonl"
    questions.write_text('{"turns": ["one two"], "category": "c"}\n{"turns": ["three"]}\n')
    asked = ("eval", heads, "--questions", questions, "--out", tmp_path / "out", "--engine", name)
    started = ("--engine-command", command(name), "--engine-target", "target.gguf")
    said = works(*asked, *started, "--max-new-tokens", 9, "--sweep-batch", 2).stdout
    assert "none differs" in " ".join(said.split())
    results = read_json(tmp_path / "out" / "results.json")
    assert results["environment"]["engine"] == {"vllm": "vllm 0.0", "llama.cpp": "llama.cpp b0"}[name]
    drafted, plain = results["compare"]
    assert (drafted["tokens_per_round"], plain["tokens_per_round"]) == (2, None), "the engine accepts one draft"
    assert drafted["acceptance_by_position"][0] == 1 and drafted["rounds_by_position"][0] == 8
    assert drafted["ttft_ms"]["count"] == 2 and drafted["round_ms"] is None
    ((row),) = results["batches"]
    assert (row["batch_size"], row["tokens_per_round"]) == (2, 2)
    page = (tmp_path / "out" / "report.html").read_text()
    assert results["environment"]["engine"] in page and "2 prompts (asked.jsonl)" in page
    for option in (("--draft", "on"), ("--min-p", "0.1"), ("--batch-size", "2"), ("--stop-token-ids", "5")):
        assert "for headstart's own loop" in refused(*asked, *started, "--overwrite", *option)
    silent = ("--engine-command", command(name, "silent"), "--engine-target", "target.gguf", "--overwrite")
    assert "drafted nothing" in refused(*asked, *silent, "--max-new-tokens", 4)
    assert "--engine-arguments" in refused(*asked, *started, "--overwrite", "--dtype", "float32")
    assert "without an engine" in refused(*asked[:6], "--overwrite", "--engine-target", "x")
    config = read_json(heads / "config.json")
    config["target"]["spec"] = str(tmp_path / "moved")
    (heads / "config.json").write_text(json.dumps(config))
    assert "--target" in refused(*asked, *started, "--overwrite")
