"""Servers that compute a run's hidden states: at given addresses, or engines that the run starts and stops."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from rich.markup import escape

from headstart.data.conversations.records import each_conversation
from headstart.data.states.served import REQUESTS, ServedStates, extraction_arguments
from headstart.errors import UserError
from headstart.hub.engines.known_engines import extracts_states
from headstart.model.frozen import FrozenModel
from headstart.model.loading import loadable_folder
from headstart.pipeline.generation_servers import LOGS, engines, target_options
from headstart.pipeline.run import CONVERSATIONS, Run
from headstart.servers import guard
from headstart.servers.client import Endpoint, RetryableError
from headstart.servers.engines import ENGINES
from headstart.servers.fleet import ENGINE_GPUS, Fleet, gpu_groups
from headstart.servers.names import MEMORY_SHARE, option_values
from headstart.servers.process import Server
from headstart.support.files import free_disk, need_disk, read_json, remove, write_json
from headstart.support.lock import Busy, locked
from headstart.support.terminal import explained
from headstart.train.processes import raise_on_all_ranks

_MEMORY = Path("/dev/shm")
_FILES = "headstart-states-"
"""Prefix of the folders for the engines' files."""
_FAULT = "fault.json"
"""File in that folder: the error, once an engine can no longer be restarted."""
_NEW = 30.0
"""Minimum age in seconds of a folder to delete: a new one is not locked yet."""
_HEALTH_SECONDS = 5.0
_WATCH_SECONDS, _RESTART_SECONDS = 0.5, 1800.0
"""Seconds between checks of the engines, and the longest wait for a restart."""
_CPU_CONNECTOR = Path(guard.__file__).parent / "templates" / "vllm_cpu_connector.py"
"""Module that vLLM's CPU build imports; it works without headstart."""


@contextmanager
def served_states(run: Run, model: FrozenModel, aux_layers: Sequence[int]) -> Iterator[ServedStates]:
    """Yield a client of the servers in data.states_server; start engines and stop them at the end.

    Collective in training. The first rank of each machine starts its engines and restarts them when they die.

    Raises:
        UserError: an engine does not start.
    """
    data = run.recipe.data
    assert data.states_source is not None, "there is a server"
    urls, recover, check = list(data.states_source), None, None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    command = extraction_command(run, model, aux_layers)
    remedy = f"Run the same command again to resume, once such a server runs: {command}"
    with ExitStack() as stack:
        if "://" not in urls[0]:
            began: tuple[list[str], Path] | None = None
            with raise_on_all_ranks():
                if ranks == 1 or PartialState().is_local_main_process:
                    began = stack.enter_context(_engines(run, model, aux_layers))
            here = socket.gethostname()
            everywhere = gather_object([(here, began)]) if ranks > 1 else [(here, began)]
            urls, folder = next(found for name, found in everywhere if name == here and found is not None)
            ranks = sum(name == here for name, _ in everywhere)
            remedy = f"Its log is in {run.folder / LOGS}. Run the same command again to resume."
            recover, check = partial(_wait_for_restart, folder, remedy), partial(_refuse_ended, folder, remedy)
        requests = data.server_requests or REQUESTS * len(urls)
        yield ServedStates(urls, model, aux_layers, max(1, requests // ranks), remedy, recover, check)


def refuse_without_hooks(model: FrozenModel) -> None:
    """Raise a UserError if vLLM cannot extract hidden states of this target."""
    if not extracts_states(model.config.model_type):
        raise UserError(
            f"data.states_server=vllm cannot extract hidden states of {model.name}: vLLM 0.32 has no hooks for models "
            f"of type {model.config.model_type!r}.",
            "Set data.states_server=null.",
        )


def extraction_command(run: Run, model: FrozenModel, aux_layers: Sequence[int]) -> str:
    """Return the command that starts a vLLM server for the run's hidden states."""
    section = run.recipe.target.model_copy(update={"dtype": "auto"})  # `files` names the dtype
    files = extraction_arguments(model, aux_layers, (run.folder / "vllm-states").resolve())
    options = [*target_options(section, "vllm"), *ENGINES["vllm"].generating, *files]
    return shlex.join(["vllm", "serve", loadable_folder(section.spec), *options])


@contextmanager
def _engines(run: Run, model: FrozenModel, aux_layers: Sequence[int]) -> Iterator[tuple[list[str], Path]]:
    """Run engines that write hidden states to a private folder; yield their addresses and the folder."""
    refuse_without_hooks(model)
    with _private_folder(run, aux_layers, model) as folder, ExitStack() as stack:
        connector, environment = None, dict[str, str]()
        if not torch.cuda.is_available():  # vLLM's own connector copies through CUDA streams
            shutil.copy(_CPU_CONNECTOR, folder)
            connector = {"kv_connector": "CpuHiddenStates", "kv_connector_module_path": _CPU_CONNECTOR.stem}
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}

        def arguments(number: int) -> list[str]:
            share = _share_of_memory(run)
            return share + extraction_arguments(model, aux_layers, folder / str(number), connector)

        servers = engines(run, "vllm", "vllm-states", arguments, environment)
        fleet, stop = Fleet(servers), threading.Event()
        with run.console.status(f"starting vllm for hidden states; its log is in {escape(str(run.folder / LOGS))}"):
            stack.enter_context(fleet)
        threading.Thread(target=_watch, args=(fleet, servers, folder, stop), daemon=True).start()
        stack.callback(stop.set)
        yield fleet.urls, folder


def _watch(fleet: Fleet, servers: Sequence[Server], folder: Path, stop: threading.Event) -> None:
    """Restart engines that die; if one cannot be restarted, record the error for all ranks and return."""
    while not stop.wait(_WATCH_SECONDS):
        for number, server in enumerate(servers):
            if server.has_died:
                remove(folder / str(number))  # files of its unanswered requests
                try:
                    fleet.recover(server.url)
                except (UserError, OSError) as error:
                    if not stop.is_set():
                        known = (error.problem, error.remedy) if isinstance(error, UserError) else explained(error)
                        write_json(folder / _FAULT, known)
                    return


def _refuse_ended(folder: Path, remedy: str) -> None:
    """Raise a UserError if an engine cannot be restarted, or if all have ended."""
    if (folder / _FAULT).is_file():
        raise UserError(*read_json(folder / _FAULT))
    if not folder.is_dir():
        raise UserError("The engines that compute hidden states have ended.", remedy)


def _wait_for_restart(folder: Path, remedy: str, url: str) -> bool:
    """Wait until an engine is healthy; return whether it was not at first. Raises a UserError after a timeout."""
    with closing(Endpoint(url)) as endpoint:
        until, has_died = time.monotonic() + _RESTART_SECONDS, False
        while time.monotonic() < until:
            _refuse_ended(folder, remedy)
            with suppress(RetryableError):
                if endpoint.send("/health", seconds=_HEALTH_SECONDS).is_success:
                    return has_died
            has_died = True
            time.sleep(_WATCH_SECONDS)
        raise UserError(f"The engine at {url} was not restarted within {_RESTART_SECONDS / 60:.0f} minutes.", remedy)


def _share_of_memory(run: Run) -> list[str]:
    """Return arguments that limit an engine to half of a GPU that it shares with training."""
    shared = run.recipe.data.online and torch.cuda.is_available() and not os.environ.get(ENGINE_GPUS)
    is_given = any(name == MEMORY_SHARE for name, _ in option_values(run.recipe.data.server_arguments))
    return [MEMORY_SHARE, "0.5"] if shared and not is_given else []


@contextmanager
def _private_folder(run: Run, aux_layers: Sequence[int], model: FrozenModel) -> Iterator[Path]:
    """Yield a locked folder for the engines' files: in /dev/shm if it has twice the room, else in the run's folder."""
    data = run.recipe.data
    files = (run.folder / CONVERSATIONS / f"{split}.jsonl" for split in ("train", "validation"))
    texts = (text for file in files if file.is_file() for text in each_conversation(file))
    longest = max((len(text.tokens) for text in texts), default=model.max_length)
    count = data.server_requests or REQUESTS * len(gpu_groups(data.server_arguments))
    needed = count * longest * len(aux_layers) * model.hidden_size * model.dtype.itemsize
    place = _MEMORY if _MEMORY.is_dir() and free_disk(_MEMORY) > 2 * needed else run.folder
    need_disk(place, needed, "Writing hidden states", "or lower data.server_requests")
    _sweep(place)
    folder = Path(mkdtemp(prefix=_FILES, dir=place))
    try:
        with locked(folder):
            yield folder
    finally:
        remove(folder)


def _sweep(place: Path) -> None:
    """Delete the folders of killed processes."""
    for folder in place.glob(f"{_FILES}*"):
        try:
            if folder.stat().st_uid == os.getuid() and folder.stat().st_mtime < time.time() - _NEW:
                with locked(folder):
                    remove(folder)
        except (Busy, OSError):
            continue
