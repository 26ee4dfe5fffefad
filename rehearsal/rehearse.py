"""Run the commands that README.md, the pages in docs/ and the examples print, at toy size on CPUs.

    python rehearsal/rehearse.py                             everything, with the engines that are installed
    python rehearsal/rehearse.py --stand-in --short          without engines, and without what tests do as well

The commands are read from the pages (`rehearsal.pages`), with toy words in place of theirs (`rehearsal.table`). A part
below names the commands that it runs by how they begin; `tests/test_rehearsal.py` fails where a page prints a command
that no part runs and the table does not excuse.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

# Last: links at the root are called train, data, eval.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "benchmarks"))

from record import here, record

from rehearsal.pages import ROOT, Command, printed
from rehearsal.places import NODES, Engines, Failed, Place, set_up, until

VLLM, LLAMA_SERVER = ROOT / "engines" / "vllm", ROOT / "engines" / "llama.cpp"
HOW_TO_INSTALL = f"""Engines that are not installed are replaced by small servers. To install them (several GB):
  python benchmarks/engine_setup.py vllm {VLLM.relative_to(ROOT)}
  python benchmarks/engine_setup.py llama.cpp {LLAMA_SERVER.relative_to(ROOT)}"""


@dataclass(frozen=True)
class Part:
    """Commands that belong together, run by one function with the place and each of the commands.

    Attributes:
        folder: working folder; parts of the same folder build on each other.
        begins: the beginning of each command, in the order of the function's arguments.
        short: whether it belongs to the short rehearsal.
    """

    play: Callable[..., None]
    folder: str
    begins: tuple[str, ...]
    short: bool


PARTS: list[Part] = []
PACKAGED = ("own", "gpu", "example")
"""Folders of the parts that run the packaged target if llama-server is real. They take as long as all other parts, and
run beside them in another place."""
SLURM = "#!/bin/bash\n#SBATCH --job-name=heads"
"""How the script of docs/scaling.md begins."""


def part(folder: str, *begins: str, short: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that runs the printed commands with these beginnings."""

    def noted(play: Callable[..., None]) -> Callable[..., None]:
        PARTS.append(Part(play, folder, begins, short))
        return play

    return noted


def named(begins: str, commands: Sequence[Command]) -> Command:
    """Return the command with this text, or else the only command that begins with it."""
    exact = [command for command in commands if command.text == begins]
    chosen = exact or [command for command in commands if command.text.startswith(begins)]
    if len(chosen) != 1:
        raise LookupError(f"{len(chosen)} printed commands begin with {begins!r}")
    return chosen[0]


# -- README.md, docs/start.md, docs/one-gpu.md, docs/commands.md -------------------------------------------------------


@part("own", "headstart run quickstart target=path/to/model")
def a_model_of_ones_own(place: Place, run: Command) -> None:
    place.run(run)
    place.check((place.here / "runs/mine/heads/heads.safetensors").is_file(), "the run ends with heads")


@part(
    "gpu",
    "headstart plan eagle3-8b target=path/to/model",
    "headstart run eagle3-8b target=path/to/model",
    "headstart audit runs/mine",
    "headstart run quickstart target=HuggingFaceTB/SmolLM2-360M-Instruct",
    short=False,
)
def a_recipe_for_gpus(place: Place, plan: Command, run: Command, audit: Command, small: Command) -> None:
    place.check("disk" in place.run(plan), "a plan says bytes")
    place.run(run)
    place.run(audit, codes=(0, 1))  # heads that know next to nothing may be found fault with
    place.run(small)


@part(
    "readme",
    "headstart run quickstart train.minutes=20",
    ".venv/bin/headstart chat runs/quickstart",
    '.venv/bin/headstart generate runs/quickstart --prompt "Explain how a bicycle stays upright."',
    '.venv/bin/headstart generate runs/quickstart --prompt "Explain how a bicycle stays upright." --drafter none',
    "import headstart",
    short=False,
)
def quickstart(place: Place, run: Command, chat: Command, drafted: Command, plain: Command, python: Command) -> None:
    place.run(run)
    place.check("tokens/s" in place.run(chat, stdin="hello\n\n"), "chat shows its speed")
    place.run(drafted)
    place.run(plain)
    place.check("tokens per forward" in place.run(python), "an answer has its figures")


@part(
    "readme",
    "headstart data show PATH",
    "headstart tune RUN",
    "headstart eval HEADS --questions FILE.jsonl --out DIR",
    "headstart race --from DIR --out race.svg",
    "headstart race HEADS --prompt TEXT",
    "headstart eval HEADS --questions FILE.jsonl --out DIR --compare all",
    "headstart eval HEADS --questions FILE.jsonl --out DIR --long-context 8192",
    "headstart export HEADS --out DIR",
    "headstart generate HEADS --prompt TEXT",
    "headstart recipes",
    "headstart recipes show quickstart --all",
    "headstart chat HEADS",
    "headstart audit HEADS",
    "headstart doctor RUN",
    short=False,
)
def what_one_does_with_heads(place: Place, *commands: Command) -> None:
    for command in commands:
        if " --out DIR" in command.text:
            shutil.rmtree(place.here / "out", ignore_errors=True)
        # Heads that know next to nothing are found fault with.
        codes = (0, 1) if command.text.startswith(("headstart audit", "headstart doctor")) else (0,)
        place.run(command, stdin="hello\n\n", codes=codes)


@part(
    "readme",
    "headstart plan RECIPE",
    "headstart data build RECIPE",
    "headstart train RECIPE",
    "accelerate launch -m headstart.train RECIPE",
    "ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -m headstart.train RECIPE",
    "headstart run RECIPE [key=value ...]",
    "headstart run hydra",
    "headstart runs",
    "headstart gc",
    short=False,
)
def steps_one_at_a_time(place: Place, *commands: Command) -> None:
    plan, build, train, launched, torchrun, run, hydra, runs, gc = commands
    place.run(plan)
    place.run(build)
    place.run(train)
    for again in (launched, torchrun):
        shutil.rmtree(place.here / "runs")
        place.run(build)
        place.check("Training on" in place.run(again), f"{again} trains")
    place.run(run)
    place.run(hydra)
    place.check("eagle3-8b" in place.run(runs), "the run is listed")
    place.run(gc, stdin="n\n")


# -- docs/scaling.md, docs/hidden-states.md ----------------------------------------------------------------------------


@part("cluster", SLURM)
def two_nodes(place: Place, script: Command) -> None:
    """The job is submitted twice: a server is killed while it writes, and the time is up while heads are trained."""
    asked = re.search(r"--signal=(\w+)@(\d+)", script.text)
    if asked is None:
        raise Failed("the job asks for no signal before its end")
    sent, grace = signal.Signals[f"SIG{asked[1]}"], float(asked[2])
    job = place.job()
    steps = Path(job["REHEARSAL_STEPS"])
    heads = place.folder / "shared/runs/heads"
    log = place.folder / "logs/cluster/00.log"

    with place.background(script, job | {"REHEARSAL_PAUSE": "0.5"}) as first:
        until(lambda: first.poll() is not None or log.read_text().count('"POST /v1/completions') > 4, "servers write")
        (server,) = (task for task in steps.iterdir() if task.read_text() == f"{NODES[1]} vllm")
        os.killpg(int(server.name), signal.SIGKILL)
        until(lambda: first.poll() is not None or steps_done(heads) > 0, "training begins")
        place.check(first.poll() is None, f"the job reaches its training; see {log}")
        for task in steps.iterdir():
            process = psutil.Process(int(task.name))
            for each in (process, *process.children(recursive=True)):  # as SLURM does: launchers' ranks lead groups
                each.send_signal(sent)
        try:
            first.wait(grace)
        except subprocess.TimeoutExpired:
            raise Failed(f"training has not left {grace:.0f} seconds after {sent.name}; see {log}") from None
    place.check(bool(first.returncode), "a job that is ended early reports it")
    stopped = re.search(r"Stopped after step (\d+); the same command continues", log.read_text())
    place.check(stopped is not None, "training says where it stopped")
    held = "that a context of 128 tokens does not hold"  # as --max-model-len is substituted
    place.check(held in log.read_text(), "prompts beyond the servers' context are counted as left out")
    place.check(bool(list((heads / "train/checkpoints").iterdir())), "training left a checkpoint")

    text = place.run(script, job=job)
    place.check("Training on 4 processes" in text, "all processes of both nodes train")
    place.check("ontinuing from step" in text, "the second job goes on from the checkpoint")
    place.check((heads / "report/report.html").is_file(), "the job ends with a report")


@part("cluster", "headstart export RUNS/heads", "headstart tune RUNS/heads")
def measured_where_it_is_served(place: Place, export: Command, tune: Command) -> None:
    with without_target(place):
        place.run(export)
    place.check("tokens/s" in place.run(tune), "an engine was measured")


@part("cluster", "srun --ntasks-per-node=8 --gpus-per-task=1 headstart data build", short=False)
def states_of_all_gpus(place: Place, build: Command) -> None:
    """Run the sentence after the script, with the script's variables."""
    script = named(SLURM, printed()).text
    variables = re.findall(r"^(?:RUNS|NODES|MAIN|ADDRESSES|WRITTEN)=.*$", script, re.MULTILINE)
    text = place.run(Command(build.page, build.line, "\n".join([*variables, build.text])), job=place.job())
    place.check("Helping it" in text or "no data left" in text, "the processes of both nodes share the states")


@part(
    "cluster",
    "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 0",
    "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 1",
    short=False,
)
def two_machines_by_hand(place: Place, first: Command, second: Command) -> None:
    forget_training(place.folder / "shared/runs/heads")
    texts = place.together(first, second)
    place.check(any("Training on 4 processes" in text for text in texts), "both machines train")


@part(
    "server",
    "headstart data build eagle3-8b data.server=",
    "headstart train eagle3-8b data.server=",
    short=False,
)
def written_by_a_server(place: Place, build: Command, train: Command) -> None:
    place.run(build)
    place.run(train)


@part("eight", "headstart run eagle3-8b --run-dir runs/eight")
def one_command(place: Place, run: Command) -> None:
    text = place.run(run)
    place.check("Chosen for this machine (no GPU): data.server=vllm" in text, "the engine on the PATH is found")
    place.check("Training on 2 processes" in text and "training streams them" in text, "states are streamed to two")
    place.check("over plain decoding in vllm, measured" in text, "the report is of the engine")
    place.check("Nothing was left to do" in place.run(run), "the command has an end")


@part(
    "several",
    "torchrun --nproc-per-node 8 -m headstart data build eagle3-8b",
    "accelerate launch --num_processes 8 -m headstart data build eagle3-8b",
    "srun --ntasks-per-node 8 headstart data build eagle3-8b",
    "headstart data build eagle3-8b",
    short=False,
)
def written_by_several_processes(
    place: Place, torchrun: Command, launch: Command, srun: Command, build: Command
) -> None:
    job = place.job(NODES[0])
    texts = {}
    for command, more in ((torchrun, {}), (launch, {}), (srun, job)):
        shutil.rmtree(place.here / "runs", ignore_errors=True)
        place.run(command, job=more)
        (train,) = place.here.glob("runs/eagle3-8b/data/conversations/train.jsonl")
        texts[command.text] = sorted(train.read_text().splitlines())
    shutil.rmtree(place.here / "runs")
    place.together(build, build)
    (train,) = place.here.glob("runs/eagle3-8b/data/conversations/train.jsonl")
    for text, lines in texts.items():
        place.check(lines == sorted(train.read_text().splitlines()), f"{text}: the same conversations")


@part(
    "states",
    "headstart data build eagle3-8b data.states_server=vllm",
    "headstart run eagle3-8b data.states_server=vllm",
    short=False,
)
def states_computed_by_vllm(place: Place, build: Command, run: Command) -> None:
    text = place.run(build)
    place.check("hidden states of" in text and "not loaded" in text, "states are stored, and the target is not loaded")
    shutil.rmtree(place.here / "runs")
    text = place.run(run)
    place.check("training streams them" in text and "is not loaded: training only reads" in text, "states are streamed")
    place.check(not list(place.here.glob("runs/artifacts/states/*/shard-*")), "no states are stored")


@part(
    "teacher",
    "headstart data build eagle3-70b",
    "rsync -a runs/ node:runs/",
    "accelerate launch -m headstart.train eagle3-70b",
    "headstart export RUN --format vllm --out FOLDER",
)
def a_node_without_the_target(place: Place, build: Command, copy: Command, train: Command, export: Command) -> None:
    place.run(build)
    place.run(copy)
    place.part += "/node"
    with without_target(place):
        text = place.run(train)
        place.run(export)
    place.check("is not loaded: training only reads" in text, "training reports that the target is not loaded")
    place.check((place.here / "served/model.safetensors").is_file(), "heads are exported where the target is not")


@part(
    "online",
    "headstart run eagle3-8b",
    "accelerate launch -m headstart.train eagle3-8b",
    "torchrun --nproc-per-node 8 -m headstart.train eagle3-8b train.shard_target=true",
    short=False,
)
def states_online(place: Place, run: Command, launch: Command, sharded: Command) -> None:
    place.run(run)
    place.check(not list(place.here.glob("runs/artifacts/states/*/shard-*")), "no states are stored")
    for command in (launch, sharded):
        forget_training(place.here / "runs/eagle3-8b")
        place.check("Training on" in place.run(command), f"{command} trains")


# -- docs/serving.md ---------------------------------------------------------------------------------------------------


@part(
    "own",
    "headstart export runs/mine --format vllm",
    "vllm serve TARGET --speculative-config",
    "curl http://localhost:8000/v1/chat/completions",
    "curl -s http://localhost:8000/metrics | grep spec_decode",
    'python client.py "Why is the sky blue?"',
)
def served_by_vllm(
    place: Place, export: Command, serve: Command, chat: Command, metrics: Command, client: Command
) -> None:
    said = re.search(r"vllm serve (\S+) --speculative-config", place.run(export))
    if said is None:
        raise Failed("export does not print what serves the heads")
    serve, chat = (replace(each, text=each.text.replace("TARGET", said[1])) for each in (serve, chat))
    with place.serving(serve, "8000"):
        place.check('"content"' in place.run(chat), "it answers")
        counted = place.run(metrics)
        place.check("accepted drafts per round" in place.run(client), "the client reports accepted drafts")
    accepted = re.search(r"^vllm:spec_decode_num_drafts_total\S* ([\d.]+)", counted, re.MULTILINE)
    place.check(accepted is not None and float(accepted[1]) > 0, "drafts are counted")


@part("own", "headstart serve runs/mine", "curl http://localhost:8000/v1/completions", "import openai")
def served_by_headstart(place: Place, serve: Command, curl: Command, python: Command) -> None:
    with place.serving(serve, "8000"):
        place.check('"finish_reason":"' in place.run(curl), "it answers")
        place.check("tokens_per_round" in place.run(python), "the client gets the figures")


@part(
    "own",
    "headstart export --check DIR",
    "headstart export --check served",
    "headstart export --check served --engine vllm,sglang",
    "headstart export --check served --against runs/mine",
    short=False,
)
def folders_are_checked(place: Place, *commands: Command) -> None:
    for command in commands:
        text = place.run(command, codes=(0, 1) if "sglang" in command.text else (0,))
        place.check("is complete" in text or "sglang:" in text, f"{command} finds no fault: {text}")


@part(
    "own",
    "headstart import FOLDER --target TARGET --out heads",
    'headstart generate heads --prompt "Why is the sky blue?"',
    "headstart tune heads --conversations validation.jsonl",
    "headstart run eagle3-8b target=TARGET train.start_from=heads",
    "headstart import FOLDER --target TARGET --out DIR",
    short=False,
)
def published_heads(
    place: Place, take: Command, generate: Command, tune: Command, run: Command, again: Command
) -> None:
    for command in (take, generate, tune, run):
        place.run(command)
    shutil.rmtree(place.here / "out", ignore_errors=True)
    place.run(again)


@part(
    "own",
    "headstart export runs/mine --format gguf",
    "llama-server -m TARGET.gguf -md served/heads.gguf",
    "curl http://localhost:8080/v1/chat/completions",
    short=False,
)
def served_by_llama_cpp(place: Place, export: Command, serve: Command, chat: Command) -> None:
    place.run(export)
    with place.serving(serve, "8080"):
        place.check('"content"' in place.run(chat), "it answers")


@part(
    "own",
    "headstart tune runs/mine --engine vllm --engine-arguments=",
    "headstart tune runs/mine --engine vllm --engine-requests 1,2,4,8",
    "headstart tune runs/mine --engine llama.cpp",
    "headstart eval runs/mine --questions FILE.jsonl --out DIR --engine vllm",
    short=False,
)
def measured_in_engines(place: Place, vllm: Command, by_load: Command, llama_cpp: Command, report: Command) -> None:
    """Also checks that each engine's acceptance on the same texts is within 5 % of our own decoder's."""
    for command in (vllm, by_load, llama_cpp):
        place.check("tokens/s" in place.run(command), "an engine was measured")
    place.check("over plain" in place.run(report), "the report compares with plain decoding")
    gguf = f" --engine-target {place.words['gguf']}"
    for engine, target in (("vllm", ""), ("llama.cpp", gguf)):
        asked = f"--questions {place.folder}/prompts.jsonl --limit 6 --max-new-tokens 64 --dtype auto --out engines"
        place.run(f"{sys.executable} {ROOT}/benchmarks/engines.py runs/mine/heads --engine {engine}{target} {asked}")
        (row,) = json.loads((place.here / f"engines/{engine}.json").read_text())["rows"]
        theirs, ours = row["accepted_per_round"], row["our_accepted_on_its_texts"]
        print(f"    {engine} {row['version']}: {theirs:.3f} drafts accepted per round, ours on its texts {ours:.3f}")
        place.check(abs(theirs - ours) <= 0.05 * ours, f"{engine} accepts {theirs} a round, our decoder {ours}")


# -- examples ----------------------------------------------------------------------------------------------------------


@part(
    "example",
    "headstart plan recipe.yaml target=path/to/model",
    "headstart run recipe.yaml target=path/to/model",
    "headstart doctor runs/own_model",
    "headstart export runs/own_model --format vllm",
    short=False,
)
def an_own_recipe(place: Place, plan: Command, run: Command, doctor: Command, export: Command) -> None:
    place.run(plan)
    place.run(run)
    place.run(doctor, codes=(0, 1))
    place.run(export)
    place.check((place.here / "served/model.safetensors").is_file(), "heads are exported")


# -- around them -------------------------------------------------------------------------------------------------------


def steps_done(run: Path) -> int:
    """Return the last step that a training has logged, or 0."""
    file = run / "train/metrics.jsonl"
    rows = file.read_text().splitlines() if file.is_file() else []
    return max((int(step) for row in rows for step in re.findall(r'"step": (\d+)', row)), default=0)


def forget_training(run: Path) -> None:
    """Let a run train anew."""
    shutil.rmtree((run / "train").resolve())
    (run / "train").unlink()


@contextmanager
def without_target(place: Place) -> Iterator[None]:
    """Hide the toy target from the commands in this block."""
    there = Path(place.words["toy"])
    there.rename(there.with_name("away"))
    try:
        yield
    finally:
        there.with_name("away").rename(there)


def installed() -> Engines:
    """Return the engines that `HOW_TO_INSTALL` installs, or those found on the PATH."""
    python, built = VLLM / "bin/python", LLAMA_SERVER / "build/bin/llama-server"
    if not python.is_file() and (program := shutil.which("vllm")) is not None:
        python = Path(program).with_name("python")
    vllm = (str(python), "-m", "vllm.entrypoints.openai.api_server") if python.is_file() else None
    llama = str(built) if built.is_file() else shutil.which("llama-server")
    return Engines(vllm, (llama,) if llama else None)


def versions(engines: Engines) -> dict[str, str]:
    """Return the versions of everything that took part."""
    from importlib.metadata import version

    known = {name: version(name) for name in ("headstart", "torch", "transformers", "accelerate")}
    known["python"] = platform.python_version()
    known["vllm"] = known["llama-server"] = "stood in for"
    if engines.vllm:
        asked = "from importlib.metadata import packages_distributions as p, version; print(version(p()['vllm'][0]))"
        known["vllm"] = subprocess.run([engines.vllm[0], "-c", asked], capture_output=True, text=True).stdout.strip()
    if engines.llama_server:
        told = subprocess.run([*engines.llama_server, "--version"], capture_output=True, text=True)
        known["llama-server"] = (told.stderr + told.stdout).strip().splitlines()[0]
    return known


@dataclass(frozen=True)
class Played:
    """The result of a part: its name, its rows of the log, its seconds, and the failure (empty if it passed)."""

    name: str
    done: Sequence[tuple[str, str, float]]
    seconds: float
    failed: str


def play(place: Place, parts: Sequence[Part]) -> list[Played]:
    """Run parts one after another."""
    commands, played = printed(), []
    for each in parts:
        name = each.play.__name__
        print(f"{each.folder}: {name}", flush=True)
        place.part, before, started, why = each.folder, len(place.done), time.monotonic(), ""
        try:
            each.play(place, *(named(begins, commands) for begins in each.begins))
        except (Failed, OSError, ValueError, KeyError) as problem:
            why = f"{problem}"
            print(f"FAILED {name}: {problem}", flush=True)
        played.append(Played(name, place.done[before:], time.monotonic() - started, why))
    return played


def summed_up(file: Path, engines: Engines, played: Sequence[Played], seconds: float, load: float) -> str:
    """Write what was run as a results file, and return it in Markdown: parts, commands, versions and minutes.

    Args:
        file: to write.
        engines: that took part.
        played: all parts.
        seconds: from beginning to end.
        load: of the machine beforehand.
    """
    known, failed = versions(engines), [each for each in played if each.failed]
    commands = sum(len(each.done) for each in played)
    total = f"{commands} commands in {seconds / 60:.1f} minutes; {len(failed)} of {len(played)} parts failed."
    rows = [
        {"part": each.name.replace("_", " "), "commands": len(each.done), "minutes": each.seconds / 60}
        | ({"failed": each.failed} if failed else {})
        for each in played
    ]
    with_these = ", ".join(f"{name} {version}" for name, version in known.items())
    what = f"The commands of the pages, at toy size. {total} With {with_these}; at a load of {load:.1f} beforehand."
    record(file, what, rows, here(), __file__, None)
    lines = ["| part | command | seconds |", "| --- | --- | --- |"]
    for each in played:
        lines.append(f"| {each.name} |  | {each.seconds:.0f} |")
        lines += [f"|  | `{text.replace('|', chr(92) + '|')}` | {took:.1f} |" for _, text, took in each.done]
    lines += ["", *(f"{name} {version}" for name, version in known.items()), "", total]
    lines += [f"\nFAILED {each.name}: {each.failed}" for each in failed]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true", help="small servers in place of engines, installed or not")
    parser.add_argument("--short", action="store_true", help="leave out parts that tests cover")
    parser.add_argument("--only", nargs="+", default=[], help="run only functions with the given names")
    parser.add_argument("--out", type=Path, help="keep everything in this folder, which is new")
    options = parser.parse_args()
    if options.out is not None and options.out.exists():
        parser.error(f"{options.out} is there already: delete it, or choose another folder")
    engines = Engines() if options.stand_in else installed()
    if not options.stand_in and None in (engines.vllm, engines.llama_server):
        print(HOW_TO_INSTALL)
    parts = [each for each in PARTS if each.short or not options.short]
    parts = [each for each in parts if each.play.__name__ in options.only] if options.only else parts
    lanes = {
        "packaged": [each for each in parts if each.folder in PACKAGED],
        "toy": [each for each in parts if each.folder not in PACKAGED],
    }
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as scratch, ThreadPoolExecutor(len(lanes)) as pool:
        out = (options.out or Path(scratch) / "out").resolve()
        places = [set_up(out / lane, engines) for lane in lanes]
        played = [each for lane in pool.map(play, places, lanes.values()) for each in lane]
        text = summed_up(out / "rehearsal.json", engines, played, time.monotonic() - began, load)
        (out / "summary.md").write_text(text)
    print(text)
    sys.exit(any(each.failed for each in played))


if __name__ == "__main__":
    main()
