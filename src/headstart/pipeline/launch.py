"""Launcher of training ranks on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from time import monotonic, sleep

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

from headstart.errors import UserError
from headstart.pipeline.run import Run
from headstart.recipes.recipe import Recipe
from headstart.servers import guard
from headstart.servers.fleet import ENGINE_GPUS, parallel_size, visible_gpus
from headstart.servers.process import without_launcher
from headstart.support.artifacts import referred
from headstart.support.files import read_json
from headstart.train import checkpoint
from headstart.train.interrupt import Interrupt
from headstart.train.processes import count_processes
from headstart.train.training_artifact import is_finished

_HOST = "127.0.0.1"
_PART_OF = "HEADSTART_PART_OF"
"""Environment variable of a rank: folder of the run that launched it; the launching command holds its lock."""
_CHECKPOINT_SECONDS = 300.0
"""Seconds from SIGTERM to SIGKILL: time to write a checkpoint."""
_REPORT_SECONDS = 15.0
"""Seconds for the other ranks to report and exit after one failed; longer than `train.processes` waits for them."""
_KILL_SECONDS = 60.0
"""Seconds from the failure to SIGKILL for ranks that hang: the first rank may still need 35 to stop its engines."""
_POLL_SECONDS = 0.1
_STOPPED = 130
"""Exit code of a rank that a signal ended."""


def training_processes(recipe: Recipe, folder: Path) -> int:
    """Return the default number of training processes.

    An interrupted training keeps its number if there are enough GPUs. Otherwise each GPU that no engine needs gets one
    process; a target on one device, or spread over all GPUs by the training itself, gets one in all.
    """
    section, gpus, trained = recipe.target, visible_gpus(), referred(folder, "train")
    if trained is not None and not is_finished(trained):
        newest = checkpoint.find(trained / "checkpoints", {}, lambda _: None)
        kept = read_json(newest[0] / checkpoint.MANIFEST)["settings"].get(checkpoint.PROCESSES, 0) if newest else 0
        if kept and (not gpus or kept <= len(gpus)):
            return int(kept)
    is_spread = section.device == "all" and recipe.data.forwards_in_training and not recipe.train.shard_target
    if section.device not in ("auto", "cuda", "all") or is_spread:
        return 1
    return max(1, len(_split_gpus(recipe)[0]))


def check_gpus(run: Run) -> None:
    """Raise a UserError if training to come and its engines cannot share the GPUs of this machine."""
    if is_part_of(run) or count_processes() > 1 or run.finished_record("train") is not None:
        return
    data, device = run.recipe.data, run.recipe.target.device
    own, engines = _split_gpus(run.recipe, run.processes)
    size, count = parallel_size(data.server_arguments), len(engines or own)
    if _streams(run.recipe) and count and size > count:
        raise UserError(
            f"vLLM needs {size} GPUs (data.server_arguments) to stream hidden states, and training leaves it {count}.",
            "Set data.states=stored, a smaller --tensor-parallel-size, or fewer --processes.",
        )
    if engines and ":" in device:
        raise UserError(
            f"target.device={device} is one GPU, and vLLM streams hidden states from the others.",
            "Set target.device=auto. CUDA_VISIBLE_DEVICES and HEADSTART_ENGINE_GPUS choose the GPUs.",
        )


def is_part_of(run: Run) -> bool:
    """Whether this process is a rank that `launch_training` started for the run."""
    return os.environ.get(_PART_OF) == str(run.folder.resolve())


def must_launch(run: Run) -> bool:
    """Whether to train in launched ranks: for several processes, or to keep training off the engine's GPUs."""
    if is_part_of(run) or count_processes() > 1:
        return False
    return run.processes > 1 or bool(_split_gpus(run.recipe, run.processes)[1])


def launch_training(run: Run) -> None:
    """Train in `run.processes` ranks of `python -m headstart.train`, which end with this process.

    Raises:
        SystemExit: a rank failed and has printed its error.
        UserError: a rank was killed.
        KeyboardInterrupt: a signal arrived; the ranks have ended, with a checkpoint if there was time.
    """
    run.release()
    # Ranks join through this store. Port 0: another program cannot take the port before the ranks use it.
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    words = [sys.executable, "-m", "headstart.train", str(run.folder / "recipe.yaml"), "--run-dir", str(run.folder)]
    ranks: list[Popen[bytes]] = []
    with Interrupt() as interrupt:
        try:
            for rank in range(run.processes):
                environment = _environment(run, rank, store.port)
                ranks.append(guard.start(words, _CHECKPOINT_SECONDS, env=environment))
            codes = _wait(ranks, interrupt)
        finally:
            for process in ranks:
                guard.stop(process, _POLL_SECONDS)
    if interrupt.requested:
        raise KeyboardInterrupt
    _raise_for(codes)


def _raise_for(codes: Mapping[int, int]) -> None:
    """Raise the error of failed ranks, from exit codes by rank in the order of their ends.

    A killed rank comes first: the others only report that they lost contact with it.
    """
    failed = [(rank, code) for rank, code in codes.items() if code not in (0, _STOPPED)]
    for rank, code in failed:
        if code not in (1, 2):
            raise UserError(
                f"Training process {rank} of {len(codes)} ended with code {code}.",
                "It may have run out of memory. The same command resumes from the last checkpoint.",
            )
    if failed:
        raise SystemExit(max(code for _, code in failed))
    if any(codes.values()):
        raise KeyboardInterrupt


def _wait(ranks: Sequence[Popen[bytes]], interrupt: Interrupt) -> dict[int, int]:
    """Wait until all ranks have ended; stop them after a signal, or `_REPORT_SECONDS` after one failed.

    Returns their exit codes in the order of their ends, `_STOPPED` for ranks that were stopped here.
    """
    codes, failed_at, asked = dict[int, int](), 0.0, False
    while len(codes) < len(ranks):
        for number, rank in enumerate(ranks):
            if number not in codes and (code := rank.poll()) is not None:
                codes[number] = _STOPPED if asked else code
                failed_at = failed_at or (monotonic() if codes[number] not in (0, _STOPPED) else 0.0)
        if not asked and (interrupt.requested or (failed_at and monotonic() > failed_at + _REPORT_SECONDS)):
            asked = True
            for rank in ranks:
                guard.ask(rank)
        # A rank may hang in a collective.
        if failed_at and not interrupt.requested and monotonic() > failed_at + _KILL_SECONDS:
            for rank in ranks:
                rank.terminate()
        sleep(_POLL_SECONDS)
    return codes


def _environment(run: Run, rank: int, port: int) -> dict[str, str]:
    """Return the environment of a rank, with torchrun's variables."""
    count, (own, engines) = run.processes, _split_gpus(run.recipe, run.processes)
    environment = without_launcher() | {
        _PART_OF: str(run.folder.resolve()),
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if engines:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(own), ENGINE_GPUS: ",".join(engines)}
    if not own:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    return environment


def _split_gpus(recipe: Recipe, processes: int = 0) -> tuple[list[str], list[str]]:
    """Return the GPUs for this number of ranks (0: as many as fit), and those of engines that stream to them.

    Engines get the GPUs in HEADSTART_ENGINE_GPUS, by default whole groups of about a quarter, at least one. Without
    GPUs of their own they share those of the ranks.
    """
    gpus, size = visible_gpus(), parallel_size(recipe.data.server_arguments)
    if not gpus or not _streams(recipe):
        return gpus, []
    if named := os.environ.get(ENGINE_GPUS):
        engines = named.split(",")
        return [gpu for gpu in gpus if gpu not in engines] or gpus, engines
    count = processes or max(1, len(gpus) - max(size, len(gpus) // 4 // size * size))
    return gpus[:count], gpus[count:]


def _streams(recipe: Recipe) -> bool:
    """Whether engines of the run stream hidden states to training."""
    return recipe.data.online and recipe.data.states_source == ("vllm",)
