"""Trained modules of a target, put back into a copy of its checkpoint, which engines serve as they serve the target.

Only the bytes of the module's tensors change: names, dtypes, shapes, index and config stay. Shards without any of them
are hard links to the target's own, where the file system has such links.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.io import WEIGHTS, build_heads, heads_folder
from headstart.hub.engines.facts import facts_of_heads
from headstart.hub.format import check_folder, read_config
from headstart.hub.target_facts import TargetFacts
from headstart.support.artifacts import link_or_copy
from headstart.support.files import need_disk, refuse_others, write_atomic
from headstart.support.hub_errors import explained
from headstart.target.loading import tensor_files

_DRAFTS = 3
"""That an engine is asked for: later ones are seldom accepted."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_LINKED = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_LENGTH = 8
"""Bytes at the beginning of a safetensors file that say how long its header is."""


@dataclass(frozen=True)
class InCheckpoint:
    """A checkpoint with a trained module; `changed` are the names of the tensors that differ from the target's."""

    folder: Path
    changed: tuple[str, ...]
    commands: Mapping[str, str]


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes lie in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def export_checkpoint(
    heads: Path, out: Path, target: str | None = None, trust_remote_code: bool = False
) -> InCheckpoint:
    """Write a copy of the target's checkpoint with the module that the heads hold; nothing is left behind when that
    fails.

    Raises:
        UserError: heads that are no module of the target's, a checkpoint that is not here or is another, packed
            weights, or a folder in use.
    """
    refuse_others(out, ())
    folder = heads_folder(heads)
    check_folder(folder)
    built = build_heads(read_config(folder)["heads"], folder / WEIGHTS)
    tensors = built.in_checkpoint()
    if broken := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None):
        raise UserError(f"{broken} holds numbers that are not finite.", "Take another checkpoint of the training.")
    facts = facts_of_heads(folder, target, trust_remote_code)
    source = _source(facts)
    pieces = _pieces(source, tensors)
    files = list(_files(source))
    copied = sum((source / file).stat().st_size for file in files if str(file) in pieces or not _is_linked(file))
    need_disk(out.parent, copied, "The changed part of the checkpoint", "or choose another --out")

    def write(partial: Path) -> None:
        for file in files:
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            if str(file) in pieces:
                shutil.copyfile(source / file, partial / file)
                _overwrite(partial / file, pieces[str(file)])
            elif _is_linked(file):
                link_or_copy((source / file).resolve(), partial / file)  # a link of the hub's cache leads to the file
            else:
                shutil.copyfile(source / file, partial / file)

    write_atomic(out, write)
    changed = sorted(name for of_file in pieces.values() for name in of_file)
    return InCheckpoint(out, tuple(changed), _commands(out, min(_DRAFTS, built.draft_steps), facts))


def _source(facts: TargetFacts) -> Path:
    """The folder of the target's checkpoint."""
    if not facts.spec:
        raise UserError(
            f"The trained module goes into a copy of {facts.name}, which is not on this machine.",
            "Say where it is with --target.",
        )
    if facts.gguf is not None:
        raise UserError(
            f"{facts.gguf} is a GGUF file, which has no room for another module.",
            "Name the checkpoint as it was published, with its safetensors files, by --target.",
        )
    if Path(facts.folder).is_dir():
        return Path(facts.folder)
    with explained("Cannot fetch", facts.folder, None):
        return Path(snapshot_download(facts.folder))


def _files(source: Path) -> Iterator[Path]:
    """What belongs to a checkpoint, by its path within it; folders such as .git and .cache are somebody else's."""
    for path in sorted(source.rglob("*")):
        file = path.relative_to(source)
        if path.is_file() and not any(part.startswith(".") for part in file.parts[:-1]):
            yield file


def _pieces(source: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, tuple[int, bytes]]]:
    """By file and name, where the bytes of each tensor begin that differs from what is there, and what they become."""
    file_of = tensor_files(str(source))
    pieces: dict[str, dict[str, tuple[int, bytes]]] = {}
    places: dict[str, dict[str, _Place]] = {}
    for name, tensor in tensors.items():
        if (file := file_of.get(name)) is None:
            raise UserError(
                f"The checkpoint in {source} has no {name}: it is not what the heads were trained with, or not whole.",
                "Name the target's checkpoint as it was published with --target.",
            )
        places.setdefault(file, {} if file in places else _places(source / file))
        place = places[file][name]
        if place.dtype not in _DTYPES:
            raise UserError(
                f"The checkpoint in {source} holds {name} in few bits ({place.dtype}), and a trained module has more.",
                "Name the checkpoint in bfloat16 with --target, and quantise the copy as a whole afterwards.",
            )
        if place.shape != tuple(tensor.shape):
            raise UserError(
                f"The checkpoint in {source} has {name} in the shape {list(place.shape)}, the heads in "
                f"{list(tensor.shape)}.",
                "Name the target that the heads were trained on with --target.",
            )
        rounded = tensor.to(_DTYPES[place.dtype]).contiguous().flatten()
        now = rounded.view(torch.uint8).numpy().tobytes()
        with (source / file).open("rb") as handle:
            handle.seek(place.start)
            if handle.read(place.stop - place.start) != now:
                pieces.setdefault(file, {})[name] = (place.start, now)
    return pieces


def _places(file: Path) -> dict[str, _Place]:
    """Where the tensors of a safetensors file lie, from its header."""
    again = "Fetch it again."
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(_LENGTH), "little")
            header: dict[str, Any] = json.loads(handle.read(length))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is cut short or damaged ({error}).", again) from None
    base, places = _LENGTH + length, {}
    for name, known in header.items():
        if name != "__metadata__":
            start, stop = (base + offset for offset in known["data_offsets"])
            places[name] = _Place(known["dtype"], tuple(known["shape"]), start, stop)
    if max((place.stop for place in places.values()), default=base) != file.stat().st_size:
        raise UserError(f"{file} is cut short or damaged.", again)
    return places


def _overwrite(file: Path, pieces: Mapping[str, tuple[int, bytes]]) -> None:
    with file.open("rb+") as handle:
        for start, now in pieces.values():
            handle.seek(start)
            handle.write(now)


def _is_linked(file: Path) -> bool:
    return file.suffix in _LINKED


def _commands(folder: Path, drafts: int, facts: TargetFacts) -> dict[str, str]:
    """What to type to serve the copy, by engine."""
    trust = ["--trust-remote-code"] if facts.trust_remote_code else []
    config = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
    chain = ["--speculative-num-steps", drafts, "--speculative-eagle-topk", 1]
    words = {
        "vllm": ["vllm", "serve", folder, *trust, "--speculative-config", config],
        "sglang": [
            *("python", "-m", "sglang.launch_server", "--model-path", folder, *trust),
            *("--speculative-algorithm", "EAGLE", *chain, "--speculative-num-draft-tokens", drafts + 1),
        ],
    }
    return {engine: shlex.join(map(str, command)) for engine, command in words.items()}
