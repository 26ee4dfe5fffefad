"""What stages make, kept by what it is: folders that runs refer to, share and extend, and that only `gc` deletes.

An artifact is a folder named by a hash of its *identity*: everything that decides what it is (the target, where prompts
come from, how answers are drawn, settings of the heads ...). How much there is of it (conversations, minutes) is not
part of its identity: more of it is added to what is there. Artifacts lie beside the folders of the runs:

    runs/quickstart/references.json                    which artifacts the run uses
    runs/artifacts/conversations/self-1c6f.../         artifact.json (its identity), lock, and what it holds
"""

from __future__ import annotations

import hashlib
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
from headstart.support.files import PARTIAL, read_json, write_atomic, write_json
from headstart.support.lock import Busy, locked
from headstart.support.terminal import tell

FOLDER = "artifacts"
"""Beside the folders of the runs that share it."""
NOTE = "artifact.json"
"""In every artifact: its identity."""
_LONG = 60.0
"""Seconds of waiting after which the other process may be dead."""
REFERENCES = "references.json"
"""In every run: the artifact of each stage, relative to the run's folder."""


@dataclass(frozen=True)
class Artifact:
    """One artifact, which may not be there yet: where it lies, and what it is, as JSON values."""

    folder: Path
    identity: dict[str, Any]

    @property
    def name(self) -> str:
        """Unique among the artifacts of all kinds; what depends on this one is identified by it."""
        return self.folder.name

    @property
    def base(self) -> dict[str, Any]:
        """The identity without the key "amount": equal for what differs only in how much went into it."""
        return {key: value for key, value in self.identity.items() if key != "amount"}


def artifact(run_folder: Path, kind: str, slug: str, identity: Mapping[str, Any]) -> Artifact:
    """The artifact with this identity (values that survive JSON), for the runs beside `run_folder`. The kind is
    conversations, states, heads, tuning, exports or reports; the slug a word for people, part of the name."""
    known = json.loads(json.dumps(dict(identity), sort_keys=True))
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]
    path = root_of(run_folder) / kind
    # The word is for people: a prompt file that was renamed is still the same.
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
def held(artifact: Artifact, console: Console | None = None, wait: bool = True) -> Iterator[Path]:
    """Work in an artifact's folder, made if need be, while no other process does; the console says when one is waited
    for, and after a minute what to type if it is dead.

    Raises:
        Busy: another process works there, without `wait`.
    """
    waiting, is_told = None, False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(artifact.folder))
                break
            except Busy as error:
                if not wait:
                    raise
                if waiting is None and console is not None:
                    tell(console, f"    waiting: {error.problem}")
                waiting = waiting or time.monotonic()
                if not is_told and console is not None and time.monotonic() > waiting + _LONG:
                    tell(console, f"    still waiting: {error.problem} {error.way_out}".rstrip())
                    is_told = True
                time.sleep(0.5)
        if not (artifact.folder / NOTE).is_file():
            made = datetime.now(UTC).isoformat(timespec="seconds")
            write_json(artifact.folder / NOTE, {"identity": artifact.identity, "made": made})
        yield artifact.folder


def relatives(of: Artifact, base: Callable[[Artifact], Any] = lambda artifact: artifact.base) -> list[Artifact]:
    """Artifacts that are there and differ from this one only in the amount, or in what else `base` leaves out."""
    folders = [note.parent for note in sorted(of.folder.parent.glob(f"*/{NOTE}"))]
    others = [Artifact(path, read_note(path)) for path in folders if path != of.folder and path.suffix != PARTIAL]
    return [other for other in others if base(other) == base(of)]


def read_note(folder: Path) -> dict[str, Any]:
    """The identity of an artifact that is there; empty when its note cannot be read."""
    try:
        return dict(read_json(folder / NOTE)["identity"])
    except (UserError, KeyError, TypeError, ValueError):
        return {}


# -- references ------------------------------------------------------------------------------------------------------


def refer(run_folder: Path, stage: str, artifact: Artifact, link: str | None = None) -> None:
    """Note that a run uses an artifact, and let `link` in the run's folder lead there.

    Raises:
        UserError: something else than a link is in its place.
    """
    paths = references(run_folder)
    file_path = os.path.relpath(artifact.folder, run_folder.resolve())
    if paths.get(stage) != file_path:
        write_json(run_folder / REFERENCES, {**paths, stage: file_path})
    if link is not None:
        point(run_folder / link, artifact.folder)


def forget(run_folder: Path, stage: str) -> None:
    """Note that a run uses no artifact of a stage any more; the artifact stays until `gc`."""
    paths = references(run_folder)
    if paths.pop(stage, None) is not None:
        write_json(run_folder / REFERENCES, paths)


def references(run_folder: Path) -> dict[str, str]:
    """The artifact of each stage of a run, relative to its folder; empty when it has none."""
    file = run_folder / REFERENCES
    if not file.is_file():
        return {}
    try:
        return {str(stage): str(path) for stage, path in read_json(file).items()}
    except (UserError, AttributeError, TypeError):  # damaged: every stage will find its artifact and refer to it again
        return {}


def referred(run_folder: Path, stage: str) -> Path | None:
    """The folder of the artifact that a run uses; None when it has none."""
    folder = references(run_folder).get(stage)
    return None if folder is None else Path(os.path.normpath(run_folder.resolve() / folder))


def point(link: Path, folder: Path) -> None:
    """Point a link to a folder, in one step; a UserError if something other than a link is in its place."""
    wanted = os.path.relpath(folder, link.parent.resolve())
    if link.is_symlink() and os.readlink(link) == wanted:
        return
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} is not a link that headstart made.", "Move it away, or choose another --run-dir.")
    write_atomic(link, lambda partial: partial.symlink_to(wanted, target_is_directory=True))


def give(source: Path, path: Path) -> None:
    """Put what an artifact's folder holds into a run, as a folder of its own that takes no further space.

    Files are second names of the artifact's: they are replaced and never written into, so neither changes the other.
    """

    def fill(partial: Path) -> None:
        shutil.copytree(source, partial, copy_function=link_or_copy)

    write_atomic(path, fill)


def link_or_copy(source: str | Path, path: str | Path) -> None:
    """A second name for a file, which takes no space; a copy where the file system has no such names."""
    try:
        os.link(source, path)
    except OSError:
        shutil.copyfile(source, path)
