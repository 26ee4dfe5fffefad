"""Locating heads in a folder or on the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

from headstart.errors import UserError
from headstart.heads.io import WEIGHTS, heads_folder
from headstart.hub.format import ANSWERS, CARD, CUSTOM_GENERATE, no_heads
from headstart.model.identity import BUNDLED
from headstart.model.loading import PACKAGED
from headstart.support.files import no_folder
from headstart.support.hub_errors import explained

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""user/name on the Hub."""


OURS = ["*.json", WEIGHTS, CARD, ANSWERS, f"{CUSTOM_GENERATE}/*", f"{BUNDLED}/*"]
"""Patterns of our files in a repository."""


def fetch(
    repo_id: str, revision: str | None = None, token: str | bool | None = None, files: list[str] | None = OURS
) -> Path:
    """Download the files of a repository that match patterns into the Hub's cache; returns its folder.

    By default only heads: the id of a model, given by mistake, costs a few kilobytes.
    """
    with explained("Cannot fetch", repo_id, revision):
        return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=files))


def has_heads(path: str) -> bool:
    """Whether a path is a local folder of heads or of a run with heads."""
    folder = Path(path).expanduser()
    return folder.is_dir() and (heads_folder(folder) / WEIGHTS).is_file()


def locate(heads: str | Path, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Resolve a folder of heads, a run's folder or a Hub id, local folders first.

    A UserError where none exists, or a run has no heads yet.
    """
    folder = Path(heads).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UserError(
                f"{heads} is a folder here and has no revision {revision!r}.",
                "Leave the revision out, or give a Hub id that is not also a folder.",
            )
        return heads_folder(folder)
    if str(heads) in PACKAGED or (folder.is_file() and folder.suffix == ".gguf"):
        raise no_heads(heads)
    if isinstance(heads, Path) or not HUB_ID.fullmatch(heads):
        raise no_folder(heads, "Give a folder that headstart export wrote, or a Hub id (user/name).")
    try:
        return fetch(heads, revision, token)
    except UserError as error:
        raise UserError(f"No folder {heads} here. {error.problem}", error.remedy) from error
