"""Hidden states of a run computed by vLLM; see `headstart.data.states.vllm_files`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from headstart.data.states.vllm_files import Import, import_from_servers
from headstart.data.states.vllm_files import serve_command as command_of_target
from headstart.errors import UserError
from headstart.model.loading import loadable_folder
from headstart.pipeline.data_stages import aux_layers, splits_in_budget, state_kind, states_artifact
from headstart.pipeline.run import Run
from headstart.support.artifacts import add_reference, lock_artifact
from headstart.support.terminal import progress_bar

FILES = "vllm-states"
"""Suggested folder of vLLM's files, in the folder of the run."""


def refuse_online(run: Run) -> None:
    if run.recipe.data.online:
        raise UserError(
            "The recipe lets training compute the hidden states (data.states=online): there are none to import.",
            "Add data.states=stored, here and in the commands that follow.",
        )


def serve_command(run: Run) -> str:
    """Return the command of a vLLM server that writes the states the heads read.

    On a GPU it leaves memory for the target here, which verifies them.
    """
    target = run.target  # first: a missing target raises the best message here
    model = loadable_folder(run.recipe.target.spec)
    command = command_of_target(model, target, aux_layers(run), (run.folder / FILES).resolve())
    if target.device.type != "cuda":
        return command
    _, total = torch.cuda.mem_get_info(target.device)
    share = max(0.1, 0.85 - target.parameters * target.dtype.itemsize / total)
    return f"{command} --gpu-memory-utilization {share:.2f}"


def import_states(run: Run, source: str) -> Import:
    """Import the states of the run's conversations from a folder of vLLM's files or comma-separated server URLs."""
    kind, shared = replace(state_kind(run), target=run.target), states_artifact(run)
    texts = [item for _, texts, budget in splits_in_budget(run) for item in kind.fit(texts, budget)]
    with lock_artifact(shared, run.console) as shards:
        add_reference(run.folder, "states", shared)
        work = Import(shards, kind, texts)
        if work.waiting and "://" in source:
            urls = [url.strip() for url in source.split(",") if url.strip()]
            with progress_bar(run.console, "hidden states by vLLM", unit="tokens") as bar:
                import_from_servers(urls, work, run.recipe.data.server_requests, bar.update)
        elif work.waiting:
            with progress_bar(run.console, "files of vLLM", unit="files") as bar:
                work.read_folder(Path(source).expanduser(), bar.update)
        return work
