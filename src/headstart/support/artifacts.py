"""Content-addressed stage outputs, shared and extended by runs and deleted only by `gc`.

An artifact is a folder named by a hash of its *identity*: every input that determines it (target, prompts, sampling,
settings of the heads ...) except the amount (conversations, minutes), which can grow. Artifacts are beside the runs:

    runs/quickstart/references.json                    artifacts of the run
    runs/artifacts/conversations/self-1c6f.../         artifact.json (its identity), lock, and content
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from headstart.errors import UserError
from headstart.support.files import PARTIAL, read_object, write_atomic, write_json
from headstart.support.lock import Busy, locked
from headstart.support.terminal import tell

FOLDER = "artifacts"
"""Folder of artifacts, beside the runs that share it."""
NOTE = "artifact.json"
"""File of an artifact's identity."""
_POLL_SECONDS, _HINT_SECONDS = 0.5, 60.0
"""Interval of attempts to lock, and time until a hint that the lock's holder may be dead."""
REFERENCES = "references.json"
"""A run's map from stage to artifact, relative to the run's folder."""


@dataclass(frozen=True)
class Artifact:
    """An artifact, existing or not, with its identity as JSON values."""

    folder: Path
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        """Unique name over all kinds; part of the identity of dependent artifacts."""
        return self.folder.name

    @property
    def base(self) -> dict[str, Any]:
        """The identity without the key "amount"."""
        return {key: value for key, value in self.identity.items() if key != "amount"}


def artifact(run_folder: Path, kind: str, slug: str, identity: Mapping[str, Any]) -> Artifact:
    """Return the artifact with this identity (JSON values) beside `run_folder`; `slug` makes its name readable.

    The kind is conversations, states, heads, tuning, exports or reports.
    """
    known = json.loads(json.dumps(dict(identity), sort_keys=True))
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    path = root_of(run_folder) / kind
    # The slug does not count: a renamed prompt file is the same artifact.
    made = next((folder for folder in sorted(path.glob(f"*-{digest}")) if folder.is_dir()), None)
    words = "".join(letter if letter.isalnum() else "-" for letter in slug.lower()).strip("-")[:32]
    return Artifact(made or path / f"{words or kind}-{digest}", known)


def root_of(run_folder: Path) -> Path:
    path = run_folder.resolve()
    if path.name == FOLDER:
        raise UserError(
            f"A run cannot be called {FOLDER!r}: that folder holds the files that runs share.", "Choose another name."
        )
    return path.parent / FOLDER


@contextmanager
def lock_artifact(artifact: Artifact, console: Console | None = None, wait: bool = True) -> Iterator[Path]:
    """Create and lock an artifact's folder; waiting is reported, with a hint for dead lock holders after a minute.

    Raises:
        Busy: another process holds the lock, and `wait` is off.
    """
    with ExitStack() as stack:
        for polls in itertools.count():
            try:
                stack.enter_context(locked(artifact.folder))
                break
            except Busy as error:
                if not wait:
                    raise
                if console is not None and polls == 0:
                    tell(console, f"    waiting: {error.problem}")
                elif console is not None and polls == _HINT_SECONDS // _POLL_SECONDS:
                    tell(console, f"    still waiting: {error.problem} {error.way_out}".rstrip())
                time.sleep(_POLL_SECONDS)
        if not (artifact.folder / NOTE).is_file():
            made = datetime.now(UTC).isoformat(timespec="seconds")
            write_json(artifact.folder / NOTE, {"identity": artifact.identity, "made": made})
        yield artifact.folder


def relatives(of: Artifact, base: Callable[[Artifact], Any]) -> list[Artifact]:
    """List the other existing artifacts with an equal `base`."""
    folders = [note.parent for note in sorted(of.folder.parent.glob(f"*/{NOTE}"))]
    others = [Artifact(path, read_note(path)) for path in folders if path != of.folder and path.suffix != PARTIAL]
    return [other for other in others if base(other) == base(of)]


def read_note(folder: Path) -> dict[str, Any]:
    """Read an artifact's identity; empty if unreadable."""
    identity = read_object(folder / NOTE).get("identity")
    return identity if isinstance(identity, dict) else {}


# -- references ------------------------------------------------------------------------------------------------------


def add_reference(run_folder: Path, stage: str, artifact: Artifact, link: str | None = None) -> None:
    """Record that a run uses an artifact, and point `link` in the run's folder to it; see `set_symlink` for errors."""
    paths = references(run_folder)
    file_path = os.path.relpath(artifact.folder, run_folder.resolve())
    if paths.get(stage) != file_path:
        write_json(run_folder / REFERENCES, {**paths, stage: file_path})
    if link is not None:
        set_symlink(run_folder / link, artifact.folder)


def forget(run_folder: Path, stage: str) -> None:
    """Remove a run's reference to a stage's artifact, which stays until `gc`."""
    paths = references(run_folder)
    if paths.pop(stage, None) is not None:
        write_json(run_folder / REFERENCES, paths)


def references(run_folder: Path) -> dict[str, str]:
    """Read the artifact of each stage of a run, relative to its folder.

    Empty if the file is damaged: each stage then finds its artifact and references it again.
    """
    return {stage: str(path) for stage, path in read_object(run_folder / REFERENCES).items()}


def referred(run_folder: Path, stage: str) -> Path | None:
    """Return the folder of a stage's artifact; None if the run has none."""
    folder = references(run_folder).get(stage)
    return None if folder is None else Path(os.path.normpath(run_folder.resolve() / folder))


def set_symlink(link: Path, folder: Path) -> None:
    """Point a link to a folder atomically; a UserError if `link` exists and is no link."""
    link_target = os.path.relpath(folder, link.parent.resolve())
    if link.is_symlink() and os.readlink(link) == link_target:
        return
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} is not a link that headstart made.", "Move it away, or choose another --run-dir.")
    write_atomic(link, lambda partial: partial.symlink_to(link_target, target_is_directory=True))


def link_into_run(source: Path, path: Path) -> None:
    """Copy an artifact's folder into a run as hard links; safe because files are replaced, never modified in place."""
    write_atomic(path, lambda partial: shutil.copytree(source, partial, copy_function=link_or_copy))


def link_or_copy(source: str | Path, path: str | Path) -> None:
    """Hard-link a file, or copy it where the file system does not support that."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
