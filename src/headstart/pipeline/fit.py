"""Settings chosen for the machine: `auto` engines, and sizes and storage of hidden states fitted to its GPUs.

The first command of a run chooses; later ones take its choices from the run's recipe.yaml.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from headstart.errors import UserError
from headstart.heads.base import DraftHead, family, make_config
from headstart.hub.engines.export import check_heads
from headstart.hub.engines.facts import facts_of_target
from headstart.hub.engines.known_engines import extracts_states
from headstart.model.loading import loadable_folder, tensor_files
from headstart.model.model import Target
from headstart.model.outline import Outline, outline, weights_are_here
from headstart.pipeline.launch import training_processes
from headstart.pipeline.workload import Speeds, Workload, assumed_lengths
from headstart.recipes.recipe import Recipe, load_recipe, parse_recipe
from headstart.replay.patch import FINAL
from headstart.servers.engines import ENGINES
from headstart.servers.fleet import parallel_size
from headstart.servers.names import split_words
from headstart.support.files import format_bytes, free_disk
from headstart.support.terminal import tell

_USED = 0.9
"""Usable fraction of a GPU's memory."""
_WORKING = 2e9
"""Bytes that an engine or this process needs besides the target's weights: KV cache, activations, CUDA graphs."""
_ENGINE_WORKING = 4e9
"""Bytes on each GPU of an engine of several GPUs, besides its weights and KV cache."""
_ENGINE_REQUESTS = 16
"""Concurrent requests of the longest conversations that an engine's KV cache should hold."""
_LEAST_TOKENS = 4096
"""Smallest `train.batch_tokens` to choose: smaller batches cost time and save little memory."""
_AUTO = ("data.server", "data.states_server", "eval.engine")
_FITTED = (
    *("target.device", "data.states", "data.batch_size", "data.cache_gigabytes", "data.server_arguments"),
    *("train.batch_tokens", "train.gradient_accumulation_steps", "train.gradient_checkpointing"),
)


def fit_recipe(
    recipe: Recipe, given: Collection[str], folder: Path, console: Console, processes: int | None = None
) -> Recipe:
    """Resolve `auto` engines and, for recipes with `fit`, choose settings that are not `given`; print the choices.

    Batches per step are chosen for this number of ranks, by default `training_processes`.
    """
    autos = [key for key in _AUTO if _value(recipe, key) in ("auto", ("auto",))]
    if not autos and not recipe.fit:
        return recipe
    if (kept := _kept(recipe, folder)) is not None:
        free = [key for key in _FITTED if recipe.fit and key not in given]
        return _with(recipe, {key: _value(kept, key) for key in (*autos, *free)})
    gpus = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]
    fits, (recipe, chosen) = recipe.fit, _with_engines(recipe, autos)
    if fits and gpus and recipe.target.device in ("auto", "cuda"):
        target, room = _outline(recipe), _USED * min(gpus)
        fitted = fit_to_gpus(recipe, target, gpus, given, free_disk(folder))
        recipe = _with(recipe, fitted)
        accumulated = recipe.train.gradient_accumulation_steps
        batches = math.ceil(accumulated / (processes or training_processes(recipe, folder)))
        if batches != accumulated and "train.gradient_accumulation_steps" not in given:
            fitted["train.gradient_accumulation_steps"] = batches
            recipe = _with(recipe, fitted)
        chosen |= fitted
        for name, takes in (("Training", training_bytes(recipe, target)), ("vLLM", engine_bytes(recipe, target))):
            if takes > room:
                sizes = f"needs about {format_bytes(takes)} of GPU memory, and {format_bytes(room)} are usable"
                tell(console, f"{name} {sizes}: it may run out of memory.")
    found = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} of {format_bytes(min(gpus))}" if gpus else "no GPU"
    words = ", ".join(f"{key}={'null' if value is None else value}" for key, value in chosen.items())
    why = "are computed during training" if recipe.data.online else "are stored before training"
    if any(chosen.values()):
        tell(console, f"Chosen for this machine ({found}): {words}. Hidden states {why}. Set key=value to override.")
    return recipe


def _kept(recipe: Recipe, folder: Path) -> Recipe | None:
    """Load the recipe of an earlier command of this run; None if there is none, or it has another target."""
    file = folder / "recipe.yaml"
    try:
        kept = load_recipe(str(file)) if file.is_file() else None
    except UserError:  # unreadable: the run rewrites it
        return None
    return kept if kept is not None and kept.target.spec == recipe.target.spec else None


def _with_engines(recipe: Recipe, autos: Collection[str]) -> tuple[Recipe, dict[str, Any]]:
    """Resolve `auto` engines: vllm if it is installed and serves the target; for `eval.engine` also the heads.

    Targets that must be loaded to describe them get no engine: both would hold their weights.
    """
    chosen = dict[str, Any]()
    data, target = recipe.data, recipe.target
    command = split_words(data.server_command, "data.server_command") or ENGINES["vllm"].command.split()
    serves = not target.adapter and target.quantization == "none" and not target.spec.endswith(".gguf")
    # Starting the engine reports a missing command of the user.
    is_here = serves and (bool(data.server_command) or shutil.which(command[0]) is not None)
    is_here = bool(autos) and is_here and _is_described(recipe)
    if "data.server" in autos:
        chosen["data.server"] = "vllm" if is_here else None
        if not is_here:
            chosen |= {f"data.{name}": "" for name in ("server_command", "server_arguments") if getattr(data, name)}
    server = chosen.get("data.server", data.engine)
    if "data.states_server" in autos:
        extracts = server == "vllm" and extracts_states(_outline(recipe).config.model_type)
        chosen["data.states_server"] = "vllm" if extracts else None
    if "eval.engine" in autos:
        chosen["eval.engine"] = server if server and _can_serve(recipe, server) else None
        if not chosen["eval.engine"]:
            names = ("engine_command", "engine_arguments")
            chosen |= {f"eval.{name}": "" for name in names if getattr(recipe.eval, name)}
    return _with(recipe, chosen), chosen


def _can_serve(recipe: Recipe, engine: str) -> bool:
    """Whether an engine can serve the recipe's heads."""
    target = _outline(recipe)
    heads = heads_of(recipe, target)
    try:
        check_heads(ENGINES[engine].format, heads.publish(), facts_of_target(target))
    except UserError:
        return False
    return True


def _is_described(recipe: Recipe) -> bool:
    """Whether the target's files describe it without loading it: unquantised, and in safetensors if they are here."""
    section = recipe.target
    if getattr(_outline(recipe).model.config, "quantization_config", None) is not None:
        return False
    here = weights_are_here(section.spec, section.revision)
    return not here or bool(tensor_files(loadable_folder(section.spec), section.revision))


def _outline(recipe: Recipe) -> Outline:
    section = recipe.target
    return _outline_of(section.spec, section.dtype, section.revision, section.trust_remote_code)


_outline_of = cache(outline)  # on the Hub each call sends requests


def heads_of(recipe: Recipe, target: Outline) -> DraftHead:
    """Build the recipe's heads on the meta device."""
    shapes = cast(Target, target)
    config = make_config(recipe.heads, shapes)
    with torch.device("meta"):
        heads = family(config.family)(config)
    heads.draft_to_target_D = torch.arange(config.draft_width)  # publishing reads it
    heads.bind(shapes)
    return heads


def fit_to_gpus(
    recipe: Recipe, target: Outline, gpus: Sequence[int], given: Collection[str], disk: int
) -> dict[str, Any]:
    """Choose settings from the memory estimates of `headstart plan`, for GPUs of these bytes and `disk` free bytes.

    An engine spans as many GPUs as the target's weights need. If GPUs remain for training, the engine streams hidden
    states; otherwise the two take turns and states are stored. Servers at addresses always stream. Without a server,
    training computes states if target and training fit together on a GPU.
    """
    memory, data, chosen = _USED * min(gpus), recipe.data, dict[str, Any]()

    def choose(key: str, value: Any) -> None:
        if key not in given and _value(recipe, key) != value:
            chosen[key] = value

    weights = target.parameters * target.dtype.itemsize
    size = parallel_size(data.server_arguments)
    if _starts_vllm(recipe) and size == 1 and "data.server_arguments" not in given:
        longest = assumed_lengths(data, target.max_length).longest
        held = weights + _ENGINE_REQUESTS * longest * target.kv_bytes_per_token
        while 2 * size <= len(gpus) and held / size + _ENGINE_WORKING > memory:
            size *= 2
        if size > 1:
            choose("data.server_arguments", f"{data.server_arguments} --tensor-parallel-size {size}".strip())
    if weights + _WORKING > memory and len(gpus) > 1:
        choose("target.device", "all")

    online = _with(recipe, {"data.states": "online"})
    if source := data.states_source:
        streams = "://" in source[0] or len(gpus) > size
    else:
        streams = weights + _WORKING < memory and training_bytes(online, target) <= memory
    choose("data.states", "online" if streams else "stored")
    recipe = _with(recipe, chosen)
    if not recipe.data.online and 1e9 * data.cache_gigabytes > 0.8 * disk:
        choose("data.cache_gigabytes", max(1.0, math.floor(0.8e-9 * disk)))

    section = recipe.train
    fixed = "train.batch_tokens" in given or "train.gradient_accumulation_steps" in given
    batches = 1 if fixed else 1 + max(0, int(math.log2(section.batch_tokens / _LEAST_TOKENS)))
    again = (section.gradient_checkpointing,) if "train.gradient_checkpointing" in given else (False, True)
    for recompute, halvings in ((recompute, halvings) for recompute in again for halvings in range(batches)):
        smaller = {
            "train.batch_tokens": section.batch_tokens >> halvings,
            "train.gradient_accumulation_steps": section.gradient_accumulation_steps << halvings,
            "train.gradient_checkpointing": recompute,
        }
        if training_bytes(_with(recipe, smaller), target) <= memory:
            break
    for key, value in smaller.items():
        choose(key, value)
    if not data.server:
        halves = (data.batch_size >> count for count in range(data.batch_size.bit_length()))
        choose("data.batch_size", next((rows for rows in halves if writing_bytes(recipe, target, rows) <= memory), 1))
    return chosen


def engine_bytes(recipe: Recipe, target: Outline) -> int:
    """Estimate the least memory of a vLLM engine on each of its GPUs; 0 if the run starts none."""
    weights = target.parameters * target.dtype.itemsize
    return int(weights / parallel_size(recipe.data.server_arguments) + _WORKING) if _starts_vllm(recipe) else 0


def _starts_vllm(recipe: Recipe) -> bool:
    return "vllm" in (recipe.data.engine, *(recipe.data.states_source or ()))


def training_bytes(recipe: Recipe, target: Outline) -> int:
    """Estimate the memory of a training process, which holds the target only if it computes hidden states."""
    return _workload(recipe, target).memory()["train"]


def writing_bytes(recipe: Recipe, target: Outline, rows: int) -> int:
    """Estimate the memory for generating conversations in this process, in batches of `rows`."""
    return _workload(_with(recipe, {"data.batch_size": rows}), target).memory()["conversations"]


def _workload(recipe: Recipe, target: Outline) -> Workload:
    heads, lengths, section = heads_of(recipe, target), assumed_lengths(recipe.data, target.max_length), recipe.train
    layers = sorted({*heads.aux_layers, FINAL})
    tables = (heads.config.draft_width, target.vocab_size)
    matrices = [weight for weight in heads.parameters() if weight.dim() == 2 and not {*weight.shape} & {*tables}]
    # For the backward: input and output of each matrix at every drafted position; with checkpointing, layer inputs.
    position = sum(map(sum, (weight.shape for weight in matrices)))
    if section.gradient_checkpointing:
        position = 4 * target.hidden_size
    drafted = heads.draft_steps * min(1.0, (section.anchors or math.inf) / lengths.tokens)
    saved = int(section.batch_tokens * drafted * position * target.dtype.itemsize)
    weights = target.parameters * target.dtype.itemsize
    return Workload(
        recipe,
        target,
        heads,
        layers,
        lengths,
        Speeds(batch_bytes=saved),
        bytes_with_target=weights,
        conversations=1.0,
        train_tokens=1,
        validation_tokens=1,
    )


def _value(recipe: Recipe, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def _with(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return the recipe with settings changed by dotted key, marked as fitted."""
    values = recipe.model_dump(mode="json")
    for key, value in changes.items():
        section, _, name = key.partition(".")
        values[section][name] = value
    return parse_recipe({**values, "fit": False})
