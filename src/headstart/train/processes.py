"""The processes of one training: the device of each, and one voice for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import broadcast_object_list, gather_object, get_int_from_env, parse_flag_from_env

from headstart.errors import UserError
from headstart.recipes.recipe import Recipe
from headstart.support.terminal import complain, explained
from headstart.target.frozen import FrozenModel

_SPEAKERS = "headstart/speakers"
"""Key of the store that all processes read: how many of them had something to say."""
_PATIENCE = 10.0
"""Seconds that the main process, which may keep the store, waits for the others."""
_MEETING = timedelta(seconds=30)
LOST_CONTACT = (
    "Another process of this training has ended.",
    "See what it said above, if anything; the same command goes on from the last checkpoint.",
)


def count_processes() -> int:
    """How many processes a launcher has started for this training; 1 without a launcher."""
    return int(get_int_from_env(("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"), 1))


def is_main() -> bool:
    """Whether this is the process that speaks and writes for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def join_processes(device: str) -> str | None:
    """Join the processes that a launcher started, if there are several; `device` is the recipe's.

    Returns:
        The device of this process; None for a process alone, which takes that of the recipe.

    Raises:
        UserError: one GPU for several processes, or a launcher that asks for FSDP.
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
        PartialState(cpu=True)
        return device  # `cuda` without a GPU is refused where the target is loaded
    if ":" in device:
        raise UserError(
            f"target.device={device} is one GPU, and {ranks} processes train.",
            "Set target.device=auto: each process takes a GPU of its own. CUDA_VISIBLE_DEVICES chooses among them.",
        )
    return str(PartialState().device)


def make_accelerator(recipe: Recipe, target: FrozenModel, folder: Path) -> Accelerator:
    """The accelerator of a run: the recipe's precision and tracker, on the target's device."""
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
    trains_on = torch.empty(0, device=accelerator.device).device  # `cuda` with the number of the current GPU
    if trains_on != target.device:
        raise UserError(
            f"The target is on {target.device}, and this process trains on {trains_on}.",
            "Set target.device=auto: the target goes where accelerate trains.",
        )
    return accelerator


def on_device(device: torch.device) -> Any:
    """A context in which `cuda` means this GPU; for any other device it changes nothing."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def describe_processes(accelerator: Accelerator) -> str:
    """How many processes train, and where; a launcher may quietly start fewer than it was asked for."""
    ranks = accelerator.num_processes
    precision = accelerator.mixed_precision.replace("no", "float32")
    return (
        f"Training on {ranks} process{'es' if ranks > 1 else ''} ({accelerator.device.type}, {precision}, "
        f"{torch.get_num_threads()} CPU threads each)."
    )


@contextmanager
def together() -> Iterator[None]:
    """A block that refuses on all processes when it refuses on one; nothing in it may wait for another process."""
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
def on_main(hold: AbstractContextManager[object]) -> Iterator[None]:
    """Hold something on the main process, for all of them; all refuse when it cannot be held."""
    with ExitStack() as stack:
        with together():
            if is_main():
                stack.enter_context(hold)
        yield


def tell_all(message: Any) -> Any:
    """What the main process gives, on every process; each of them calls it."""
    return broadcast_object_list([message])[0] if dist.is_initialized() else message


@contextmanager
def one_voice() -> Iterator[None]:
    """Inside, several processes of a launcher end together, with one exit code, and one of them says why."""
    if count_processes() == 1:
        yield
        return
    try:
        yield
        leave_processes()
    except (UserError, OSError) as error:
        words = (error.problem, error.remedy) if isinstance(error, UserError) else explained(error)
        _speak_once(lambda: complain(*words))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        leave_processes()
        raise SystemExit(130) from None
    except RuntimeError as error:
        if not _is_lost_contact(error):
            raise
        raise SystemExit(1 if _speak_once(lambda: complain(*LOST_CONTACT)) else 2) from None


def _speak_once(say: Callable[[], None]) -> bool:
    """Leave the processes of a training, which may all have the same to say; returns whether this one said it first."""
    with suppress(RuntimeError, ValueError):
        if not dist.is_initialized():  # refused before the processes met
            PartialState(cpu=True, timeout=_MEETING)
    try:
        main, ranks = is_main(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        first = bool(store.add(_SPEAKERS, 1) == 1)
    except (RuntimeError, ValueError):  # the store went with the process that kept it
        say()
        leave_processes()
        return True
    if first:
        say()
    leave_processes()  # those that wait for this one hear of it
    end = monotonic() + _PATIENCE
    with suppress(RuntimeError):
        while main and store.add(_SPEAKERS, 0) < ranks and monotonic() < end:  # the main process may keep the store
            sleep(0.02)
    return first


def _is_lost_contact(error: BaseException) -> bool:
    """Whether a call between processes failed because another one has ended."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def leave_processes() -> None:
    """Leave the group of processes: what is left of it when Python ends may abort the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
