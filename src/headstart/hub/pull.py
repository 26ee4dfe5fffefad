"""Getting heads: from a folder, or from the Hub."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download

from headstart.errors import UserError
from headstart.heads.io import WEIGHTS, heads_folder
from headstart.hub.format import ANSWERS, CARD, CUSTOM_GENERATE, no_heads
from headstart.support.files import no_folder
from headstart.support.hub_errors import explained
from headstart.target.identity import BUNDLED
from headstart.target.loading import PACKAGED

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""user/name, as the Hub writes it."""


def fetch(repo_id: str, revision: str | None = None, token: str | bool | None = None) -> Path:
    """Download a repository of heads into the Hub's cache, as far as it is not there; returns its folder there."""
    with explained("Cannot fetch", repo_id, revision):
        # Only our own files: an id of a whole model, given by mistake, is refused after a few kilobytes.
        ours = ["*.json", WEIGHTS, CARD, ANSWERS, f"{CUSTOM_GENERATE}/*", f"{BUNDLED}/*"]
        return Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=ours))


def has_heads(path: str) -> bool:
    """Whether what a user named is a folder here with heads, or that of a run."""
    folder = Path(path).expanduser()
    return folder.is_dir() and (heads_folder(folder) / WEIGHTS).is_file()


def locate(heads: str | Path, revision: str | None = None, token: str | bool | None = None) -> Path:
    """The folder of heads that a user named by its path, by that of the run they belong to, or by a Hub id.

    A folder that exists comes before a Hub id. A UserError where there is neither, or a run has no heads yet.
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
