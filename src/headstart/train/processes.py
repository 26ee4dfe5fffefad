"""The ranks of one training: devices, collective errors, and a common exit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import broadcast_object_list, gather_object, get_int_from_env, parse_flag_from_env

from headstart.errors import UserError
from headstart.model.frozen import FrozenModel
from headstart.recipes.recipe import Recipe
from headstart.support.terminal import complain, explained

_REPORTING = "headstart/reporting"  # key in the distributed store: number of ranks with an error to report
_EXIT_TIMEOUT = 10.0  # seconds the main rank waits for other ranks: it may host the store
_JOIN_TIMEOUT = timedelta(seconds=30)
COLLECTIVE_TIMEOUT = timedelta(hours=1)
"""Longest wait in a collective: another rank may be starting an engine. Launchers end all ranks if one ends."""
LOST_CONTACT = (
    "Another process of this training has ended.",
    "See what it said above, if anything; the same command goes on from the last checkpoint.",
)


def count_processes() -> int:
    """Number of processes started by a launcher; 1 without one."""
    return int(get_int_from_env(("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), 1))


def is_main() -> bool:
    """Whether this is the main rank, which logs and writes for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def join_processes(device: str) -> str | None:
    """Join the ranks of a launcher, if any, and return this rank's device; None to use the recipe's `device`.

    Raises:
        UserError: one GPU for several ranks, or a launcher that asks for FSDP.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes", "on"):
        raise UserError(
            "Heads train whole on every process (DDP), and the launcher asks for FSDP.",
            "Launch without FSDP (use_fsdp: false); train.shard_target=true spreads a large target over processes.",
        )
    ranks = count_processes()
    if ranks == 1:
        return "cpu" if parse_flag_from_env("ACCELERATE_USE_CPU") else None
    if device == "cpu" or not torch.cuda.is_available():
        PartialState(cpu=True, timeout=COLLECTIVE_TIMEOUT)
        return device  # loading the target refuses `cuda` without a GPU
    if ":" in device:
        raise UserError(
            f"target.device={device} is one GPU, and {ranks} processes train.",
            "Set target.device=auto: each process takes a GPU of its own. CUDA_VISIBLE_DEVICES chooses among them.",
        )
    return str(PartialState(timeout=COLLECTIVE_TIMEOUT).device)


def make_accelerator(recipe: Recipe, target: FrozenModel, folder: Path) -> Accelerator:
    """Build the accelerator with the recipe's precision and tracker, on the target's device."""
    precision: str = recipe.train.mixed_precision
    tracker = recipe.train.tracker
    if precision == "auto":
        precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(target.dtype, "no")
    accelerator = Accelerator(
        cpu=target.device.type == "cpu",
        mixed_precision=precision,
        log_with=None if tracker == "none" else tracker,
        project_dir=str(folder),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    trains_on = torch.empty(0, device=accelerator.device).device  # adds the index to `cuda`
    if trains_on != target.device:
        raise UserError(
            f"The target is on {target.device}, and this process trains on {trains_on}.",
            "Set target.device=auto: the target goes where accelerate trains.",
        )
    return accelerator


def describe_processes(accelerator: Accelerator) -> str:
    """Log line on the ranks; a launcher may silently start fewer than requested."""
    ranks, precision = accelerator.num_processes, accelerator.mixed_precision.replace("no", "float32")
    how = f"{accelerator.device.type}, {precision}, {torch.get_num_threads()} CPU threads each"
    return f"Training on {ranks} process{'es' if ranks > 1 else ''} ({how})."


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise a UserError of one rank on all ranks; the block must not contain collectives."""
    refusal: UserError | None = None
    try:
        yield
    except UserError as error:
        refusal = error
    if dist.is_initialized():
        refusals = gather_object([(refusal.problem, refusal.remedy) if refusal is not None else None])
        if refusal is None and (first := next(filter(None, refusals), None)):
            raise UserError(*first)
    if refusal is not None:
        raise refusal


@contextmanager
def on_main(context: AbstractContextManager[object]) -> Iterator[None]:
    """Enter a context on the main rank only; its UserError is raised on all ranks."""
    with ExitStack() as stack:
        with raise_on_all_ranks():
            if is_main():
                stack.enter_context(context)
        yield


def broadcast_from_main(message: Any) -> Any:
    """Broadcast the main rank's value; collective."""
    return broadcast_object_list([message])[0] if dist.is_initialized() else message


@contextmanager
def exit_together() -> Iterator[None]:
    """Make all ranks exit together with one exit code and a single error message."""
    if count_processes() == 1:
        yield
        return
    try:
        yield
        leave_processes()
    except (UserError, OSError) as error:
        words = (error.problem, error.remedy) if isinstance(error, UserError) else explained(error)
        _report_once(lambda: complain(*words))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        leave_processes()
        raise SystemExit(130) from None
    except RuntimeError as error:
        if not _is_lost_contact(error):
            raise
        raise SystemExit(1 if _report_once(lambda: complain(*LOST_CONTACT)) else 2) from None


def _report_once(say: Callable[[], None]) -> bool:
    """Leave the process group and let only the first rank report an error; returns whether this one did."""
    with suppress(RuntimeError, ValueError):
        if not dist.is_initialized():  # failed before `join_processes`
            PartialState(cpu=True, timeout=_JOIN_TIMEOUT)
    try:
        main, ranks = is_main(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        first = bool(store.add(_REPORTING, 1) == 1)
    except (RuntimeError, ValueError):  # the rank that hosted the store is gone
        say()
        leave_processes()
        return True
    if first:
        say()
    leave_processes()  # unblocks ranks that wait for this one
    end = monotonic() + _EXIT_TIMEOUT
    with suppress(RuntimeError):
        while main and store.add(_REPORTING, 0) < ranks and monotonic() < end:  # the main rank may host the store
            sleep(0.02)
    return first


def _is_lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another rank has ended."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def leave_processes() -> None:
    """Destroy the process group, which may otherwise abort the process at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()
