"""Sharing heads: an exported folder becomes a repository on the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import huggingface_hub

from headstart.errors import UserError
from headstart.files import PARTIAL
from headstart.hub.format import CARD, check_folder
from headstart.hub.pull import HUB_ID
from headstart.network import LOGIN, explained


@dataclass(frozen=True)
class Upload:
    """What a push did, or with `dry_run` would do.

    Attributes:
        repo_id: user/name.
        files: (path in the repository, size in bytes).
        url: page of the repository; empty after a dry run.
        commit: hash of the commit; empty after a dry run.
    """

    repo_id: str
    files: tuple[tuple[str, int], ...]
    url: str = ""
    commit: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for _, size in self.files)


def push(folder: Path, repo_id: str, *, private: bool = False, dry_run: bool = False, message: str = "") -> Upload:
    """Create a repository, if there is none, and upload an exported folder to it in one commit.

    Args:
        folder: what `export_heads` wrote.
        repo_id: user/name.
        private: create the repository for its owner's eyes only; one that exists has to be private already.
        dry_run: only say what would be uploaded; nothing is sent and no token is needed.
        message: of the commit.

    Raises:
        UserError: the folder is not whole, the id is none, there is no token, it may not write there, a repository
            that should be private is public, or the Hub cannot be reached.
    """
    check_folder(folder)
    if not (folder / CARD).is_file():
        raise UserError(f"{folder} has no {CARD}.", "Export the heads again; the model card is written with them.")
    if not HUB_ID.fullmatch(repo_id):
        raise UserError(f"{repo_id!r} is not a Hub id.", "Write it as user/name.")
    files = _files(folder)
    if dry_run:
        return Upload(repo_id, files)
    if huggingface_hub.get_token() is None:
        raise UserError(f"Pushing to {repo_id} needs a Hub token, and there is none.", LOGIN)
    with explained("Cannot push to", repo_id):
        url = huggingface_hub.create_repo(repo_id, private=private, exist_ok=True)
        if private and not huggingface_hub.model_info(repo_id).private:
            raise UserError(
                f"{repo_id} is there already, and public.", "Make it private in its settings, or choose another name."
            )
        commit = huggingface_hub.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            allow_patterns=[name for name, _ in files],
            commit_message=message or "Upload draft heads with headstart",
        )
    return Upload(repo_id, files, str(url), str(commit.oid))


def _files(folder: Path) -> tuple[tuple[str, int], ...]:
    """Every file of the folder but hidden and half-written ones."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(".") or part.endswith(PARTIAL) for part in parts):
            found.append(("/".join(parts), path.stat().st_size))
    return tuple(found)
