"""The place of a rehearsal: its folder, the environment of its commands, and the log."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import yaml

from rehearsal.pages import ROOT, Command
from rehearsal.table import PORTS, RECIPES, TOY_SIZES, toy

BIN = Path(__file__).with_name("bin")
NODES = ("127.0.0.1", "127.0.0.2")
"""Addresses of this machine that stand for two nodes."""
Process = subprocess.Popen[bytes]
LONGEST = 900.0
"""Time limit of a command, in seconds."""
WORDS = "tell me about the sun and moon how to cook rice what is a river who lives in the sea why do we sleep"


class Failed(Exception):
    """A command or a check did not do what the page says."""


@dataclass(frozen=True)
class Engines:
    """Command lines of `vllm` and `llama-server`, or None for small servers in their place."""

    vllm: tuple[str, ...] | None = None
    llama_server: tuple[str, ...] | None = None


@dataclass
class Place:
    """A folder with toy recipes, prompts and models, for running commands; `done` is the log.

    Attributes:
        folder: holds everything that is written.
        words: replacements for the table's braces, and for the printed ports.
        engines: real engines, or None for each stand-in.
        done: rows of part, command, seconds.
    """

    folder: Path
    words: dict[str, str]
    engines: Engines
    part: str = ""
    done: list[tuple[str, str, float]] = field(default_factory=list)

    # -- commands ------------------------------------------------------------------------------------------------

    def run(
        self,
        command: Command | str,
        *,
        stdin: str = "",
        codes: tuple[int, ...] = (0,),
        job: Mapping[str, str] | None = None,
    ) -> str:
        """Run a printed command in the part's folder, and return its output; `job` are environment variables.

        Raises:
            Failed: it ended with another code, or not in time.
        """
        began, log = time.monotonic(), self._log()
        with log.open("w+", encoding="utf-8") as out:
            process = self._start(command, out, job or {}, stdin)
            try:
                code = process.wait(LONGEST)
            except subprocess.TimeoutExpired:
                end(process)  # politely first: it ends the engines that it has started
                code = -1
        self._note(command, time.monotonic() - began)
        text = log.read_text(encoding="utf-8", errors="replace")
        if code not in codes:
            raise Failed(f"{command}\n  ended with {code}; {log} ends:\n{_last(text)}")
        return text

    def together(self, *commands: Command | str) -> list[str]:
        """Run commands at the same time, and return their outputs once all have succeeded."""
        began, logs, processes = time.monotonic(), [], []
        for command in commands:
            logs.append(self._log())
            with logs[-1].open("w", encoding="utf-8") as out:
                processes.append(self._start(command, out, {}, ""))
            time.sleep(0.01)
        codes = [process.wait(LONGEST) for process in processes]
        texts = [log.read_text(encoding="utf-8", errors="replace") for log in logs]
        for command, code, text, log in zip(commands, codes, texts, logs, strict=True):
            self._note(command, time.monotonic() - began)
            if code:
                raise Failed(f"{command}\n  ended with {code}; {log} ends:\n{_last(text)}")
        return texts

    @contextmanager
    def serving(self, command: Command | str, printed_port: str) -> Iterator[None]:
        """Keep a server running in the block, from the moment it answers."""
        began, log, port = time.monotonic(), self._log(), self.words[printed_port]
        with log.open("w", encoding="utf-8") as out:
            process = self._start(command, out, {}, "")
        try:
            until(lambda: process.poll() is not None or healthy(NODES[0], port), f"{command} answers")
            if process.poll() is not None:
                raise Failed(f"{command}\n  ended with {process.poll()}; {log} ends:\n{_last(log.read_text())}")
            self._note(command, time.monotonic() - began)
            yield
        finally:
            end(process)

    @contextmanager
    def background(self, command: Command, job: Mapping[str, str]) -> Iterator[Process]:
        """Run a job in the background; kill it and its steps if the block is left early."""
        began = time.monotonic()
        with self._log().open("w", encoding="utf-8") as out:
            process = self._start(command, out, job, "")
        try:
            yield process
        finally:
            end(process, signal.SIGKILL)
            for task in Path(job["REHEARSAL_STEPS"]).iterdir():  # started by srun, as leaders of their groups
                with suppress(ProcessLookupError):
                    os.killpg(int(task.name), signal.SIGKILL)
                task.unlink()
            self._note(command, time.monotonic() - began)

    def job(self, *nodes: str) -> dict[str, str]:
        """Return the variables of a job on these nodes, by default on both."""
        steps, nodes = self.folder / "steps", nodes or NODES
        steps.mkdir(exist_ok=True)
        lists = {"SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_NNODES": str(len(nodes))}
        return lists | {"REHEARSAL_STEPS": str(steps)}

    @property
    def here(self) -> Path:
        """The folder of the part under way."""
        return self.folder / self.part

    def check(self, holds: bool, what: str) -> None:
        """Fail unless a promise of the page holds."""
        if not holds:
            raise Failed(what)

    def _start(self, command: Command | str, out: IO[str], more: Mapping[str, str], stdin: str) -> Process:
        text = command if isinstance(command, str) else toy(command.text, self.words)
        print(f"  {self.part} $ {text.splitlines()[0]}{' ...' if chr(10) in text else ''}", flush=True)
        script = ["bash", "-c", text]
        if isinstance(command, Command) and "\nimport" in f"\n{text}" and not text.startswith("#!"):
            script = [sys.executable, "-c", text]
        self.here.mkdir(parents=True, exist_ok=True)
        answers = self.here / ".stdin"
        answers.write_text(stdin)
        with answers.open() as given:
            return subprocess.Popen(
                script,
                cwd=self.here,
                env={**self._environment(), **more},
                stdin=given,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
        path = [self.folder / "bin", BIN, Path(sys.executable).parent, *os.environ["PATH"].split(":")]
        return kept | {
            "PATH": ":".join(map(str, path)),
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def _log(self) -> Path:
        folder = self.folder / "logs" / self.part
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{len(list(folder.iterdir())):02}.log"

    def _note(self, command: Command | str, seconds: float) -> None:
        self.done.append((self.part, str(command), seconds))


# -- waiting -----------------------------------------------------------------------------------------------------------


def until(holds: Callable[[], bool], what: str, seconds: float = LONGEST) -> None:
    """Wait until a condition holds; raise `Failed` if it does not in time."""
    end_of_patience = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end_of_patience:
            raise Failed(f"waited {seconds:.0f} seconds in vain: {what}")
        time.sleep(0.05)


def healthy(host: str, port: str) -> bool:
    """Return whether a server answers there."""
    asked = ["curl", "-sf", "-m", "5", "-o", "/dev/null", f"http://{host}:{port}/health"]
    return subprocess.run(asked, check=False).returncode == 0


def free_port() -> str:
    """Return a port that is free on every node, below the ephemeral ports."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            for node, tried in zip(NODES, (first, second), strict=True):
                tried.bind((node, port))
            return str(port)


def end(process: Process, sent: signal.Signals = signal.SIGTERM) -> None:
    """End a command and its children."""
    for each in (sent, signal.SIGKILL):
        try:
            os.killpg(process.pid, each)
            process.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _last(text: str) -> str:
    return "\n".join(f"    | {line}" for line in text.splitlines()[-25:])


# -- set-up ------------------------------------------------------------------------------------------------------------


def set_up(folder: Path, engines: Engines) -> Place:
    """Write models, recipes, prompts and substitutes for other programs to a new folder."""
    for name in ("recipes", "bin", "shared"):
        (folder / name).mkdir(parents=True)
    (folder / "docs").symlink_to(ROOT / "docs")
    _prompts(folder)
    save_toy_target(folder / "models" / "toy")
    toy_target = str(folder / "models" / "toy")
    target, gguf = toy_target, toy_target
    if engines.llama_server is not None:  # loads GGUF files only
        target, gguf = "smollm2-135m", bfloat16_gguf(folder / "models", engines.llama_server[0])
    example = {"own_model": str(ROOT / "examples" / "own_model" / "recipe.yaml")}
    for recipe, extended in (dict(zip(RECIPES, RECIPES, strict=True)) | example).items():
        sizes = {name: dict(section) for name, section in TOY_SIZES.items()}
        sizes["data"]["prompts"] = str(folder / "prompts.jsonl")
        values = {"extends": extended, "name": recipe, "target": toy_target, **sizes}
        (folder / "recipes" / f"{recipe}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    tuning = "--engine-drafts 3 --engine-prompts 2 --engine-tokens 24"
    words = {port: free_port() for port in PORTS} | {
        "place": str(folder), "recipes": str(folder / "recipes"), "toy": toy_target,
        "target": target, "gguf": gguf, "tuning": tuning, "examples": str(ROOT / "examples"),
        "tuning_llama": "--engine-command llama-server" + f" --engine-target {gguf}",
    }  # fmt: skip
    _programs(folder / "bin", engines, words)
    return Place(folder, words, engines)


def _prompts(folder: Path) -> None:
    words = WORDS.split()
    turns = [" ".join(words[(start * step + step) % len(words)] for step in range(1, 8)) for start in range(60)]
    asked = [f"{text} {number}" + f" and {text}" * (4 * (number % 4 == 0)) for number, text in enumerate(turns)]
    rows = [json.dumps({"turns": [each]}) + "\n" for each in asked]  # every fourth is longer than a small context
    (folder / "prompts.jsonl").write_text("".join(rows))
    (folder / "questions.jsonl").write_text('{"turns": ["who are you", "and now"]}\n{"turns": ["tell me a story"]}\n')


def save_toy_target(folder: Path) -> None:
    """Save a random Llama of eight layers, with head sizes that engines have kernels for, and a small tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=384, intermediate_size=512, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def bfloat16_gguf(folder: Path, llama_server: str) -> str:
    """Return the packaged target as an unquantised GGUF file; quantised products round differently from ours."""
    from headstart.model.loading import gguf_file

    packaged = gguf_file("smollm2-135m")
    assert packaged is not None
    file = folder / "target.gguf"
    quantize = Path(llama_server).with_name("llama-quantize")
    if not quantize.is_file():
        return str(packaged)
    subprocess.run([quantize, "--allow-requantize", packaged, file, "BF16"], check=True, capture_output=True)
    return str(file)


def _programs(folder: Path, engines: Engines, words: Mapping[str, str]) -> None:
    """Write `vllm` and `llama-server` as the pages call them, on the address of the node that starts them."""
    node = f'--host "${{SLURMD_NODENAME:-{NODES[0]}}}" --port {words["8000"]}'
    stand_in = shlex.join([sys.executable, str(ROOT / "rehearsal" / "stand_in.py")])
    llama_port = f"--port {words['8080']}"
    vllm, llama = f'{stand_in} vllm serve "$2" {node} "${{@:3}}"', f'{stand_in} llama-server {llama_port} "$@"'
    if engines.vllm is not None:
        from headstart.model.loading import pick_device, pick_dtype

        dtype = str(pick_dtype("auto", pick_device("cpu"))).removeprefix("torch.")  # our own decoder's
        small = f"--max-model-len 512 --max-num-seqs 8 --kv-cache-memory-bytes {1 << 28} --enforce-eager"
        options = f"{small} --no-enable-prefix-caching --dtype {dtype} {node}"
        two = "VLLM_ENABLE_V1_MULTIPROCESSING=0"  # processes, not three, that each take 10 seconds to import vLLM
        vllm = f'env {two} {shlex.join(engines.vllm)} --model "$2" {options} "${{@:3}}"'
    if engines.llama_server is not None:
        llama = f'{shlex.join(engines.llama_server)} -c 1024 -t 2 {llama_port} "$@"'
    for name, started in (("vllm", vllm), ("llama-server", llama)):
        (folder / name).write_text(f"#!/bin/bash\nexec {started}\n")
        (folder / name).chmod(0o755)
