"""Export of a trained module of the target into a copy of its checkpoint, served like the target itself.

Only the module's tensors change. Shards without them are hard links if the file system supports them.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headstart.errors import UserError
from headstart.heads.io import heads_folder
from headstart.hub.engines.base import DTYPES, SAY_WHERE, Finding
from headstart.hub.engines.checkpoint import opened
from headstart.hub.engines.facts import facts_of_heads
from headstart.hub.format import check_folder
from headstart.hub.pull import fetch
from headstart.hub.target_facts import TargetFacts
from headstart.model.loading import tensor_files
from headstart.model.outline import outline
from headstart.model.shipped import check_shipped
from headstart.support.artifacts import link_or_copy
from headstart.support.files import need_disk, refuse_foreign_code, write_atomic, write_tensors

_DRAFTS = 3
"""Maximum drafts to serve with: later ones are seldom accepted."""
ENGINES = ("vllm", "sglang")
"""Engines that draft with a checkpoint's module."""
_LINKED = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


@dataclass(frozen=True)
class InCheckpoint:
    """A checkpoint with a trained module; `changed` names the tensors that differ from the target's."""

    folder: Path
    changed: tuple[str, ...]
    commands: Mapping[str, str]


def export_checkpoint(
    heads: Path, out: Path, target: str | None = None, trust_remote_code: bool = False
) -> InCheckpoint:
    """Write a copy of the target's checkpoint with the heads' module, atomically.

    Raises:
        UserError: heads that are not a module of the target, a missing or different checkpoint, packed weights, or a
            folder in use.
    """
    refuse_foreign_code(out, ())
    folder = heads_folder(heads)
    built = check_folder(folder)
    tensors = built.in_checkpoint()  # first: a UserError if the heads are not a module
    facts = facts_of_heads(folder, target, trust_remote_code)
    source = _source(facts)
    changed = _changed(source, tensors)
    paths = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    files = [file for file in paths if not any(part.startswith(".") for part in file.parts[:-1])]  # no .git, .cache
    copied = sum((source / file).stat().st_size for file in files if str(file) in changed or file.suffix not in _LINKED)
    need_disk(out.parent, copied, "The changed part of the checkpoint", "or choose another --out")

    def write(partial: Path) -> None:
        for file in files:
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            if str(file) in changed:
                with opened(source / file) as handle:
                    original = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118  # not a mapping
                    write_tensors(partial / file, {**original, **changed[str(file)]}, handle.metadata())
            elif file.suffix in _LINKED:
                link_or_copy((source / file).resolve(), partial / file)  # the Hub's cache holds symlinks
            else:
                shutil.copyfile(source / file, partial / file)

    write_atomic(out, write)
    names = sorted(name for of_file in changed.values() for name in of_file)
    return InCheckpoint(out, tuple(names), _commands(out, min(_DRAFTS, built.draft_steps), facts))


def check_checkpoint(
    folder: Path, engines: Sequence[str] = (), against: Path | None = None, trust_remote_code: bool = False
) -> list[Finding]:
    """Report problems of engines with the module in a target's checkpoint; it must equal the heads `against`."""
    unread = [engine for engine in engines if engine not in ENGINES]
    problems = [(engine, "It does not draft with modules of a checkpoint.", "Use vllm or sglang.") for engine in unread]
    read_by = [engine for engine in engines or ENGINES if engine in ENGINES]
    try:
        for file in sorted(set(tensor_files(str(folder)).values())):
            with opened(folder / file):
                pass
        check_shipped(outline(str(folder), trust_remote_code=trust_remote_code))
        if against is not None:
            tensors = check_folder(heads_folder(against)).in_checkpoint()
            if differing := [name for of_file in _changed(folder, tensors).values() for name in of_file]:
                problem = f"{len(differing)} tensors differ from {against}, {differing[0]} among them."
                raise UserError(problem, "Export the heads again.")
    except UserError as error:
        problems += [(engine, error.problem, error.remedy) for engine in read_by]
    return [Finding(*problem) for problem in problems]


def _source(facts: TargetFacts) -> Path:
    """Return the folder of the target's checkpoint, downloaded if necessary."""
    if not facts.spec:
        raise UserError(f"The export copies {facts.name}, which is not on this machine.", SAY_WHERE)
    if facts.gguf is not None:
        problem = f"{facts.gguf} is a GGUF file, which cannot hold another module."
        raise UserError(problem, "Name the published checkpoint with safetensors files by --target.")
    return Path(facts.folder) if Path(facts.folder).is_dir() else fetch(facts.folder, files=None)


def _changed(source: Path, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the tensors that differ from the checkpoint by file and name, in the checkpoint's dtypes."""
    file_of = tensor_files(str(source))
    changed: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (file := file_of.get(name)) is None:
            problem = f"The checkpoint in {source} has no {name}: it is incomplete, or not the heads' target."
            raise UserError(problem, "Name the target's published checkpoint with --target.")
        with opened(source / file) as handle:
            kind, before = handle.get_slice(name).get_dtype(), handle.get_tensor(name)
        if before.dtype not in DTYPES.values():
            raise UserError(
                f"The checkpoint in {source} stores {name} in low precision ({kind}), too low for a trained module.",
                "Name the checkpoint in bfloat16 with --target, and quantise the copy afterwards.",
            )
        if before.shape != tensor.shape:
            raise UserError(
                f"{name} has shape {list(before.shape)} in the checkpoint in {source}, and {list(tensor.shape)} in the "
                "heads.",
                "Name the heads' target with --target.",
            )
        if not torch.equal(before, now := tensor.to(before)):
            changed.setdefault(file, {})[name] = now
    return changed


def _commands(folder: Path, drafts: int, facts: TargetFacts) -> dict[str, str]:
    config = json.dumps({"method": "mtp", "num_speculative_tokens": drafts})
    chain = ["--speculative-num-steps", drafts, "--speculative-eagle-topk", 1]
    words = {
        "vllm": ["vllm", "serve", folder, *facts.server_options, "--speculative-config", config],
        "sglang": [
            *("python", "-m", "sglang.launch_server", "--model-path", folder, *facts.server_options),
            *("--speculative-algorithm", "EAGLE", *chain, "--speculative-num-draft-tokens", drafts + 1),
        ],
    }
    return {engine: shlex.join(map(str, command)) for engine, command in words.items()}
