"""Hidden states of a run computed by vLLM; see `headstart.data.states.vllm_files`."""

from __future__ import annotations

from pathlib import Path

import torch

from headstart.data.states.shards import StateKind
from headstart.data.states.vllm_files import Import, take_from_servers
from headstart.data.states.vllm_files import serve_command as of_target
from headstart.errors import UserError
from headstart.model.loading import loadable_folder
from headstart.pipeline.data_stages import aux_layers, conversations, states_artifact
from headstart.pipeline.run import Run
from headstart.support.artifacts import held, refer
from headstart.support.terminal import progress_bar

FILES = "vllm-states"
"""Suggested folder of vLLM's files, in the folder of the run."""


def refuse_online(run: Run) -> None:
    if run.recipe.data.online:
        raise UserError(
            "The recipe lets training compute the hidden states (data.states=online): there are none to import.",
            "Add data.states=stored, here and in the commands that follow.",
        )


def memory_share(weights: int, gpu: int) -> float:
    """Return the fraction of GPU memory for a server that runs beside the loaded target; arguments in bytes.

    >>> memory_share(16_000_000_000, 80_000_000_000)
    0.65
    """
    return round(max(0.1, 0.85 - weights / gpu), 2)


def serve_command(run: Run) -> str:
    """Return the command for a vLLM server that writes the states the heads read. On a GPU it leaves room for the
    target, which checks them."""
    target = run.target  # first: a missing target raises the best message here
    model = loadable_folder(run.recipe.target.spec)
    command = of_target(model, target, aux_layers(run), (run.folder / FILES).resolve())
    if target.device.type != "cuda":
        return command
    _, total = torch.cuda.mem_get_info(target.device)
    share = memory_share(target.parameters * target.dtype.itemsize, total)
    return f"{command} --gpu-memory-utilization {share}"


def import_states(run: Run, source: str) -> Import:
    """Import the states of the run's conversations from a folder of vLLM's files or comma-separated server URLs."""
    target, layers, wanted, states_dtype = run.target, aux_layers(run), [], run.recipe.data.states_dtype
    budget, kind = int(run.recipe.data.cache_gigabytes * 1e9), StateKind(target, tuple(layers), states_dtype)
    for split in ("validation", "train"):  # the order of `both_stores`
        texts = conversations(run, split)
        texts = texts[: kind.fitting(texts, budget)]
        budget -= kind.bytes(sum(len(item.tokens) for item in texts))
        wanted += texts
    shared = states_artifact(run)
    with held(shared, run.console) as shards:
        refer(run.folder, "states", shared)
        work = Import(shards, target, wanted, layers, states_dtype=states_dtype)
        if work.waiting and "://" in source:
            urls = [url.strip() for url in source.split(",") if url.strip()]
            with progress_bar(run.console, "hidden states by vLLM", unit="tokens") as bar:
                take_from_servers(urls, work, run.recipe.data.server_requests, bar.update)
        elif work.waiting:
            with progress_bar(run.console, "files of vLLM", unit="files") as bar:
                work.take_folder(Path(source).expanduser(), bar.update)
        return work
