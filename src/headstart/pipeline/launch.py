"""Launcher of training ranks on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from subprocess import Popen
from time import monotonic, sleep

import torch
import torch.distributed as dist

from headstart.errors import UserError
from headstart.pipeline.run import Run
from headstart.recipes.recipe import Recipe
from headstart.servers import guard
from headstart.servers.fleet import ENGINE_GPUS, parallel_size, visible_gpus
from headstart.servers.process import without_launcher
from headstart.train.interrupt import Interrupt

_HOST = "127.0.0.1"
_PART_OF = "HEADSTART_PART_OF"
"""Environment variable of a rank: folder of the run that launched it; the launching command holds its lock."""
_CHECKPOINT_SECONDS = 300.0
"""Seconds from SIGTERM to SIGKILL: time to write a checkpoint."""
_REPORT_SECONDS = 15.0
"""Seconds for the other ranks to report and exit after one failed; longer than `train.processes` waits for them."""
_POLL_SECONDS = 0.1


def training_processes(recipe: Recipe) -> int:
    """Return the default number of training processes: one per visible GPU that no engine needs, or 1."""
    if recipe.target.device not in ("auto", "cuda", "all"):
        return 1
    return max(1, len(visible_gpus()) - _engine_share(recipe))


def is_part_of(run: Run) -> bool:
    """Whether this process is a rank that `launch_training` started for the run."""
    return os.environ.get(_PART_OF) == str(run.folder.resolve())


def must_launch(run: Run) -> bool:
    """Whether to train in launched ranks: for several processes, or to keep training off the engine's GPUs."""
    return not is_part_of(run) and (run.processes > 1 or _engine_share(run.recipe) > 0)


def launch_training(run: Run) -> None:
    """Train in `run.processes` ranks of `python -m headstart.train`, which end with this process.

    Raises:
        SystemExit: a rank failed and has printed its error.
        UserError: a rank was killed.
        KeyboardInterrupt: a signal arrived; the ranks have ended, with a checkpoint if there was time.
    """
    run.release()
    # Ranks join through this store. Port 0: another program cannot take the port before the ranks use it.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
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
    if any(codes):
        if reported := [code for code in codes if code in (1, 2)]:
            raise SystemExit(max(reported))
        rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
        raise UserError(
            f"Training process {rank} of {run.processes} ended with code {code}.",
            "It may have run out of memory. The same command resumes from the last checkpoint.",
        )


def _wait(ranks: Sequence[Popen[bytes]], interrupt: Interrupt) -> list[int]:
    """Wait until all ranks have ended; stop them after a signal, or `_REPORT_SECONDS` after one failed."""
    failed_at, asked = 0.0, False
    while None in (codes := [rank.poll() for rank in ranks]):
        failed_at = failed_at or (monotonic() if any(codes) else 0.0)
        if not asked and (interrupt.requested or (failed_at and monotonic() > failed_at + _REPORT_SECONDS)):
            asked = True
            for rank in ranks:
                guard.ask(rank)
        if failed_at and monotonic() > failed_at + 2 * _REPORT_SECONDS:  # a rank may hang in a collective
            for rank in ranks:
                rank.terminate()
        sleep(_POLL_SECONDS)
    return [code for code in codes if code is not None]


def _environment(run: Run, rank: int, port: int) -> dict[str, str]:
    """Return the environment of a rank, with torchrun's variables."""
    gpus, count = visible_gpus(), run.processes
    environment = without_launcher() | {
        _PART_OF: str(run.folder.resolve()),
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK")},
        **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if _engine_share(run.recipe) and len(gpus) > count:
        environment |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus[:count]), ENGINE_GPUS: ",".join(gpus[count:])}
    if not gpus:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // count)))
    return environment


def _engine_share(recipe: Recipe) -> int:
    """Return the number of GPUs reserved for engines that stream hidden states to training."""
    data, count = recipe.data, len(visible_gpus())
    if not data.online or data.states_source != ("vllm",) or count < 2:
        return 0
    return min(count - 1, max(count // 4, parallel_size(data.server_arguments)))
